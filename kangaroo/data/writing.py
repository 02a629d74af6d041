"""Let the target write user turns and answers of many conversations at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import topk_logits
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling
from kangaroo.models.prompts import Message, Sample, Tokenizer, masked_ids, plain_text, user_header
from kangaroo.models.target import TargetModel


@dataclass
class Dialogue:
    """A growing conversation, a function of its seed, the model and the sampling."""

    seed: int
    opening: str = ""  # the beginning of its first user turn
    messages: list[Message] = field(default_factory=list)
    open: bool = True  # whether another turn may follow
    input_ids: list[int] = field(default_factory=list)  # up to the last answer, as the loss mask
    loss_mask: list[int] = field(default_factory=list)
    topk_logits: np.ndarray | None = None  # a record for each token of the assistant, if kept

    def sample(self) -> Sample:
        """The conversation up to its last answer; it must have one."""
        unanswered = self.messages[-1]["role"] == "user"
        messages = self.messages[: len(self.messages) - unanswered]
        sample = Sample(messages=messages, input_ids=self.input_ids, loss_mask=self.loss_mask)
        if self.topk_logits is not None:
            sample["teacher"] = self.topk_logits
        return sample

    def append(self, prompt: Sequence[int], mask: Sequence[int], answer: Generation) -> None:
        """Add an answer to `prompt`, which was tokenised anew from the text. Records of earlier
        answers stay up to the first token that differs; behind it distributions are unknown."""
        if answer.teacher is not None:
            records = topk_logits.rounded(answer.teacher)
            earlier = np.zeros(sum(mask), records.dtype)
            if self.topk_logits is not None:
                pairs = enumerate(zip(self.input_ids, prompt, strict=False))
                equal = next((i for i, (old, new) in pairs if old != new), len(self.input_ids))
                size = min(equal + 1, len(self.loss_mask), len(mask))
                masks = [np.array(m[:size], dtype=bool) for m in (self.loss_mask, mask)]
                old, new = (np.cumsum(m)[masks[0] & masks[1]] - 1 for m in masks)
                earlier[new] = self.topk_logits[old]
            self.topk_logits = np.concatenate([earlier, records])
        self.input_ids = [*prompt, *answer.tokens]
        self.loss_mask = [*mask, *[1] * len(answer.tokens)]


@dataclass
class DialogueWriter:
    """Lets the target write turns of dialogues, and counts the tokens in `written`.

    Args:
        longest: a turn that might make a conversation longer than this many tokens, or than the
            model's context, is not begun, and closes its dialogue.
        keep: likeliest tokens to keep of every distribution that an answer's token is chosen from.
        bar: shows the number of written tokens.
    """

    lm: TargetModel
    tokenizer: Tokenizer
    batch_size: int
    longest: int
    keep: int
    bar: tqdm[Any]

    def __post_init__(self) -> None:
        self.engine = Engine(self.lm, Vanilla(), self.tokenizer, prefix_cache=True)
        self.longest = min(self.longest, self.lm.context)
        self.written = 0

    def ask(
        self, dialogues: Iterable[Dialogue], max_tokens: int, temperature: float, keeps_cut: bool
    ) -> None:
        """Let the target write the next user turn of every open dialogue. An empty turn closes its
        dialogue, and so does one that reaches `max_tokens`, unless `keeps_cut`."""
        openings = []
        requests = []
        for dialogue in dialogues:
            if not dialogue.open:
                continue
            header, end = user_header(self.tokenizer, dialogue.messages)
            opening = "" if dialogue.messages else dialogue.opening
            header += self.tokenizer(opening, add_special_tokens=False).input_ids
            dialogue.open = len(header) + max_tokens <= self.longest
            if dialogue.open:
                openings.append((dialogue, opening, end))
                requests.append(Request(header, max_tokens, dialogue.seed, [end]))
        generations = self._decode(requests, temperature)
        for (dialogue, opening, end), question in zip(openings, generations, strict=True):
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
        """Let the target answer the user turn that ends every open dialogue. An answer that reaches
        `max_tokens` is kept and closes its dialogue; after any other `proceed` is called. A user
        turn that it adds is answered at once, without a new prefill of the earlier turns."""
        pairs = [(dialogue, self._prompt(dialogue, max_tokens)) for dialogue in dialogues]
        turns = [(dialogue, prompt) for dialogue, prompt in pairs if prompt is not None]

        def after(index: int, answer: Generation) -> Request | None:
            dialogue, (request, mask) = turns[index]
            text = plain_text(self.tokenizer, answer.tokens)
            dialogue.messages.append(Message(role="assistant", content=text))
            dialogue.append(request.prompt, mask, answer)
            dialogue.open = answer.finish != "length"
            if dialogue.open and proceed:
                proceed(dialogue)
            prompt = self._prompt(dialogue, max_tokens)
            if prompt is None:
                return None
            turns[index] = dialogue, prompt
            return prompt[0]

        requests = [request for _, (request, _) in turns]
        self._decode(requests, temperature, after=after, longest=self.longest if proceed else None)

    def _prompt(self, dialogue: Dialogue, max_tokens: int) -> tuple[Request, list[int]] | None:
        """The request for the next answer and its loss mask; None if none is due or has room."""
        if not (dialogue.open and dialogue.messages[-1]["role"] == "user"):
            return None
        prompt, mask = masked_ids(self.tokenizer, dialogue.messages, add_generation_prompt=True)
        dialogue.open = len(prompt) + max_tokens <= self.longest
        keep = min(self.keep, self.lm.config.vocab_size)
        request = Request(prompt, max_tokens, dialogue.seed, keep=keep)
        return (request, mask) if dialogue.open else None

    def _decode(
        self,
        requests: Sequence[Request],
        temperature: float,
        after: Callable[[int, Generation], Request | None] = lambda index, generation: None,
        longest: int | None = None,
    ) -> list[Generation]:
        """The last generation in place of each request (`after` as in `Engine.completions`)."""
        last: dict[int, Generation] = {}
        completions = self.engine.completions(
            requests,
            Sampling(temperature=temperature),
            self.batch_size,
            after=after,
            longest=longest,
        )
        for index, generation in completions:
            self.written += len(generation.tokens)
            self.bar.update(len(generation.tokens))
            last[index] = generation
        return [last[index] for index in range(len(requests))]
