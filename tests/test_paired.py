"""Differences between methods, how many questions they take, and what noise alone does."""

import json
import logging

import numpy as np
import pytest
from evaluation_records import ABOUT, SETTINGS, record, run, vanilla_run
from evaluation_worker import tiny_lm
from test_evaluation_run import QUESTIONS

from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.evaluation import comparison, paired, planning, summary
from kangaroo.evaluation import records as store
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.metrics import metrics
from kangaroo.evaluation.planning import Spread
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.run import Baseline, Contestant, EvaluateConfig, evaluate
from kangaroo.evaluation.statistics import interval
from kangaroo.models.loading import byte_tokenizer
from kangaroo.utils.errors import ConfigError


def method(name, seconds, vanilla, rounds=10):
    """A method's part of a comparison: seconds of it and of vanilla by question."""
    questions = [
        {
            "question_id": i,
            "paired_seconds": s,
            "vanilla_paired_seconds": v,
            "emitted": 20,
            "rounds": rounds,
        }
        for i, (s, v) in enumerate(zip(seconds, vanilla, strict=True))
    ]
    pairs = np.array([seconds, vanilla]).T[:, ::-1]
    overall = {"speedup": float(pairs[:, 0].sum() / pairs[:, 1].sum())}
    return {"name": name, "overall": overall | {"speedup_ci95": interval(pairs)}}, questions


def hard_and_easy(count=40):
    """Vanilla's seconds, and those of a drafter that some questions suit far more than others."""
    rng = np.random.default_rng(1)
    vanilla = rng.uniform(1, 3, count)
    return vanilla, vanilla / rng.uniform(1, 3, count)


def test_a_difference_shows_that_the_intervals_of_the_speedups_hide():
    """One method is 5% faster on every question, whose speedups differ by much more than that."""
    vanilla, seconds = hard_and_easy()
    fast, slow = method("fast", seconds / 1.05, vanilla), method("slow", seconds, vanilla)
    assert fast[0]["overall"]["speedup_ci95"][0] < slow[0]["overall"]["speedup_ci95"][1]
    (found,) = paired.pairs([fast, slow])
    low, high = found["speed_ratio_ci95"]
    assert found["speed_ratio"] == pytest.approx(1.05)
    assert 1 < low <= found["speed_ratio"] <= high < 1.06


def test_methods_that_differ_by_chance_show_no_difference():
    vanilla, seconds = hard_and_easy()
    noise = 1 + np.random.default_rng(2).normal(0, 0.03, len(seconds))
    found = paired.pairs([method("a", seconds, vanilla), method("b", seconds * noise, vanilla)])
    (row,) = paired.table(found, "speed_ratio", same=1.0)
    low, high = found[0]["speed_ratio_ci95"]
    told = f"{found[0]['speed_ratio']:.2f} ({low:.2f}-{high:.2f}), no difference shown"
    assert row == {"": "a", "b": told}


def test_over_vanilla_it_is_the_speedup_with_its_interval():
    vanilla, seconds = hard_and_easy()
    kangaroo, plain = method("kangaroo", seconds, vanilla), method("vanilla", vanilla, vanilla)
    (found,) = paired.pairs([kangaroo, plain])
    assert found["speed_ratio"] == kangaroo[0]["overall"]["speedup"]
    assert found["speed_ratio_ci95"] == kangaroo[0]["overall"]["speedup_ci95"]


def test_jobs_of_a_sweep_are_compared_by_their_own_baselines():
    """The machine was half as fast during one of them."""
    vanilla, seconds = hard_and_easy()
    found = paired.pairs(
        [method("a", seconds, vanilla), method("b", 2 * 1.1 * seconds, 2 * vanilla)]
    )
    assert found[0]["speed_ratio"] == pytest.approx(1.1)
    assert found[0]["speed_ratio_ci95"] == pytest.approx([1.1, 1.1])


def test_only_questions_that_both_answered_are_compared():
    vanilla, seconds = hard_and_easy(10)
    few = method("few", seconds[:4], vanilla[:4])
    (found,) = paired.pairs([method("all", seconds, vanilla), few])
    assert found["questions"] == 4 and found["speed_ratio"] == 1
    none = method("none", seconds, vanilla)
    for question in none[1]:
        question["question_id"] += 100
    (found,) = paired.pairs([none, few])
    assert (found["questions"], found["speed_ratio"], found["cr_difference"]) == (0, None, None)


