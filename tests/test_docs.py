"""What the documentation shows does what it says, and every public name has a docstring."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
from test_conformance import BATCHES, CHUNK, NEW_TOKENS, PROMPTS, SAMPLINGS, case_of

from kangaroo.drafters.cascade import Cascade
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine import Engine

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGE = (ROOT / "docs/add-a-drafter.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


@pytest.fixture(scope="module")
def bigram(tmp_path_factory):
    """The shown file, as a module."""
    folder = tmp_path_factory.mktemp("shown")
    (folder / "bigram.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("bigram")


def test_the_shown_drafter_has_at_most_50_lines():
    assert len(CODE.splitlines()) <= 50


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_shown_drafter_writes_what_vanilla_decoding_writes(bigram, sampling, batch):
    case = case_of("llama", sampling)
    drafter = bigram.BigramConfig().build(case.lm)
    for engine in (
        Engine(case.lm, drafter, prefill_chunk=CHUNK),
        Engine(case.lm, Cascade(case.lm, drafter, Kangaroo(case.lm, case.adapter, 4, 0.3), True)),
    ):
        done = engine.generate(PROMPTS, NEW_TOKENS, SAMPLINGS[sampling], BATCHES[batch])
        assert [p + g.tokens for p, g in zip(PROMPTS, done, strict=True)] == case.texts


def test_the_shown_drafter_finds_what_repeats(bigram):
    drafter = bigram.Bigram(steps=3)
    assert drafter.continuation(0, [1, 2, 3, 1]) == [2, 3, 1]
    assert drafter.continuation(0, [1, 2, 1, 3, 1]) == [3, 1, 3]
    assert drafter.continuation(0, [1, 2]) == []


# Files that a reader of a page is told to write.
TO_WRITE = {"bigram", "mine", "X"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_tests_and_pages_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/])((?:kangaroo|tests|scripts|configs)/[\w./-]+\.\w+)", text)
    files = {ROOT / path for path in named if Path(path).stem not in TO_WRITE}
    for link, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        files.add(to := page.parent / link if link else page)
        if anchor:
            headings = re.findall(r"^#+ (.*)$", to.read_text(encoding="utf-8"), flags=re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
    assert not [path for path in files if not path.exists()]
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*.py"))
    assert not [test for test in re.findall(r"`(test_\w+)`", text) if f"def {test}(" not in sources]


# Modules that still have public names without a docstring, and how many names these are at most.
EXEMPT = {
    "batch.py",
    "benchmark/bandwidth.py",
    "benchmark/cost_report.py",
    "benchmark/speed_batches.py",
    "benchmark/speed_phases.py",
    "benchmark/speed_report.py",
    "benchmark/speed_trials.py",
    "clock.py",
    "drafters/autoregressive.py",
    "drafters/base.py",
    "drafters/early_exit.py",
    "drafters/kangaroo.py",
    "drafters/layer_search.py",
    "drafters/layer_subset.py",
    "drafters/vanilla.py",
    "engine.py",
    "estimate/estimate_report.py",
    "estimate/expectation.py",
    "estimate/fit.py",
    "evaluation/comparison.py",
    "evaluation/comparison_plots.py",
    "evaluation/methods.py",
    "evaluation/metrics.py",
    "evaluation/plots.py",
    "evaluation/records.py",
    "evaluation/report.py",
    "evaluation/run.py",
    "evaluation/summary.py",
    "model.py",
    "native.py",
    "tracking.py",
    "training/checkpoint.py",
    "training/recipe.py",
}
MOST = 90


def test_every_public_name_has_a_docstring():
    missing = undocumented(ROOT / "kangaroo")
    assert {name: names for name, names in missing.items() if name not in EXEMPT} == {}
    assert sum(map(len, missing.values())) <= MOST, missing


def public(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.ClassDef]:
    named = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [node for node in named if not node.name.startswith("_")]


def undocumented(folder: Path) -> dict[str, list[str]]:
    """Public functions, classes and methods without a docstring, by module.

    A method may do without one if a base class documents it, or a protocol that its class has all
    methods of.
    """
    files = sorted(folder.rglob("*.py"))
    trees = {str(f.relative_to(folder)): ast.parse(f.read_text(encoding="utf-8")) for f in files}
    everything = [node for tree in trees.values() for node in tree.body]
    classes = {node.name: node for node in everything if isinstance(node, ast.ClassDef)}

    def bases(owner: ast.ClassDef) -> list[str]:
        return [base.id for base in owner.bases if isinstance(base, ast.Name)]

    def methods(owner: ast.ClassDef) -> dict[str, bool]:
        """Whether each method has a docstring, its own or that of a base class."""
        found: dict[str, bool] = {}
        for base in bases(owner):
            found |= methods(classes[base]) if base in classes else {}
        for node in public(owner.body):
            found[node.name] = bool(ast.get_docstring(node)) or found.get(node.name, False)
        return found

    protocols = [methods(node) for node in classes.values() if "Protocol" in bases(node)]
    missing: dict[str, list[str]] = {}
    for name, tree in trees.items():
        nodes = public(tree.body)
        lacking = [node.name for node in nodes if not ast.get_docstring(node)]
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                own = methods(node)
                promised = {m for p in protocols if p.keys() <= own.keys() for m in p if p[m]}
                here = {method.name for method in public(node.body)}
                lacking += [f"{node.name}.{m}" for m in here if not own[m] and m not in promised]
        missing |= {name: sorted(lacking)} if lacking else {}
    return missing
