"""`--help` says of every option what it means and takes, and a mistyped name finds the nearest."""

import sys
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import get_type_hints

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from kangaroo.cli import commands, help

PARTS = {"model", "drafter", "data", "adapter", "trainer", "logger"}  # groups, whose type is Any
MISTYPED = [
    ("evaluate", "drafter.treshold=0", "no option 'drafter.treshold'. Did you mean 'drafter.thre"),
    ("evaluate", "threshold=0.5", "no option 'threshold'. Did you mean 'drafter.threshold'?"),
    ("evaluate", "seeed=1", "Did you mean 'sampling.seed' or 'seed'?"),
    ("evaluate", "experimnt=debug", "no option 'experimnt'. Did you mean 'experiment'?"),
    ("evaluate", "drafter=hybird", "is no drafter=hybird. Did you mean 'hybrid'? There are bl"),
    ("evaluate", "experiment=paper/tabel1", "no experiment=paper/tabel1. Did you mean 'table1'?"),
    ("evaluate", "variants.steps=[1]", "+variants.steps= adds it."),
    ("train", "trainer.epochs=x", "override trainer.epochs=x: Value 'x' of type 'str' could not"),
    ("evaluate", "xyzzyx=1", "there is no option 'xyzzyx'. --help lists them all."),
]


def kinds(node):
    """The dataclasses of all configs, with those of their fields."""
    for part in node.values() if isinstance(node, dict) else [OmegaConf.get_type(node.node)]:
        if isinstance(node, dict):
            yield from kinds(part)
        elif is_dataclass(part) and part.__module__.startswith("kangaroo."):
            yield part
            yield from (hint for hint in get_type_hints(part).values() if is_dataclass(hint))


def test_every_option_of_every_command_has_a_meaning():
    checked = 0
    for kind in set(kinds(ConfigStore.instance().repo)):
        for name, hint in get_type_hints(kind).items():
            if name in {field.name for field in fields(kind)} - PARTS and not is_dataclass(hint):
                assert help.meanings(kind).get(name), f"{kind}: {name}"
                checked += 1
    assert checked > 280


@pytest.mark.parametrize("command", ["train", "convert_pack"])
def test_help_fits_into_eighty_columns(command):
    shown = help.text(command, f"A purpose {'that is long ' * 9}.", [])
    assert max(map(len, shown.splitlines())) <= 80 and "hydra." not in shown
    entries = [line for line in shown.splitlines() if line.startswith("  ")]
    for head, below in pairwise(entries):
        if head[2:].strip() == head[2:]:  # an option, or its continued value, above its meaning
            assert below.startswith("    ") and below[6] != "(", head


def test_help_tells_ranges_choices_and_the_chosen_part(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve.py", "drafter=kangaroo", "--help"])
    commands.serve()
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "port=8000 for clients; 0 takes a free one (a whole number, 0 or more and at",
        "max_batch_size=16 texts that are decoded at the same time (a whole number, 1 or more)",
        "(one of: bfloat16, float16, float32)",
        "(a number, 0 or more and below 1, or auto)",
        "drafter.adapter=adapters/smollm2-135m folder",
        "drafter=kangaroo block, cascade, clasp",
    ):
        assert words in shown


@pytest.mark.parametrize("command, option, message", MISTYPED)
def test_a_mistyped_name_finds_the_nearest(command, option, message, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [command, option, f"hydra.run.dir={tmp_path}"])
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as refused:
        getattr(commands, command)()
    assert message in str(refused.value) and "schema" not in str(refused.value)
    assert str(refused.value).startswith(("ConfigError: ", "Error merging"))
