"""Restrictions of texts: biases of tokens, and a grammar that a text follows.

They change the target's logits wherever it chooses, so a draft is accepted if the target would have
written it under the same restriction. Drafters know nothing of them.

Shapes: N nodes of a draft, V vocabulary.
"""

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kangaroo.utils.errors import ConfigError, MissingPackage
from kangaroo.utils.folders import install


class Constraint:
    """The restriction of one text that is being written.

    Args:
        vocab_size: the number of logits.
        biases: what is added to the logits of tokens, by id; -inf bans a token.
        start: llguidance's `LLMatcher` of an empty text, which masks the tokens that its grammar
            forbids; it is copied.

    Errors: `ConfigError` for an id outside the vocabulary or a bias that is no number.
    """

    def __init__(
        self, vocab_size: int, biases: Mapping[int, float] | None = None, start: Any = None
    ):
        self.start = start
        self.matcher = start and start.deep_copy()
        self.text: list[int] = []  # what it has read
        self.biases_V = np.zeros(vocab_size, np.float32)
        for token, bias in (biases or {}).items():
            if not (isinstance(token, int) and 0 <= token < vocab_size):
                raise ConfigError(
                    f"logit_bias: {token!r} is no token; they are 0 to {vocab_size - 1}."
                )
            if not (isinstance(bias, int | float) and bias < math.inf):  # NaN is not, either
                raise ConfigError(f"logit_bias: {bias!r} of token {token} is no finite number.")
            self.biases_V[token] = bias

    def advance(self, tokens: Sequence[int]) -> None:
        """Read new tokens of the text. Errors: `RuntimeError` where the grammar cannot, for
        instance beyond llguidance's limits."""
        if self.matcher is not None:
            self.text += tokens
            self.matcher.try_consume_tokens(list(tokens))
            if self.matcher.is_error():
                raise RuntimeError(self.matcher.get_error())

    def after(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """The biases after each node of a draft, `[N, V]`. Node 0 is the text's last token, and a
        parent comes before its children."""
        biases_NV = np.tile(self.biases_V, (len(tokens), 1))
        if self.matcher is None:
            return biases_NV
        paths: list[list[int]] = [[]]
        for node in range(len(tokens)):
            if node:
                paths.append([*paths[parents[node]], tokens[node]])
            read = self.matcher.try_consume_tokens(paths[node])
            # otherwise the node is not accepted; what has stopped reads no more, and allows an EOS
            if read == len(paths[node]) or self.matcher.is_stopped():
                words = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
                allowed_V = np.unpackbits(words, bitorder="little")[: len(self.biases_V)]
                biases_NV[node, allowed_V == 0] = -np.inf
            if self.matcher.is_error():  # at a draft token; it would refuse all others, too
                self.matcher = self.start.deep_copy()
                self.matcher.try_consume_tokens(self.text)
            else:
                self.matcher.rollback(read)
        return biases_NV


@dataclass
class Restrictions:
    """Makes the constraints of a model's texts; any thread may call it.

    Args:
        tokenizer: needed for grammars; None allows biases alone.
        vocab_size: the number of logits.
        eos_ids: tokens that end a text.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    eos_ids: Collection[int]
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while a grammar is made

    def of(
        self, biases: Mapping[int, float] | None = None, schema: Mapping[str, Any] | None = None
    ) -> Callable[[], Constraint] | None:
        """What makes the constraint of a text with these `biases`, of JSON that follows a `schema`,
        or of both; None without a restriction. Errors: `ConfigError` for an invalid token, bias or
        schema; `MissingPackage` without llguidance."""
        if schema is None and not biases:
            return None
        matcher: Any = None
        if schema is not None:
            with self.lock:
                matcher = self._json(schema)
        constraint = partial(Constraint, self.vocab_size, biases, matcher)
        constraint()  # for its errors
        return constraint

    @cached_property
    def _tokens(self) -> Any:
        """The vocabulary for grammars, which takes a second to make."""
        from llguidance import hf

        if not isinstance(self.tokenizer, PreTrainedTokenizerFast):
            raise ConfigError("JSON by a schema needs the model's tokenizer.json.")
        return hf.from_tokenizer(self.tokenizer, self.vocab_size, sorted(self.eos_ids))

    def _json(self, schema: Mapping[str, Any]) -> Any:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise MissingPackage(f"JSON needs llguidance: {install('serve')}.") from error
        if not isinstance(schema, Mapping):
            raise ConfigError(f"the JSON schema is a {type(schema).__name__}; pass an object.")
        matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_json_schema(dict(schema)))
        if matcher.is_error():
            said = " ".join(matcher.get_error().split())
            raise ConfigError(f"the JSON schema: {said[:300]}")
        return matcher
