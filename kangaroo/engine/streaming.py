"""Turns tokens that arrive one by one into text."""

from collections.abc import Iterable, Iterator, Sequence

from kangaroo.engine.requests import Token
from kangaroo.models.prompts import UNFINISHED, Tokenizer, plain_text


class UntilStop:
    """Passes text on up to the first stop string, which it leaves out."""

    def __init__(self, stop: Sequence[str]):
        self.stop = stop
        self.held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can be shown now; what may become a stop string is held back."""
        if self.stopped:
            return ""
        held = self.held + text
        if places := [at for at in map(held.find, self.stop) if at >= 0]:
            self.held = ""
            self.stopped = True
            return held[: min(places)]
        prefixes = (n for stop in self.stop for n in range(len(stop)) if held.endswith(stop[:n]))
        end = len(held) - max(prefixes, default=0)
        self.held = held[end:]
        return held[:end]

    def end(self) -> str:
        """The text that was held back, when no more follows."""
        return self.held


class Pieces:
    """Decodes tokens to text up to the first stop string; a character of several tokens appears
    with the last of them. A piece is decoded together with the one before it, since SentencePiece
    strips the first space of a text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self.tokenizer = tokenizer
        self.until_stop = UntilStop(stop)
        self.before: list[int] = []  # tokens of the last piece
        self.pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that can be shown after this token; perhaps none."""
        self.pending.append(token)
        text = self._pending_text()
        if not text or text.endswith(UNFINISHED):
            return ""
        self.before = self.pending
        self.pending = []
        return self.until_stop.push(text)

    def end(self) -> str:
        return self.until_stop.push(self._pending_text()) + self.until_stop.end()

    def _pending_text(self) -> str:
        before = plain_text(self.tokenizer, self.before)
        return plain_text(self.tokenizer, self.before + self.pending)[len(before) :]


def pieces(
    tokens: Iterable[Token], tokenizer: Tokenizer, stop: Sequence[str] = ()
) -> Iterator[tuple[str, bool]]:
    """Pairs (text, drafted) in whole characters as tokens arrive, up to the first stop string."""
    decoding = Pieces(tokenizer, stop)
    drafted = False
    for token in tokens:
        drafted = token.drafted
        if text := decoding.push(token.id):
            yield text, drafted
    if rest := decoding.end():
        yield rest, drafted


def whole_text(tokens: list[int], tokenizer: Tokenizer, stop: Sequence[str] = ()) -> str:
    """The pieces of these tokens, joined."""
    text = plain_text(tokenizer, tokens)
    if not stop and UNFINISHED not in text:  # a shortcut
        return text
    # near a byte that is no character, SentencePiece's decoder drops characters
    return "".join(text for text, _ in pieces((Token(i, False) for i in tokens), tokenizer, stop))
