"""What can go wrong for a user; every message says what, where, and the fix."""


class KangarooError(Exception):
    """A failure that the user can fix; the command line shows its message, no traceback."""


class ModelNotFound(KangarooError):
    """A target model is in no place where it was looked for."""


class CorruptFile(KangarooError):
    """A file is truncated, incomplete, or not the one that was asked for."""


class UnsupportedModel(KangarooError):
    """A model's architecture or positions cannot be driven by this engine."""


class ModelTooLarge(KangarooError):
    """A target's weights do not fit the devices that are to compute it."""


class AdapterMismatch(KangarooError):
    """An adapter was trained for another target or another exit layer."""


class AdapterNotFound(KangarooError):
    """No adapter lies where one was looked for."""


class PromptError(KangarooError):
    """A prompt is empty, too long for the context, or cannot be written in the chat template."""


class ConfigError(KangarooError):
    """A setting has a value that cannot work."""


class DataError(KangarooError):
    """A data set is missing, malformed, or holds nothing to train or evaluate on."""


class NotLossless(KangarooError):
    """A method wrote another text than vanilla decoding, and rounding does not explain it."""


class ProcessLost(KangarooError):
    """A process of a run has ended while the others still needed it."""


class MissingPackage(KangarooError):
    """A package that only some uses need is not installed."""
