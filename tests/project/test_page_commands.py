"""Every `python` line of README and docs runs as a user types it, on tiny stand-ins."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import PAGES, ROOT, python, shown
from stand_ins import BRIEF, FEW, ONE, SHORT, TUNED, typed

# What stands in for the models, in every line; a recipe, a shape or a name stays the model's own.
MODELS = ("smollm2-135m", "vicuna-7b", "vicuna-33b", "llama-3.1-70b")

SPEED = (
    "speed.prompts=1 speed.repeats=1 speed.contexts=[64] speed.max_new_tokens=20 "
    "speed.context_tokens=20 speed.batches=[1,2] speed.bandwidth_megabytes=16"
)
MIXED = "data.paths=[outputs/data/self_synthesis/tiny,outputs/data/tasks/tiny]"
FILES = "data.max_answer_tokens=16 data.filters.max_repetition=1 data.filters.near_duplicate=1"

# Lines that need no weights, and so no stand-in.
AS_TYPED = {
    "train.py model=vicuna-7b --cfg job",
}

# Lines with gaps that a reader fills; and those that test_examples.py, test_serving.py,
# test_load_test.py, test_paper.py, test_sweeps.py (where Optuna is installed) or test_hub.py run.
ELSEWHERE = re.compile(
    r"serve\.py|load_test|examples/|OUTPUT|\.\.\.|evaluate\.py results=|search=optuna|"
    r"push (?!.*dry_run=true)|convert\.py pull"
)


def stand_ins(line: str) -> str:
    """What is appended to a line, so that it takes seconds."""
    script = line.partition(" ")[0]
    if line in AS_TYPED or script.endswith("convert.py"):
        return "exit_layer=2 output=adapters/imported" if " import " in line else ""
    parts = [] if "model=" in line.replace("bench@", "") else ["model=tiny"]
    if script == "evaluate.py":
        parts += [FEW, "question_every=1", "logger.mode=offline" if "=wandb" in line else ""]
    elif script == "scripts/tune.py":
        parts += ["bench.path=questions.jsonl", TUNED]
    elif script == "scripts/speed.py":
        parts += [SPEED, "speed.bench.path=questions.jsonl" if "=spec_bench" in line else ""]
    elif " split " in line:
        parts = ["held=2"]
    elif "data=mix" in line:
        parts += [MIXED, BRIEF if script == "train.py" else ""]
    elif script == "scripts/prepare.py":
        parts += [SHORT]
    elif "experiment=questions" in line:
        parts += ["data.source=ShareGPT.json trainer.epochs=1 trainer.holdout=4", FILES]
    elif "experiment=debug" in line:
        parts = [SHORT]
    else:
        from_file = "data.source" in line or ("=vicuna-7b" in line and "make_data" not in line)
        parts += ["" if re.search(r"\badapter[.=]", line) else ONE, BRIEF]
        parts += ["data.source=ShareGPT.json" if from_file else SHORT]
        parts += ["recipe=vicuna-7b" if "=vicuna-7b" in line and from_file else ""]
        parts += ["hydra.sweep.subdir=${hydra.job.num}" if " -m " in line else ""]
    return " ".join(filter(None, parts))


FAST = {"evaluate.py model=smollm2-135m drafter=kangaroo bench=demo", "train.py model=smollm2-135m"}

# Before lines with this drafter a reader has to write it: test_docs.py does.
OWN_DRAFTER = "bigram"
LINES = {" ".join(words[1:]) for page in PAGES for words in shown(page, "python")}
SHOWN = sorted(x for x in LINES if OWN_DRAFTER not in x and not ELSEWHERE.search(x))


# Commands within sentences, but for sweeps and those that leave something to fill in.
WITHIN = {
    line
    for page in PAGES
    for line in re.findall(r"`(?:python )?((?:evaluate|train)\.py [^`]+)`", page.read_text())
    if not re.search(r"=(X|\.\.\.)?( |$)| -m ", line)
}


def marked(line: str) -> object:
    return pytest.param(line, marks=[pytest.mark.slow] * (line not in FAST))


@pytest.mark.parametrize("line", list(map(marked, SHOWN)))
def test_a_line_of_the_pages_runs(line, request, tmp_path):
    before = request.getfixturevalue("begun" if line in FAST | AS_TYPED else "made")
    script, *words = f"{line} {stand_ins(line)}".split()
    for model in MODELS if line not in AS_TYPED else ():
        words = [w if w.startswith("recipe=") else w.replace(model, "tiny") for w in words]
    here = shutil.copytree(before, tmp_path / "here")
    typed(script, " ".join(words), here)


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted(WITHIN))
def test_the_options_of_a_command_within_a_sentence_exist(line, tmp_path):
    script, *words = shlex.split(line)
    typed(script, " ".join([*words, "--cfg", "job"]), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not (Path(sys.prefix) / ".installed").exists(), reason="needs make's own .venv")
@pytest.mark.parametrize(
    "target, options, shown",
    [
        (
            "demo",
            "question_end=1 warmup=1 max_new_tokens=8 output={here}",
            r"\nvanilla: 8 tokens.*\nkangaroo: .*\nhybrid: .*methods compared.*decoding",
        ),
        ("chat", "chat.max_new_tokens=8", "an empty"),
    ],
)
def test_a_make_target_runs_on_the_embedded_model(target, options, shown, tmp_path):
    arguments = f"ARGS={options.format(here=tmp_path)}"
    command = ["make", target, f"VENV={sys.prefix}", arguments]
    done = subprocess.run(command, cwd=ROOT, input="Hello\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(shown, done.stdout.lower(), re.DOTALL), done.stdout


def test_the_readmes_first_example_answers(smollm2, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    monkeypatch.chdir(ROOT)
    exec(compile(code.replace("max_new_tokens=128", "max_new_tokens=24"), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 8


# Lines of docs/use.md that end in an error, with what it says first.
REFUSED = {
    "evaluate.py drafter.adapter=outputs/train/tiny/attention-exit2": "AdapterMismatch: adapter",
    "train.py model=vicuna-7b": "ModelNotFound: 'lmsys/vicuna-7b-v1.3' was found nowhere",
    "evaluate.py drafter.treshold=0.5": "Could not override 'drafter.treshold'.",
}


@pytest.mark.slow
@pytest.mark.parametrize("line", REFUSED)
def test_an_error_that_a_page_shows_is_the_one_that_comes(line, begun, tmp_path):
    page = (ROOT / "docs/use.md").read_text()
    assert f"$ python {line}" in page and REFUSED[line] in page
    here = shutil.copytree(begun, tmp_path / "here")
    shutil.copytree(here / "adapters/tiny", here / "outputs/train/tiny/attention-exit2")
    done = python(*line.split(), cwd=here)
    assert done.returncode == 1 and REFUSED[line] in done.stderr, done.stderr
