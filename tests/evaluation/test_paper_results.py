"""What the paper's experiments say follows from records: values, findings, tables, plots, pages."""

import json
import shutil

import numpy as np
import pytest
from evaluation_cases import finish, record, run, vanilla_run
from matplotlib.figure import Figure
from test_paper import NAMES, composed, methods_of

from kangaroo.evaluation.metrics import Estimate, estimate, pairs, value_of
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.study import report
from kangaroo.evaluation.study.study import Claim, StudyConfig, read_study, verdict
from kangaroo.utils.errors import ConfigError

DRAWN = {"position", "table1", "temperature", "threshold"}  # the others are like one of these
SLOW, FAST = (f"kangaroo,steps=6,threshold={x}" for x in (0, 0.6))
CLAIMS = [
    Claim("stopping early is faster", more=FAST, less=SLOW, why="It is not."),
    Claim("and it is not", more=SLOW, less=FAST, why="It is not."),
]
PLACES = {"x": "drafter.threshold", "curve": "drafter.steps", "curve_label": "steps"}
STUDY = StudyConfig("threshold", "Thresholds", **PLACES, claims=CLAIMS)
PAGE = """Written by hand.
<!-- summary -->
<!-- end -->
<!-- study: threshold -->
old
<!-- end -->
Between.
<!-- study: tree -->

kept

| finding | verdict |
| --- | --- |
| A tree has a higher CR | **open** |

<!-- end -->
"""


def answered(seconds, accepted=(3, 1), ids=range(8), category="qa"):
    """Questions whose rounds took so long; each question is harder than the one before."""
    emitted, records = [count + 1 for count in accepted], []
    for i, s in zip(ids, np.broadcast_to(seconds, len(ids)), strict=True):
        rounds = emitted, list(accepted), [4] * len(emitted), [s * (1 + i)] * len(emitted)
        pair = run(*rounds), vanilla_run(sum(emitted), 1.0 + i)
        records.append(record(i, pair, category=category))
    return records


def test_what_makes_a_question_hard_for_both_does_not_widen_the_interval():
    hard = np.random.default_rng(1).uniform(0.3, 3.0, 12)
    fast, slow = (pairs(answered(hard * x, ids=range(12)), "speedup") for x in (1.0, 1.1))
    a, b = estimate(fast), estimate(slow)
    assert value_of("compression_rate", answered(1.0, ids=[1])) == Estimate(3.0)  # has none
    both = (fast, slow), (slow, fast), (fast, fast)
    plain, reverse, none = (estimate(np.hstack(x)) for x in both)
    assert a.ends[0] < b.ends[1]
    assert plain.ends[0] > 0 and plain.value == pytest.approx(a.value - b.value)
    assert [verdict(x, 12) for x in (plain, reverse, none)] == ["agrees", "disagrees", "open"]
    assert verdict(plain, 7) == "open"  # a bootstrap over so few questions is too sure


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


def test_rows_are_curves_with_the_papers_below_and_the_baseline_is_none(results):
    rows = report.table(read_study(STUDY, results))
    by_row = {f"{row['steps']} {row['CR / speedup']}": row for row in rows}
    assert ", ".join(by_row) == "4 here, 4 Vicuna-7B, 6 here, 6 Vicuna-7B, 8 Vicuna-7B"
    assert list(rows[0])[2:] == ["0", "0.3", "0.5", "0.6", "0.7", "0.9"]
    assert by_row["6 here"]["0.6"].startswith("3.00 / ") and by_row["4 here"]["0.3"] == "-"
    assert by_row["6 Vicuna-7B"]["0.6"] == "2.06 / 1.50"
    assert by_row["8 Vicuna-7B"]["0.5"] == "2.13 / 1.48"


