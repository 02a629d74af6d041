"""The paper's experiments: they compose for every model, and each is one command."""

import itertools
import json
import re
import shutil
import subprocess
from functools import cache

import pytest
from cases import in_turn
from commands import ROOT, typed, write_inputs
from composing import of_command
from evaluation_cases import record, run, vanilla_run
from hydra.types import RunMode
from omegaconf import OmegaConf

from kangaroo import ConfigError, KangarooConfig
from kangaroo.cli.command import combinations
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.metrics import pairs
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.run import EvaluateConfig, select_questions
from kangaroo.evaluation.study.report import STUDY
from kangaroo.evaluation.study.study import published_points

FILES = {path.stem for path in (ROOT / "configs/experiment/paper").glob("*.yaml")}
NAMES = sorted(FILES - {"base", "adapters"})
MODELS = [("smollm2-135m", "cpu", 64), ("vicuna-7b", "gpu", 1024)]
FEW = ("bench.path=questions.jsonl", "max_new_tokens=6", "question_every=1")


@cache
def composed(name, *overrides):
    options = [f"experiment=paper/{name}", "output=out", *overrides]
    return OmegaConf.to_object(of_command("evaluate", options))


@cache
def jobs(name, *overrides):
    """What an experiment tells Hydra: its folders and its sweep."""
    options = [f"experiment=paper/{name}", *overrides]
    return of_command("evaluate", options, return_hydra_config=True).hydra


def methods_of(name):
    """The names of the folders that an experiment's results lie in, but for the noise floor's."""
    config = composed(name)
    names = [*combinations(config.drafter, config.variants, "variants"), *config.more]
    names.remove(AGAIN)
    if name != "temperature":
        return names
    params = jobs(name).sweeper.params
    temperatures = str(params["sampling.temperature"]).split(",")
    settings = itertools.product(temperatures, params["sampling.rule"].split(","))
    return [f"temperature={x},Rule.{rule}/{names[0]}" for x, rule in settings]


