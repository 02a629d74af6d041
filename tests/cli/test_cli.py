"""The command line: every config composes, typos are refused, errors come without a traceback; and
the sizes of trees, drafts and windows are small on a CPU, elsewhere the papers'."""

import errno
import json
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
import yaml
from commands import ROOT, typed, write_inputs
from commands import python as run
from composing import composed
from helpers import adapter_for, saved_adapter, tiny_target
from omegaconf import OmegaConf

import kangaroo
from kangaroo import CascadeConfig, DrafterConfig, KangarooConfig, MedusaConfig, RestConfig
from kangaroo import __main__ as program
from kangaroo.cli import commands
from kangaroo.cli.command import remedy
from kangaroo.utils import errors
from kangaroo.utils.discovery import classes
from kangaroo.utils.folders import fitting_name, sole_writer

INTERRUPTED = """
import os, signal
from kangaroo.data.conversations import ConversationsConfig
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
ConversationsConfig.make = lambda *given: os.kill(os.getpid(), signal.SIGINT)
"""
UNTRACKED = """
import sys
from kangaroo.utils import tracking
tracking.Wandb.start = lambda self, settings, output: sys.exit("a run has begun")
"""
UNLOADED = """
import sys
commands.load_target = lambda config: sys.exit("the model would be loaded")
"""
CONFIGS = classes("kangaroo.drafters", DrafterConfig)
CPU, GPU = yaml.safe_load((ROOT / "configs/groups/hardware.yaml").read_text()).values()
NAMES = sorted(CPU.keys() & CONFIGS.keys())


def test_every_command_has_a_script_and_a_function():
    assert all(callable(getattr(commands, n.replace(" ", "_"))) for n in program.COMMANDS)
    scripts = [ROOT / "train.py", ROOT / "evaluate.py", *(ROOT / "scripts").glob("*.py")]
    assert {name.split()[0] for name in program.COMMANDS} == {path.stem for path in scripts}


def test_the_package_and_the_list_of_its_commands_load_no_torch():
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = kangaroo.lode
    assert {"load", "Model", "KangarooConfig", "Sampling", "ConfigError"} <= {*dir(kangaroo)}
    code = "import sys, kangaroo; from kangaroo import __main__; __main__.main()"
    code += "; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name, what in program.COMMANDS.items():
        assert f"{name} " in shown and what in shown


def test_all_that_users_name_can_be_imported_from_the_package():
    """Configs of drafters and all errors, too, once there are more of them."""
    configs = classes("kangaroo.drafters", DrafterConfig).values()
    ours = (x for x in vars(errors).values() if getattr(x, "__module__", "") == errors.__name__)
    kinds = [*configs, *(x for x in ours if isinstance(x, type))]
    assert {kind.__name__ for kind in kinds} <= {*kangaroo.__all__}
    for name in kangaroo.__all__:
        assert getattr(kangaroo, name).__name__ == name
    assert all(getattr(kangaroo, kind.__name__) is kind for kind in kinds)


@pytest.mark.parametrize(
    "script, argv, expected",
    [
        ("", ["/bin/kangaroo", "convert", "export", "to=vllm"], "kangaroo convert export"),
        ("convert", ["scripts/convert.py", "export", "to=vllm"], "scripts/convert.py export"),
    ],
)
def test_a_command_runs_under_its_name(monkeypatch, capsys, script, argv, expected):
    command_lines = []
    monkeypatch.setattr(commands, "convert_export", lambda: command_lines.append(sys.argv))
    monkeypatch.setattr(sys, "argv", argv)
    program.main(script)
    assert command_lines == [[expected, "to=vllm"]]
    monkeypatch.setattr(sys, "argv", argv[:1])
    program.main(script)  # a script with several commands lists its own
    shown = capsys.readouterr().out
    assert "convert pack " in shown and ("train " in shown) == (script == "")


