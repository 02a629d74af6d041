"""The logarithms of tokens' probabilities in answers, as OpenAI's objects.

They are of the target's distribution before temperature and filters, but under the restriction of a
text that has one.
"""

import math
from dataclasses import dataclass
from typing import Any

from kangaroo.engine.requests import StepRecord
from kangaroo.engine.streaming import UNFINISHED
from kangaroo.models.prompts import Tokenizer, plain_text

UNLIKELY = -9999.0  # in OpenAI's API, that of a token which is not among the likeliest


@dataclass
class Logprobs:
    """The logprobs of one answer.

    Args:
        top: how many of the likeliest tokens are listed for each token.
        is_chat: whether the object is a chat's, or a completion's.
    """

    tokenizer: Tokenizer
    top: int
    is_chat: bool

    def __post_init__(self) -> None:
        self.tokens = list[dict[str, Any]]()  # each with its own logprob and those of the likeliest
        self.offset = 0  # characters of the tokens before, for completions

    def add(self, step: StepRecord, ends_with_eos: bool) -> None:
        """Take a step's tokens, without an EOS, which is no part of the text."""
        assert step.topk is not None
        for token, record in zip(step.tokens, step.topk, strict=False):
            pairs = zip(record["tokens"].tolist(), record["chances"].tolist(), strict=True)
            # the logarithm of 0 is no number of JSON
            logprobs = {other: math.log(x) if x > 0 else UNLIKELY for other, x in pairs}
            entry = self._entry(token, logprobs.get(token, UNLIKELY))
            entries = [self._entry(other, logprob) for other, logprob in logprobs.items()]
            self.tokens.append(entry | {"top_logprobs": entries[: self.top]})
        if ends_with_eos:
            self.tokens.pop()

    def taken(self) -> dict[str, Any]:
        """The object for the tokens since the last call."""
        tokens, self.tokens = self.tokens, []
        if self.is_chat:
            return {"content": tokens, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in token["top_logprobs"]}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = plain_text(self.tokenizer, [token])
        encoded = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": encoded}
