"""Every command that a message prints has options that exist, and arrives as it was meant."""

import ast
import shlex

import pytest
from composing import of_command
from test_architecture import TREES

from kangaroo.utils import folders

# For options that a message takes from elsewhere, where not any word is one.
STAND_INS = {"drafter": "kangaroo", "adapter": "medusa", "experiment": "paper/table1"}
CALLS = [
    pytest.param(node, id=f"{name}:{node.lineno}")
    for name, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command_line"
]


@pytest.mark.parametrize("call", CALLS)
def test_the_options_of_a_printed_command_exist(call):
    command, *words = (node.value for node in call.args if isinstance(node, ast.Constant))
    reads_more_configs = len(call.args) > 1 and not words  # --config-dir=, of which it needs one
    for option in call.keywords:
        if option.arg and option.arg != "launcher" and not reads_more_configs:
            constant = option.value.value if isinstance(option.value, ast.Constant) else None
            value = STAND_INS.get(option.arg, "x") if constant is None else constant
            words.append(f"{option.arg.replace('__', '.')}={value}")
    assert of_command(command, words)


def test_where_the_package_is_installed_the_program_is_named(tmp_path, monkeypatch):
    options = {"model": "tiny", "drafter__adapter": "my adapters/x", "trainer__shard_target": True}
    typed = """model=tiny 'drafter.adapter="my adapters/x"' trainer.shard_target=true"""
    assert folders.command_line("tune", **options) == f"python scripts/tune.py {typed}"
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(folders, "PACKAGE", tmp_path)
    started = f"{folders.TORCHRUN} -m kangaroo train {typed}"
    assert folders.command_line("train", launcher=folders.TORCHRUN, **options) == started


@pytest.mark.parametrize(
    "value", ["a/b", "my folder/x", 'say "hi"', "it's", r"a\b", 'q\\"x', "e\\"]
)
def test_a_folder_of_any_name_arrives_as_it_is(value):
    word = shlex.split(folders.command_line("evaluate", drafter__adapter=value))[-1]
    assert of_command("evaluate", [word]).drafter.adapter == value
