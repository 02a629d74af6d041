"""Every command that a message prints is whole: it composes, and with less to do it runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from commands import talks
from helpers import adapter_for
from hydra import compose, initialize_config_dir
from stand_ins import BRIEF, FEW, ONE, SHORT, TUNED, typed

from kangaroo import cli
from kangaroo.cli.training import SLOW_BFLOAT16
from kangaroo.drafters import datastore, layer_search
from kangaroo.drafters.draft_verify import DraftVerifyConfig
from kangaroo.evaluation import bench
from kangaroo.evaluation.study import report
from kangaroo.heads import adapter_files
from kangaroo.hub import card
from kangaroo.models.loading import TINY, Dtype, ModelConfig, byte_tokenizer, load, random_model
from kangaroo.models.target import TargetModel
from kangaroo.training import backend
from kangaroo.training.config import TrainerConfig
from kangaroo.utils import folders
from kangaroo.utils.errors import KangarooError
from kangaroo.utils.ranks import Ranks

WORDS = r"(?: (?:'[^']*'|--[\w-]+=[^\s`),]+|[\w.@+~]+=[^\s`),]+))*"
SCRIPT = r"(\S+\.py(?: (?:import|export|push|pull|datastore|layers|split)\b)?)"
COMMAND = re.compile(rf"(?:python|torchrun --nproc-per-node=N) {SCRIPT}({WORDS})")
# What is appended, so that it takes seconds.
SMALLER = {
    "train.py": f"{ONE} {BRIEF} {SHORT}",
    "evaluate.py": f"{FEW} model.dtype=float32",
    "scripts/prepare.py layers": f"search.budget=4 search.conversations=2 {SHORT}",
    "scripts/prepare.py datastore": SHORT,
    "scripts/tune.py": f"bench.path=questions.jsonl {TUNED}",
    "scripts/convert.py import": "exit_layer=2 output=imported",
    "scripts/make_data.py": f"model=tiny {ONE} {BRIEF} {SHORT}",
}


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Scripts, with an action where they have several, and their options."""
    matches = [(script, shlex.split(words)) for script, words in COMMAND.findall(text)]
    return [(script.rstrip("."), [word.rstrip(".") for word in words]) for script, words in matches]


def damaged(file: str, content: str) -> str:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(content)
    return file


def other_subset(lm):
    layer_search.write(layer_search.LayerSubset([1], "x", "y"), Path("subset.json"))
    return layer_search.read("subset.json", lm)


def conversations():
    file = damaged("talks of mine.json", json.dumps(talks() * 3))
    return bench.load_questions(bench.BenchConfig(path=file))


def other_adapter(lm, other):
    about = adapter_files.describe(other, adapter_for(other), {})
    adapter_files.save(adapter_for(other), about, None, Path("adapters/other"))
    return adapter_files.as_saved("adapters/other", lm)


# What makes the text, from a folder in which a user might stand; `other` is another target.
TEXTS = {
    "an adapter of another target": other_adapter,
    "no adapter": lambda lm, other: adapter_files.find("adapters/vicuna-7b"),
    "no adapter of one's own target": lambda lm, other: adapter_files.find("adapters/mine"),
    "no heads": lambda lm, other: adapter_files.find("adapters/mine-medusa"),
    "no subset": lambda lm, other: layer_search.found("adapters/tiny-draft_verify.json"),
    "a damaged subset": lambda lm, other: layer_search.found(damaged("subset.json", "[]")),
    "a subset of another target": lambda lm, other: other_subset(lm),
    "no subset asked for": lambda lm, other: DraftVerifyConfig().build(lm),
    "no datastore": lambda lm, other: datastore.load("adapters/tiny-datastore", lm),
    "a datastore of another target": lambda lm, other: datastore.load(
        str(Path(damaged(f"store/{datastore.ABOUT}", "{}")).parent), lm
    ),
    "conversations as a bench": lambda lm, other: conversations(),
    "one process for many": lambda lm, other: backend.check(
        TrainerConfig(shard_target=True), Ranks()
    ),
    "slow training": lambda lm, other: SLOW_BFLOAT16,
    "a study not measured yet": lambda lm, other: report.section("table1", None),
    "an adapter of the hub": lambda lm, other: card.measure(TINY, "kangaroo", "adapters/tiny"),
    "that of a folder": lambda lm, other: card.measure("FOLDER", "kangaroo", "my adapters/tiny"),
}


# By test_paper.py, and by test_commands.py in two processes.
ELSEWHERE = {"a study not measured yet", "one process for many", "tensor parallelism"}


@pytest.fixture(scope="module")
def targets():
    lm = TargetModel(load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))[0])
    return lm, TargetModel(random_model(num_hidden_layers=3))


def text_of(name, targets, here, monkeypatch) -> str:
    monkeypatch.chdir(here)
    try:
        return str(TEXTS[name](*targets))
    except KangarooError as error:
        return str(error)


@pytest.mark.parametrize("name", TEXTS)
def test_a_printed_command_composes(name, targets, here, monkeypatch):
    printed = commands(text_of(name, targets, here, monkeypatch))
    assert printed
    for script, words in printed:
        with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
            file, *action = script.split()
            config = compose("_".join([Path(file).stem, *action]), words)
        named = {"model", "model.path", "trainer.shard_target", "experiment", "source"}
        assert name == "slow training" or {word.partition("=")[0] for word in words} & named
        assert config.get("model") is None or config.model.path


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TEXTS if name not in ELSEWHERE])
def test_a_printed_command_runs(name, targets, here, made, monkeypatch):
    text = text_of(name, targets, here, monkeypatch)
    shutil.copytree(made, here, dirs_exist_ok=True)
    random_model().save_pretrained(here / "FOLDER")
    byte_tokenizer().save_pretrained(here / "FOLDER")
    shutil.copytree(here / "adapters/tiny", here / "my adapters/tiny")
    (here / "kangaroo-tiny-v1.3").rename(here / "CHECKPOINT")
    for script, words in commands(text):
        words = [word.replace("vicuna-7b", "tiny") for word in words]
        shown = typed(script, f"{shlex.join(words)} {SMALLER.get(script, '')}", here)
        for printed in commands(shown):  # such as "measure it"
            typed(printed[0], f"{shlex.join(printed[1])} {SMALLER[printed[0]]}", here)


def test_where_the_package_is_installed_the_program_is_named(tmp_path, monkeypatch):
    options = {"model": "tiny", "drafter__adapter": "my adapters/x", "trainer__shard_target": True}
    told = """model=tiny 'drafter.adapter="my adapters/x"' trainer.shard_target=true"""
    torchrun = {"launcher": folders.TORCHRUN}
    assert folders.command_line("evaluate", **options) == f"python evaluate.py {told}"
    assert folders.command_line("tune", **options) == f"python scripts/tune.py {told}"
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(folders, "PACKAGE", tmp_path)
    assert folders.command_line("tune", **options) == f"kangaroo tune {told}"
    started = f"{folders.TORCHRUN} -m kangaroo train {told}"
    assert folders.command_line("train", **torchrun, **options) == started


@pytest.mark.parametrize(
    "value", ["a/b", "my folder/x", 'say "hi"', "it's", r"a\b", 'q\\"x', "e\\"]
)
def test_a_folder_of_any_name_arrives_as_it_is(value):
    word = shlex.split(folders.command_line("evaluate", drafter__adapter=value))[-1]
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        assert compose("evaluate", [word]).drafter.adapter == value
