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
from kangaroo.cli.training import cost, estimate, make_data, train
from kangaroo.cli.tuning import learning_curve, tune

__all__ = [
    "CONFIGS",
    "calibrate",
    "chat",
    "cost",
    "datastore",
    "estimate",
    "evaluate",
    "export",
    "import_adapter",
    "learning_curve",
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
