"""W&B's sweeps: what `wandb sweep` is given is valid, its command lines compose, and the numbers
that a search goes by are really there."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
import yaml
from commands import ROOT, typed
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kangaroo.cli import commands as cli
from kangaroo.evaluation.metrics import METRICS
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.tracking import ID_FILE, Wandb

FILES = sorted((ROOT / "configs/sweep").glob("*.yaml"))
STUDIES = {file.stem: yaml.safe_load(file.read_text()) for file in FILES}
SWEEP, RUN = "sweep1d2", "run3x4y"  # as a server names them


def each_value(study: dict) -> Iterator[dict]:
    """So many choices that every value of every parameter is in one, and every end of a range."""
    values = [p.get("values") or [p["min"], p["max"]] for p in study["parameters"].values()]
    for turn in range(max(map(len, values))):
        chosen = (some[turn % len(some)] for some in values)
        yield dict(zip(study["parameters"], chosen, strict=True))


def typed_by_the_agent(study: dict, point: dict, monkeypatch) -> list[str]:
    """The command line that W&B's own agent makes of a study and one choice of its parameters."""
    pytest.importorskip("wandb", reason="needs the extra wandb")
    from wandb.sdk.launch.sweeps import utils

    monkeypatch.setenv("WANDB_SWEEP_ID", SWEEP)
    args = utils.create_sweep_command_args({"args": {k: {"value": v} for k, v in point.items()}})
    args |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [study["program"]]}
    command = []
    for part in utils.create_sweep_command(list(study["command"])):
        command += args[part[2:-1]] if part.startswith("${") and part.endswith("}") else [part]
    return command


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_one_that_wandb_runs_and_goes_by_a_metric_that_its_command_ends_with(name):
    study = STUDIES[name]
    fields = "program project name method metric run_cap parameters command"
    assert set(study) <= set(fields.split()) and study["project"] == Wandb().project
    metrics = {"evaluate.py": {x.name for x in METRICS}, "train.py": {"compression_rate"}}
    assert study["metric"]["name"] in metrics[study["program"]]
    assert study["metric"]["goal"] == "maximize"
    assert ("run_cap" in study) == (study["method"] == "bayes")  # a search never ends by itself
    for parameter in study["parameters"].values():
        if "values" in parameter:
            assert len(set(parameter["values"])) == len(parameter["values"]) > 1
        else:
            kinds = {"uniform": float, "int_uniform": int, "log_uniform_values": float}
            kind = kinds[parameter["distribution"]]
            assert all(isinstance(parameter[end], kind) for end in ("min", "max"))
            assert study["method"] == "bayes" and 0 < parameter["min"] < parameter["max"]


@pytest.mark.parametrize("name", STUDIES)
def test_a_choice_composes_to_what_was_chosen(name, monkeypatch):
    study = STUDIES[name]
    monkeypatch.setenv("WANDB_RUN_ID", RUN)
    # what a group of configs holds is not seen in the config: any choice of one is another recipe
    groups = [p for p in study["parameters"] if (ROOT / f"configs/groups/{p}.yaml").is_file()]
    with initialize_config_dir(cli.schema.CONFIGS, version_base="1.3"):
        for point in each_value(study):
            env, interpreter, program, *options = typed_by_the_agent(study, point, monkeypatch)
            assert [env, interpreter, program] == ["/usr/bin/env", "python", study["program"]]
            config = compose(Path(program).stem, options, return_hydra_config=True)
            for key, value in point.items():
                if key not in groups:
                    composed = OmegaConf.select(config, key, throw_on_missing=True)
                    text = isinstance(value, str) and value.startswith("[")
                    assert composed == (json.loads(value) if text else value)
                    assert not isinstance(composed, str) or composed == value
            assert config.logger.name == "wandb" and config.logger.group == f"{name}-{SWEEP}"
            assert config.hydra.run.dir == f"outputs/sweep/{name}-{SWEEP}/{RUN}"
            part = config.drafter if program == "evaluate.py" else config.trainer
            OmegaConf.to_object(part)  # of the right types