@pytest.mark.parametrize(
    "script, words, message",
    [
        ("", "trian", "no command 'trian'. Did you mean 'train'? `kangaroo --help` lists"),
        ("", "model=tiny", "no command 'model=tiny'. `kangaroo --help` lists"),
        ("", "search_layers", "Did you mean 'prepare layers'? `kangaroo --help` lists"),
        ("convert", "exprot", "no command 'convert exprot'. Did you mean 'convert export'?"),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest_name(script, words, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kangaroo", *words.split()])
    with pytest.raises(SystemExit, match=re.escape(message)):
        program.main(script)


@pytest.mark.parametrize("path, adapter", [("", "adapters/tiny"), ("org/small", None)])
def test_another_draft_model_takes_the_place_of_the_adapter(path, adapter):
    options = ["model=tiny", "drafter=draft_model", *[f"drafter.model={path}"] * bool(path)]
    assert OmegaConf.to_object(composed("evaluate", *options).drafter).adapter == adapter


def test_a_folder_is_called_by_the_benchs_file_and_values_make_no_levels():
    path = "bench.path=my/own.jsonl"
    folders = {"own": [path], "other": [path, "bench.name=other"], "demo": []}
    for folder, options in (folders | {"spec_bench": [path, "bench=spec_bench"]}).items():
        assert f"/hybrid-{folder}" in composed("evaluate", "model=tiny", *options).hydra.run.dir
    folder = composed("evaluate", "model=tiny", "drafter.adapter=/a/b/c", "seed=1").hydra.run.dir
    assert folder == "outputs/evaluate/tiny/hybrid-demo/drafter.adapter=-a-b-c,seed=1"


DEMO = ROOT / "kangaroo/evaluation/benches/demo.jsonl"


@pytest.mark.parametrize(
    "command, message",
    [
        ("evaluate.py -m model=tiny output=x", "ConfigError: output=x lies outside the sweep's"),
        (f"train.py model=tiny output={__file__}", "test_cli.py cannot be a folder: File exists."),
        ("evaluate.py results=. page=.", "ConfigError: page=. must be a Markdown page: its name"),
        (f"scripts/prepare.py split source={DEMO} held=1 output={__file__}", "Pass another path."),
        ("evaluate.py model=tiny drafter=cascade drafter.first=llma", "@drafter.first=llma."),
        (
            "scripts/tune.py model=tiny +more.x=llma",
            "ConfigError: more.x=llma is no drafter's conf",
        ),
        ("evaluate.py model=tiny -m drafter=hybrid output=x", "output=x lies outside the sweep's"),
        (
            "train.py model=tiny experiment=null",
            "ConfigError: experiment=null is no choice. ~exper",
        ),
        ("train.py model=tiny +trainer.epoch=2", "+trainer.epoch: there is no such option"),
        ("evaluate.py model=tiny +drafter@more.x=5", "+drafter@more.x=5 is no choice. ~drafter"),
        ("evaluate.py model=tiny drafter=[5]", "drafter=[5] is no choice. It takes one name; -m"),
        ("evaluate.py model=tiny drafter=[llma,rest]", "-m drafter=llma,rest takes each in turn."),
        ("evaluate.py model=tiny drafter=[llma", "no viable alternative at input '[llma'"),
        ("scripts/tune.py model=tiny +search.hybird.nodes=[9]", "ConfigError: search.hybird is"),
    ],
)
def test_an_error_that_a_user_can_mend_comes_without_a_traceback(command, message, tmp_path):
    result = run(*command.split(), cwd=tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert message in result.stderr


@pytest.mark.parametrize("script", ["evaluate.py", "train.py"])
def test_a_second_run_in_the_same_folder_is_refused_while_the_first_goes_on(script, tmp_path):
    with sole_writer(tmp_path / "out", rank=0), sole_writer(tmp_path / "out", rank=1):
        result = run(script, "model=tiny", "output=out", cwd=tmp_path)
    assert result.returncode == 1
    assert "ConfigError: another process writes into 'out' now. Wait for it" in result.stderr
    with sole_writer(tmp_path / "out", rank=0):
        pass


def run_changed(name, change, *options, cwd):
    """A command after some lines of Python."""
    script = cwd / "changed.py"
    script.write_text(f"from kangaroo.cli import commands\n{change}\ncommands.{name}()\n")
    return run(str(script), "model=tiny", "output=out", *options, cwd=cwd)


@pytest.mark.parametrize("name, goes_on", [("train", True), ("prepare_datastore", False)])
def test_what_is_stopped_ends_with_one_line_that_says_how_to_go_on(name, goes_on, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"messages": []}\n' * 3)
    options = ["data=conversations", "data.source=x.jsonl", "data.path=data"]
    options += ["trainer.holdout=1"] if name == "train" else []
    result = run_changed(name, INTERRUPTED, *options, cwd=tmp_path)
    line = "Stopped." + " What is finished is kept: the same command goes on from there." * goes_on
    assert line in result.stderr.splitlines() and "Traceback" not in result.stderr
    assert result.returncode == 130


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("evaluate", "drafter=vanilla question_begin=900", "select none of"),
        (
            "train",
            "trainer.holdout=30 data=conversations data.source=ShareGPT.json data.regenerate=false "
            "data.filters.near_duplicate=1 data.path=data adapter.exit_layers=[2]",
            "holdout=30 .* of 24 .*Pass trainer.holdout=2",
        ),
    ],
)
def test_what_is_refused_begins_no_run_in_a_tracker(name, options, message, tmp_path):
    write_inputs(tmp_path)
    tracked = "logger=wandb", "logger.mode=offline"
    result = run_changed(name, UNTRACKED, *tracked, *options.split(), cwd=tmp_path)
    assert re.search(f"ConfigError: .*{message}", result.stderr), result.stderr


def test_what_an_evaluation_cannot_do_is_said_before_its_model_is_loaded(tmp_path):
    few = "baselines=[] question_end=1 warmup=0 drafter=prompt_lookup".split()
    two = [*few, "+drafter@more.again=prompt_lookup"]
    typed("evaluate.py", "model=tiny", "output=out", *two, "max_new_tokens=4", cwd=tmp_path)
    out = tmp_path / "out"
    assert (out / "evaluate.log").is_file() and (out / ".hydra/config.yaml").is_file()
    assert not (tmp_path / "outputs").exists()
    before = sorted(out.rglob("*.json*"))
    for options, message in (
        ([*few, "max_new_tokens=5"], "'out/again' was begun with .*=4 there, 5 now"),
        ([*few, "max_new_tokens=40000"], "40000 leaves no room for a prompt in the context of t"),
        ([*few, "max_new_tokens=4"], "the model would be loaded"),
    ):
        result = run_changed("evaluate", UNLOADED, *options, cwd=tmp_path)
        assert re.search(message, result.stderr), result.stderr
        assert "Traceback" not in result.stderr
    assert sorted(out.rglob("*.json*")) == before


def test_a_datastore_of_a_text_says_what_it_is_of(tmp_path):
    (tmp_path / "notes.txt").write_text("The quick brown fox jumps over the lazy dog.")
    options = ["model=tiny", "~data", "texts=[notes.txt]"]
    typed("scripts/prepare.py datastore", *options, cwd=tmp_path)
    about = json.loads((tmp_path / "adapters/tiny-datastore/datastore.json").read_text())
    assert (about["documents"], about["texts"], about["dataset"]) == (1, ["notes.txt"], None)
    assert about["target"] == "random:tiny" and about["versions"]["torch"]


def test_a_sweep_compares_what_has_finished_and_goes_on_where_it_failed(tmp_path):
    few = "max_new_tokens=6,question_every=40,warmup=0"
    options = ["-m", "model=tiny", "drafter=kangaroo,vanilla", *few.split(",")]

    def compared():
        methods = json.loads((folder / "comparison.json").read_text())["methods"]
        return {method["name"]: method for method in methods}

    folder = tmp_path / f"outputs/evaluate/tiny/compare-demo,{few}"
    failed = run("evaluate.py", *options, cwd=tmp_path)  # there is no adapter
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "AdapterNotFound: no adapter at 'adapters/tiny'" in failed.stderr
    assert "tiny on demo: methods compared" in failed.stdout
    assert list(compared()) == ["vanilla"]
    measured = (folder / "vanilla/records-0.jsonl").read_bytes()

    lm = tiny_target()
    adapter, training = adapter_for(lm), {"progress": {"assistant_tokens": 7}}
    saved_adapter(lm, adapter, tmp_path / "adapters/tiny", training=training)
    typed("evaluate.py", *options, "logger=wandb", "logger.mode=offline", cwd=tmp_path)
    assert (folder / "vanilla/records-0.jsonl").read_bytes() == measured
    both = compared()
    assert set(both) == {"kangaroo", "vanilla"}
    cost = both["kangaroo"]["drafter_cost"]
    assert cost["parameters"] == sum(p.numel() for p in adapter.parameters())
    assert cost["training"] == {"trained_positions": 7} and cost["bytes"] > cost["parameters"]
    assert both["vanilla"]["drafter_cost"] == {"parameters": 0, "bytes": 0, "training": {}}
    for job in both:
        (kept,) = (folder / job).rglob("*.wandb")
        assert f"tiny-{folder.name}".encode() in kept.read_bytes()


def test_any_two_drafters_make_a_cascade():
    options = ["drafter=cascade", "drafter@drafter.first=rest", "drafter@drafter.second=medusa"]
    config = composed("evaluate", *options, "drafter.first.num_draft=7")
    cascade = OmegaConf.to_object(config.drafter)
    assert isinstance(cascade, CascadeConfig)
    assert isinstance(cascade.first, RestConfig) and cascade.first.num_draft == 7
    assert isinstance(cascade.second, MedusaConfig)
    assert cascade.second.adapter == "adapters/smollm2-135m-medusa"
    assert cascade.settings()["first"]["num_draft"] == 7
    sweep = composed("evaluate", *options).hydra.sweep
    assert sweep.dir.endswith("compare-demo")
    assert sweep.subdir == "cascade,first=rest,second=medusa"


@pytest.mark.parametrize("command, own", [("evaluate", []), ("tune", ["hybrid", "prompt_lookup"])])
def test_further_drafters_stand_beside_the_first(command, own):
    added = ["+drafter@more.mine=kangaroo", "more.mine.steps=3", "+drafter@more.both=cascade"]
    config = composed(command, *added)
    mine, both = OmegaConf.to_object(config.more)["mine"], config.more.both
    assert isinstance(mine, KangarooConfig) and mine.steps == 3
    assert mine.adapter == "adapters/smollm2-135m" and list(config.more) == [*own, "mine", "both"]
    assert both.first.num_pred_tokens == 5 and both.second.adapter == "adapters/smollm2-135m"
    for name in own[:1]:
        assert list(composed(command, f"~drafter@more.{name}").more) == own[1:]


def test_a_sweeps_folder_is_named_by_all_but_the_drafter_and_its_jobs_by_that():
    options = ["model=tiny", "drafter.threshold=0.4", "seed=1", "logger=wandb", "drafter=kangaroo"]
    options += ["sampling.top_p=0.9", "drafter.adapter=adapters/x"]
    for order in (options, options[::-1]):
        sweep = composed("evaluate", *order).hydra.sweep
        assert sweep.dir == "outputs/evaluate/tiny/compare-demo,sampling.top_p=0.9,seed=1"
        assert sweep.subdir == "kangaroo,adapter=adapters-x,threshold=0.4"
    # names have no more bytes than file systems take, and differ where what is cut off does
    options = ["model=tiny", "drafter=prompt_lookup"]
    for name in (f"variant_{i}" for i in range(10)):
        options += [f"+drafter@more.{name}=prompt_lookup", f"more.{name}.num_pred_tokens=3"]
    folders = [composed("evaluate", *options, f"seed={i}").hydra.run.dir for i in (1, 2)]
    first, second = (folder.rpartition("/")[2] for folder in folders)
    assert first.startswith("more.variant_0.num_pred_tokens=3,") and first != second
    assert all(len(name.encode()) <= 200 for name in (first, fitting_name("é" * 101)))


def sizes(config):
    """A drafter's options, but for where a model's files lie."""
    options = asdict(config).items()
    return {key: x for key, x in options if key not in ("adapter", "heads", "datastore")}


def drafters(*options):
    more = (f"+drafter@more.{name}={name}" for name in NAMES)
    config = OmegaConf.to_object(composed("evaluate", *more, *options).more)
    return {name: sizes(drafter) for name, drafter in config.items()}


def test_sizes_are_those_measured_on_a_cpu_or_on_a_gpu_the_papers(monkeypatch):
    papers = {name: sizes(CONFIGS[name]()) for name in NAMES}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert drafters() == {name: papers[name] | CPU[name] for name in NAMES}
    assert drafters("hardware=gpu") == {name: papers[name] | GPU[name] for name in NAMES} == papers
    assert all(CPU[name].keys() == GPU[name].keys() for name in NAMES)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert drafters() == papers


@pytest.mark.parametrize("hardware, expected", [("cpu", (3, 7, 5, 4)), ("gpu", (10, 59, 10, 63))])
def test_every_command_has_them_also_in_a_cascade_and_the_command_line_wins(hardware, expected):
    for command in ("chat", "speed"):
        of_command = composed(command, "drafter=medusa", f"hardware={hardware}").drafter
        assert of_command.nodes == expected[-1]
    named = "drafter=medusa", f"hardware={hardware}", "drafter.nodes=7"
    assert composed("chat", *named).drafter.nodes == 7
    options = ["drafter=cascade", "drafter@drafter.second=medusa", "+drafter@more.tree=eagle_tree"]
    config = composed("evaluate", *options, f"hardware={hardware}")
    tree, both = config.more.tree, config.drafter
    assert (tree.top_k, tree.nodes, both.first.num_pred_tokens, both.second.nodes) == expected


def test_a_full_disk_and_a_full_memory_say_what_to_do_and_a_fault_of_ours_keeps_its_traceback():
    assert "Free some space" in remedy(OSError(errno.ENOSPC, "No space left on device"))
    assert "fewer texts" in remedy(torch.OutOfMemoryError("CUDA out of memory"))
    assert "fewer texts" in remedy(OSError(errno.ENOMEM, "Cannot allocate memory"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert "fewer texts" in remedy(raised.value)
    assert "another path" in remedy(PermissionError(errno.EACCES, "Permission denied", "/x"))
    assert remedy(OSError(errno.EIO, "Input/output error")) is None
