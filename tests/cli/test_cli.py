"""The command line: every config composes, typos are refused, errors come without a traceback."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import ROOT, python
from composing import DRAFTERS, MODELS, composed
from helpers import adapter_for
from omegaconf import OmegaConf

from kangaroo import __main__, cli
from kangaroo.cli.command import with_actions
from kangaroo.cli.schema import WITH_ACTIONS, sections
from kangaroo.drafters.cascade import CascadeConfig
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.medusa import MedusaConfig
from kangaroo.drafters.rest import RestConfig
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter_files import WEIGHTS
from kangaroo.models.loading import Dtype, ModelConfig, load
from kangaroo.models.target import TargetModel
from kangaroo.utils.folders import sole_writer


def run(script, *overrides, cwd):
    return python(script, *overrides, cwd=cwd)


def test_every_command_has_a_script_a_config_and_its_name_in_the_console_programs_list():
    names = {name.split()[0] for name in __main__.COMMANDS}
    configs = {path.stem for path in (ROOT / "configs").glob("*.yaml")} - {"leaves_no_files"}
    scripts = [ROOT / "train.py", ROOT / "evaluate.py", *(ROOT / "scripts").glob("*.py")]
    assert names == configs == set(cli.__all__) - {"CONFIGS"}
    assert names <= {path.stem for path in scripts}
    for command in WITH_ACTIONS:
        actions = [name.split()[1] for name in __main__.COMMANDS if name.startswith(f"{command} ")]
        assert actions == list(sections(f"{command}.yaml"))


def test_the_console_command_lists_them_without_loading_torch():
    code = "import sys; from kangaroo import __main__; __main__.main()"
    code += "; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name, what in __main__.COMMANDS.items():
        assert f"{name} " in shown and what in shown


def test_the_console_command_runs_what_it_is_given_under_its_name(monkeypatch, capsys):
    seen = []
    export = with_actions("convert", {"export": lambda: seen.append(sys.argv)})
    monkeypatch.setattr(cli, "convert", export)
    monkeypatch.setattr(
        sys, "argv", ["/bin/kangaroo", "convert", "export", "model=tiny", "--cfg", "job"]
    )
    __main__.main()
    assert seen == [["kangaroo convert export", "model=tiny", "--cfg", "job"]]


def test_a_command_with_actions_lists_them_and_refuses_others(tmp_path):
    shown = run("scripts/convert.py", cwd=tmp_path).stdout
    assert "usage: convert.py ACTION" in shown and "  push    Upload an adapter, or" in shown
    refused = run("scripts/convert.py exprot", "to=vllm", cwd=tmp_path)
    assert refused.returncode == 1
    told = (
        "convert does not do 'exprot'. Did you mean 'export'? It does import, export, push, pull."
    )
    assert refused.stderr.startswith(f"{told}\n")


def test_help_lists_choices_alone(tmp_path):
    shown = run("evaluate.py", "--help", cwd=tmp_path).stdout
    assert "schema" not in shown and "\nbench: demo, spec_bench\n" in shown
    assert "\nadapter: attention, " in shown and "threshold: " in shown
    assert "\nlogger: none, wandb\n" in shown and "\ngroups: " not in shown
    shown = run("scripts/convert.py export", "--help", cwd=tmp_path).stdout
    assert shown.startswith("convert.py export: every setting") and "to: draft_model" in shown
    for path in (ROOT / "configs").glob("*.yaml"):
        text = path.read_text()
        assert 'help: {template: "${help:}"}' in text or "leaves_no_files" in text


@pytest.mark.parametrize(
    "script, option, new",
    [
        ("scripts/serve.py", "rows=8", "max_batch_size"),
        ("scripts/serve.py", "longest=9", "max_model_len"),
        ("scripts/serve.py", "most_waiting=9", "max_queue"),
        ("scripts/speed.py", "speed.new_tokens=9", "speed.max_new_tokens"),
    ],
)
def test_an_option_by_its_old_name_is_refused_with_the_new_one(script, option, new, tmp_path):
    refused = run(script, option, cwd=tmp_path)
    old = option.partition("=")[0]
    told = f"Could not override '{old}': there is no such option; it is '{new}'."
    assert refused.returncode == 1 and refused.stderr.startswith(f"{told}\n")


@pytest.mark.parametrize("path, adapter", [(None, "adapters/tiny"), ("org/small", None)])
def test_another_draft_model_takes_the_place_of_the_adapter(path, adapter):
    given = [] if path is None else [f"drafter.model={path}"]
    config = composed("evaluate", "model=tiny", "drafter=draft_model", *given)
    drafter = OmegaConf.to_object(config.drafter)
    assert (drafter.model, drafter.adapter) == (path, adapter)


@pytest.mark.parametrize(
    "options, folder",
    [
        (["bench.path=my/own.jsonl"], "hybrid-own"),
        (["bench.path=my/own.jsonl", "bench.name=other"], "hybrid-other"),
        (["bench=spec_bench", "bench.path=my/own.jsonl"], "hybrid-spec_bench"),
        ([], "hybrid-demo"),
    ],
)
def test_a_folder_is_called_by_the_benchs_file(options, folder):
    assert f"/{folder}" in composed("evaluate", "model=tiny", *options).hydra.run.dir


@pytest.mark.parametrize(
    "asked, told",
    [
        ("trian", "there is no command 'trian'. Did you mean 'train'? `kangaroo --help` lists"),
        ("model=tiny", "there is no command 'model=tiny'. `kangaroo --help` lists"),
        ("export", "there is no command 'export'. Did you mean 'convert export'? `kangaroo"),
        ("search_layers", "Did you mean 'prepare layers'? `kangaroo --help` lists"),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest_name(asked, told, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kangaroo", asked])
    with pytest.raises(SystemExit, match=re.escape(told)):
        __main__.main()


@pytest.mark.parametrize("model", MODELS)
def test_every_model_composes_and_is_named_as_its_file(model):
    config = OmegaConf.to_object(composed("train", f"model={model}").model)
    assert isinstance(config, ModelConfig) and config.name == model


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("command", ["evaluate", "chat", "speed"])
def test_every_drafter_composes_everywhere(command, drafter):
    config = composed(command, f"drafter={drafter}")
    assert OmegaConf.to_object(config.drafter).name == drafter


@pytest.mark.parametrize("data", ["self_synthesis", "tasks", "conversations", "sharegpt", "mix"])
def test_every_source_of_data_composes_and_goes_to_a_folder_of_its_own(data):
    config = composed("train", f"data={data}")
    assert config.data.path == f"outputs/data/{data}/smollm2-135m"


@pytest.mark.parametrize("logger", ["none", "wandb"])
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_every_logger_composes(command, logger):
    assert composed(command, f"logger={logger}").logger.name == logger


@pytest.mark.parametrize("trainer, stage", [("default", 0), ("deepspeed", 1)])
def test_every_trainer_composes(trainer, stage):
    assert composed("train", f"trainer={trainer}").trainer.zero_stage == stage


def test_an_unknown_override_is_refused_by_name(tmp_path):
    result = run("train.py", "trainer.learningrate=1", cwd=tmp_path)
    assert result.returncode != 0
    assert "learningrate" in result.stderr and "TrainerConfig" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_type_is_refused_by_name(tmp_path):
    result = run("train.py", "trainer.epochs=two", cwd=tmp_path)
    assert result.returncode != 0 and "trainer.epochs" in result.stderr


def test_an_error_that_a_user_can_mend_comes_in_one_line(tmp_path):
    result = run("evaluate.py", "model=tiny", "drafter.adapter=nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert "AdapterNotFound: no adapter at 'nowhere'" in result.stderr
    assert "Traceback" not in result.stderr


def kill_when(path, script, *overrides, cwd):
    """Start a command and kill it, without a chance to clean up, as soon as `path` exists."""
    command = [sys.executable, ROOT / script, *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("script", ["evaluate.py", "train.py"])
def test_a_second_run_in_the_same_folder_is_refused_while_the_first_goes_on(script, tmp_path):
    """Both would go on with what the other writes. Another rank of the same run may."""
    with sole_writer(tmp_path / "out", rank=0), sole_writer(tmp_path / "out", rank=1):
        result = run(script, "model=tiny", "output=out", cwd=tmp_path)
    assert result.returncode == 1
    assert "ConfigError: another process writes into 'out' now. Wait for it" in result.stderr
    with sole_writer(tmp_path / "out", rank=0):
        pass


@pytest.mark.slow
def test_killed_synthesis_and_training_end_with_the_same_adapter(tmp_path):
    settings = ["experiment=debug", "data.shards=4", "data.max_answer_tokens=160"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert run("train.py", *settings, cwd=whole).returncode == 0
    shards = killed / "outputs/data/self_synthesis/tiny.shards"
    kill_when(shards / "00001.part", "train.py", *settings, cwd=killed)
    assert not (killed / "outputs/data/self_synthesis/tiny").exists()
    kill_when(killed / "outputs/train/tiny/checkpoint.pt", "train.py", *settings, cwd=killed)
    assert not (killed / "outputs/train/tiny/attention-exit2").exists()
    assert run("train.py", *settings, cwd=killed).returncode == 0
    weights = Path("outputs/train/tiny/attention-exit2") / WEIGHTS
    assert (whole / weights).read_bytes() == (killed / weights).read_bytes()
    # the data of experiment=debug, which is for train.py
    data = [
        "data.shards=4",
        "data.shard_size=16",
        "data.max_question_tokens=16",
        "data.max_answer_tokens=160",
        "data.keep_unfinished_questions=true",
    ]
    compared = run(
        "evaluate.py",
        "experiment=compare",
        "model=tiny",
        "output=compared",
        "compare.holdout=8",
        "compare.adapters=[outputs/train/tiny/attention-exit2]",
        "compare.prompts=2",
        "compare.new_tokens=8",
        *data,
        cwd=whole,
    )
    assert compared.returncode == 0, compared.stderr
    rows = json.loads((whole / "compared/compare.json").read_text())["rows"]
    assert [row["adapter"] for row in rows] == ["attention-exit2"]


INTERRUPTED = """
import os, signal
from kangaroo import cli
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.evaluation import run