@pytest.mark.slow
def test_optuna_searches_for_what_a_command_returns(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper.config", reason="needs optuna")
    page = (ROOT / "docs/training.md").read_text()
    (shown,) = re.findall(r"^python (.*search=optuna.*)$", page, flags=re.M)
    shrunk = "model=tiny drafter.adapter=untrained:2 hydra.sweeper.n_trials=4 baselines=[vanilla]"
    shrunk += " question_every=33 max_new_tokens=6 warmup=1"
    typed(*shlex.split(shown), *shrunk.split(), cwd=tmp_path)
    (results,) = tmp_path.rglob("optimization_results.yaml")
    best = yaml.safe_load(results.read_text())
    summaries = [json.loads(path.read_text()) for path in results.parent.rglob("summary.json")]
    assert len(summaries) == 4
    first = max(summaries, key=lambda summary: summary["overall"]["speedup"])
    assert best["best_value"] == first["overall"]["speedup"]
    assert best["best_params"].keys() == {"drafter.threshold", "drafter.steps"}
    assert best["best_params"].items() <= first["settings"].items()


@pytest.fixture
def wandb(monkeypatch):
    module = MagicMock()
    module.init.return_value.starting_step = 0
    module.Image = "image of {}".format
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    return module


def test_a_run_has_a_flat_config_and_its_results_after_the_last_step(wandb, tmp_path):
    nested = {"drafter": {"first": {"steps": 2}}, "seed": 3, "drafter.exit_layer": 2}
    tracker = Wandb().start(nested, tmp_path)
    flat = {"drafter.first.steps": 2, "seed": 3, "drafter.exit_layer": 2}
    assert wandb.init.call_args.kwargs["config"] == flat
    tracker.log({"speedup": 1.0}, 7)
    tracker.result({"speedup": 1.2}, [tmp_path / "ctar.png"])
    shown, run = {"plots/ctar": f"image of {tmp_path / 'ctar.png'}"}, wandb.init.return_value
    assert run.log.call_args_list == [call({"speedup": 1.0}, step=7), call(shown)]
    assert run.mock_calls[-1] == call.summary.update({"speedup": 1.2})
    file = tmp_path / "kangaroo/summary.json"
    tracker.save(tmp_path, [file], "a=b", "evaluation", {"speedup": 1.2})
    kept = wandb.Artifact.return_value
    assert wandb.Artifact.call_args == call("a-b", "evaluation", metadata={"speedup": 1.2})
    assert kept.add_file.call_args_list == [call(str(file), name="kangaroo/summary.json")]
    assert run.log_artifact.call_args == call(kept)


def test_steps_that_wandb_knows_are_not_logged_again(wandb, tmp_path):
    wandb.init.return_value.starting_step = 58
    tracker = Wandb().start({}, tmp_path)
    assert wandb.init.call_args.kwargs["name"] == "/".join(tmp_path.parts[-2:])
    for step in (57, 58, 59):  # the checkpoint held step 56
        tracker.log({"loss": 1.0}, step)
    assert [x.kwargs["step"] for x in wandb.init.return_value.log.call_args_list] == [58, 59]
    (tmp_path / ID_FILE).unlink()
    assert not list(tmp_path.glob("wandb_*"))


def test_in_a_sweep_the_agent_says_which_run_it_is(wandb, tmp_path, monkeypatch):
    for _ in range(2):  # the second goes on
        Wandb(entity="me").start({}, tmp_path / "alone")
    assert len({start.kwargs["id"] for start in wandb.init.call_args_list}) == 1
    place = {"project": "kangaroo", "entity": "me", "id": (tmp_path / "alone/wandb_id").read_text()}
    assert place.items() <= wandb.init.call_args.kwargs.items()
    monkeypatch.setenv("WANDB_SWEEP_ID", SWEEP)
    Wandb(group="study").start({}, tmp_path / "swept")
    swept = wandb.init.call_args.kwargs
    assert not place.keys() & swept.keys()
    assert swept["group"] == "study" and not (tmp_path / "swept/wandb_id").exists()


@pytest.mark.parametrize(
    ("options", "login", "message"),
    [
        ({}, [EOFError("no terminal")], "finds no key. Call `wandb login`, set WANDB_API_KEY"),
        ({}, [False], "or pass logger.mode=offline"),
        ({"mode": "onlin"}, [True], "logger.mode=onlin is none of online, "),
        ({"mode": "offline"}, [False], None),
        ({}, [True], None),
    ],
)
def test_what_wandb_needs_is_checked_before_any_work(options, login, message, wandb):
    wandb.login.side_effect = login
    if message is None:
        return Wandb(**options).check()
    with pytest.raises(ConfigError, match=re.escape(message)):
        Wandb(**options).check()


def test_a_failure_of_wandb_never_ends_a_run(wandb, tmp_path, caplog):
    run = wandb.init.return_value
    wandb.init.side_effect = [OSError("no network"), run]
    for part in (run.log, run.log_artifact, run.finish, wandb.Artifact):
        part.side_effect = OSError("lost")
    with Wandb().start({}, tmp_path) as tracker:
        kept = {"mode": "offline", "id": None}  # W&B does not give an id twice
        assert kept.items() <= wandb.init.call_args.kwargs.items()
        tracker.log({"loss": 1.0}, 1)
        tracker.result({}, [])
        tracker.save(tmp_path, [], "a", "evaluation", {})
    assert "W&B refuses: no network. The run goes to" in caplog.text
    assert caplog.text.count("the run goes on without it: lost") == 4


def test_names_are_no_longer_than_wandb_takes(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_NAME", "a" * 200)
    Wandb(group="b" * 200).start({}, tmp_path).save(tmp_path, [], "c" * 200, "evaluation", {})
    options, kept = wandb.init.call_args.kwargs, wandb.Artifact.call_args.args
    assert (options["name"], options["group"], kept[0]) == ("a" * 128, "b" * 128, "c" * 128)


def test_a_search_is_told_of_a_run_that_failed(wandb, tmp_path):
    with Wandb().start({}, tmp_path):
        pass
    with pytest.raises(ConfigError), Wandb().start({}, tmp_path):
        raise ConfigError("no")
    assert wandb.init.return_value.finish.call_args_list == [call(exit_code=0), call(exit_code=1)]
