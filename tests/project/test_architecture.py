"""Imports point one way, and each outside library has its place."""

from __future__ import annotations

import ast

import pytest
from modules import MODULES, NAMES

TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}

# A module may import those of its own row and of the rows above it; a folder stands for all of its
# modules. docs/architecture.md says what each holds.
ORDER = [
    {"utils", "cpu.huge_pages", "cpu.last_level", "cpu.compiling"},
    {"engine.cache", "engine.sampling", "models.attention", "models.supported"},
    {"engine.tree", "engine.topk_logits", "engine.requests", "models.prompts"},
    {"engine.verify", "engine.budget", "cpu.native", "cuda"},
    {"engine.acceleration", "engine.clock", "models.layer_weights"},
    {"engine.batch", "models.target"},
    {"engine.costs"},
    {"models"},
    {"heads"},
    {"drafters"},
    {"engine.stepper"},
    {"cpu"},
    {"engine"},
    {"data", "evaluation"},
    {"evaluation.study"},
    {"training"},
    {"evaluation.speed"},
    {"evaluation.tune"},
    {"api", "chat", "evaluation.race", "hub", "serving"},
    {"cli"},
    {"__main__"},
]
CORE = """utils.errors utils.ranges engine.tree engine.cache engine.sampling engine.verify
models.attention""".split()
HYDRA_USERS = {"kangaroo.cli.command", "kangaroo.cli.schema"}


ROWS = {row: i for i, rows in enumerate(ORDER) for row in rows}


def part(name: str) -> str:
    """The longest name in `ORDER` that it begins with: `drafters` of `kangaroo.drafters.rest`."""
    inner = name.removeprefix("kangaroo").removeprefix(".")
    while inner and inner not in ROWS:
        inner = inner.rpartition(".")[0]
    return inner


def rank(name: str) -> int:
    """Which row of `ORDER` a module is in; the package itself, which imports lazily, is in none."""
    return ROWS.get(part(name), len(ORDER))


def imports(name: str) -> set[str]:
    """Every module that a module imports, inside functions too, by its full name."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            assert node.module
            for alias in node.names:  # `from kangaroo import tree` imports kangaroo.engine.tree
                full = f"{node.module}.{alias.name}"
                found.add(full if full in NAMES else node.module)
    return found


def outside(name: str) -> set[str]:
    return {imported.split(".")[0] for imported in imports(name)} - {"kangaroo"}


def inside(name: str) -> set[str]:
    return {imported for imported in imports(name) if imported.split(".")[0] == "kangaroo"}


def test_the_package_is_where_it_is_looked_for():
    assert {"kangaroo.engine.tree", "kangaroo.engine.engine", "kangaroo.drafters.kangaroo"} <= set(
        MODULES
    )
    assert "kangaroo.drafters.early_exit" in inside("kangaroo.drafters.kangaroo")
    assert "torch" in outside("kangaroo.engine.tree")


def test_the_order_names_every_module_once():
    assert sum(map(len, ORDER)) == len(ROWS)
    assert {part(name) for name in NAMES if name != "kangaroo"} == set(ROWS)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    for imported in inside(name):
        assert rank(imported) <= rank(name), f"{name} imports {imported}, which stands below it"


@pytest.mark.parametrize("name", [f"kangaroo.{name}" for name in CORE])
def test_the_core_imports_torch_alone(name):
    import sys

    assert outside(name) - set(sys.stdlib_module_names) <= {"torch"}


@pytest.mark.parametrize("name", [name for name in MODULES if part(name) == "drafters"])
def test_drafters_import_neither_the_engine_nor_each_other(name):
    in_common = {"base", "chain", "early_exit", "kangaroo", "kangaroo_tree"}
    made_from = {"datastore", "layer_search", "suffix", "expected_gain"}
    shared = in_common | made_from  # and what some are made from
    allowed = {f"kangaroo.drafters.{other}" for other in shared} | {name}
    for imported in inside(name):
        assert part(imported) not in ("engine", "cpu", "cuda")
        assert part(imported) != "drafters" or imported in allowed


def users(library: str) -> set[str]:
    return {name for name in MODULES if library in outside(name)}


def test_each_outside_library_has_its_place():
    assert users("deepspeed") <= {"kangaroo.training.backend"}
    assert len(users("wandb")) <= 1
    assert users("hydra") | users("omegaconf") <= HYDRA_USERS
    assert {name.rsplit("_", 1)[0] for name in users("triton")} == {"kangaroo.cuda.kernels"}


@pytest.mark.parametrize("library", ["deepspeed", "gguf", "pydivsufsort", "wandb", "xllamacpp"])
def test_optional_libraries_are_imported_where_they_are_used(library):
    """At the top of a module they would be needed by everybody who imports it."""
    for name in users(library):
        top = [node for node in TREES[name].body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in top:
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert module is None or module.split(".")[0] != library, name


# what transformers calls the parts of a layer
HF_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "rotary_emb"}


@pytest.mark.parametrize("name", MODULES)
def test_only_the_model_and_the_adapter_know_transformers_layers(name):
    known = {node.attr for node in ast.walk(TREES[name]) if isinstance(node, ast.Attribute)}
    if part(name) not in ("models.layer_weights", "heads", "models.target", "models"):
        assert not known & HF_PARTS
    if name == "kangaroo.models.random_models":  # makes random models, whose deep layers it weakens
        assert known & HF_PARTS <= {"self_attn", "mlp"}


@pytest.mark.parametrize("name", MODULES)
def test_a_file_can_be_read_in_one_go(name):
    assert len(MODULES[name].read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("name", MODULES)
def test_nothing_prints(name):
    called = {
        node.func.id
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "print" not in called
