"""Every command of README and docs runs as a user types it, on tiny stand-ins: `python` lines, and
`torchrun` lines in two processes. And the commands that messages print exist."""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import BRIEF, FILES, PAGES, ROOT, SHORT, free_port, python, shown, typed, write_inputs
from composing import of_command
from helpers import adapter_for, random_model, saved_adapter, tiny_target
from hydra.core.override_parser.overrides_parser import OverridesParser
from test_architecture import TREES
from tiny_gguf import write as write_gguf

from kangaroo.__main__ import COMMANDS
from kangaroo.cli import commands as cli
from kangaroo.heads import published
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.adapter_files import WEIGHTS
from kangaroo.heads.eagle3_head import Eagle3Head
from kangaroo.heads.eagle_head import EagleHead
from kangaroo.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from kangaroo.models.random_models import byte_tokenizer
from kangaroo.utils import folders

# What stands in for the models, in every line; a recipe, a shape or a name stays the model's own.
MODELS = "smollm2-135m|vicuna-7b|vicuna-33b|llama-3.1-70b"
FEW = "bench.path=questions.jsonl max_new_tokens=6 warmup=1"
ONE = "adapter.exit_layers=[2]"
TUNED = (
    "tuning_questions=2 reporting_questions=2 max_new_tokens=8 search.kangaroo.steps=[6] "
    "search.kangaroo.threshold=[0.0] search.hybrid.nodes=[5] search.hybrid.min_gain_per_step=[1.5]"
)
SPEED = (
    "speed.prompts=1 speed.repeats=1 speed.contexts=[64] speed.max_new_tokens=20 "
    "speed.context_tokens=20 speed.batches=[1,2] speed.bandwidth_megabytes=16"
)
MIXED = "data.paths=[outputs/data/self_synthesis/tiny,outputs/data/tasks/tiny]"
# Where earlier lines of a page leave adapters; these stand in for them.
TRAINED = {"tiny": "attention/attention-exit2", "tiny-fused": "fused/fused-exit2"}
TRAINED["tiny-eagle3"] = "eagle3/eagle3"
AS_TYPED = {"train.py model=vicuna-7b --cfg job"}  # it needs no weights, and so no stand-in
TARGETS = {  # its options, and what it then prints
    "demo": ("question_end=1 warmup=1 max_new_tokens=8 output={here}", "compared.*kangaroo"),
    "chat": ("chat.max_new_tokens=8", "an empty"),
}
# Lines of docs/use.md that end in an error, with what it says first.
REFUSED = {
    "evaluate.py drafter.adapter=outputs/train/tiny/attention-exit2": "AdapterMismatch: adapter",
    "evaluate.py drafter.treshold=0.5": "ConfigError: there is no option 'drafter.treshold'.",
}
TORCHRUN = sorted({" ".join(words) for page in PAGES for words in shown(page)})
# For options that a message takes from elsewhere, where not any word is one.
STAND_INS = {"drafter": "kangaroo", "adapter": "medusa", "experiment": "paper/table1"}
STAND_INS |= {"model": "tiny"}
CALLS = [
    pytest.param(node, id=f"{name}:{node.lineno}")
    for name, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command_line"
]
PAGE = ROOT / "docs/your-own-model.md"
# What is appended to each command, so that it takes seconds.
SMALLER = {
    "scripts/prepare.py": "held=4",
    "evaluate.py": "max_new_tokens=6 warmup=1",
    "train.py": f"{BRIEF} {FILES} trainer.vocabulary=64",
    "scripts/tune.py": TUNED,
    # one asks at a terminal, the other never ends
    "scripts/chat.py": "--cfg job",
    "scripts/serve.py": "--cfg job",
}


def stand_ins(line: str) -> str:
    """What is appended to a line, so that it takes seconds."""
    script = line.partition(" ")[0]
    if line in AS_TYPED or script.endswith("convert.py"):
        return "exit_layer=2 output=adapters/imported" if " import " in line else ""
    parts = [] if "model=" in line.replace("bench@", "") else ["model=tiny"]
    if script == "evaluate.py":
        parts += [FEW, "question_every=1", "logger.mode=offline" if "=wandb" in line else ""]
        parts += ["question_begin=2" if "question_begin" in line else ""]  # of five
    elif script == "scripts/chat.py":
        parts += ["chat.max_new_tokens=8"]
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
        from_file = "data.source" in line or ("=vicuna-" in line and "make_data" not in line)
        parts += ["" if re.search(r"\badapter[.=]", line) else ONE, BRIEF]
        parts += ["data.source=ShareGPT.json" if from_file else SHORT]
        parts += ["recipe=vicuna-7b" if "=vicuna-" in line and from_file else ""]
        parts += ["hydra.sweep.subdir=${hydra.job.num}" if " -m " in line else ""]
    return " ".join(filter(None, parts))


