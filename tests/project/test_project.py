"""Facts that stand in several of the project's own files agree."""

import re
import sys
from typing import Any

import yaml
from commands import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_workflow_runs_the_supported_python_versions():
    tested = read(".github/workflows/check.yml")["jobs"]["check"]["strategy"]["matrix"]["python"]
    name = "Programming Language :: Python :: 3."
    named = ["3." + c.removeprefix(name) for c in PROJECT["classifiers"] if c.startswith(name)]
    assert tested == sorted(named, key=lambda version: int(version.removeprefix("3.")))
    assert PROJECT["requires-python"] == f">={tested[0]}"


def test_every_extra_that_a_message_names_exists():
    sources = [*(ROOT / "kangaroo").rglob("*.py"), ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    texts = (path.read_text(encoding="utf-8") for path in sources)
    naming = r"""(?:CHECKOUT\[|\binstall\(['"])([\w-]+)['"\]]"""
    named = {extra for text in texts for extra in re.findall(naming, text)}
    assert named
    assert named <= PROJECT["optional-dependencies"].keys()
