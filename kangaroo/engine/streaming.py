"""Text from tokens that arrive one by one."""

from collections.abc import Iterator, Sequence

from kangaroo.engine.requests import Token
from kangaroo.models.prompts import Tokenizer, plain_text

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what an incomplete UTF-8 sequence decodes to


class Pieces:
    """Tokens in, text out: a character of several tokens waits for the last one. A piece is decoded
    together with the one before it, since SentencePiece strips a text's first space."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.before: list[int] = []  # tokens of the last piece
        self.pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that is complete with this token; it may be empty."""
        self.pending.append(token)
        text = self._after()
        if not text or text.endswith(UNFINISHED):
            return ""
        self.before, self.pending = self.pending, []
        return text

    def end(self) -> str:
        """What is left when there are no more tokens."""
        return self._after()

    def _after(self) -> str:
        before = plain_text(self.tokenizer, self.before)
        return plain_text(self.tokenizer, self.before + self.pending)[len(before) :]


def pieces(tokens: Iterator[Token], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Pairs (text, drafted) as tokens arrive, of whole characters."""
    growing, drafted = Pieces(tokenizer), False
    for token in tokens:
        drafted = token.drafted
        if text := growing.push(token.id):
            yield text, drafted
    if text := growing.end():
        yield text, drafted


class UntilStop:
    """Text until the first of some strings, which is not part of it."""

    def __init__(self, stop: Sequence[str]):
        self.stop, self.held, self.stopped = stop, "", False

    def push(self, text: str) -> str:
        """What can be shown now: no part of what may become a stop string."""
        if self.stopped:
            return ""
        self.held += text
        places = [at for at in map(self.held.find, self.stop) if at >= 0]
        if places:
            shown, self.held, self.stopped = self.held[: min(places)], "", True
            return shown
        # as many characters at the end may begin one
        begun = (n for stop in self.stop for n in range(len(stop)) if self.held.endswith(stop[:n]))
        keep = max(begun, default=0)
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown

    def end(self) -> str:
        """What was held back, when there is no more text."""
        return self.held
