"""What the documentation shows does what it says, every public name has a docstring, and facts that
stand in several files agree."""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cases import BATCHES, CHUNK, NEW_TOKENS, PROMPTS, SAMPLINGS, case_of
from commands import ROOT
from helpers import adapter_for, chain_of, saved_adapter, tiny_target
from test_architecture import NAMES

from kangaroo.drafters.cascade import Cascade
from kangaroo.engine.engine import Engine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGE = (ROOT / "docs/add-a-drafter.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("sampling, batch", [("greedy", "ragged"), ("sampled", "admitted")])
def test_the_shown_drafter_writes_what_vanilla_writes(tmp_path, monkeypatch, sampling, batch):
    case = case_of("llama", sampling)
    (tmp_path / "bigram.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    drafter = importlib.import_module("bigram").BigramConfig().build(case.lm)
    cascade = Cascade(drafter, chain_of(case.lm, case.adapter, 4, 0.3))
    for engine in (Engine(case.lm, drafter, prefill_chunk=CHUNK), Engine(case.lm, cascade)):
        done = engine.generate(PROMPTS, NEW_TOKENS, SAMPLINGS[sampling], BATCHES[batch])
        assert [p + g.tokens for p, g in zip(PROMPTS, done, strict=True)] == case.texts


@pytest.mark.slow
def test_the_shown_files_are_all_that_the_shown_commands_need(tmp_path):
    """In a copy of the project, to which a reader adds them."""
    for folder in ("kangaroo", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "evaluate.py", tmp_path)
    (tmp_path / "kangaroo/drafters/bigram.py").write_text(CODE)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.S)
    (tmp_path / "configs/drafter/bigram.yaml").write_text(yaml)
    lm = tiny_target()
    saved_adapter(lm, adapter_for(lm), tmp_path / "adapters/tiny", None)
    lines = re.findall(r"^python (evaluate\.py .*bigram\S*)", PAGE, flags=re.M)
    assert len(lines) == 2
    for line in lines:
        options = "model=tiny question_every=33 max_new_tokens=4 warmup=1"
        command = [sys.executable, *line.split(), *options.split()]
        where = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path)}}
        done = subprocess.run(command, **where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_tests_and_pages_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/])((?:kangaroo|tests|scripts|configs)/[\w./-]+\.\w+)", text)
    to_write = {"bigram", "mine", "X"}  # files that a reader is told to write
    files = {ROOT / path for path in named if Path(path).stem not in to_write}
    for link, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        files.add(to := page.parent / link if link else page)
        if anchor:
            headings = re.findall(r"^#+ (.*)$", to.read_text(encoding="utf-8"), flags=re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
    assert not [path for path in files if not path.exists()]
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py"))
    assert not [test for test in re.findall(r"`(test_\w+)`", text) if f"def {test}(" not in sources]


def test_source_files_that_comments_and_docstrings_name_exist():
    folders = [ROOT / name for name in ("kangaroo", "configs", "scripts", "examples", "tests")]
    sources = [p for x in folders for p in x.rglob("*") if p.suffix in (".py", ".h", ".yaml")]
    names = {path.name for path in [*sources, *ROOT.glob("*.py")]}
    there = names | {"tuned.yaml", "eval.py"}  # which tune writes; Spec-Bench's
    for path in sources:
        named = re.findall(r"`(?:[\w.-]+/)*([\w.-]+\.(?:py|h|yaml))`", path.read_text("utf-8"))
        assert {*named} <= there, path


def test_every_public_name_has_a_docstring():
    """A method may do without one where a base class or a protocol has one of that name."""
    members = {m for name in NAMES for m in vars(importlib.import_module(name)).values() if of(m)}
    methods = [
        (name, getattr(member, name))
        for member in filter(inspect.isclass, members)
        for name, value in vars(member).items()
        if inspect.isroutine(value) and not name.startswith("_")
    ]
    documented = {name for name, method in methods if inspect.getdoc(method)}
    missing = {f"{m.__module__}.{m.__name__}" for m in members if not inspect.getdoc(m)}
    assert missing | ({name for name, _ in methods} - documented) == set()


def of(member: object) -> bool:
    """Whether it is a public class or function of the package."""
    is_ours = (getattr(member, "__module__", None) or "").startswith("kangaroo")
    is_kind = inspect.isclass(member) or inspect.isfunction(member)
    return is_ours and is_kind and not member.__name__.startswith("_")


def test_the_workflow_runs_the_supported_python_versions():
    workflow = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text(encoding="utf-8"))
    tested = workflow["jobs"]["check"]["strategy"]["matrix"]["python"]
    name = "Programming Language :: Python :: 3."
    named = ["3." + c.removeprefix(name) for c in PROJECT["classifiers"] if c.startswith(name)]
    assert tested == sorted(named, key=lambda version: int(version.removeprefix("3.")))
    assert PROJECT["requires-python"] == f">={tested[0]}"


def test_every_extra_that_a_message_names_exists():
    texts = (p.read_text(encoding="utf-8") for p in [*(ROOT / "kangaroo").rglob("*.py"), *PAGES])
    naming = r"""(?:CHECKOUT\[|\binstall\(['"])([\w-]+)['"\]]"""
    named = {extra for text in texts for extra in re.findall(naming, text)}
    assert named and named <= PROJECT["optional-dependencies"].keys()
