"""What is installed: the wheel works without its checkout, and says which packages it lacks."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from commands import ROOT

from kangaroo.drafters import datastore, layer_search
from kangaroo.heads import adapter_files
from kangaroo.utils.errors import MissingPackage

ADAPTER = Path("adapters/smollm2-135m")


def run(home: Path, program: str, *arguments: str) -> str:
    """What a program of the environment there prints; it has to succeed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [home / ".venv/bin" / program, *arguments]
    done = subprocess.run(command, cwd=home, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A wheel, and a folder away from the checkout with a virtual environment that it is in; other
    packages are those of the environment that runs the tests."""
    here = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", here, ROOT]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = here.glob("*.whl")
    home = here / "somewhere"
    venv.create(home / ".venv", symlinks=True)
    python = home / ".venv/bin/python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    # a name that sorts late: this wheel, not another kangaroo, comes first
    places = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (site,) = home.glob(".venv/lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(places) + "\n")
    # the folder is a repository of its own, whose commits are not this project's
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run([*git, "init", "--quiet"], cwd=home, check=True)
    commit = ["commit", "--quiet", "--allow-empty", "--message=mine"]
    subprocess.run([*git, *commit], cwd=home, check=True)
    return wheel, home


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git tells which files are the project's")
def test_the_wheel_holds_the_package_its_configs_and_what_is_shipped(installed):
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    folders = ["kangaroo", "configs", "adapters", "integrations/transformers"]
    files = subprocess.check_output([*listed, *folders], cwd=ROOT, text=True).splitlines()
    there = (name.removeprefix("kangaroo/") for name in files if (ROOT / name).is_file())
    expected = {f"kangaroo/{name}" for name in there}
    names = set(zipfile.ZipFile(installed[0]).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"kangaroo/configs/train.yaml", f"kangaroo/{ADAPTER}/config.json"} <= names


@pytest.mark.slow
def test_the_readmes_first_example_and_a_command_run_with_what_is_shipped(installed, smollm2):
    _, home = installed
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    code = code.replace("max_new_tokens=128", "max_new_tokens=16")
    more = "print('', model.engine.drafter.exit_layer, kangaroo.__file__, sep='\\n')"
    *text, exit_layer, file = run(home, "python", "-c", f"{code}\n{more}").splitlines()
    assert int(exit_layer) == json.loads((ROOT / ADAPTER / "config.json").read_text())["exit_layer"]
    assert Path(file).is_relative_to(home)
    assert len(" ".join(text).split()) > 8
    options = "model=tiny drafter=vanilla bench=demo question_every=33 max_new_tokens=4"
    shown = run(home, "kangaroo", "evaluate", *options.split())
    assert "the comparison, as report.md, speedup.png and comparison.json, is in" in shown
    (summary,) = (home / "outputs/evaluate/tiny").glob("*/*/summary.json")
    provenance = json.loads(summary.read_text())["provenance"]
    assert provenance["command"] == f"kangaroo evaluate {options}"
    assert provenance["versions"]["kangaroo-decoding"] and provenance["git_revision"] is None


def test_what_is_shipped_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert adapter_files.find(str(ADAPTER)) == ROOT / ADAPTER
    assert adapter_files.read_config(f"{ADAPTER}-medusa").architecture.kind() == "medusa_heads"
    assert datastore.read_about(f"{ADAPTER}-datastore")["tokens"]
    assert layer_search.read(f"{ADAPTER}-draft_verify.json").skip
    (tmp_path / ADAPTER).mkdir(parents=True)  # one's own comes before it
    assert adapter_files.find(str(ADAPTER)) == ADAPTER


def test_what_needs_an_extra_names_it_before_anything_is_fetched(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)  # as if it were not installed
    with pytest.raises(MissingPackage, match=r'pip install .*\[datastore\]"'):
        datastore.index([[1, 2]], vocab_size=4)
    assert not cache.exists()
