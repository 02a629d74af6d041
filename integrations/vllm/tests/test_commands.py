"""The commands of this package's page, as they stand there, with less to do."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "integrations/vllm/README.md", ROOT / "docs/serving.md"
PYTHON = {"python", ".venv-vllm/bin/python"}  # this one is the latter
LITTLE = "--questions 2 --tokens 8 --at-once 1 2 --repeats 1 --eager --dtype float32".split()


def commands(starts: str) -> list[list[str]]:
    """Those of the pages that begin so, each once."""
    lines = {
        line for page in PAGES for line in page.read_text().splitlines() if re.match(starts, line)
    }
    return [shlex.split(line) for line in sorted(lines)]


def ran(command: list[str], folder: Path) -> str:
    program, script, *rest = command
    assert program in PYTHON
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *rest],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_table_of_speeds(tmp_path):
    (tmp_path / "adapters").symlink_to(ROOT / "adapters")
    exports = commands(r"python scripts/convert.py export to=(vllm|draft_model)")
    (bench,) = commands(r"\S+ integrations/vllm/bench.py")
    assert len(exports) == 2
    for command in exports:
        ran(command, tmp_path)
    table, forks, settings = ran(bench + LITTLE, tmp_path).strip().rsplit("\n\n", 2)
    rows = [line.split("|")[1].strip() for line in table.splitlines()[-4:]]
    assert rows == ["none", "draft model", "Kangaroo", "Kangaroo, up to 2"]
    assert forks == "all texts are equal" and '"dtype": "float32"' in settings
