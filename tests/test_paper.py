"""The paper's experiments: they compose for every model, and what they say follows from records."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import cache

import numpy as np
import pytest
import torch
from commands import python
from evaluation_records import ABOUT, SETTINGS, record, run, vanilla_run
from helpers import adapter_for
from hydra import compose, initialize_config_dir
from hydra.types import RunMode
from omegaconf import OmegaConf
from test_commands import ROOT, questions, talks

from kangaroo import cli
from kangaroo.cli.command import varied
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.errors import ConfigError, DataError
from kangaroo.evaluation import summary
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.metrics import metrics
from kangaroo.evaluation.records import Writer
from kangaroo.evaluation.run import EvaluateConfig, asked
from kangaroo.model import LM
from kangaroo.models import TINY, Dtype, ModelConfig, load
from kangaroo.paper import page, ratios, report, rows
from kangaroo.paper.claims import AGREES, DISAGREES, OPEN, verdict
from kangaroo.paper.published import published
from kangaroo.paper.ratios import Value
from kangaroo.paper.results import study_of
from kangaroo.paper.study import Claim, StudyConfig
from kangaroo.trained import adapter_files

NAMES = """
    table1 adapter_ablation exit_layer threshold steps position parameters temperature tree
""".split()
FILES = {path.stem for path in (ROOT / "configs/experiment/paper").glob("*.yaml")}
EMBEDDED, VICUNA = "smollm2-135m", "vicuna-7b"


@cache
def composed(name, *overrides):
    """The typed config of an experiment."""
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        return OmegaConf.to_object(
            compose("evaluate", [f"experiment=paper/{name}", "output=out", *overrides])
        )


@cache
def jobs(name, *overrides):
    """What an experiment tells Hydra: its folders and its sweep."""
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        asked = [f"experiment=paper/{name}", *overrides]
        return compose("evaluate", asked, return_hydra_config=True).hydra


def methods_of(name):
    """The names of the folders that an experiment's results lie in."""
    config = composed(name)
    names = [*varied(config.drafter, config.variants), *config.more]
    if name != "temperature":
        return names
    params, found = jobs(name).sweeper.params, []
    for temperature in str(params["sampling.temperature"]).split(","):
        for rule in params["sampling.rule"].split(","):
            found.append(f"temperature={temperature},Rule.{rule}")
    assert len(names) == 1
    return found


# --- what is declared


def test_every_experiment_of_the_paper_has_a_file_and_a_place_on_the_page():
    assert {*NAMES, "base", "adapters"} == FILES
    shown = page.STUDY.findall((ROOT / "docs/paper.md").read_text())
    assert sorted(name for _, name, _ in shown) == sorted(NAMES)
    makefile = (ROOT / "Makefile").read_text()
    (listed,) = [x for x in makefile.splitlines() if x.startswith("PAPER = ")]
    assert sorted(listed.removeprefix("PAPER = ").split()) == sorted(NAMES)


@pytest.mark.parametrize("model", [EMBEDDED, VICUNA, "tiny"])
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_composes_for_every_model(name, model):
    config = composed(name, f"model={model}")
    assert config.study.name == name and config.bench.name == "spec_bench"
    (baseline,) = config.baselines
    assert baseline.value == "vanilla"
    assert (config.max_new_tokens == 1024) == (model == VICUNA)


def test_a_models_results_have_a_folder_and_its_experiments_have_folders_there():
    home = "outputs/paper/vicuna-7b"
    assert jobs("tree", "model=vicuna-7b").run.dir == f"{home}/tree"
    sweep = jobs("temperature", "model=vicuna-7b")
    assert sweep.mode is RunMode.MULTIRUN and sweep.sweep.dir == f"{home}/temperature"
    assert sweep.sweep.subdir == "temperature=0.0,Rule.match"  # of the job's own settings


@pytest.mark.parametrize("name", NAMES)
def test_claims_and_labels_name_methods_that_the_experiment_measures(name):
    config, names = composed(name), methods_of(name)
    known = {*names, "match", "rejection"}
    assert set(config.study.labels) <= known
    for claim in config.study.claims:
        assert {claim.more, claim.less} <= set(names) and claim.more != claim.less
        ratios.pairs([record(1, (run([3], [2], [4], [1.0]), vanilla_run(3)))], claim.metric)


