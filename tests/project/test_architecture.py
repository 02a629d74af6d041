"""Imports point one way, each outside library has its place, and docs/architecture.md lists the
files that execute in a step of Kangaroo."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from commands import ROOT
from helpers import adapter_for, chain_of, random_prompts, tiny

from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling

MODULES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted((ROOT / "kangaroo").rglob("*.py"))
}
NAMES = [name.removesuffix(".__init__") for name in MODULES]
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}

# A module may import those of its own row and of the rows above it; a folder stands for all of its
# modules. docs/architecture.md says what each holds.
ORDER = [
    {"utils", "cpu.huge_pages", "cpu.compiling", "models.draft_steps"},
    {"engine.cache", "engine.sampling", "models.attention", "models.packed", "models.supported"},
    {"engine.tree", "engine.topk_logits", "engine.constraint", "models.prompts"},
    {"engine.requests"},
    {"engine.verify", "engine.budget", "engine.backend", "cpu.structs"},
    {"cpu.blocks", "cpu.native", "cpu.backend", "cpu.outcomes", "cuda"},
    {"engine.clock", "models.layer_weights", "models.quantizing"},
    {"engine.batch", "models.target"},
    {"engine.costs", "engine.prefill"},
    {"models"},
    {"heads"},
    {"drafters"},
    {"cpu"},
    {"engine"},
    {"data", "evaluation"},
    {"evaluation.study"},
    {"training"},
    {"api", "chat", "hub", "serving"},
    {"cli"},
    {"__main__"},
]
CORE = """utils.errors utils.ranges engine.tree engine.cache engine.sampling engine.verify
models.attention""".split()
ROWS = {row: i for i, rows in enumerate(ORDER) for row in rows}
PACKAGE = ROOT / "kangaroo"


def part(name: str) -> str:
    """The longest name in `ORDER` that it begins with: `drafters` of `kangaroo.drafters.rest`."""
    inner = name.removeprefix("kangaroo").removeprefix(".")
    while inner and inner not in ROWS:
        inner = inner.rpartition(".")[0]
    return inner


def rank(name: str) -> int:
    """Which row of `ORDER` a module is in; the package itself, which imports lazily, is in none."""
    return ROWS.get(part(name), len(ORDER))


def imported_by(*nodes: ast.AST) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            for alias in node.names:  # `from kangaroo.engine import tree` imports that module
                full = f"{node.module}.{alias.name}"
                yield full if full in NAMES else node.module


@cache
def imports(name: str) -> set[str]:
    return set(imported_by(*ast.walk(TREES[name])))


def outside(name: str) -> set[str]:
    return {imported.split(".")[0] for imported in imports(name)} - {"kangaroo"}


def inside(name: str) -> set[str]:
    return {imported for imported in imports(name) if imported.split(".")[0] == "kangaroo"}


def test_the_order_names_every_module_once():
    assert sum(map(len, ORDER)) == len(ROWS)
    assert {part(name) for name in NAMES if name != "kangaroo"} == set(ROWS)


def test_imports_point_one_way():
    pairs = [(name, imported) for name in MODULES for imported in inside(name)]
    wrong = [(name, imported) for name, imported in pairs if rank(imported) > rank(name)]
    assert not wrong, "each imports one that stands below it"


def test_the_core_imports_torch_alone():
    for name in CORE:
        assert outside(f"kangaroo.{name}") - set(sys.stdlib_module_names) <= {"torch"}, name


def test_drafters_import_neither_the_engine_nor_a_backend():
    for name in (name for name in MODULES if part(name) == "drafters"):
        assert not {part(imported) for imported in inside(name)} & {"engine", "cpu", "cuda"}, name


def test_five_drafters_are_made_from_others_and_no_other_imports_one():
    """Modules of `drafters/` that are no method, such as `chain`, are there to be shared."""
    methods = {f"kangaroo.drafters.{path.stem}" for path in (ROOT / "configs/drafter").iterdir()}
    made = {name: (inside(name) & methods) - {name} for name in sorted(methods & TREES.keys())}
    pairs = {f"{name} {other}" for name, imported in made.items() for other in imported}
    assert {pair.replace("kangaroo.drafters.", "") for pair in pairs} == {
        *("eagle kangaroo", "eagle kangaroo_tree", "eagle3 eagle", "layerskip kangaroo"),
        *("hybrid kangaroo", "hybrid suffix"),
        *("llma prompt_lookup", "token_recycling medusa"),
    }


def users(library: str) -> set[str]:
    return {name for name in MODULES if library in outside(name)}


def test_each_outside_library_has_its_place():
    assert users("deepspeed") <= {"kangaroo.training.backend"}
    assert len(users("wandb")) <= 1
    cli = {f"kangaroo.cli.{name}" for name in ("command", "help", "schema")}
    assert users("hydra") <= cli and users("omegaconf") <= {*cli, "kangaroo.api"}
    assert {name.rsplit("_", 1)[0] for name in users("triton")} == {"kangaroo.cuda.kernels"}
    beside_cpu = {name for name in users("ctypes") if not name.startswith("kangaroo.cpu.")}
    assert beside_cpu == {"kangaroo.utils.memory"}


@pytest.mark.parametrize("library", ["deepspeed", "pydivsufsort", "wandb", "xllamacpp"])
def test_optional_libraries_are_imported_where_they_are_used(library):
    """At the top of a module they would be needed by everybody who imports it."""
    for name in users(library):
        assert library not in {x.split(".")[0] for x in imported_by(*TREES[name].body)}, name


def test_a_file_can_be_read_in_one_go_and_prints_nothing():
    for name, path in MODULES.items():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, name
        calls = [node.func for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)]
        assert "print" not in {call.id for call in calls if isinstance(call, ast.Name)}, name


def test_a_prompts_way_from_generate_to_tokens_reads_downwards():
    """No method of the engine calls one that stands above it."""
    methods = [x for x in ast.walk(TREES["kangaroo.engine.engine"]) if type(x) is ast.FunctionDef]
    places = {f"self.{method.name}": method.lineno for method in methods}
    for method in methods:
        names = {ast.unparse(x) for x in ast.walk(method) if isinstance(x, ast.Attribute)}
        assert all(places[name] > method.lineno for name in names & places.keys()), method.name


def executed(engine, sampling):
    """The files with a function that runs in a text's steps after the first, by their paths."""
    session, files = engine.open(1, 64, sampling), set()
    session.admit(0, Request(random_prompts(20)[0], 40, ignore_eos=True))
    session.step()

    def profile(frame, event, argument):
        files.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        for _ in range(8):
            session.step()
    finally:
        sys.setprofile(None)
    return {file.removeprefix(f"{PACKAGE}/") for file in files if file.startswith(f"{PACKAGE}/")}


@pytest.mark.parametrize("compiled, lines", [(True, 1700), (False, 3000)])
def test_a_step_executes_the_files_that_the_page_lists(compiled, lines):
    lm = tiny()
    if compiled:
        assert lm.compile_for_decoding().backend.is_compiled, "there is no C++ compiler"
    engine = Engine(lm, chain_of(lm, adapter_for(lm), 4, 0.3))
    files = executed(engine, Sampling()) | executed(engine, Sampling(temperature=0.8, seed=1))
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    kind = "Native" if compiled else "Reference"
    count, listed = re.search(rf"^- {kind}, (\d+) files: (.*?)\.$", page, re.S | re.M).groups()
    assert files == {*re.findall(r"`([\w/]+\.py)`", listed)} and len(files) == int(count)
    assert sum(len((PACKAGE / file).read_text().splitlines()) for file in files) <= lines
