"""Metrics, answer files and the report, from records written by hand."""

import io
import json

import numpy as np
import pytest
from evaluation_records import ABOUT, SETTINGS, record, run, vanilla_run
from rich.console import Console

import kangaroo.evaluation.metrics
from kangaroo.evaluation import comparison, report, summary
from kangaroo.evaluation.metrics import METRICS, Metric, Place, metrics, runs, scalars
from kangaroo.evaluation.records import METHOD, Fork, Run
from kangaroo.evaluation.statistics import interval, paired_seconds, seconds_until


def test_metrics_of_one_question_by_hand():
    # Rounds: 3 drafted 2 accepted; 2 drafted, none accepted; 3 drafted, all accepted.
    method = run([3, 1, 4], [2, 0, 3], [3, 2, 3], [1.0, 1.0, 2.0])
    m = metrics([record(1, (method, vanilla_run(8)))])
    assert m["compression_rate"] == 8 / 3
    assert m["ctar"] == [2 / 3, 2 / 3, 1 / 3]
    assert m["compression_rate"] == pytest.approx(1 + sum(m["ctar"]))
    assert m["acceptance_rate"] == 5 / 8
    assert m["tokens_per_second"] == 8 / 5
    assert m["vanilla_tokens_per_second"] == 8 / 9
    assert m["hf_tokens_per_second"] is None
    assert m["speedup"] == pytest.approx(9 / 5)
    assert m["decoding_speedup"] == pytest.approx(8 / 4)
    assert m["prefill_seconds"] == pytest.approx(1)
    assert m["draft_seconds"] == pytest.approx(1.6)
    assert m["verify_seconds"] == pytest.approx(1.6)
    assert m["host_seconds"] == pytest.approx(0.8)


def test_vanilla_as_the_method_has_compression_rate_one_and_no_acceptance_rate():
    m = metrics([record(1, (vanilla_run(5), vanilla_run(5)))])
    assert m["compression_rate"] == 1
    assert m["speedup"] == pytest.approx(1)
    assert m["ctar"] == []
    assert m["acceptance_rate"] is None


def test_a_round_that_the_count_cuts_counts_in_proportion():
    method = run([2, 4], [1, 3], [3, 3], [1.0, 2.0], prefill=0.5)
    assert seconds_until(method, 2) == pytest.approx(1.5)
    assert seconds_until(method, 3) == pytest.approx(2.0)
    assert seconds_until(method, 6) == pytest.approx(3.5)


def test_both_sides_are_timed_up_to_the_same_number_of_tokens():
    """The method forked and wrote an EOS after 4 tokens, vanilla went on to 8."""
    method = run([4], [3], [3], [2.0])
    assert paired_seconds(record(1, (method, vanilla_run(8)))) == pytest.approx((1 + 4, 1 + 2))


def test_the_speedup_is_the_ratio_of_total_seconds():
    fast, slow = run([4], [3], [3], [1.0]), run([4], [3], [3], [9.0])
    records = [record(1, (fast, vanilla_run(4))), record(2, (slow, vanilla_run(4)))]
    assert metrics(records)["speedup"] == pytest.approx((5 + 5) / (2 + 10))


def hf_run(count, seconds):
    return Run(list(range(count)), "text", "length", count, seconds, [], [], [], [], [], [])


def test_hf_is_timed_up_to_the_same_number_of_tokens_too():
    """It wrote 10 tokens in 20 seconds, the method 4 in 3: hf's share of them is 8."""
    some = record(1, (run([4], [3], [3], [2.0]), None))
    some.turns[0].runs["hf"] = hf_run(10, 20.0)
    assert paired_seconds(some, "hf") == pytest.approx((8, 3))
    assert metrics([some])["hf_speedup"] == pytest.approx(8 / 3)
    some.turns[0].runs["hf"] = hf_run(
        2, 6.0
    )  # and here the method's are cut: prefill, half a round
    assert paired_seconds(some, "hf") == pytest.approx((6, 2))


def test_each_baseline_has_a_speedup_and_an_interval_of_its_own():
    records = [record(i, (run([4], [3], [3], [1.0]), vanilla_run(4))) for i in range(5)]
    for some in records:
        some.turns[0].runs["hf"] = hf_run(4, 8.0)
    m = metrics(records)
    assert (m["speedup"], m["hf_speedup"]) == pytest.approx((5 / 2, 8 / 2))
    assert m["speedup_ci95"] == pytest.approx([2.5, 2.5])
    assert m["hf_speedup_ci95"] == pytest.approx([4, 4])


def test_the_interval_contains_the_speedup_and_narrows_with_more_questions():
    rng = np.random.default_rng(1)
    pairs = np.stack([rng.uniform(2, 4, 400), rng.uniform(1, 2, 400)], 1)
    widths = []
    for count in (20, 400):
        low, high = interval(pairs[:count])
        vanilla, method = pairs[:count].sum(0)
        assert low < vanilla / method < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 3
    assert interval(pairs[:20]) == interval(pairs[:20])


def test_spec_bench_counts_vanilla_by_its_text():
    """Vanilla wrote 8 tokens, whose text has 6 and the BOS that the tokenizer adds."""
    method = run([4, 4], [3, 3], [3, 3], [1.0, 1.0])
    m = metrics([record(1, (method, vanilla_run(8, retokenised=7)))])
    assert m["spec_bench_speedup"] == pytest.approx((8 / 3) / (6 / 9))


def test_without_vanilla_there_is_no_speedup():
    m = metrics([record(1, (run([4], [3], [3], [1.0]), None))])
    assert m["speedup"] is m["speedup_ci95"] is m["spec_bench_speedup"] is None
    assert m["decoding_speedup"] is None
    assert m["hf_speedup"] is m["hf_speedup_ci95"] is None
    assert m["tokens_per_second"] == 2


