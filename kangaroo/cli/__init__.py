"""The commands; with `cli/schema.py`, their types, `cli/command.py` alone knows Hydra."""

from kangaroo.cli.decoding import chat, evaluate, serve, speed, tune
from kangaroo.cli.making import (
    convert_export,
    convert_import,
    convert_pull,
    convert_push,
    make_data,
    prepare_datastore,
    prepare_layers,
    prepare_split,
    train,
)
from kangaroo.cli.schema import CONFIGS

__all__ = ["CONFIGS", "chat", "convert_export", "convert_import", "convert_pull", "convert_push"]
__all__ += ["evaluate", "make_data", "prepare_datastore", "prepare_layers", "prepare_split"]
__all__ += ["serve", "speed", "train", "tune"]
