"""Imports point one way, and each outside library has its place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kangaroo"
MODULES = {
    path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
NAMES = [name.removesuffix(".__init__") for name in MODULES]
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}

# Each group may import itself and what stands above it. What is in no group (provenance, models,
# trace, ...) is no concern of the core: no group up to the engine may import it.
LAYERS = [
    {"errors", "tree", "attention", "cache", "sampling", "verify"},
    {
        "folders",
        "native",
        "graphs",
        "clock",
        "model",
        "models",
        "embedded",
        "shapes",
        "placement",
        "adapter",
        "medusa",
        "adapter_files",
        "export",
        "official",
        "layer_subset",
        "batch",
        "datastore",
    },
    {"drafters", "engine"},
    {"data", "training", "evaluation", "serve", "streaming"},
    {"api"},
    {"cli", "cli_schema"},
]
CORE = LAYERS[0]
HYDRA_USERS = {"kangaroo.cli", "kangaroo.cli_schema"}


def part(name: str) -> str:
    """`drafters` of `kangaroo.drafters.lookup`."""
    return [*name.split("."), ""][1]


def rank(name: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if part(name) in layer), None)


def imports(name: str) -> set[str]:
    """Every module that a module imports, inside functions too, by its full name."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            assert node.module
            for alias in node.names:  # `from kangaroo import adapter` imports kangaroo.adapter
                full = f"{node.module}.{alias.name}"
                found.add(full if full in NAMES else node.module)
    return found


def outside(name: str) -> set[str]:
    return {imported.split(".")[0] for imported in imports(name)} - {"kangaroo"}


def inside(name: str) -> set[str]:
    return {imported for imported in imports(name) if imported.split(".")[0] == "kangaroo"}


def test_the_package_is_where_it_is_looked_for():
    assert {"kangaroo.tree", "kangaroo.engine", "kangaroo.drafters.kangaroo"} <= set(MODULES)
    assert "kangaroo.adapter" in inside("kangaroo.drafters.kangaroo")
    assert "torch" in outside("kangaroo.tree")


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    own = rank(name)
    if own is None:
        return
    for imported in inside(name):
        other = rank(imported)
        if other is None:
            assert own > 2, f"{name} imports {imported}, which is not below it"
        else:
            assert other <= own, f"{name} imports {imported}, which stands above it"


@pytest.mark.parametrize("name", [name for name in MODULES if part(name) in CORE])
def test_the_core_imports_torch_alone(name):
    import sys

    assert outside(name) - set(sys.stdlib_module_names) <= {"torch"}


@pytest.mark.parametrize("name", [name for name in MODULES if part(name) == "drafters"])
def test_drafters_import_neither_the_engine_nor_each_other(name):
    shared = {"base", "early_exit", "autoregressive"}  # what methods have in common
    allowed = {f"kangaroo.drafters.{other}" for other in shared} | {name}
    for imported in inside(name):
        assert part(imported) != "engine"
        assert part(imported) != "drafters" or imported in allowed


def users(library: str) -> set[str]:
    return {name for name in MODULES if library in outside(name)}


def test_each_outside_library_has_its_place():
    assert users("deepspeed") <= {"kangaroo.training.backend"}
    assert len(users("wandb")) <= 1
    assert users("hydra") | users("omegaconf") <= HYDRA_USERS


@pytest.mark.parametrize("library", ["deepspeed", "wandb"])
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
    if name not in ("kangaroo.model", "kangaroo.adapter", "kangaroo.models"):
        assert not known & HF_PARTS
    if name == "kangaroo.models":  # makes random models, whose deep layers it weakens
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
