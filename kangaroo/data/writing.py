"""The target writes user turns and answers for many conversations at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling
from kangaroo.models.prompts import Message, Sample, Tokenizer, masked_ids, plain_text, user_header
from kangaroo.models.target import TargetModel


@dataclass
class Dialogue:
    """A conversation as it grows. What is written depends on its seed, the model and the sampling.

    Args:
        opening: how its first user turn begins.
        open: whether another turn may follow.
        input_ids, loss_mask: up to the last answer; empty before the first.
        topk_logits: a record for each token of the assistant, where these are kept.
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
        """Take the tokens of a further answer, and those before it as they are now: a prompt is
        tokenised from its text. After the first token that is not the one that was written the
        distributions are others, and no record is known."""
        if said.teacher is not None:
            carried = np.zeros(sum(mask), said.teacher.dtype)
            if self.topk_logits is not None:
                pairs = enumerate(zip(self.input_ids, prompt, strict=False))
                same = next((i for i, (was, now) in pairs if was != now), len(self.input_ids))
                size = min(same + 1, len(self.loss_mask), len(mask))
                then, now = (np.array(m[:size], dtype=bool) for m in (self.loss_mask, mask))
                was, becomes = (np.cumsum(m)[then & now] - 1 for m in (then, now))
                carried[becomes] = self.topk_logits[was]
            self.topk_logits = np.concatenate([carried, said.teacher])
        self.input_ids = [*prompt, *said.tokens]
        self.loss_mask = [*mask, *[1] * len(said.tokens)]


@dataclass
class DialogueWriter:
    """Lets the target write turns of dialogues.

    Args:
        longest: a turn that might make a conversation longer than this many tokens, or than the
            model's context, is not begun, and closes its dialogue.
        keep: likeliest tokens that are kept of every distribution an answer is written from.
        bar: shows how many tokens it has written, as `written` does.
    """

    lm: TargetModel
    tokenizer: Tokenizer
    batch_size: int
    longest: int
    keep: int
    bar: tqdm[Any]

    def __post_init__(self) -> None:
        self.engine = Engine(self.lm, Vanilla(), self.tokenizer, prefix_cache=True)
        self.longest, self.written = min(self.longest, self.lm.context), 0

    def ask(
        self, dialogues: Iterable[Dialogue], max_tokens: int, temperature: float, keeps_cut: bool
    ) -> None:
        """Let the target write the next user turn of every open dialogue. An empty one closes it,
        and so does one that reaches `max_tokens`, unless `keeps_cut`."""
        going, requests = [], []
        for dialogue in filter(lambda dialogue: dialogue.open, dialogues):
            header, end = user_header(self.tokenizer, dialogue.messages)
            opening = "" if dialogue.messages else dialogue.opening
            header += self.tokenizer(opening, add_special_tokens=False).input_ids
            dialogue.open = len(header) + max_tokens <= self.longest
            if dialogue.open:
                going.append((dialogue, opening, end))
                requests.append(Request(header, max_tokens, dialogue.seed, [end]))
        generations = self._decode(requests, temperature)
        for (dialogue, opening, end), question in zip(going, generations, strict=True):
            text = plain_text(self.tokenizer, question.tokens).removesuffix(end)
            text = (opening + text).strip()
            dialogue.open = bool(text) and (question.finish != "length" or keeps_cut)
            if dialogue.open:
                dialogue.messages.append(Message(role="user", content=text))

    def answer(
        self,
        dialogues: Iterable[Dialogue],
        max_tokens: int,
        temperature: float,
        proceed: Callable[[Dialogue], object] | None = None,
    ) -> None:
        """Let the target answer the user turn that ends every open dialogue, after the prompt of
        decoding. An answer that reaches `max_tokens` is kept and closes its dialogue.

        Args:
            proceed: called after an answer that leaves its dialogue open; where it adds a user
                turn, that is answered at once, and what went before is not read again.
        """
        pairs = [(dialogue, self._prompt(dialogue, max_tokens)) for dialogue in dialogues]
        going = [(dialogue, prompt) for dialogue, prompt in pairs if prompt]

        def after(index: int, said: Generation) -> Request | None:
            dialogue, (request, mask) = going[index]
            text = plain_text(self.tokenizer, said.tokens)
            dialogue.messages.append(Message(role="assistant", content=text))
            dialogue.append(request.prompt, mask, said)
            dialogue.open = said.finish != "length"
            if dialogue.open and proceed:
                proceed(dialogue)
            if (following := self._prompt(dialogue, max_tokens)) is None:
                return None
            going[index] = dialogue, following
            return following[0]

        requests = [request for _, (request, _) in going]
        self._decode(requests, temperature, self.keep, after, self.longest if proceed else None)

    def _prompt(self, dialogue: Dialogue, max_tokens: int) -> tuple[Request, list[int]] | None:
        """What asks for the next answer, and its loss mask; None without a question, or room."""
        if not (dialogue.open and dialogue.messages[-1]["role"] == "user"):
            return None
        prompt, mask = masked_ids(self.tokenizer, dialogue.messages, add_generation_prompt=True)
        dialogue.open = len(prompt) + max_tokens <= self.longest
        return (Request(prompt, max_tokens, dialogue.seed), mask) if dialogue.open else None

    def _decode(
        self,
        requests: Sequence[Request],
        temperature: float,
        keep: int = 0,
        after: Callable[[int, Generation], Request | None] = lambda index, generation: None,
        longest: int | None = None,
    ) -> list[Generation]:
        """A generation for each request, in their order; of those that `after` lets follow each
        other (see `Engine.completions`), the last."""

        def following(index: int, generation: Generation) -> Request | None:
            self.written += len(generation.tokens)
            self.bar.update(len(generation.tokens))
            return after(index, generation)

        limits = Sampling(temperature=temperature), self.batch_size, keep
        texts = dict(self.engine.completions(requests, *limits, following, longest))
        return [texts[index] for index in range(len(requests))]