def shrunk(line: str) -> list[str]:
    words = f"{line} {stand_ins(line)}".split()
    if line in AS_TYPED:
        return words
    words = [w if w.startswith("recipe=") else re.sub(MODELS, "tiny", w) for w in words]
    return [re.sub(r"[\d.]+B\.gguf", "FILE.gguf", w) for w in words]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Where a user might stand: an adapter, heads, questions and conversations lie there."""
    here, lm = tmp_path_factory.mktemp("begun"), tiny_target()
    training = {"progress": {"assistant_tokens": 7}}
    for name, fused in ("tiny", False), ("tiny-fused", True):
        adapter = adapter_for(lm, architecture=AdapterHeadConfig(fused=fused))
        saved_adapter(lm, adapter, here / "adapters" / name, training=training)
    heads = MedusaHeads(lm, MedusaHeadsConfig(heads=2)).start_from(lm)
    facts = {"guesses": [[0.5, 0.2]] * 2}
    saved_adapter(lm, heads, here / "adapters/tiny-medusa", facts=facts)
    saved_adapter(lm, EagleHead(lm), here / "adapters/tiny-eagle")
    saved_adapter(lm, Eagle3Head(lm), here / "adapters/tiny-eagle3")
    write_gguf(here / "FILE.gguf")
    write_inputs(here)
    return here


@pytest.fixture
def here(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "here")


@pytest.fixture(scope="module")
def prepared(begun, tmp_path_factory):
    """And what earlier commands left: data, a datastore, a subset of layers; a checkpoint."""
    here = shutil.copytree(begun, tmp_path_factory.mktemp("made") / "here")
    for name, saved in TRAINED.items():
        shutil.copytree(here / "adapters" / name, here / "outputs" / saved)
    for data in ("self_synthesis", "tasks"):
        options = f"model=tiny data={data} {SHORT} {ONE} {BRIEF}"
        typed("scripts/make_data.py", *options.split(), cwd=here)
    options = f"model=tiny {SHORT}".split()
    typed("scripts/prepare.py datastore", *options, cwd=here)
    search = "search.budget=4", "search.conversations=2"
    typed("scripts/prepare.py layers", *search, *options, cwd=here)
    lm, checkpoint = tiny_target(), here / "kangaroo-tiny-v1.3"  # of the authors' code
    checkpoint.mkdir()
    state = adapter_for(lm).state_dict()
    names = published.KANGAROO.items()
    named = {f"{theirs}.weight": state[f"{ours}.weight"] for theirs, ours in names}
    torch.save(named, checkpoint / published.WEIGHTS)
    lm.config.to_json_file(checkpoint / published.CONFIG)
    return here


# Lines with gaps that a reader fills; and those that test_examples.py, test_docs.py, test_hub.py,
# test_load_test.py, test_paper.py, test_serving.py or test_sweeps.py (if Optuna is there) run.
ELSEWHERE = re.compile(
    r"serve\.py|load_test|examples/|OUTPUT|OWNER|\.\.\.|evaluate\.py results=|search=optuna|bigram"
)

FAST = {
    "evaluate.py model=smollm2-135m drafter=kangaroo bench=demo",
    "train.py model=smollm2-135m",
    "torchrun --nproc-per-node=8 train.py model=vicuna-7b",
}

# A test below runs the lines of one page in their order.
OTHERS = [page for page in PAGES if page.name != "your-own-model.md"]
LINES = {" ".join(words[1:]) for page in OTHERS for words in shown(page, "python")}
SHOWN = sorted(line for line in LINES if not ELSEWHERE.search(line))

# Commands within sentences, but for sweeps and those that leave something to fill in.
PAGES_TEXT = "\n".join(page.read_text() for page in PAGES)
SCRIPTS = r"evaluate|train|scripts/(?:chat|serve|speed|tune)"
NAMED = re.findall(rf"`(?:python )?((?:{SCRIPTS})\.py [^`]+)`", PAGES_TEXT)
WITHIN = {line for line in NAMED if not re.search(r"=(X|\.\.\.)?( |$)| -m |--help", line)}


def marked(line: str) -> object:
    return pytest.param(line, marks=[pytest.mark.slow] * (line not in FAST))


@pytest.mark.parametrize("line", list(map(marked, SHOWN)))
def test_a_line_of_the_pages_runs(line, request, tmp_path):
    before = request.getfixturevalue("begun" if line in FAST | AS_TYPED else "prepared")
    script, *words = shrunk(line)
    here = shutil.copytree(before, tmp_path / "here")
    typed(script, *shlex.split(" ".join(words)), cwd=here)


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted(WITHIN))
def test_the_options_of_a_command_within_a_sentence_exist(line, tmp_path):
    script, *words = shlex.split(line)
    typed(script, *words, "--cfg", "job", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not (Path(sys.prefix) / ".installed").exists(), reason="needs make's own .venv")
@pytest.mark.parametrize("target", TARGETS)
def test_a_make_target_runs_on_the_embedded_model(target, tmp_path):
    options, shown = TARGETS[target]
    command = ["make", target, f"VENV={sys.prefix}", f"ARGS={options.format(here=tmp_path)}"]
    done = subprocess.run(command, cwd=ROOT, input="Hello\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(shown, done.stdout.lower(), re.DOTALL), done.stdout


def test_the_readmes_first_example_answers(smollm2, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    monkeypatch.chdir(ROOT)
    exec(compile(code.replace("max_new_tokens=128", "max_new_tokens=24"), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 8


@pytest.mark.slow
@pytest.mark.parametrize("line", REFUSED)
def test_an_error_that_a_page_shows_is_the_one_that_comes(line, here):
    page = (ROOT / "docs/use.md").read_text()
    assert f"$ python {line}" in page and REFUSED[line] in page
    shutil.copytree(here / "adapters/tiny", here / "outputs/train/tiny/attention-exit2")
    done = python(*line.split(), cwd=here)
    assert done.returncode == 1 and REFUSED[line] in done.stderr, done.stderr


def start(line: str, folder: Path) -> list[subprocess.Popen]:
    """The launchers of a command, one a node, as a user starts them: two processes in all."""
    nodes, port = 2 if "--nnodes=4" in line else 1, free_port()
    line = re.sub("--nproc-per-node=[48]", f"--nproc-per-node={2 // nodes}", line)
    line = line.replace("--nnodes=4", "--nnodes=2").replace("node0:29500", f"localhost:{port}")
    words = [str(ROOT / word) if word.endswith(".py") else word for word in line.split()[1:]]
    # torchrun's own port is one for all: tests run side by side
    environment = os.environ | {"PET_MASTER_PORT": str(free_port())}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return [subprocess.Popen(command, cwd=folder, env=environment, **pipes) for _ in range(nodes)]


def run(line: str, folder: Path) -> None:
    if "trainer=deepspeed" in line and find_spec("deepspeed") is None:
        pytest.skip("needs the extra deepspeed")
    for process in start(line, folder):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def bytes_of(folder: Path, pattern: str) -> dict[str, bytes]:
    files = sorted((folder / "outputs").rglob(pattern))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("line", TORCHRUN)
def test_a_line_of_the_pages_runs_in_two_processes(line, here):
    launcher, script, options = re.fullmatch(r"(.* )(\S+\.py)(.*)", line).groups()
    run(launcher + " ".join(shrunk(script + options)), here)
    if script == "train.py":
        (about,) = bytes_of(here, "attention-exit2/config.json").values()
        training = json.loads(about)["training"]
        assert training["processes"] == 2 and bytes_of(here, WEIGHTS)
        assert training["data"]["settings"]["source"] == "ShareGPT.json"
    elif script == "scripts/make_data.py":
        assert bytes_of(here, "*.arrow") and not bytes_of(here, "*.safetensors")
    else:
        records = bytes_of(here, "records-*.jsonl").values()
        assert [content.count(b"\n") for content in records] == [3, 2]
        baselines = re.compile("/(vanilla|transformers)/")
        summaries = bytes_of(here, "summary.json").items()
        (summary,) = (content for name, content in summaries if not baselines.search(name))
        assert json.loads(summary)["lossless"]["identical"] == 5


def kill_second(running, path):
    """Kill rank 1, without a chance to clean up, as soon as `path` is there."""
    (torchrun,) = running
    deadline = time.monotonic() + 120
    while not path.exists():
        assert torchrun.poll() is None and time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    second = next(c for c in children if b"\0RANK=1\0" in Path(f"/proc/{c}/environ").read_bytes())
    os.kill(int(second), signal.SIGKILL)
    _, errors = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 1 and "SIGKILL" in errors


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the second process in /proc")
def test_a_process_killed_in_writing_and_in_training_changes_no_byte(here):
    """Two processes, one of them killed twice, make the data and the adapter that one makes."""
    settings = "experiment=debug data.shards=4 data.max_answer_tokens=160"
    two = f"torchrun --nproc-per-node=2 train.py {settings}"
    shards = here / "outputs/data/self_synthesis/tiny.shards"
    # the first file of all: a shard has none until it is whole
    kill_second(start(two, here), shards / "settings.json")
    assert not (shards / "00001.jsonl").exists() and not (shards / "00003.jsonl").exists()
    kill_second(start(two, here), here / "outputs/train/tiny/checkpoint.pt")
    run(two, here)
    (alone := here / "alone").mkdir()
    run(f"torchrun --nproc-per-node=1 train.py {settings} trainer.accumulate=2", alone)
    for pattern in (WEIGHTS, "data/**/*.jsonl", "data/**/*.arrow"):
        assert bytes_of(here, pattern) == bytes_of(alone, pattern) != {}


def test_a_command_for_one_process_refuses_more(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["it.py", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit, match=r"it\.py runs in one process, and torchrun started 2"):
        cli.convert_import()


@pytest.mark.parametrize("call", CALLS)
def test_the_options_of_a_printed_command_exist(call):
    command, *words = (node.value for node in call.args if isinstance(node, ast.Constant))
    reads_more_configs = len(call.args) > 1 and not words  # --config-dir=, of which it needs one
    for option in call.keywords:
        if option.arg and option.arg != "launcher" and not reads_more_configs:
            constant = option.value.value if isinstance(option.value, ast.Constant) else None
            value = STAND_INS.get(option.arg, "x") if constant is None else constant
            words.append(f"{option.arg.replace('__', '.')}={value}")
    assert of_command(command, words)


def test_where_the_package_is_installed_the_program_is_named(tmp_path, monkeypatch):
    options = {"model": "tiny", "drafter__adapter": "my adapters/x", "trainer__shard_target": True}
    typed = """model=tiny 'drafter.adapter="my adapters/x"' trainer.shard_target=true"""
    assert folders.command_line("tune", **options) == f"python scripts/tune.py {typed}"
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(folders, "PACKAGE", tmp_path)
    started = f"{folders.TORCHRUN} -m kangaroo train {typed}"
    assert folders.command_line("train", launcher=folders.TORCHRUN, **options) == started


def test_a_folder_of_any_name_arrives_as_it_is():
    parser = OverridesParser.create()
    for name in ("a/b", "my folder/x", 'say "hi"', "it's", r"a\b", 'q\\"x', "e\\"):
        word = shlex.split(folders.command_line("evaluate", drafter__adapter=name))[-1]
        assert parser.parse_override(word).value() == name
    assert of_command("evaluate", [word]).drafter.adapter == name


@pytest.mark.slow
def test_the_commands_of_your_own_model_follow_from_each_other(tmp_path):
    random_model("llama", deep_scale=0.15).save_pretrained(tmp_path / "models/mine")
    byte_tokenizer().save_pretrained(tmp_path / "models/mine")
    questions = [{"category": "sums", "turns": [f"What is {i} and {i}?"]} for i in range(40)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n")
    lines = shown(PAGE, "python")
    assert len(lines) == 10
    for _, script, *options in lines:
        typed(script, *options, *SMALLER.get(script, "").split(), cwd=tmp_path)
    assert (tmp_path / "outputs/tune/mine/drafter/tuned.yaml").is_file()
    assert (tmp_path / "outputs/pack/USER/NAME/config.json").is_file()


def test_the_commands_of_your_own_model_are_known():
    for _, script, *options in shown(PAGE, "python"):
        action = [x for x in options[:1] if "=" not in x and not x.startswith("-")]
        assert " ".join([Path(script).stem, *action]) in COMMANDS