def test_the_papers_draft_model_is_vicunas_and_other_models_have_their_own_layers():
    of_vicuna, of_embedded = (
        composed("table1", f"model={model}").more["draft_model"] for model in (VICUNA, EMBEDDED)
    )
    assert (of_vicuna.model, of_vicuna.adapter) == ("double7/vicuna-68m", None)
    assert (of_embedded.model, of_embedded.adapter) == (None, "adapters/smollm2-135m")


def test_evaluation_takes_the_adapters_that_training_saves():
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        train = compose("train", ["experiment=paper/adapters"], return_hydra_config=True)
    recipes = [train.adapter, *train.more.values()]
    saved = {"medusa"} | {f"{r.name}-exit{layer}" for r in recipes for layer in r.exit_layers}
    home = "outputs/paper/smollm2-135m/adapters"
    assert train.hydra.run.dir == home
    for name in ("adapter_ablation", "parameters", "exit_layer"):
        config = composed(name)
        for drafter in (config.drafter, *config.more.values()):
            folder, _, adapter = drafter.adapter.rpartition("/")
            assert folder == home and adapter in saved


def test_two_experiments_on_the_same_methods_share_their_answers():
    ablation, parameters = composed("adapter_ablation"), composed("parameters")
    assert ablation.more == parameters.more and ablation.drafter == parameters.drafter
    assert jobs("adapter_ablation").run.dir == jobs("parameters").run.dir


# --- the published values


@pytest.mark.parametrize("name", [x for x in NAMES if x not in ("position", "temperature")])
def test_published_values_lie_where_the_study_has_places_for_them(name):
    config, names = composed(name), methods_of(name)
    study = config.study
    found = published(study)
    assert found and all(one.values and one.source for one in found)
    assert {m for one in found for m in one.values} <= set(study.metrics)
    by_label = {study.labels.get(x, x) for x in names}
    if study.curve == "method":
        assert {one.curve for one in found} <= by_label
    if study.x == "method":
        assert {one.x for one in found} == by_label
    if name in ("threshold", "steps", "tree"):
        settings = {one.curve for one in found if isinstance(one.curve, float)}
        assert settings <= set(map(float, config.variants[study.curve.removeprefix("drafter.")]))


def test_published_values_are_the_papers():
    def values(name, curve, x, model="Vicuna-7B"):
        (one,) = [
            o
            for o in published(composed(name).study)
            if (o.curve, o.x, o.model) == (curve, x, model)
        ]
        return one.values

    told = values("table1", "Kangaroo, no tree", "math_reasoning")
    assert told == {"compression_rate": 2.14, "speedup": 1.61}
    assert values("table1", "Kangaroo, tree", "overall", "Vicuna-13B") == {"speedup": 1.65}
    assert values("adapter_ablation", "", "MLP alone") == {"speedup": 1.22}
    assert values("exit_layer", "", 8.0) == {"compression_rate": 2.61, "speedup": 1.275}
    assert values("threshold", 6.0, 0.6) == values("steps", 0.6, 6.0)
    assert values("parameters", "Medusa, no tree", 591e6) == {"speedup": 1.41}
    assert values("tree", "chain", None) == {"speedup": 1.50}


# --- values and findings


def answered(seconds, accepted=(3, 1), ids=range(8), category="qa"):
    """Questions whose rounds took so long; each question is harder than the one before."""
    emitted = [count + 1 for count in accepted]
    return [
        record(
            i,
            (
                run(emitted, list(accepted), [4] * len(emitted), [s * (1 + i)] * len(emitted)),
                vanilla_run(sum(emitted), 1.0 + i),
            ),
            category=category,
        )
        for i, s in zip(ids, np.broadcast_to(seconds, len(ids)), strict=True)
    ]


def test_a_studys_values_are_those_of_the_evaluation():
    records = answered([0.5, 1.0, 2.0, 0.7], ids=range(4)) + answered(1.0, (0, 2, 4), [9])
    known = metrics(records)
    for name in ("speedup", "compression_rate", "acceptance_rate"):
        assert ratios.value(ratios.pairs(records, name)).value == pytest.approx(known[name])
    for w, share in enumerate(known["ctar"], start=1):
        assert ratios.value(ratios.pairs(records, f"ctar{w}")).value == pytest.approx(share)
    found = ratios.value(ratios.pairs(records, "speedup"))
    assert [found.low, found.high] == known["speedup_ci95"]


