"""Text from tokens that arrive one by one."""

from collections.abc import Iterator, Sequence

from kangaroo.engine.requests import Token
from kangaroo.models.prompts import Tokenizer, plain_text

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what an incomplete UTF-8 sequence decodes to


class Pieces:
    """Decodes tokens to text; a character of several tokens waits for the last one. A piece is
    decoded together with the one before it, since SentencePiece strips a text's first space."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.before: list[int] = []  # tokens of the last piece
        self.pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that is complete with this token; it may be empty."""
        self.pending.append(token)
        text = self.end()
        if not text or text.endswith(UNFINISHED):
            return ""
        self.before, self.pending = self.pending, []
        return text

    def end(self) -> str:
        """The text of the pending tokens, complete or not."""
        before = plain_text(self.tokenizer, self.before)
        return plain_text(self.tokenizer, self.before + self.pending)[len(before) :]


def pieces(tokens: Iterator[Token], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Pairs (text, drafted) of whole characters as tokens arrive."""
    decoding, drafted = Pieces(tokenizer), False
    for token in tokens:
        drafted = token.drafted
        if text := decoding.push(token.id):
            yield text, drafted
    if text := decoding.end():
        yield text, drafted


class UntilStop:
    """Passes text on up to the first stop string, which is left out."""

    def __init__(self, stop: Sequence[str]):
        self.stop, self.held, self.stopped = stop, "", False

    def push(self, text: str) -> str:
        """The text that can be shown now; what may become a stop string is held back."""
        if self.stopped:
            return ""
        held = self.held + text
        if places := [at for at in map(held.find, self.stop) if at >= 0]:
            self.held, self.stopped = "", True
            return held[: min(places)]
        prefixes = (n for stop in self.stop for n in range(len(stop)) if held.endswith(stop[:n]))
        end = len(held) - max(prefixes, default=0)
        self.held = held[end:]
        return held[:end]

    def end(self) -> str:
        """The text that is held back, when no more follows."""
        return self.held
