"""Facts that stand in several of the project's own files agree."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml
from commands import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_workflow_runs_the_supported_python_versions():
    tested = read(".github/workflows/check.yml")["jobs"]["check"]["strategy"]["matrix"]["python"]
    name = "Programming Language :: Python :: 3."
    named = ["3." + c.removeprefix(name) for c in PROJECT["classifiers"] if c.startswith(name)]
    assert tested == sorted(named, key=number)
    assert PROJECT["requires-python"] == f">={tested[0]}"


def test_the_workflow_ends_with_the_command_of_ci_run():
    steps = read(".github/workflows/check.yml")["jobs"]["check"]["steps"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert steps[-1]["run"] == script[-1] == "make check"


def test_the_citation_is_of_this_version_and_of_the_paper():
    citation = read("CITATION.cff")
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert [paper["url"] for paper in citation["references"]] == [PROJECT["urls"]["Paper"]]


@pytest.mark.parametrize("form", ["bug_report", "feature_request"])
def test_an_issue_form_has_what_github_asks_for(form):
    content = read(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert content["name"] and content["description"]
    asked = [field for field in content["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in asked)
    assert len({field["id"] for field in asked}) == len(asked) > 0
    for options in (field["attributes"].get("options", []) for field in asked):
        assert all(isinstance(option, str) for option in options)  # a bare `yes` is a bool


def test_every_extra_that_a_message_names_exists():
    sources = [*(ROOT / "kangaroo").rglob("*.py"), ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    texts = (path.read_text(encoding="utf-8") for path in sources)
    naming = r"""(?:CHECKOUT\[|\binstall\(['"])([\w-]+)['"\]]"""
    named = {extra for text in texts for extra in re.findall(naming, text)}
    assert named
    assert named <= PROJECT["optional-dependencies"].keys()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git tells which files are the project's")
def test_no_file_is_larger_than_the_commit_hook_allows():
    hooks = {hook["id"]: hook for hook in read(".pre-commit-config.yaml")["repos"][0]["hooks"]}
    limit = 1024 * int(hooks["check-added-large-files"]["entry"].rpartition("=")[2])
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    files = [ROOT / name for name in listed.split("\0") if name]
    assert [path for path in files if path.is_file() and path.stat().st_size > limit] == []