def test_every_experiment_of_the_paper_has_a_file_and_a_place_on_the_page():
    shown = STUDY.findall((ROOT / "docs/results/paper.md").read_text())
    (listed,) = re.findall(r"^PAPER = (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert sorted(name for _, name, _, _ in shown) == sorted(listed.split()) == NAMES
    # make paper evaluates each once, and first one that needs no training
    done = subprocess.run(["make", "-n", "paper"], cwd=ROOT, capture_output=True, text=True)
    order = r"evaluate.py experiment=paper/(\w+).*experiment=paper/adapters.*name in ([^;]+);"
    first, others = re.search(order, done.stdout, re.DOTALL).groups()
    assert sorted([first, *others.split()]) == NAMES
    config = composed(first)
    trained = [vars(each).get("adapter") for each in (config.drafter, *config.more.values())]
    assert not any(str(adapter).startswith("outputs/paper") for adapter in trained)


@pytest.mark.parametrize(("name", "model", "hardware", "longest"), in_turn(NAMES, MODELS))
def test_every_experiment_composes_for_every_model(name, model, hardware, longest):
    config = composed(name, f"model={model}", f"hardware={hardware}")
    assert config.study.name == name and config.bench.name == "spec_bench"
    assert [baseline.value for baseline in config.baselines] == ["vanilla"]
    assert config.max_new_tokens == longest and config.more[AGAIN].name == "vanilla"
    drafters = [config.drafter, *config.more.values()]
    assert all(getattr(each, "threshold", 0) != "auto" for each in drafters)
    chains = [each for each in drafters if isinstance(each, KangarooConfig)]
    assert {chain.threshold for chain in chains} - {0} <= {0.6}  # the paper's, anywhere
    names = methods_of(name)
    assert set(config.study.labels) <= {*names, "match", "rejection"}
    for claim in config.study.claims:
        assert {claim.more, claim.less} <= set(names) and claim.more != claim.less
        pairs([record(1, (run([3], [2], [4], [1.0]), vanilla_run(3)))], claim.metric)


def test_a_models_results_have_a_folder_and_its_draft_model_is_the_papers_if_it_can():
    home, vicuna = "outputs/paper/vicuna-7b", "model=vicuna-7b"
    assert jobs("tree", vicuna).run.dir == f"{home}/tree"
    sweep = jobs("temperature", vicuna)
    assert sweep.mode is RunMode.MULTIRUN and sweep.sweep.dir == f"{home}/temperature"
    assert sweep.sweep.subdir == "temperature=0.0,Rule.match"  # of the job's own settings
    drafts = [composed("table1", *model).more["draft_model"] for model in ([vicuna], [])]
    papers, ours = ("double7/vicuna-68m", None), (None, "adapters/smollm2-135m")
    assert [(draft.model, draft.adapter) for draft in drafts] == [papers, ours]


def test_evaluation_takes_the_adapters_that_training_saves():
    train = of_command("train", ["experiment=paper/adapters"], return_hydra_config=True)
    recipes = [train.adapter, *train.more.values()]
    saved = {"medusa"} | {f"{r.name}-exit{layer}" for r in recipes for layer in r.exit_layers}
    ablation, parameters = composed("adapter_ablation"), composed("parameters")
    assert (ablation.drafter, ablation.more) == (parameters.drafter, parameters.more)
    assert jobs("adapter_ablation").run.dir == jobs("parameters").run.dir  # they share answers
    home = "outputs/paper/smollm2-135m/adapters"
    assert train.hydra.run.dir == home
    for name in ("adapter_ablation", "parameters", "exit_layer"):
        config = composed(name)
        for drafter in (config.drafter, *(v for k, v in config.more.items() if k != AGAIN)):
            folder, _, adapter = drafter.adapter.rpartition("/")
            assert folder == home and adapter in saved


@pytest.mark.parametrize("name", [x for x in NAMES if x != "position"])
def test_published_values_lie_where_the_study_has_places_for_them(name):
    config, names = composed(name), methods_of(name)
    study = config.study
    points = published_points(study)
    assert points and all(point.values and point.source for point in points)
    assert {m for point in points for m in point.values} <= set(study.metrics)
    by_label = {study.place(x) for x in names}
    if study.curve == "method":
        assert {point.curve for point in points} <= by_label
    if study.x == "method":
        assert {point.x for point in points} == by_label
    if name in ("threshold", "steps", "tree"):
        settings = {point.curve for point in points if isinstance(point.curve, float)}
        assert settings <= set(map(float, config.variants[study.curve.removeprefix("drafter.")]))


def test_variants_are_all_combinations_named_by_their_options():
    options = {"steps": [2, 4], "threshold": [0, 0.5]}
    variants = combinations(KangarooConfig(adapter="a"), options, "variants")
    assert list(variants) == [f"kangaroo,steps={s},threshold={t}" for s in (2, 4) for t in (0, 0.5)]
    last = KangarooConfig(adapter="a", steps=4, threshold=0.5)
    assert list(variants.values())[-1] == last
    assert combinations(last, {}, "variants") == {"kangaroo": last}
    wrong = {"step": [1]}, {"steps": ["many"]}, {"threshold": [0], "steps": []}
    said = "no setting 'step'; Kangaroo", "KangarooConfig.steps='many'", "no steps .*=kangaroo"
    for options, message in zip(wrong, said, strict=True):
        with pytest.raises(ConfigError, match=f"^search.mine: .*{message}"):
            combinations(last, options, "search.mine")


def test_the_questions_of_one_task_are_counted_among_themselves():
    config = EvaluateConfig("out", BenchConfig(), task="math_reasoning", question_every=3)
    questions, _ = select_questions(config)
    assert {x.category for x in questions} == {"math_reasoning"} and len(questions) == 4
    config.task = "maths"
    with pytest.raises(ConfigError, match="demo has no task 'maths'; it has mt_bench, "):
        select_questions(config)


@pytest.mark.slow
def test_every_experiment_runs_unchanged_for_vicuna(tmp_path):
    """On random weights of its architecture, which has six layers here."""
    write_inputs(here := tmp_path)
    weights = "random:small:lmsys/vicuna-7b-v1.3"
    vicuna = ["model=vicuna-7b", f"model.path={weights}", "model.dtype=float32"]
    brief = "trainer.epochs=1 trainer.holdout=4 trainer.batch_tokens=256"
    brief += " adapter.exit_layers=[0,1,2,3,4] data.source=ShareGPT.json"
    typed("train.py", "experiment=paper/adapters", *vicuna, *brief.split(), cwd=here)
    trained = here / "outputs/paper/vicuna-7b/adapters"
    shutil.copytree(trained / "attention-exit2", here / "adapters/vicuna-7b")
    shutil.copytree(trained / "medusa", here / "adapters/vicuna-7b-medusa")
    (here / "notes.txt").write_text("What is 2 and 2? It is 4. " * 9)
    typed("scripts/prepare.py datastore", *vicuna, "~data", "texts=[notes.txt]", cwd=here)
    for name in NAMES:
        options = {
            "table1": ["more.draft_verify.skip=[1,3]", f"more.draft_model.model={weights}"],
            "position": [f"more.draft_model.model={weights}", "task=qa"],
            "exit_layer": ["~drafter@more.exit8", "~drafter@more.exit16"],
        }
        line = [f"experiment=paper/{name}", *vicuna, *FEW, *options.get(name, [])]
        typed("evaluate.py", *line, cwd=here)
        folder = "adapter_ablation" if name == "parameters" else name
        results = json.loads((here / f"outputs/paper/vicuna-7b/{folder}/{name}.json").read_text())
        assert results["points"] and results["questions"] == 5
    page = shutil.copy(ROOT / "docs/results/paper.md", here / "paper.md")
    typed("evaluate.py", "results=outputs/paper/vicuna-7b", "page=paper.md", cwd=here)
    assert page.read_text().count("\nvicuna-7b on spec_bench: 5 questions, ") == len(NAMES)
