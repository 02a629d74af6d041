"""Text from tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from kangaroo.generation import Token
from kangaroo.prompts import plain_text

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what an incomplete UTF-8 sequence decodes to


def pieces(
    tokens: Iterator[Token], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, bool]]:
    """Pairs (text, drafted) as tokens arrive; a character of several tokens waits for the last one.

    Each piece is decoded together with the one before it, since SentencePiece tokenizers strip the
    space at the beginning of a decoded text. So the pieces join to the text of all tokens.
    """
    before: list[int] = []  # tokens of the last piece
    pending: list[int] = []
    drafted = False
    for token in tokens:
        pending.append(token.id)
        drafted = token.drafted
        text = _after(before, pending, tokenizer)
        if text and not text.endswith(UNFINISHED):
            yield text, drafted
            before, pending = pending, []
    if text := _after(before, pending, tokenizer):
        yield text, drafted


def _after(before: list[int], pending: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of `pending` where it follows `before`."""
    return plain_text(tokenizer, before + pending)[len(plain_text(tokenizer, before)) :]
