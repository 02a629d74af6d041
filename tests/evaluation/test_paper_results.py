"""What the paper's experiments say follows from records: values, findings, tables, the page."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
from evaluation_records import finish, record, run, vanilla_run
from paper_cases import NAMES, composed, methods_of

from kangaroo.evaluation import statistics
from kangaroo.evaluation.metrics import pairs
from kangaroo.evaluation.study import report
from kangaroo.evaluation.study.plots import Scale, plot
from kangaroo.evaluation.study.study import (
    AGREES,
    DISAGREES,
    OPEN,
    Claim,
    Estimate,
    StudyConfig,
    estimate,
    study_of,
    value_of,
    verdict,
)
from kangaroo.utils.errors import ConfigError

# --- values and findings


def answered(seconds, accepted=(3, 1), ids=range(8), category="qa"):
    """Questions whose rounds took so long; each question is harder than the one before."""
    emitted, records = [count + 1 for count in accepted], []
    for i, s in zip(ids, np.broadcast_to(seconds, len(ids)), strict=True):
        rounds = emitted, list(accepted), [4] * len(emitted), [s * (1 + i)] * len(emitted)
        pair = run(*rounds), vanilla_run(sum(emitted), 1.0 + i)
        records.append(record(i, pair, category=category))
    return records


def test_what_makes_a_question_hard_for_both_does_not_widen_the_interval():
    """One method is always a little slower: the intervals overlap, and the difference has none."""
    hard = np.random.default_rng(1).uniform(0.3, 3.0, 12)
    fast, slow = (pairs(answered(hard * x, ids=range(12)), "speedup") for x in (1.0, 1.1))
    a, b = estimate(fast), estimate(slow)
    assert value_of(answered(1.0, ids=[1]), "compression_rate") == Estimate(3.0)  # has none
    difference, reverse, none = (
        estimate(np.hstack(both), statistics.difference)
        for both in ((fast, slow), (slow, fast), (fast, fast))
    )
    assert a.low < b.high
    assert difference.low > 0 and difference.value == pytest.approx(a.value - b.value)
    assert verdict(difference, 12) == AGREES
    assert verdict(reverse, 12) == DISAGREES
    assert verdict(none, 12) == OPEN
    assert verdict(difference, 7) == OPEN  # a bootstrap over so few questions is too sure


# --- tables, plots, files


@pytest.fixture
def results(tmp_path):
    """Thresholds by steps, as a run with `variants` leaves them, and its baseline."""
    for steps in (4, 6):
        for i, threshold in enumerate((0, 0.6)):
            folder = tmp_path / f"kangaroo,steps={steps},threshold={threshold}"
            settings = {"drafter.steps": steps, "drafter.threshold": threshold}
            finish(folder, answered(1.0 - 0.3 * i + steps / 100), **settings)
    finish(tmp_path / "vanilla", answered(1.0))
    return tmp_path


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
    found = report.table(study_of(STUDY, results))
    by_place = {(row["steps"], row["threshold"]): row for row in found}
    assert by_place["6", "0.6"]["Vicuna-7B: speedup"] == "1.50"
    assert by_place["6", "0.6"]["CR"].startswith("3.00")
    assert by_place["4", "0.6"]["Vicuna-7B: speedup"] == "-"
    assert by_place["8", "0.5"]["CR"] == "-" and by_place["8", "0.5"]["Vicuna-7B: CR"] == "2.13"


def test_vanilla_decoded_again_is_a_level_with_its_name(tmp_path):
    """It has no setting of a drafter, and so no place along the plot."""
    finish(tmp_path / "exit2", answered(1.0), **{"drafter.exit_layer": 2})
    finish(tmp_path / "vanilla again", answered(1.0))
    exits = StudyConfig("exits", "Exits", x="drafter.exit_layer", x_label="exit layer")
    found = study_of(exits, tmp_path)
    assert [(p.curve, p.x) for p in found.points] == [("", 2), ("vanilla again", None)]
    assert [row["exit layer"] for row in report.table(found)] == ["2", "vanilla again"]
    report.write(found, tmp_path)


def test_a_word_among_numbers_makes_all_of_them_words_along_the_plot(tmp_path):
    for threshold in (0.4, "auto", 0.9):
        finish(tmp_path / str(threshold), answered(1.0), **{"drafter.threshold": threshold})
    study = StudyConfig("thresholds", "Thresholds", x="drafter.threshold", x_label="eta")
    points = study_of(study, tmp_path).points
    (panel, *_) = plot(study, points, [], "").axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["auto", "0.4", "0.9"]
    left, right = panel.get_xlim()
    scale = Scale(study, points)
    assert [scale.at(point.x, "") for point in points] == [0, 1, 2] and left < 0 and right > 2


def test_drafters_of_the_jobs_of_a_sweep_have_curves_of_their_own(tmp_path):
    for rule in ("match", "rejection"):
        for drafter in ("kangaroo", "vanilla again"):
            settings = {"sampling.rule": rule, "sampling.temperature": 0.5}
            finish(tmp_path / rule / drafter, answered(1.0), **settings)
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
    reasons = [x for x in report.body(found, "x.png").splitlines() if x.endswith("It is not.")]
    assert reasons == ["- *and it is not* (disagrees): It is not."]


def test_what_was_not_measured_is_left_out(results, tmp_path):
    shutil.rmtree(results / CLAIM.more)
    assert study_of(STUDY, results).checked == []
    assert study_of(STUDY, tmp_path / "nowhere") is None


def test_what_was_asked_otherwise_is_not_in_one_study(results):
    shutil.rmtree(results / CLAIM.more)
    settings = {"drafter.steps": 6, "drafter.threshold": 0.6}
    finish(results / CLAIM.more, answered(1.0, ids=range(3)), **settings)
    with pytest.raises(ConfigError, match="were not asked the same questions"):
        study_of(STUDY, results)
    finish(results / "other", answered(1.0), max_new_tokens=99)
    with pytest.raises(ConfigError, match=r"'other'.* cannot be in one study: max_new_tokens=8 "):
        study_of(STUDY, results)


def test_methods_by_task_are_rows_with_the_papers_below(tmp_path):
    study = composed("table1").study
    qa, rag = answered(1.0, ids=[0, 1]), answered(1.0, ids=[2, 3], category="rag")
    for name in ("kangaroo", "lookahead"):
        finish(tmp_path / name, [*qa, *rag])
    first, second, *_ = found = report.table(study_of(study, tmp_path))
    assert [row["method"] for row in found] == 3 * ["Kangaroo, no tree"] + 3 * ["Lookahead"]
    assert list(first) == ["method", "CR / speedup", "QA", "RAG", "overall"]
    assert first["overall"].startswith("3.00 / ")
    assert second == {
        "method": "Kangaroo, no tree",
        "CR / speedup": "Vicuna-7B",
        "QA": "1.87 / 1.43",
        "RAG": "2.05 / 1.52",
        "overall": "- / 1.50",
    }


def test_positions_are_places_with_the_share_of_rounds_that_reach_them(tmp_path):
    finish(tmp_path / "kangaroo", answered(1.0, (3, 1)))
    found = study_of(composed("position").study, tmp_path)
    assert [(p.x, p.values["ctar"].value) for p in found.points] == [(1, 1), (2, 0.5), (3, 0.5)]
    (row,) = report.table(found)
    assert row == {"method": "Kangaroo", "CTAR(w)": "here"} | {
        f"w = {w}": x for w, x in ((1, "1.00"), (2, "0.50"), (3, "0.50"))
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_a_plot_with_all_its_curves(name, tmp_path):
    config = composed(name)
    for i, method in enumerate(methods_of(name)):
        numbers = dict.fromkeys(("steps", "exit_layer", "nodes"), i) | {"threshold": i / 10}
        settings = {f"drafter.{k}": v for k, v in (numbers | {"top_k": 3}).items()}
        records = answered(1.0, category="math_reasoning")
        finish(tmp_path / method, records, task=None, **settings)
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
    report.rewrite(file, folder)
    text = file.read_text()
    assert "Written by hand." in text and "\nBetween.\n" in text and "\nold\n" not in text
    assert "Not measured yet: `python evaluate.py experiment=paper/tree`." in text
    assert "Of 2 findings of the paper that were checked, 1 agree, 1 disagree, and 0 are" in text
    assert "asked 8 questions of b, with at most 8 new tokens" in text
    assert "![Thresholds](img/paper/threshold.png)" in text
    assert (tmp_path / "img/paper/threshold.png").is_file()
    report.rewrite(file, folder)
    assert file.read_text() == text