def test_compression_rates_are_compared_by_their_difference():
    vanilla, seconds = hard_and_easy(10)
    found = paired.pairs(
        [method("a", seconds, vanilla, rounds=8), method("b", seconds, vanilla, rounds=10)]
    )
    assert found[0]["cr_difference"] == pytest.approx(2.5 - 2.0)
    assert paired.table(found, "cr_difference", same=0.0) == [{"": "a", "b": "0.50"}]  # no spread


def test_what_tells_no_rounds_or_met_no_vanilla_has_no_such_difference():
    vanilla, seconds = hard_and_easy(10)
    hf, plain = method("transformers", seconds, vanilla, rounds=0), method("x", seconds, vanilla)
    assert paired.pairs([hf, plain])[0]["cr_difference"] is None
    for question in plain[1]:
        question["vanilla_paired_seconds"] = question["paired_seconds"] = None
    (found,) = paired.pairs([hf, plain])
    assert found["speed_ratio"] is found["speed_ratio_ci95"] is None
    assert paired.table([found], "speed_ratio", same=1.0) == [{"": "transformers", "x": "-"}]


def test_the_table_has_each_pair_once():
    vanilla, seconds = hard_and_easy(10)
    found = paired.pairs([method(name, seconds, vanilla) for name in "abc"])
    rows = paired.table(found, "speed_ratio", same=1.0)
    assert [list(row) for row in rows] == [["", "b", "c"]] * 2
    assert [row[""] for row in rows] == ["a", "b"] and rows[1]["b"] == ""


def test_the_interval_holds_what_it_says():
    """Of runs on other questions, about 95 of 100 have the true speedup in their interval."""
    rng, inside = np.random.default_rng(3), 0
    for _ in range(200):
        vanilla = rng.uniform(1, 3, 60)
        seconds = vanilla / rng.lognormal(0.4, 0.3, 60)
        truth = 1 / np.exp(-0.4 + 0.3**2 / 2)
        low, high = interval(np.stack([vanilla, seconds], 1))
        inside += low <= truth <= high
    assert 0.89 <= inside / 200 <= 0.99


def questions_of(count, seed=0):
    rng = np.random.default_rng(seed)
    vanilla = rng.uniform(1, 3, count)
    return method("kangaroo", vanilla / rng.lognormal(0.4, 0.3, count), vanilla)


@pytest.mark.parametrize("count", [24, 240])
def test_the_width_that_is_foretold_is_about_the_bootstraps(count):
    spread = planning.spread_of(questions_of(400)[1])
    found = questions_of(count, seed=7)[0]["overall"]
    low, high = found["speedup_ci95"]
    width = (high - low) / found["speedup"]
    assert Spread(spread, "").width(count) == pytest.approx(width, rel=0.25)


def test_the_number_of_questions_gives_the_width():
    spread = Spread(0.3, "")
    assert spread.questions(spread.width(100)) == 100
    assert spread.questions(spread.width(100) / 2) == 400
    assert spread.width(spread.questions(0.05)) <= 0.05 < spread.width(spread.questions(0.05) - 1)


def test_too_few_questions_tell_no_spread():
    assert planning.spread_of(questions_of(7)[1]) is None
    assert planning.spread_of(questions_of(8)[1]) is not None


def test_the_spread_is_that_of_the_newest_run_of_the_model_and_drafter(tmp_path):
    told = {"model": "m", "drafter": "kangaroo"}
    for name, by_question, about in (
        ("old", questions_of(20)[1], told),
        ("other", questions_of(20, 1)[1], told | {"drafter": "hybrid"}),
        ("short", questions_of(3)[1], told),
    ):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "summary.json"
        file.write_text(json.dumps(about | {"by_question": by_question}))
    found = planning.known_spread(str(tmp_path), "m", "kangaroo")
    assert found.value == planning.spread_of(questions_of(20)[1])
    assert str(tmp_path / "old") in found.source
    for assumed in (
        planning.known_spread(str(tmp_path), "m", "medusa"),
        planning.known_spread(str(tmp_path / "nowhere"), "m", "kangaroo"),
        planning.known_spread(None, "m", "kangaroo"),
    ):
        assert assumed.value == planning.ASSUMED and "is assumed" in assumed.source


def write(folder, name, some, **settings):
    about = ABOUT | {"settings": SETTINGS | {"drafter": name} | settings}
    (folder / name).mkdir()
    text = json.dumps(summary.summarise(some, about))
    (folder / name / "summary.json").write_text(text)


