"""Errors that a user can fix. Every message says what is wrong, where, and how to fix it."""

from collections.abc import Iterator
from contextlib import contextmanager

# what reading raises if a file is damaged, or of another kind
DAMAGED = OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError


class KangarooError(Exception):
    """An error that the user can fix; the command line shows its message without a traceback."""


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Let errors of one of several drafters or prompts begin with its `option`, as `more.rest`."""
    try:
        yield
    except KangarooError as error:
        message = str(error).replace("drafter.", f"{option}.")
        raise type(error)(f"{option}: {message}") from error


@contextmanager
def explained(
    kind: type[Exception], problem: str, fix: str, causes: tuple[type[Exception], ...] = DAMAGED
) -> Iterator[None]:
    """Turn exceptions of these kinds into an error that says problem, reason and fix."""
    try:
        yield
    except causes as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise kind(f"{problem}: {reason}. {fix}") from error


class ModelNotFound(KangarooError):
    """A target model was found neither on disk nor on the hub."""


class CorruptFile(KangarooError):
    """A file is truncated, incomplete, or not the expected one."""


class UnsupportedModel(KangarooError):
    """The engine cannot run a model of this architecture or with this positional encoding."""


class ModelTooLarge(KangarooError):
    """A target's weights do not fit on its devices."""


class AdapterMismatch(KangarooError):
    """An adapter was trained for another target or another exit layer."""


class AdapterNotFound(KangarooError):
    """The given folder holds no adapter."""


class PromptError(KangarooError):
    """A prompt is empty, too long for the context, or does not fit the chat template."""


class ConfigError(KangarooError):
    """A setting has a value that cannot work."""


class DataError(KangarooError):
    """A dataset is missing, malformed, or holds nothing to train or evaluate on."""


class Diverged(KangarooError):
    """Training has produced numbers that are not finite, such as NaN."""


class NotLossless(KangarooError):
    """A method's text differs from vanilla decoding's, and rounding does not explain it."""


class ProcessLost(KangarooError):
    """A required process has ended."""


class MissingPackage(KangarooError):
    """An optional package that this use needs is not installed."""