def test_a_plot_has_a_panel_for_each_metric_and_model_and_the_tables_curves(results):
    finish(results / AGAIN, answered(1.0))
    study = read_study(STUDY, results)
    figure = report.plot(study)
    panels = {panel.get_title(loc="left"): panel for panel in figure.axes}
    metrics = ("CR", "speedup")
    assert list(panels) == [f"{x}, {model}" for x in metrics for model in ("here", "Vicuna-7B")]
    places = [x.get_text() for x in figure.axes[-1].get_xticklabels()]
    assert places == ["0", "0.3", "0.5", "0.6", "0.7", "0.9"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["vanilla again", "steps 4", "steps 6", "steps 8"]
    theirs = dict(zip(labels, panels["speedup, Vicuna-7B"].containers, strict=True))
    assert theirs["steps 8"][0].get_xydata().tolist() == [[0, 1.11], [2, 1.48]]
    here = dict(zip(labels, panels["speedup, here"].containers, strict=True))
    for steps in (4.0, 6.0):
        points = [p.values["speedup"] for p in study.points if p.curve == steps]
        line, _, (intervals,) = here[f"steps {steps:g}"]
        assert line.get_xydata().tolist() == [[0, points[0].value], [3, points[1].value]]
        ends = [segment[:, 1] for segment in intervals.get_segments()]
        assert np.allclose(ends, [point.ends for point in points])
    # vanilla again has no place along them, and so is a level, and a column of its own
    alone = read_study(StudyConfig("threshold", "Thresholds", x="drafter.threshold"), results)
    assert {(p.curve, p.x) for p in alone.points} == {("", 0), ("", 0.6), (AGAIN, None)}
    assert list(report.table(study)[0])[2:] == ["-", *places]
    assert [3, 3] in [list(line.get_ydata()) for line in panels["CR, here"].lines]


def test_drafters_of_the_jobs_of_a_sweep_have_rows_of_their_own(tmp_path):
    for rule in ("match", "rejection"):
        for drafter in ("kangaroo", AGAIN):
            settings = {"sampling.rule": rule, "sampling.temperature": 0.5}
            finish(tmp_path / rule / drafter, answered(1.0), **settings)
    study = read_study(composed("temperature").study, tmp_path)
    rules = "matched noise", "rejection sampling"
    curves = {f"{rule}, {drafter}" for rule in rules for drafter in ("kangaroo", AGAIN)}
    assert {point.curve for point in study.points} == curves
    assert "temperature 0.5" in report.size(study)


def test_a_claim_is_checked_and_its_reason_is_told_only_if_it_does_not_agree(results):
    study = read_study(STUDY, results)
    assert [each.verdict for each in study.checked] == ["agrees", "disagrees"]
    reasons = [x for x in report.body(study).splitlines() if x.endswith("It is not.")]
    assert study.checked[1]._replace(questions=7).reason == "7 questions are too few to judge by."
    assert [row["the paper"] for row in report.claim_rows(study)] == ["1.50 > 1.21", "1.21 > 1.50"]
    assert reasons == ["- *and it is not* (disagrees): It is not."]


def test_a_value_that_the_paper_gives_for_no_place_stands_for_its_row(tmp_path):
    tree = {"drafter.top_k": 10, "drafter.nodes": 32}
    finish(tmp_path / "kangaroo_tree,top_k=10,nodes=32", answered(1.0), **tree)
    finish(tmp_path / "kangaroo", answered(1.1))
    rows = report.claim_rows(read_study(composed("tree").study, tmp_path))
    assert [row["the paper"] for row in rows] == ["-", "1.72 > 1.50"]


def test_what_was_not_measured_is_left_out_and_what_was_asked_otherwise_refused(results, tmp_path):
    shutil.rmtree(results / FAST)
    assert read_study(STUDY, results).checked == []
    assert read_study(STUDY, tmp_path / "nowhere") is None
    settings = {"drafter.steps": 6, "drafter.threshold": 0.6}
    finish(results / FAST, answered(1.0, ids=range(3)), **settings)
    with pytest.raises(ConfigError, match="were not asked the same questions"):
        read_study(STUDY, results)
    finish(results / "other", answered(1.0), max_new_tokens=99)
    with pytest.raises(ConfigError, match=r"'other'.* with other settings: max_new_tokens=8 "):
        read_study(STUDY, results)
    finish(tmp_path / "alone/kangaroo", [record(1, (run([3], [2], [4], [1.0]), None))])
    with pytest.raises(ConfigError, match="needs vanilla decoding"):
        read_study(STUDY, tmp_path / "alone")


def test_methods_by_task_are_rows_with_the_papers_below(tmp_path):
    qa, rag = answered(1.0, ids=[0, 1]), answered(1.0, ids=[2, 3], category="rag")
    for name in ("kangaroo", "lookahead"):
        finish(tmp_path / name, [*qa, *rag])
    first, second, *_ = report.table(read_study(composed("table1").study, tmp_path))
    assert first["method"] == second["method"] == "Kangaroo, no tree"
    assert first["overall"].startswith("3.00 / ") and first["MT-bench"] == "-"
    written = {"CR / speedup": "Vicuna-7B", "QA": "1.87 / 1.43", "overall": "- / 1.50"}
    assert written.items() <= second.items()


def test_positions_are_places_with_the_share_of_rounds_that_reach_them(tmp_path):
    finish(tmp_path / "kangaroo", answered(1.0, (3, 1)))
    (row,) = report.table(read_study(composed("position").study, tmp_path))
    assert list(row.values()) == ["Kangaroo", "here", "1.00", "0.50", "0.50"]
    assert list(row) == ["method", "CTAR(w)", "1", "2", "3"]


def test_an_interval_that_lies_beside_its_value_ends_there():
    report._draw(axes := Figure().subplots(), [1.0], {1.0: Estimate(2.0, [2.1, 2.5])}, "k", 0)
    (bars,) = axes.collections
    assert bars.get_segments()[0][:, 1].tolist() == [2.0, 2.5]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in DRAWN)) for x in NAMES]
)
def test_every_study_has_a_table_and_a_plot_of_all_that_it_measures(name, tmp_path):
    config = composed(name)
    for i, method in enumerate(methods_of(name)):
        numbers = dict.fromkeys(("steps", "exit_layer", "nodes"), i) | {"threshold": i / 10}
        settings = {f"drafter.{k}": v for k, v in (numbers | {"top_k": 3}).items()}
        finish(tmp_path / method, answered(1.0, category="math_reasoning"), task=None, **settings)
    study = read_study(config.study, tmp_path)
    report.write(study, tmp_path)
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(written["checked"]) == len(config.study.claims)
    assert written["provenance"].keys() == {each.name for each in study.methods}
    assert f"]({name}.png)" in (tmp_path / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert " | here | " in (tmp_path / f"{name}.md").read_text() or "| here |" in report.body(study)


def test_the_page_keeps_its_own_words_and_gets_what_was_measured(results, tmp_path):
    folder = tmp_path / "of-a-model"
    shutil.copytree(results, folder / "threshold", ignore=lambda *_: ["of-a-model"])
    report.write(read_study(STUDY, folder / "threshold"), folder / "threshold")
    file = tmp_path / "paper.md"
    file.write_text(PAGE)
    report.publish(folder, file)
    text = file.read_text()
    assert "Written by hand." in text and "\nBetween.\n" in text and "\nold\n" not in text
    assert "\n\nkept\n\n|" in text
    assert "Of 3 findings of the paper that were checked, 1 agree, 1 disagree, and 1 are" in text
    assert "m on b: 8 questions, 8 turns, at most 8 new tokens, greedy" in text
    assert "![Thresholds](img/paper/threshold.png)" in text
    assert (tmp_path / "img/paper/threshold.png").is_file()
    report.publish(folder, file)
    assert file.read_text() == text