def test_accept_lengths_are_accepted_plus_one_over_all_turns():
    method = run([3, 1], [2, 0], [3, 2], [1.0, 1.0]), run([2], [2], [3], [1.0])
    line = summary.answer(
        record(7, (method[0], vanilla_run(4)), (method[1], vanilla_run(2))), METHOD, "m-d"
    )
    (choice,) = line["choices"]
    assert choice["accept_lengths"] == [3, 1, 3]  # the last one was cut: its bonus token is missing
    assert choice["new_tokens"] == [4, 2]
    assert choice["decoding_steps"] == [2, 1]
    assert choice["wall_time"] == [3.0, 2.0]


def test_transformers_answers_count_one_a_token():
    hf = Run([5, 6, 7], "text", "eos", 4, 2.0, [], [], [], [], [], [])
    some = record(1, (vanilla_run(3), None))
    some.turns[0].runs["hf"] = hf
    (choice,) = summary.answer(some, "hf", "m-hf")["choices"]
    assert choice["accept_lengths"] == [1, 1, 1]
    assert choice["decoding_steps"] == [3]


def result(*records, **settings):
    return summary.summarise(records, ABOUT | {"settings": SETTINGS | settings})


def pair():
    return run([3, 1, 4], [2, 0, 3], [3, 2, 3], [1.0, 1.0, 2.0]), vanilla_run(8)


def test_the_eight_categories_of_mt_bench_are_one_task():
    found = result(
        record(1, pair(), category="math"), record(2, pair(), category="stem"), record(3, pair())
    )
    assert {task: m["questions"] for task, m in found["by_task"].items()} == {
        "mt_bench": 2,
        "qa": 1,
    }
    assert found["overall"]["questions"] == found["questions"] == 3


def test_acceptance_by_position_is_shown_where_there_is_any():
    none = run([1, 1], [0, 0], [2, 2], [1.0, 1.0])
    shown = [
        "## Acceptance by position" in report.markdown(result(record(1, answers)))
        for answers in (pair(), (none, vanilla_run(2)))
    ]
    assert shown == [True, False]


def test_forks_are_listed_by_question_and_turn():
    method, vanilla = pair()
    method.tokens[3] = 99
    found = result(record(4, (method, vanilla), fork=Fork(3, 0.125, "near-tie")), record(5, pair()))
    assert found["lossless"] == {
        "turns": 2,
        "identical": 1,
        "hf_turns": 0,
        "hf_identical": None,
        "forks": [{"question_id": 4, "turn": 0, "position": 3, "gap": 0.125, "label": "near-tie"}],
    }
    text = report.markdown(found)
    assert "| 4 | 0 | 3 | 0.1250 | near-tie |" in text
    assert "forks explained by rounding: 1, not explained: 0" in text


def test_rejection_sampling_is_not_compared_text_by_text():
    settings = {"sampling.temperature": 1.0, "sampling.rule": "rejection"}
    found = result(record(1, pair()), **settings)
    assert found["lossless"]["identical"] is None
    assert "the rejection rule keeps the distribution" in report.markdown(found)


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("vanilla", [True, False])
def test_the_report_stands_with_and_without_drafts_and_baseline(drafts, vanilla, tmp_path):
    method, baseline = pair() if drafts else (vanilla_run(8), vanilla_run(8))
    records = [record(i, (method, baseline if vanilla else None)) for i in (1, 2)]
    found = result(*records, baselines=["vanilla"] if vanilla else [])
    report.write(found, tmp_path)
    assert {"report.md", "speedup.png", "ctar.png", "time.png"} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert ("x** the speed of vanilla" in (tmp_path / "report.md").read_text()) == vanilla


def test_the_terminals_table_fits_80_columns():
    found = result(*(record(i, pair(), category="summarization") for i in (1, 2)))
    for results in (found["overall"], found["by_task"]["summarization"]):
        results |= {name: 123.5 for name in results if name.endswith("tokens_per_second")}
    table = io.StringIO()
    Console(width=80, file=table).print(report.terminal_table(found))
    assert "summarization" in table.getvalue()
    assert table.getvalue().count("123.5") == 6
    assert "…" not in table.getvalue()


def test_a_metric_that_is_added_in_one_place_is_in_every_result(tmp_path, monkeypatch):
    longest = Metric(
        "longest_round",
        lambda records: max(max(run.emitted) for run in runs(records, METHOD)),
        "longest",
        Place.everywhere,
        str,
        "the most tokens that one round wrote.",
    )
    monkeypatch.setattr(kangaroo.evaluation.metrics, "METRICS", [*METRICS, longest])
    found = result(record(1, pair()), record(2, pair(), category="rag"))
    assert found["overall"]["longest_round"] == found["by_task"]["rag"]["longest_round"] == 4
    assert scalars(found["overall"])["longest_round"] == 4  # what W&B takes
    intervals = {"speedup_ci95": [1.1, 1.3], "hf_speedup_ci95": None, "ctar": [0.5]}
    assert scalars(intervals) == {"speedup_ci95_low": 1.1, "speedup_ci95_high": 1.3}
    (tmp_path / "kangaroo").mkdir()
    (tmp_path / "kangaroo/summary.json").write_text(json.dumps(found))
    compared = comparison.compare(tmp_path)
    assert compared["methods"][0]["overall"]["longest_round"] == 4
    for page in (report.markdown(found), comparison.markdown(compared)):
        assert " longest |" in page
        assert "- **longest** (`longest_round`): the most tokens that one round wrote." in page
    for table in (report.terminal_table(found), comparison.terminal_table(compared)):
        (cells,) = [[*col.cells] for col in table.columns if str(col.header) == "longest"]
        assert str(cells[-1]) == "4"
