"""The target writes user turns and answers for many conversations at once, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.clock import now
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling
from kangaroo.models.prompts import Message, Sample, masked_ids, plain_text, user_header
from kangaroo.models.target import TargetModel

TRIAL_SECONDS = 0.5  # a forward this long is timed well enough and fills the device
TRIAL_STEPS, TRIAL_LENGTH = 8, 512  # tokens a row, decoded and read


@dataclass
class Dialogue:
    """A conversation as it grows.

    Args:
        seed: what is written depends on it, the model and the sampling alone.
        opening: how its first user turn begins.
        open: whether another turn may follow.
        input_ids, loss_mask: up to the last answer; empty before the first.
        topk_logits: a record for each token of the assistant (`topk_logits.py`), where these are
            kept.
    """

    seed: int
    opening: str = ""
    messages: list[Message] = field(default_factory=list)
    open: bool = True
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    topk_logits: np.ndarray | None = None

    def sample(self) -> Sample:
        """The conversation up to its last answer, of which there must be one."""
        unanswered = self.messages[-1]["role"] == "user"
        messages = self.messages[: len(self.messages) - unanswered]
        sample = Sample(messages=messages, input_ids=self.input_ids, loss_mask=self.loss_mask)
        if self.topk_logits is not None:
            sample["teacher"] = self.topk_logits
        return sample

    def append(self, prompt: Sequence[int], mask: Sequence[int], said: Generation) -> None:
        """Take the tokens of a further answer, and those before it as they are now."""
        if said.teacher is not None:
            self.topk_logits = np.concatenate(
                [self._carried(prompt, mask, said.teacher), said.teacher]
            )
        self.input_ids = [*prompt, *said.tokens]
        self.loss_mask = [*mask, *[1] * len(said.tokens)]

    def _carried(self, prompt: Sequence[int], mask: Sequence[int], like: np.ndarray) -> np.ndarray:
        """Records for the earlier answers in a prompt.

        They are tokenised from their text there. After the first token that is not the one that
        was written, the distributions are others too, and not known.
        """
        carried = np.zeros(sum(mask), like.dtype)
        if self.topk_logits is None:
            return carried
        pairs = enumerate(zip(self.input_ids, prompt, strict=False))
        stop = next((i for i, (was, now) in pairs if was != now), len(self.input_ids)) + 1
        then, now = (np.array(m[:stop], dtype=bool) for m in (self.loss_mask, mask))
        both = then[: len(now)] & now[: len(then)]
        was, becomes = (np.cumsum(m[: len(both)])[both] - 1 for m in (then, now))
        carried[becomes] = self.topk_logits[was]
        return carried


@dataclass
class Speed:
    """How fast text was written.

    Args:
        written, read: tokens decoded, and tokens of prompts, but for those that were read before.
        seconds: the time for both.
        trial: tokens per second of a short trial with a full batch, before anything is written.
        forward: tokens per second of a plain forward over full rows, LM head included.
    """

    written: int = 0
    read: int = 0
    seconds: float = 0.0
    trial: float = 0.0
    forward: float = 0.0

    @staticmethod
    def together(speeds: Sequence[Speed]) -> Speed:
        """The speed of processes that write at the same time, until the last one is done."""
        names = "written", "read", "trial", "forward"
        sums = {name: sum(getattr(speed, name) for speed in speeds) for name in names}
        return Speed(**sums, seconds=max(speed.seconds for speed in speeds))

    def facts(self) -> dict[str, float]:
        """For the provenance; `share_of_forward` compares with a plain forward over all tokens."""
        return {
            "tokens_written": self.written,
            "seconds": round(self.seconds, 1),
            "tokens_per_second": round(self.written / self.seconds, 1),
            "forward_tokens_per_second": round(self.forward, 1),
            "share_of_forward": round((self.written + self.read) / self.forward / self.seconds, 4),
        }


class DialogueWriter:
    """Lets the target write turns of dialogues.

    Args:
        longest: no conversation grows beyond this many tokens, nor beyond the model's context; a
            turn that might do so is not begun, and closes its dialogue.
        keep: likeliest tokens that are kept of every distribution an answer is written from.
    """

    def __init__(
        self,
        lm: TargetModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        longest: int,
        keep: int = 0,
    ):
        self.lm, self.tokenizer, self.batch_size, self.keep = lm, tokenizer, batch_size, keep
        self.engine = Engine(lm, Vanilla(), tokenizer, prefix_cache=True)
        self.longest = min(longest, lm.context)
        self.speed = Speed()

    def ask(
        self,
        dialogues: Iterable[Dialogue],
        max_tokens: int,
        temperature: float,
        keep_unfinished: bool,
    ) -> None:
        """Let the target write the next user turn of every open dialogue; an empty one closes it.

        Args:
            keep_unfinished: keep a turn that reached `max_tokens`; false closes its dialogue.
        """
        going, openings, requests = [], [], []
        for dialogue in filter(lambda dialogue: dialogue.open, dialogues):
            header, end = user_header(self.tokenizer, dialogue.messages)
            opening = "" if dialogue.messages else dialogue.opening
            header += self.tokenizer(opening, add_special_tokens=False).input_ids
            dialogue.open = len(header) + max_tokens <= self.longest
            if dialogue.open:
                going.append(dialogue)
                openings.append(opening)
                requests.append(Request(header, max_tokens, dialogue.seed, [end]))
        generations = self._decode(requests, temperature)
        written = zip(going, openings, requests, generations, strict=True)
        for dialogue, opening, request, question in written:
            text = plain_text(self.tokenizer, question.tokens)
            text = (opening + text.removesuffix(request.stop[0])).strip()
            dialogue.open = bool(text) and (question.finish != "length" or keep_unfinished)
            if dialogue.open:
                dialogue.messages.append(Message(role="user", content=text))

    def answer(
        self,
        dialogues: Iterable[Dialogue],
        max_tokens: int,
        temperature: float,
        done: Callable[[], object],
        proceed: Callable[[Dialogue], object] | None = None,
    ) -> None:
        """Let the target answer the user turn that ends every open dialogue.

        The prompt is the one of decoding: earlier answers are tokenised from their text. An answer
        that reaches `max_tokens` is kept and closes its dialogue.

        Args:
            done: called after every answer.
            proceed: called after an answer that leaves its dialogue open; where it adds a user
                turn, that is answered at once, and what went before is not read again.
        """
        pairs = [(dialogue, self._prompt(dialogue, max_tokens)) for dialogue in dialogues]
        going = [dialogue for dialogue, prompt in pairs if prompt]
        prompts = [prompt for _, prompt in pairs if prompt]

        def after(index: int, said: Generation) -> Request | None:
            dialogue, (request, mask) = going[index], prompts[index]
            text = plain_text(self.tokenizer, said.tokens)
            dialogue.messages.append(Message(role="assistant", content=text))
            dialogue.append(request.prompt, mask, said)
            dialogue.open = said.finish != "length"
            done()
            if dialogue.open and proceed:
                proceed(dialogue)
            following = self._prompt(dialogue, max_tokens)
            if following is None:
                return None
            prompts[index] = following
            return following[0]

        requests = [request for request, _ in prompts]
        self._decode(requests, temperature, self.keep, after, self.longest if proceed else None)

    def _prompt(self, dialogue: Dialogue, max_tokens: int) -> tuple[Request, list[int]] | None:
        """What asks for the next answer, and which of its tokens are of earlier answers; None where
        there is no open question, or no room."""
        if not (dialogue.open and dialogue.messages[-1]["role"] == "user"):
            return None
        prompt, mask = masked_ids(self.tokenizer, dialogue.messages, add_generation_prompt=True)
        dialogue.open = len(prompt) + max_tokens <= self.longest
        return (Request(prompt, max_tokens, dialogue.seed), mask) if dialogue.open else None

    def time_trials(self) -> None:
        """Measure, in a few seconds, how fast a full batch decodes and a plain forward runs."""
        length = min(self.longest, TRIAL_LENGTH)
        requests = [Request([0], TRIAL_STEPS, seed) for seed in range(self.batch_size)]
        for _ in range(2):  # the first one warms up
            self.speed = Speed()
            self._decode(requests, temperature=1.0, keep=self.keep)
        rows, seconds = 1, self._forward(1, length)
        while seconds < TRIAL_SECONDS and rows < self.batch_size:
            rows = min(2 * rows, self.batch_size)
            self._forward(rows, length)
            seconds = self._forward(rows, length)
        self.speed = Speed(
            trial=self.speed.written / self.speed.seconds, forward=rows * length / seconds
        )

    @torch.no_grad()
    def _forward(self, rows: int, length: int) -> float:
        """Seconds that a plain causal forward takes, LM head included."""
        tokens_BT = torch.arange(rows * length, device=self.lm.device).view(rows, length)
        start = now(self.lm.device)
        meta = self.lm.chunk(0, length, row=0, n_slots=length)
        x_BTD = self.lm.embed(tokens_BT % self.lm.config.vocab_size)
        x_BTD, _ = self.lm.run(x_BTD, None, meta, range(self.lm.n_layers))
        for x_TD in x_BTD:  # by row: logits of all of them need not fit
            self.lm.logits(x_TD[None])
        return now(self.lm.device) - start

    def _decode(
        self,
        requests: Sequence[Request],
        temperature: float,
        keep: int = 0,
        after: Callable[[int, Generation], Request | None] = lambda index, generation: None,
        longest: int | None = None,
    ) -> list[Generation]:
        """A generation for each request, in their order; of those that `after` lets follow each
        other, the last. `after` and `longest` are those of `Engine.completions`."""
        start, current = time.perf_counter(), list(requests)

        def following(index: int, generation: Generation) -> Request | None:
            self.speed.written += len(generation.tokens)
            self.speed.read += len(current[index].prompt) - generation.reused
            request = after(index, generation)
            current[index] = request or current[index]
            return request

        limits = Sampling(temperature=temperature), self.batch_size, keep
        texts = dict(self.engine.completions(requests, *limits, following, longest))
        self.speed.seconds += time.perf_counter() - start
        return [texts[index] for index in range(len(requests))]