@pytest.mark.parametrize("metric", ["speed", "ctar", "ctarx"])
def test_a_metric_that_is_not_known_is_refused(metric):
    with pytest.raises(ConfigError, match=f"there is no '{metric}'; there are speedup"):
        ratios.pairs(answered(1.0), metric)


def test_a_speedup_without_vanilla_is_refused():
    with pytest.raises(ConfigError, match="needs vanilla decoding"):
        ratios.pairs([record(1, (run([3], [2], [4], [1.0]), None))], "speedup")


def test_of_a_single_question_there_is_no_interval():
    found = ratios.value(ratios.pairs(answered(1.0, ids=[1]), "compression_rate"))
    assert found == Value(3.0)


def test_what_makes_a_question_hard_for_both_does_not_widen_the_interval():
    """One method is always a little slower: the intervals overlap, and the difference has none."""
    rng = np.random.default_rng(1)
    hard = rng.uniform(0.3, 3.0, 12)
    fast, slow = (ratios.pairs(answered(hard * x, ids=range(12)), "speedup") for x in (1.0, 1.1))
    a, b, found = ratios.value(fast), ratios.value(slow), ratios.difference(fast, slow)
    assert a.low < b.high
    assert found.low > 0 and found.value == pytest.approx(a.value - b.value)
    assert verdict(found, 12) == AGREES
    assert verdict(ratios.difference(slow, fast), 12) == DISAGREES
    assert verdict(ratios.difference(fast, fast), 12) == OPEN
    assert verdict(found, 7) == OPEN  # a bootstrap over so few questions is too sure


# --- tables, plots, files


@pytest.fixture
def results(tmp_path):
    """Thresholds by steps, as a run with `variants` leaves them, and its baseline."""
    for steps in (4, 6):
        for i, threshold in enumerate((0, 0.6)):
            name = f"kangaroo,steps={steps},threshold={threshold}"
            told = {"drafter": name, "drafter.steps": steps, "drafter.threshold": threshold}
            finish(tmp_path / name, answered(1.0 - 0.3 * i + steps / 100), told)
    finish(tmp_path / "vanilla", answered(1.0), {"drafter": "vanilla"})
    return tmp_path


def finish(folder, records, settings):
    about = ABOUT | {"settings": SETTINGS | settings}
    folder.mkdir()
    writer = Writer(folder, 0)
    for one in records:
        writer.append(one)
    writer.close()
    (folder / "summary.json").write_text(json.dumps(summary.summarise(records, about)))


CLAIM = Claim(
    "stopping early is faster",
    more="kangaroo,steps=6,threshold=0.6",
    less="kangaroo,steps=6,threshold=0",
    why="It is not.",
)
STUDY = StudyConfig(
    "threshold",
    "Thresholds",
    x="drafter.threshold",
    x_label="threshold",
    curve="drafter.steps",
    curve_label="steps",
    claims=[
        CLAIM,
        dataclasses.replace(CLAIM, says="and it is not", more=CLAIM.less, less=CLAIM.more),
    ],
)


def test_settings_are_places_and_curves_and_the_baseline_is_neither(results):
    found = study_of(STUDY, results)
    assert [(p.curve, p.x) for p in found.points] == [(4, 0), (4, 0.6), (6, 0), (6, 0.6)]
    assert len(found.methods) == 4


def test_the_papers_values_stand_beside_ours_and_what_it_alone_has_is_a_row(results):
    found = rows.table(study_of(STUDY, results))
    by_place = {(row["steps"], row["threshold"]): row for row in found}
    assert by_place["6", "0.6"]["Vicuna-7B: speedup"] == "1.50"
    assert by_place["6", "0.6"]["CR"].startswith("3.00")
    assert by_place["4", "0.6"]["Vicuna-7B: speedup"] == "-"
    assert by_place["8", "0.5"]["CR"] == "-" and by_place["8", "0.5"]["Vicuna-7B: CR"] == "2.13"


