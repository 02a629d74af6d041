"""The commands; with `cli_schema.py`, their types, `cli/command.py` alone knows Hydra."""

from kangaroo.cli.command import CONFIGS
from kangaroo.cli.decoding import chat, soak, speed
from kangaroo.cli.evaluating import evaluate
from kangaroo.cli.making import (
    calibrate,
    datastore,
    export,
    import_adapter,
    pull,
    push,
    search_layers,
    split,
)
from kangaroo.cli.serving import load, serve
from kangaroo.cli.training import make_data, train
from kangaroo.cli.tuning import tune

__all__ = [
    "CONFIGS",
    "calibrate",
    "chat",
    "datastore",
    "evaluate",
    "export",
    "import_adapter",
    "load",
    "make_data",
    "pull",
    "push",
    "search_layers",
    "serve",
    "soak",
    "speed",
    "split",
    "train",
    "tune",
]
