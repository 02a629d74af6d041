"""Every `python` line of README and docs runs as a user types it, on tiny stand-ins."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import PAGES, ROOT, python, shown
from stand_ins import BRIEF, FEW, ONE, SHORT, TUNED, typed

# What stands in for the models, in every line; a recipe, a shape or a name stays the model's own.
MODELS = ("smollm2-135m", "vicuna-7b", "vicuna-33b", "llama-3.1-70b")

SPEED = (
    "speed.max_new_tokens=20 speed.context_tokens=20 speed.batches=[1,2] "
    "speed.bandwidth_megabytes=16"
)
MIXED = "data.paths=[outputs/data/self_synthesis/tiny,outputs/data/tasks/tiny]"
PAPERS = "recipe=vicuna-7b data.source=ShareGPT.json"

# Lines that need no weights, and so no stand-in.
AS_TYPED = {
    "train.py model=vicuna-7b --cfg job",
}

# What is appended to each line; a line that is not here fails. None: a line with gaps that a reader
# fills.
APPENDED = {
    "evaluate.py model=smollm2-135m drafter=kangaroo bench=demo": FEW,
    "evaluate.py bench=spec_bench": f"model=tiny {FEW}",
    "evaluate.py bench=spec_bench question_every=20": f"model=tiny {FEW}",
    "evaluate.py model.dtype=float32 sampling.temperature=0.8 seed=3": f"model=tiny {FEW}",
    "evaluate.py -m drafter=vanilla,kangaroo,medusa,prompt_lookup": f"model=tiny {FEW}",
    "evaluate.py drafter=kangaroo +drafter@more.hybrid=hybrid hf_every=8": f"model=tiny {FEW}",
    "evaluate.py drafter=kangaroo drafter.adapter=adapters/smollm2-135m-fused": (
        f"model=tiny {FEW}"
    ),
    "evaluate.py drafter=kangaroo noise_floor=true": f"model=tiny {FEW}",
    "evaluate.py drafter=kangaroo +drafter@more.hybrid=hybrid race=true": f"model=tiny {FEW}",
    "evaluate.py drafter=kangaroo +variants.threshold=[0.4,0.6] +variants.steps=[2,6]": (
        f"model=tiny {FEW}"
    ),
    "evaluate.py drafter=kangaroo +variants.threshold=[auto,0.3,0.4,0.6] noise_floor=true": (
        f"model=tiny {FEW}"
    ),
    "evaluate.py -m drafter=vanilla,kangaroo bench=demo": f"model=tiny {FEW}",
    "evaluate.py -m drafter.threshold=0.4,0.6,0.8": f"model=tiny {FEW}",
    "evaluate.py -m drafter.threshold=0.4,0.6,0.8 logger=wandb": (
        f"model=tiny {FEW} logger.mode=offline"
    ),
    "evaluate.py experiment=methods": f"model=tiny {FEW}",
    "evaluate.py experiment=methods bench=spec_bench question_every=20": (
        f"model=tiny {FEW} question_every=1"
    ),
    "evaluate.py experiment=paper/table1": f"model=tiny {FEW} question_every=1",
    "evaluate.py experiment=paper/table1 model=vicuna-7b": f"{FEW} question_every=1",
    "evaluate.py model=vicuna-7b": FEW,
    "evaluate.py model=llama-3.1-70b model.device_map=auto": FEW,
    "train.py model=smollm2-135m": f"{ONE} {BRIEF} {SHORT}",
    "train.py model=vicuna-7b": f"{PAPERS} {ONE} {BRIEF}",
    "train.py model=vicuna-7b --cfg job": "",
    "train.py model=vicuna-7b estimate=true": f"{PAPERS} {ONE} {BRIEF}",
    "train.py model=vicuna-7b adapter=medusa": f"{PAPERS} {BRIEF}",
    "train.py experiment=paper/adapters": f"model=tiny {ONE} {BRIEF} {SHORT}",
    "train.py experiment=paper/adapters model=vicuna-7b": f"{PAPERS} {ONE} {BRIEF}",
    "train.py experiment=debug adapter=eagle": SHORT,
    "train.py model=smollm2-135m adapter=eagle": f"{BRIEF} {SHORT}",
    "evaluate.py -m drafter=vanilla,kangaroo,eagle": f"model=tiny {FEW}",
    "train.py data.teacher=32 data.path=outputs/data/kept output=outputs/kept": (
        f"model=tiny {ONE} {BRIEF} {SHORT}"
    ),
    "scripts/prepare.py split source=ShareGPT.json output=outputs/questions held=64": "held=2",
    "train.py data=conversations data.source=outputs/questions/training.jsonl": (
        f"model=tiny data.source=ShareGPT.json {ONE} {BRIEF}"
    ),
    "evaluate.py bench.path=outputs/questions/held_out.jsonl bench.name=held_out": (
        f"model=tiny {FEW}"
    ),
    "scripts/serve.py port=8000": None,  # test_serving.py starts servers
    "scripts/serve.py model=vicuna-7b drafter=kangaroo max_batch_size=8": None,
    # test_load_test.py runs it
    "integrations/load_test/load_test.py": None,
    "integrations/load_test/load_test.py vanilla kangaroo hybrid --rounds 6": None,
    "integrations/load_test/load_test.py vanilla kangaroo draft_model hybrid vllm=URL "
    "--users 1 2 --rounds 2": None,
    "train.py experiment=study": f"model=tiny {ONE} {BRIEF} {SHORT}",
    "train.py experiment=smollm2": f"model=tiny {ONE} {BRIEF} {SHORT}",
    "train.py data=mix adapter=medusa trainer.vocabulary=2048 trainer.cache_target_states=true "
    "output=outputs/medusa": f"model=tiny {BRIEF} {MIXED}",
    "scripts/make_data.py model=vicuna-33b recipe=own_text model.device_map=auto": (
        f"{ONE} {BRIEF} {SHORT}"
    ),
    "scripts/speed.py +drafter@more.rest=rest": (
        f"model=tiny speed.prompts=1 speed.repeats=1 speed.contexts=[64] {SPEED}"
    ),
    "scripts/speed.py ~drafter@more.cascade": (
        f"model=tiny speed.prompts=1 speed.repeats=1 speed.contexts=[64] {SPEED}"
    ),
    "scripts/speed.py model=smollm2-135m": (
        f"speed.prompts=1 speed.repeats=1 speed.contexts=[64] {SPEED}"
    ),
    "scripts/speed.py bench@speed.bench=spec_bench +drafter@more.tree=kangaroo_tree "
    "speed.prompts=24 speed.repeats=1 speed.contexts=[256,1024] speed.batches=[1,8,32]": (
        f"model=tiny speed.bench.path=questions.jsonl speed.contexts=[64] {SPEED}"
    ),
    "scripts/prepare.py layers data=mix search.budget=150 search.conversations=6 "
    "search.max_length=384": f"model=tiny {MIXED}",
    "scripts/tune.py": f"model=tiny bench.path=questions.jsonl {TUNED}",
    "scripts/tune.py search.drafters=[kangaroo,hybrid] bench.path=outputs/questions/held_out.jsonl "
    "tuning_questions=24 reporting_questions=8 max_new_tokens=96": (
        f"model=tiny bench.path=questions.jsonl {TUNED}"
    ),
    "scripts/tune.py model=vicuna-7b bench=spec_bench": f"bench.path=questions.jsonl {TUNED}",
    "evaluate.py --config-dir=OUTPUT drafter=tuned": None,
    "evaluate.py --config-dir=OUTPUT drafter=kangaroo +drafter@more.tuned=tuned": None,
    "train.py experiment=questions data.source=outputs/questions/training.jsonl": (
        "model=tiny data.source=ShareGPT.json trainer.epochs=1 trainer.holdout=4 "
        "data.max_answer_tokens=16 data.filters.max_repetition=1 data.filters.near_duplicate=1"
    ),
    "scripts/prepare.py datastore data=mix": f"model=tiny {MIXED}",
    "scripts/prepare.py datastore model=vicuna-7b": SHORT,
    # tests/evaluation/test_paper.py, tests/evaluation/test_result_page.py
    "evaluate.py results=outputs/paper/smollm2-135m page=docs/results/paper.md": None,
    "evaluate.py results=outputs/demo page=docs/mine.md": None,
    "scripts/convert.py import source=kangaroo-vicuna-7b-v1.3 model=vicuna-7b": (
        "exit_layer=2 output=adapters/imported"
    ),
    "scripts/convert.py export to=draft_model source=adapters/smollm2-135m model=smollm2-135m "
    "output=smollm2-draft": "",
    "scripts/convert.py export to=vllm source=adapters/smollm2-135m model=smollm2-135m "
    "output=smollm2-vllm": "",
    "scripts/convert.py export to=official source=adapters/vicuna-7b model=vicuna-7b "
    "output=kangaroo-ours": "",
    "train.py model=smollm2-135m adapter.exit_layers=[1,2,3,4]": f"{BRIEF} {SHORT}",
    "scripts/make_data.py model=smollm2-135m data.shards=3": f"{ONE} {BRIEF} {SHORT}",
    "train.py -m adapter.exit_layers=[2],[3] trainer.learning_rate=2.5e-3,5e-3 logger=wandb "
    "logger.mode=offline": f"model=tiny {BRIEF} {SHORT} hydra.sweep.subdir=${{hydra.job.num}}",
    # test_sweeps.py runs it where Optuna is installed
    "evaluate.py -m +search=optuna drafter.threshold=interval(0.2,0.9) drafter.steps=range(1,9)": (
        None
    ),
    "scripts/convert.py push source=adapters/smollm2-135m repo=USER/NAME dry_run=true": "",
    # test_hub.py runs these against a hub of its own
    "scripts/convert.py push source=adapters/smollm2-135m repo=USER/NAME": None,
    "scripts/convert.py pull repo=USER/NAME output=adapters/NAME": None,
    "evaluate.py experiment=compare data.shards=7 "
    "compare.adapters=[adapters/smollm2-135m, ...]": None,
}
FAST = {"evaluate.py model=smollm2-135m drafter=kangaroo bench=demo", "train.py model=smollm2-135m"}

# Before lines with this drafter a reader has to write it: test_docs.py does.
OWN_DRAFTER = "bigram"
LINES = {" ".join(words[1:]) for page in PAGES for words in shown(page, "python")}
SHOWN = {line for line in LINES if OWN_DRAFTER not in line}


# Commands within sentences, but for sweeps and those that leave something to fill in.
WITHIN = {
    line
    for page in PAGES
    for line in re.findall(r"`(?:python )?((?:evaluate|train)\.py [^`]+)`", page.read_text())
    if not re.search(r"=(X|\.\.\.)?( |$)| -m ", line)
}


PROBE = """
import atexit, os, signal, sys
assert not hasattr(sys, "left_behind")
atexit.register(print, "at exit")
print(sys.argv[1:], os.getcwd(), os.environ.get("ASKED"), sys.stdin.read(), __name__, sys.path[0])
print("warned", file=sys.stderr)
os.environ["ASKED"] = sys.left_behind = "by an earlier run"
"""


@pytest.mark.parametrize(
    "end, code, told",
    [
        ("", 0, "warned\n"),
        ("raise SystemExit('no')", 1, "warned\nno\n"),
        ("sys.exit(7)", 7, "warned\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_a_command_is_a_process_of_its_own(end, code, told, tmp_path, monkeypatch):
    """Though its imports are those of a process before it (`commands.py`)."""
    (tmp_path / "it").mkdir()
    script = tmp_path / "it/probe.py"
    script.write_text(PROBE + end)
    monkeypatch.setenv("ASKED", "yes")
    done = python(str(script), "a", "b c", cwd=tmp_path)
    # where the package triton is installed, it says at exit what it leaks
    stderr = done.stderr.partition("nanobind: leaked")[0]
    assert done.returncode == code and stderr.endswith(told)
    if code >= 0:
        expected = f"['a', 'b c'] {tmp_path} yes  __main__ {script.parent}\nat exit\n"
        assert done.stdout == expected


def test_every_python_line_has_its_stand_ins():
    assert set(APPENDED) == SHOWN


def marked(line: str) -> object:
    return pytest.param(line, marks=[pytest.mark.slow] * (line not in FAST))


@pytest.mark.parametrize(
    "line", [marked(line) for line in sorted(APPENDED) if APPENDED[line] is not None]
)
def test_a_line_of_the_pages_runs(line, request, tmp_path):
    before = request.getfixturevalue("begun" if line in FAST | AS_TYPED else "made")
    script, *words = f"{line} {APPENDED[line]}".split()
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
        ("train", f"model=tiny {ONE} {BRIEF} {SHORT} output={{here}} data.path={{here}}/data", ""),
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