def test_vanilla_decoded_again_is_a_level_with_its_name(tmp_path):
    """It has no setting of a drafter, and so no place along the plot."""
    finish(tmp_path / "exit2", answered(1.0), {"drafter": "exit2", "drafter.exit_layer": 2})
    finish(tmp_path / "vanilla again", answered(1.0), {"drafter": "vanilla again"})
    exits = StudyConfig("exits", "Exits", x="drafter.exit_layer", x_label="exit layer")
    found = study_of(exits, tmp_path)
    assert [(p.curve, p.x) for p in found.points] == [("", 2), ("vanilla again", None)]
    assert [row["exit layer"] for row in rows.table(found)] == ["2", "vanilla again"]
    report.write(found, tmp_path)


def test_drafters_of_the_jobs_of_a_sweep_have_curves_of_their_own(tmp_path):
    for rule in ("match", "rejection"):
        for drafter in ("kangaroo", "vanilla again"):
            told = {"drafter": drafter, "sampling.rule": rule, "sampling.temperature": 0.5}
            (tmp_path / rule).mkdir(exist_ok=True)
            finish(tmp_path / rule / drafter, answered(1.0), told)
    found = study_of(composed("temperature").study, tmp_path)
    assert [point.curve for point in found.points] == [
        f"{rule}, {drafter}"
        for rule in ("matched noise", "rejection sampling")
        for drafter in ("kangaroo", "vanilla again")
    ]
    assert "sampled" in report.size(found)


def test_a_claim_is_checked_and_its_reason_is_told_only_if_it_does_not_agree(results):
    found = study_of(STUDY, results)
    assert [one.verdict for one in found.checked] == [AGREES, DISAGREES]
    assert [one.published for one in found.checked] == [(1.50, 1.21), (1.21, 1.50)]
    (told,) = rows.reasons(found.checked)
    assert told == "- *and it is not* (disagrees): It is not."


def test_a_value_whose_place_the_paper_does_not_tell_is_that_of_the_curve(tmp_path):
    study = composed("tree").study
    for name in ("kangaroo", "kangaroo_tree,top_k=10,nodes=32"):
        told = {"drafter.top_k": 10, "drafter.nodes": 32} if "tree" in name else {}
        finish(tmp_path / name, answered(1.0), {"drafter": name} | told)
    found = study_of(study, tmp_path)
    assert [one.published for one in found.checked] == [None, (1.72, 1.50)]


def test_a_claim_about_a_method_that_was_left_out_is_not_checked(results):
    shutil.rmtree(results / CLAIM.more)
    assert study_of(STUDY, results).checked == []


def test_a_claim_about_methods_that_were_asked_different_questions_is_refused(results):
    shutil.rmtree(results / CLAIM.more)
    told = {"drafter": CLAIM.more, "drafter.steps": 6, "drafter.threshold": 0.6}
    finish(results / CLAIM.more, answered(1.0, ids=range(3)), told)
    with pytest.raises(ConfigError, match="were not asked the same questions"):
        study_of(STUDY, results)


def test_results_of_other_settings_are_not_mixed(results):
    finish(results / "other", answered(1.0), {"drafter": "other", "max_new_tokens": 99})
    with pytest.raises(ConfigError, match=r"'other'.* cannot be in one study: max_new_tokens=8 "):
        study_of(STUDY, results)


def test_a_folder_without_results_is_no_study(tmp_path):
    assert study_of(STUDY, tmp_path) is None


def test_methods_by_task_are_rows_with_the_papers_below(tmp_path):
    study = composed("table1").study
    tasks = ["qa", "rag"]
    for name in ("kangaroo", "lookahead"):
        records = [
            r
            for i, x in enumerate(tasks)
            for r in answered(1.0, ids=[2 * i, 2 * i + 1], category=x)
        ]
        finish(tmp_path / name, records, {"drafter": name})
    first, second, *_ = found = rows.table(study_of(study, tmp_path))
    assert [row["method"] for row in found] == 3 * ["Kangaroo, no tree"] + 3 * ["Lookahead"]
    assert list(first) == ["method", "CR / speedup", "QA", "RAG", "overall"]
    assert first["overall"].startswith("3.00 (3.00-3.00) / ")
    assert second == {
        "method": "Kangaroo, no tree",
        "CR / speedup": "Vicuna-7B",
        "QA": "1.87 / 1.43",
        "RAG": "2.05 / 1.52",
        "overall": "- / 1.50",
    }


