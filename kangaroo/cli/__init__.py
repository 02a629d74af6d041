"""The commands; with `cli/schema.py`, their types, `cli/command.py` alone knows Hydra."""

from kangaroo.cli.decoding import chat, evaluate, serve, speed, tune
from kangaroo.cli.preparing import (
    convert_export,
    convert_import,
    convert_pull,
    convert_push,
    prepare_datastore,
    prepare_layers,
    prepare_split,
)
from kangaroo.cli.schema import CONFIGS
from kangaroo.cli.training import make_data, train

__all__ = ["CONFIGS", "chat", "convert_export", "convert_import", "convert_pull", "convert_push"]
__all__ += ["evaluate", "make_data", "prepare_datastore", "prepare_layers", "prepare_split"]
__all__ += ["serve", "speed", "train", "tune"]