def answered(seconds):
    return [
        record(i, (run([4, 4], [3, 3], [5, 5], [s, s]), vanilla_run(8)))
        for i, s in enumerate(seconds)
    ]


def test_reports_and_json_have_every_pair(tmp_path):
    write(tmp_path, "fast", answered([1.0, 1.2, 1.1]))
    write(tmp_path, "slow", answered([2.0, 2.5, 2.1]))
    found = comparison.compare(tmp_path)
    comparison.write(found, tmp_path)
    (pair,) = json.loads((tmp_path / "comparison.json").read_text())["paired"]
    assert (pair["row"], pair["column"], pair["questions"]) == ("fast", "slow", 3)
    assert pair["speed_ratio"] == pytest.approx((3 + 2 * 6.6) / (3 + 2 * 3.3))
    text = (tmp_path / "report.md").read_text()
    low, high = pair["speed_ratio_ci95"]
    assert f"| fast | {pair['speed_ratio']:.2f} ({low:.2f}-{high:.2f}) |" in text
    assert "## Compression rate, row less column" in text and "**row over column**" in text
    assert "Noise floor" not in text


def test_a_question_is_summed_over_its_turns():
    some = record(7, *[(run([4], [3], [5], [2.0]), vanilla_run(8))] * 2, category="writing")
    assert summary.of_question(some) == {
        "question_id": 7,
        "task": "mt_bench",
        "tokens": 8,
        "seconds": 6.0,
        "paired_seconds": 6.0,
        "vanilla_paired_seconds": pytest.approx(10.0),
        "rounds": 2,
        "emitted": 8,
        "drafted": 10,
        "accepted": 6,
    }
    assert metrics([some])["speedup"] == pytest.approx(10 / 6)


def test_a_summary_of_an_earlier_version_is_named(tmp_path):
    write(tmp_path, "old", answered([1.0, 1.0]))
    file = tmp_path / "old/summary.json"
    found = json.loads(file.read_text())
    del found["by_question"]
    file.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"old/summary.json' was written by an earlier version"):
        comparison.compare(tmp_path)


def evaluated(output, file, **changes):
    lm = tiny_lm()
    config = EvaluateConfig(
        output=str(output),
        bench=BenchConfig("tiny", path=str(file)),
        **{"max_new_tokens": 8, "warmup": 0, "baselines": [Baseline.vanilla]} | changes,
    )
    settings = {"model": {"path": "random:tiny"}, "drafter": {"steps": 3}}
    contestants = [Contestant("lookup", PromptLookup(), settings)]
    return evaluate(lm, byte_tokenizer(), contestants, config, model_name="tiny")


@pytest.fixture
def bench(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return file


def test_the_noise_floor_is_vanilla_decoded_once_more(tmp_path, bench, caplog):
    caplog.set_level(logging.INFO)
    _, again = evaluated(tmp_path / "out", bench, noise_floor=True)
    assert again["drafter"] == AGAIN and again["overall"]["compression_rate"] == 1
    assert again["lossless"]["identical"] == 7
    for one in store.read(tmp_path / "out" / AGAIN):
        for turn in one.turns:  # another decoding, not the baseline's numbers
            assert turn.runs["method"].seconds != turn.runs["vanilla"].seconds
    found = comparison.compare(tmp_path / "out")
    assert {method["name"] for method in found["methods"]} == {"lookup", "vanilla", AGAIN}
    ratio = again["overall"]["speedup"]
    told = f"Noise floor: vanilla decoded once more is {ratio:.2f} times as fast as vanilla"
    assert told in comparison.markdown(found)
    assert "lookup, 5 questions: expect" in caplog.text and "a spread of 0.3 is" in caplog.text
    assert f"{AGAIN}, 5 questions" not in caplog.text


def test_a_noise_floor_without_vanilla_is_refused(tmp_path, bench):
    with pytest.raises(ConfigError, match="noise_floor=true decodes vanilla a second time, but"):
        evaluated(tmp_path / "out", bench, noise_floor=True, baselines=[])


def test_without_vanilla_nothing_is_foretold(tmp_path, bench, caplog):
    caplog.set_level(logging.INFO)
    evaluated(tmp_path / "out", bench, baselines=[])
    assert "expect a 95% interval" not in caplog.text