def test_positions_are_places_with_the_share_of_rounds_that_reach_them(tmp_path):
    finish(tmp_path / "kangaroo", answered(1.0, (3, 1)), {"drafter": "kangaroo"})
    found = study_of(composed("position").study, tmp_path)
    assert [(p.x, p.values["ctar"].value) for p in found.points] == [(1, 1), (2, 0.5), (3, 0.5)]
    (row,) = rows.table(found)
    assert row == {"method": "Kangaroo", "CTAR(w)": "here"} | {
        f"w = {w}": f"{x} ({x}-{x})" for w, x in ((1, "1.00"), (2, "0.50"), (3, "0.50"))
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_a_plot_with_all_its_curves(name, tmp_path):
    config = composed(name)
    for i, method in enumerate(methods_of(name)):
        told = {
            "drafter": method,
            "drafter.steps": i,
            "drafter.threshold": i / 10,
            "drafter.exit_layer": i,
            "sampling.rule": "match",
            "drafter.nodes": i,
            "drafter.top_k": 3,
            "task": None,
        }
        finish(tmp_path / method, answered(1.0, category="math_reasoning"), told)
    found = study_of(config.study, tmp_path)
    report.write(found, tmp_path)
    assert {f"{name}.{kind}" for kind in ("json", "md", "png")} <= {
        x.name for x in tmp_path.iterdir()
    }
    told = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(told["checked"]) == len(config.study.claims)
    assert told["provenance"].keys() == {one.name for one in found.methods}


# --- the page


PAGE = """# Ours

Written by hand.

<!-- summary -->
<!-- end -->

## threshold

<!-- study: threshold -->
old
<!-- end -->

Between.

<!-- study: tree -->
<!-- end -->
"""


def test_the_page_keeps_its_own_words_and_gets_what_was_measured(results, tmp_path):
    folder = tmp_path / "of-a-model"
    shutil.copytree(results, folder / "threshold", ignore=lambda *_: ["of-a-model"])
    report.write(study_of(STUDY, folder / "threshold"), folder / "threshold")
    file = tmp_path / "paper.md"
    file.write_text(PAGE)
    page.rewrite(file, folder)
    text = file.read_text()
    assert "Written by hand." in text and "\nBetween.\n" in text and "\nold\n" not in text
    assert "Not measured yet: `python evaluate.py experiment=paper/tree`." in text
    assert "Of 2 findings of the paper that were checked, 1 agree, 1 disagree, and 0 are" in text
    assert "With fewer than" not in text
    assert "![Thresholds](img/paper/threshold.png)" in text
    assert (tmp_path / "img/paper/threshold.png").is_file()
    page.rewrite(file, folder)
    assert file.read_text() == text


def test_the_page_says_which_results_are_too_small_to_tell_anything(results):
    study = study_of(STUDY, results)
    report.write(study, results)
    told = json.loads((results / "threshold.json").read_text())
    assert "With fewer than 8 questions" in page.summary([told, told | {"questions": 7}])
    assert "asked 7 to 8 questions of b, with at most 8 new tokens" in page.summary(
        [told, told | {"questions": 7}]
    )


def test_a_page_without_a_place_for_a_study_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("# Nothing\n")
    with pytest.raises(DataError, match="has no line '<!-- study: NAME -->'"):
        page.rewrite(tmp_path / "page.md", tmp_path)


# --- what the experiments are made from


def test_variants_are_all_combinations_named_by_their_options():
    found = varied(KangarooConfig(adapter="a"), {"steps": [2, 4], "threshold": [0, 0.5]})
    assert list(found) == [f"kangaroo,steps={s},threshold={t}" for s in (2, 4) for t in (0, 0.5)]
    last = KangarooConfig(adapter="a", steps=4, threshold=0.5)
    assert list(found.values())[-1] == last
    assert varied(last, {}) == {"kangaroo": last}


@pytest.mark.parametrize("options", [{"step": [1]}, {"steps": ["many"]}])
def test_variants_of_an_option_that_is_not_there_are_refused(options):
    with pytest.raises(ConfigError, match=r"^variants=.* for drafter=kangaroo: "):
        varied(KangarooConfig(adapter="a"), options)


def test_the_questions_of_one_task_are_counted_among_themselves():
    config = EvaluateConfig("out", BenchConfig(), task="math_reasoning", question_every=3)
    found, _ = asked(config)
    assert {question.category for question in found} == {"math_reasoning"} and len(found) == 4
    with pytest.raises(ConfigError, match="demo has no task 'maths'; it has mt_bench, "):
        asked(dataclasses.replace(config, task="maths"))


# --- the commands


FEW = ("bench.path=questions.jsonl", "max_new_tokens=6", "question_every=1")


def saved(lm, here):
    adapter = adapter_for(lm)
    about = adapter_files.describe(lm, adapter, {"progress": {"assistant_tokens": 7}})
    adapter_files.save(adapter, about, torch.tensor([3]), here)


@pytest.fixture
def here(tmp_path):
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions())) + "\n")
    (tmp_path / "ShareGPT.json").write_text(json.dumps(talks()))
    return tmp_path


