"""Every example runs as a newcomer would run it, and shows what it says."""

import json
import re

import pytest
from commands import ROOT, typed

TOUR = ROOT / "examples/tour.ipynb"
TINY = "--model tiny --adapter untrained:2"

OUTPUT = "--model tiny --output {here}"
TUNING = f"{OUTPUT}/tuned --files examples --steps 3 --width 64"

ASKED = "Name three rivers", "What is 12", "What is the capital", "And what is it"

# What is appended to each, and what it then prints.
RUNS = {
    "generate.py": (f"{TINY} --max-new-tokens 8", "".join(rf"\n> {x}.*" for x in ASKED)),
    "train_adapter.py": ("--output {here}", r"attention-exit2 is trained; with it .*\n'.+'\n$"),
    "add_a_drafter.py": ("--model tiny", "writes the same: True"),
    "fine_tune.py": (TUNING, r"files, \d+ tokens.*tuned is fine-tuned"),
    "long_prompts.py": (f"{OUTPUT}/x.jsonl --lengths 100 200", "4 questions of 100, 200 tokens"),
}
EXAMPLES = [path.name for path in (ROOT / "examples").glob("*.py")]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example, tmp_path):
    options, expected = RUNS[example]
    printed = typed(f"examples/{example}", *options.format(here=tmp_path).split(), cwd=ROOT)
    assert re.search(expected, printed, flags=re.S)


def stdout_of(cell: dict) -> str:
    texts = [output["text"] for output in cell["outputs"] if output.get("name") == "stdout"]
    return "".join("".join(text) for text in texts)  # a file has lists of lines


def check_tour(notebook: dict) -> None:
    """Its cells ran in order, and show what their text promises."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    load, generate, several, stream, compare, plot = cells
    assert stdout_of(load) == "" and "sky" in stdout_of(generate) and "Paris" in stdout_of(stream)
    assert re.search(r"> Name three rivers.*\n> What is 12", stdout_of(several), flags=re.S)
    assert re.match(r"the same text: True\nvanilla +\d.*\nkangaroo +\d.*\n$", stdout_of(compare))
    (drawn,) = (output for output in plot["outputs"] if output["output_type"] == "display_data")
    assert "image/png" in drawn["data"]


def test_the_notebook_is_kept_with_what_it_shows():
    notebook = json.loads(TOUR.read_text(encoding="utf-8"))
    check_tour(notebook)
    shown = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert all(output.get("name") != "stderr" for output in shown)  # it has somebody's paths


@pytest.mark.slow
def test_the_notebook_runs_on_the_embedded_model(smollm2, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebooks")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(TOUR, as_version=4)
    here = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=600, resources=here, coalesce_streams=True)
    check_tour(client.execute())
    assert list(tmp_path.iterdir()) == []