def stop(*told, **options):
    os.kill(os.getpid(), signal.SIGINT)

ConversationsConfig.make = run.Evaluator = stop
cli.NAME()
"""


@pytest.mark.parametrize("name, told", [("train", True), ("evaluate", True), ("datastore", False)])
def test_what_is_stopped_ends_with_one_line_that_says_how_to_go_on(name, told, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"messages": []}\n' * 3)
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED.replace("NAME", name))
    data = ["data=conversations", "data.source=x.jsonl", "data.path=data"]
    data += ["trainer.holdout=1"] if name == "train" else []
    asked = ["drafter=vanilla"] if name == "evaluate" else data
    result = run(str(script), "model=tiny", "output=out", *asked, cwd=tmp_path)
    line = "Stopped." + " What is finished is kept: the same command goes on from there." * told
    assert line in result.stderr.splitlines() and "Traceback" not in result.stderr
    assert result.returncode == 130


UNTRACKED = """
import sys
from kangaroo import cli
from kangaroo.utils import tracking
tracking.WandbConfig.start = lambda self, settings, output: sys.exit("a run has begun")
cli.NAME()
"""


@pytest.mark.parametrize(
    "name, asked, told",
    [
        ("evaluate", ["drafter=vanilla", "question_begin=900"], "select none of"),
        ("train", ["trainer.holdout=30"], "holdout=30 .* of 24 .*Pass trainer.holdout=2"),
    ],
)
def test_what_is_refused_begins_no_run_in_a_tracker(name, asked, told, tmp_path):
    talk = '{"conversations": [{"from": "human", "value": "Why %d?"}, '
    talk += '{"from": "gpt", "value": "Because of %d."}]}'
    (tmp_path / "talks.jsonl").write_text("\n".join(talk % (i, i) for i in range(24)))
    script = tmp_path / "untracked.py"
    script.write_text(UNTRACKED.replace("NAME", name))
    if name == "train":
        asked = [*asked, "data=conversations", "data.source=talks.jsonl", "data.regenerate=false"]
        asked += ["data.filters.near_duplicate=1", "data.path=data", "adapter.exit_layers=[2]"]
    result = run(str(script), "model=tiny", "logger=wandb", "output=out", *asked, cwd=tmp_path)
    assert re.search(f"ConfigError: .*{told}", result.stderr), result.stderr
    assert not (tmp_path / "data").exists()


def test_training_on_conversations_from_a_file(tmp_path):
    talks = [
        {
            "conversations": [
                {"from": "human", "value": f"What is {i} and {i}?"},
                {"from": "gpt", "value": f"It is {2 * i}."},
            ]
        }
        for i in range(100, 124)
    ]
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    for regenerate in ("true", "false"):
        result = run(
            "train.py",
            "model=tiny",
            "data=conversations",
            "data.source=talks.json",
            f"data.regenerate={regenerate}",
            f"data.path=data-{regenerate}",
            "data.max_answer_tokens=16",
            "data.filters.near_duplicate=1",
            "adapter.exit_layers=[2]",
            "trainer.epochs=1",
            "trainer.holdout=4",
            f"output=out-{regenerate}",
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stderr
        saved = json.loads((tmp_path / f"out-{regenerate}/attention-exit2/config.json").read_text())
        assert saved["training"]["data"]["settings"]["source"] == "talks.json"


def test_a_datastore_of_a_dataset_and_a_text_and_what_drafts_from_it(tmp_path):
    (tmp_path / "notes.txt").write_text("The quick brown fox jumps over the lazy dog.")
    settings = [
        "data.shards=1",
        "data.shard_size=16",
        "data.max_question_tokens=16",
        "data.max_answer_tokens=48",
        "data.keep_unfinished_questions=true",
    ]
    for source, documents in (settings, 17), (["~data"], 1):
        built = run(
            "scripts/prepare.py datastore", "model=tiny", *source, "texts=[notes.txt]", cwd=tmp_path
        )
        assert built.returncode == 0, built.stderr
        about = json.loads((tmp_path / "adapters/tiny-datastore/datastore.json").read_text())
        assert about["documents"] <= documents and about["texts"] == ["notes.txt"]
        assert about["target"] == "random:tiny" and about["versions"]["torch"]
        assert (about["dataset"] is None) == (documents == 1)
    evaluated = run(
        "evaluate.py",
        "model=tiny",
        "drafter=rest",
        "question_end=1",
        "max_new_tokens=4",
        "warmup=0",
        cwd=tmp_path,
    )
    assert evaluated.returncode == 0, evaluated.stderr


@pytest.mark.slow
def test_offline_wandb_runs_of_training_and_evaluation(tmp_path):
    logger = ["logger=wandb", "logger.mode=offline"]
    train = run("train.py", "experiment=debug", *logger, cwd=tmp_path)
    assert train.returncode == 0, train.stderr
    evaluate = run(
        "evaluate.py",
        "model=tiny",
        "drafter=kangaroo_tree",
        "question_end=1",
        "max_new_tokens=4",
        "warmup=0",
        *logger,
        cwd=tmp_path,
    )
    assert evaluate.returncode == 0, evaluate.stderr
    assert "'adapters/tiny' is that in outputs/train/tiny/attention-exit2" in evaluate.stdout
    (summary,) = (tmp_path / "outputs/evaluate").rglob("summary.json")
    assert json.loads(summary.read_text())["settings"]["drafter.nodes"] == 4
    (choices,) = (tmp_path / "outputs/evaluate").rglob(".hydra/hydra.yaml")
    assert "hardware: cpu" in choices.read_text()
    (kept,) = (tmp_path / "outputs/train").rglob("*.wandb")
    for known in (b"git_revision", b"fingerprint", b"tiny-attention-exit2", b"peak_memory_gib"):
        assert known in kept.read_bytes()
    again = run("train.py", "experiment=debug", *logger, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    parts = list((tmp_path / "outputs/train").rglob("*.wandb"))
    assert {part.name for part in parts} == {kept.name}  # the id of the same run
    assert len(list((tmp_path / "outputs/evaluate").rglob("*.wandb"))) == 1


def test_a_sweep_compares_what_has_finished_and_goes_on_where_it_failed(tmp_path):
    def sweep(*more):
        return run(
            "evaluate.py",
            "-m",
            "model=tiny",
            "drafter=kangaroo,vanilla",
            "max_new_tokens=6",
            "question_every=40",
            "warmup=0",
            *more,
            cwd=tmp_path,
        )

    def compared():
        found = json.loads((folder / "comparison.json").read_text())
        return {method["name"]: method for method in found["methods"]}

    failed = sweep()  # there is no adapter
    folder = tmp_path / "outputs/evaluate/tiny"
    folder /= "compare-demo,max_new_tokens=6,question_every=40,warmup=0"
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "AdapterNotFound: no adapter at 'adapters/tiny'" in failed.stderr
    assert "tiny on demo: methods compared" in failed.stdout
    assert list(compared()) == ["vanilla"]
    measured = (folder / "vanilla/records-0.jsonl").read_bytes()

    lm = TargetModel(load(ModelConfig("tiny", "random:tiny", dtype=Dtype.float32, device="cpu"))[0])
    adapter = adapter_for(lm)
    about = adapter_files.describe(lm, adapter, {"progress": {"assistant_tokens": 7}})
    adapter_files.save(adapter, about, torch.tensor([3]), tmp_path / "adapters/tiny")
    done = sweep("logger=wandb", "logger.mode=offline")
    assert done.returncode == 0, done.stderr
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
    asked = ["drafter=cascade", "drafter@drafter.first=rest", "drafter@drafter.second=medusa"]
    config = composed("evaluate", *asked, "drafter.first.num_draft=7", "drafter.extend=true")
    cascade = OmegaConf.to_object(config.drafter)
    assert isinstance(cascade, CascadeConfig) and cascade.extend
    assert isinstance(cascade.first, RestConfig) and cascade.first.num_draft == 7
    assert isinstance(cascade.second, MedusaConfig)
    assert cascade.second.adapter == "adapters/smollm2-135m-medusa"
    assert cascade.settings()["first"]["num_draft"] == 7
    with pytest.raises(Exception, match="num_drafts"):
        composed("evaluate", *asked, "drafter.first.num_drafts=7")
    sweep = composed("evaluate", *asked).hydra.sweep
    assert sweep.dir.endswith("compare-demo")
    assert sweep.subdir == "cascade,first=rest,second=medusa"


@pytest.mark.parametrize(
    "command, there", [("evaluate", []), ("speed", ["cascade", "prompt_lookup", "hybrid"])]
)
def test_further_drafters_stand_beside_the_first(command, there):
    assert list(composed(command).more) == there
    config = composed(command, "+drafter@more.mine=kangaroo", "more.mine.steps=3")
    mine = OmegaConf.to_object(config.more)["mine"]
    assert isinstance(mine, KangarooConfig) and mine.steps == 3
    assert mine.adapter == "adapters/smollm2-135m" and list(config.more) == [*there, "mine"]
    for name in there:
        assert name not in composed(command, f"~drafter@more.{name}").more
    nested = composed(command, "+drafter@more.both=cascade").more.both
    assert nested.first.num_pred_tokens == 5 and nested.second.adapter == "adapters/smollm2-135m"


def test_a_sweeps_folder_is_named_by_all_but_the_drafter_and_its_jobs_by_that():
    asked = ["model=tiny", "drafter.threshold=0.4", "seed=1", "logger=wandb", "drafter=kangaroo"]
    sweep = composed("evaluate", *asked).hydra.sweep
    assert sweep.dir == "outputs/evaluate/tiny/compare-demo,seed=1"
    assert sweep.subdir == "kangaroo,threshold=0.4"
    assert composed("evaluate", "drafter=vanilla").hydra.sweep.subdir == "vanilla"


def test_a_folder_may_be_named_by_many_settings(tmp_path):
    """Its name has no more bytes than file systems take."""
    asked = ["model=tiny", "drafter=prompt_lookup", "question_every=0"]
    for name in (f"variant_{i}" for i in range(10)):
        asked += [f"+drafter@more.{name}=prompt_lookup", f"more.{name}.num_pred_tokens=3"]
    result = run("evaluate.py", *asked, cwd=tmp_path)
    assert "ConfigError: question_every=0 must be a whole number, 1 or more" in result.stderr, (
        result.stderr
    )
    (folder,) = (tmp_path / "outputs/evaluate/tiny/prompt_lookup-demo").iterdir()
    assert folder.name.startswith("more.variant_0.num_pred_tokens=3,")
    sweep = composed("evaluate", *asked).hydra.sweep.dir
    assert sweep != composed("evaluate", *asked[:-1]).hydra.sweep.dir
    (tmp_path / sweep).mkdir(parents=True)


def test_a_sweeps_output_lies_in_its_folder(tmp_path):
    result = run("evaluate.py", "-m", "model=tiny", "output=elsewhere", cwd=tmp_path)
    assert result.returncode == 1
    assert "ConfigError: output=elsewhere lies outside the sweep's folder" in result.stderr