def typed(script, *options, cwd):
    done = python(script, *options, cwd=cwd)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_an_experiment_is_one_command_that_goes_on_where_it_was_stopped(here):
    saved(
        LM(load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))[0]),
        here / "adapters/tiny",
    )
    line = ["evaluate.py", "experiment=paper/steps", "model=tiny", *FEW]
    told = typed(*line, cwd=here)
    assert "Length of a draft" in told
    folder = here / "outputs/paper/tiny/steps"
    assert (folder / "steps.png").is_file()
    found = json.loads((folder / "steps.json").read_text())
    methods = [point["method"] for point in found["points"]]
    assert len(methods) == 11 and "vanilla again" in methods and len(found["checked"]) == 3
    records = sorted(folder.glob("*/records-0.jsonl"))
    assert len(records) == 11
    cut = records[3].read_bytes().splitlines(keepends=True)
    records[3].write_bytes(b"".join(cut[:3]) + cut[3][:9])  # as a kill leaves it
    before = [x.read_bytes() for x in records]
    (folder / "steps.json").unlink()
    typed(*line, cwd=here)
    after = [x.read_bytes() for x in records]
    pairs = list(zip(before, after, strict=True))
    del pairs[3]
    assert all(b.startswith(a) and b.count(b"\n") == 7 for a, b in pairs)  # two more answers
    assert json.loads((folder / "steps.json").read_text())["questions"] == 5
    shutil.copy(ROOT / "docs/paper.md", here / "paper.md")
    typed("scripts/paper.py", "outputs/paper/tiny", "paper.md", cwd=here)
    assert "tiny on spec_bench: 5 questions" in (here / "paper.md").read_text()


@pytest.mark.slow
def test_every_experiment_runs_unchanged_for_vicuna(here):
    """On random weights of its architecture, which has six layers here."""
    weights = "random:small:lmsys/vicuna-7b-v1.3"
    vicuna = ["model=vicuna-7b", f"model.path={weights}", "model.dtype=float32"]
    brief = "trainer.epochs=1 trainer.holdout=4 trainer.decode_prompts=0 trainer.batch_tokens=256"
    exits = "adapter.exit_layers=[1,2,3,4]"
    data = "data.source=ShareGPT.json"
    typed("train.py", "experiment=paper/adapters", *vicuna, *brief.split(), exits, data, cwd=here)
    trained = here / "outputs/paper/vicuna-7b/adapters"
    shutil.copytree(trained / "attention-exit2", here / "adapters/vicuna-7b")
    shutil.copytree(trained / "medusa", here / "adapters/vicuna-7b-medusa")
    (here / "notes.txt").write_text("What is 2 and 2? It is 4. " * 9)
    typed("scripts/datastore.py", *vicuna, "~data", "texts=[notes.txt]", cwd=here)
    for name in NAMES:
        own = {
            "table1": [f"more.draft_model.model={weights}"],
            "position": [f"more.draft_model.model={weights}", "task=qa"],
            "exit_layer": ["~drafter@more.exit8", "~drafter@more.exit16"],
        }
        line = [f"experiment=paper/{name}", *vicuna, *FEW, *own.get(name, [])]
        typed("evaluate.py", *line, cwd=here)
        folder = "adapter_ablation" if name == "parameters" else name
        found = json.loads((here / f"outputs/paper/vicuna-7b/{folder}/{name}.json").read_text())
        assert found["points"] and found["questions"] == 5
    shutil.copy(ROOT / "docs/paper.md", here / "paper.md")
    typed("scripts/paper.py", "outputs/paper/vicuna-7b", "paper.md", cwd=here)
    assert "Not measured yet" not in (here / "paper.md").read_text()
