"""What can go wrong for a user; every message says what, where, and the fix."""


class KangarooError(Exception):
    """A failure that the user can fix; the command line shows its message, no traceback."""


class ModelNotFound(KangarooError):
    """A target model was not found in any of the places where it could be."""


class CorruptFile(KangarooError):
    """A file is truncated, incomplete, or not the one that was asked for."""


class UnsupportedModel(KangarooError):
    """This engine cannot run a model of that architecture or with those positions."""


class ModelTooLarge(KangarooError):
    """A target's weights do not fit on the devices that have to compute it."""


class AdapterMismatch(KangarooError):
    """An adapter was trained for another target or another exit layer."""


class AdapterNotFound(KangarooError):
    """There is no adapter in the folder where one was expected."""


class HubError(KangarooError):
    """The model hub cannot be reached, or refuses."""


class PromptError(KangarooError):
    """A prompt is empty, too long for the context, or cannot be written in the chat template."""


class ConfigError(KangarooError):
    """A setting has a value that cannot work."""


class DataError(KangarooError):
    """A data set is missing, malformed, or holds nothing to train or evaluate on."""


class Diverged(KangarooError):
    """A training has come to numbers that are not finite, such as NaN."""


class NotLossless(KangarooError):
    """A method wrote another text than vanilla decoding, and rounding does not explain it."""


class ProcessLost(KangarooError):
    """A process that was needed has ended."""


class MissingPackage(KangarooError):
    """A package that only some uses need is not installed."""
