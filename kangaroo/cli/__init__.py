"""The commands; with `cli/schema.py`, their types, `cli/command.py` alone knows Hydra."""

from kangaroo.cli.command import with_actions
from kangaroo.cli.converting import export, import_adapter, pull, push
from kangaroo.cli.decoding import chat, serve, speed
from kangaroo.cli.evaluating import evaluate
from kangaroo.cli.preparing import datastore, layers, split
from kangaroo.cli.schema import CONFIGS
from kangaroo.cli.training import make_data, train
from kangaroo.cli.tuning import tune

convert = with_actions(
    "convert", {"import": import_adapter, "export": export, "push": push, "pull": pull}
)
prepare = with_actions("prepare", {"datastore": datastore, "layers": layers, "split": split})

__all__ = [
    "CONFIGS",
    "chat",
    "convert",
    "evaluate",
    "make_data",
    "prepare",
    "serve",
    "speed",
    "train",
    "tune",
]
