"""Several drafters measured in one run: they share the questions, the turns and the baselines."""

import io
import json
import time

import pytest
from evaluation_worker import tiny_lm
from helpers import adapter_for
from rich.console import Console
from test_evaluation_run import QUESTIONS

import kangaroo.engine.engine
import kangaroo.evaluation.run
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.evaluation import comparison
from kangaroo.evaluation import records as store
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.metrics import Place
from kangaroo.evaluation.records import METHOD
from kangaroo.evaluation.run import Baseline, Contestant, EvaluateConfig, evaluate
from kangaroo.models.loading import byte_tokenizer
from kangaroo.utils.errors import ConfigError

ANSWERED_BY_HF = [81, 322]  # every third of five


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "tiny.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return BenchConfig("tiny", path=str(file))


def both(lm, names=("kangaroo", "lookup")):
    drafters = Kangaroo(lm, adapter_for(lm), steps=3, threshold=0.2), PromptLookup()
    pairs = zip(names, drafters, strict=True)
    return [Contestant(name, drafter, {"drafter": {"of": name}}) for name, drafter in pairs]


def run(output, bench, contestants=None, log=None, **changes):
    lm = tiny_lm()
    settings = {"max_new_tokens": 16, "warmup": 0, "hf_every": 3} | changes
    config = EvaluateConfig(output=str(output), bench=bench, **settings)
    found = both(lm) if contestants is None else contestants(lm)
    return evaluate(lm, byte_tokenizer(), found, config, model_name="tiny", log=log)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, bench):
    output = tmp_path_factory.mktemp("finished")
    return output, run(output, bench)


def test_each_has_its_own_folder_and_they_share_the_baselines_runs(finished):
    output, (kangaroo, lookup) = finished
    assert (kangaroo["drafter"], lookup["drafter"]) == ("kangaroo", "lookup")
    pairs = zip(*(store.read(output / name) for name in ("kangaroo", "lookup")), strict=True)
    for a, b in pairs:
        for one, other in zip(a.turns, b.turns, strict=True):
            assert one.runs["vanilla"] == other.runs["vanilla"]
            assert one.runs.get("hf") == other.runs.get("hf")
            assert one.runs[METHOD] != other.runs[METHOD]
    for summary in (kangaroo, lookup):
        assert summary["questions"] == 5
        assert summary["lossless"]["identical"] == summary["lossless"]["turns"] == 7
    assert kangaroo["settings"]["drafter.of"] == "kangaroo"


def test_transformers_answers_every_nth_question_and_is_compared_on_these(finished):
    output, summaries = finished
    for name, summary in zip(("kangaroo", "lookup"), summaries, strict=True):
        records = store.read(output / name)
        answered = [record for record in records if "hf" in record.turns[0].runs]
        assert [record.question_id for record in answered] == ANSWERED_BY_HF
        theirs = sum(turn.runs["hf"].seconds for record in answered for turn in record.turns)
        ours = sum(turn.runs[METHOD].seconds for record in answered for turn in record.turns)
        # texts are equal, so nothing is cut
        assert summary["overall"]["hf_speedup"] == pytest.approx(theirs / ours)
        assert summary["lossless"]["hf_turns"] == summary["lossless"]["hf_identical"] == 3
        assert "vanilla's text in 3 of the 3 that it answered" in report_of(output / name)


def report_of(folder):
    return (folder / "report.md").read_text()


def test_the_baselines_are_rows_beside_the_methods(finished):
    output, (kangaroo, _) = finished
    found = comparison.compare(output)
    rows = {row["method"]: row for row in comparison.methods(found, Place.methods)}
    assert set(rows) == {"kangaroo", "lookup", "vanilla", "transformers"}
    assert rows["vanilla"]["speedup"] == "1.00" and rows["vanilla"]["CR"] == "1.00"
    assert rows["vanilla"]["tokens/s"] == f"{kangaroo['overall']['vanilla_tokens_per_second']:.1f}"
    assert rows["transformers"]["vs hf"] == "1.00" and rows["transformers"]["CR"] == "-"
    assert rows["transformers"]["lossless"] == "3/3" and rows["vanilla"]["lossless"] == "7/7"
    assert {rows[name]["memory"] for name in ("vanilla", "transformers")} == {"0B"}
    slower = (
        1 / next(m for m in found["methods"] if m["name"] == "vanilla")["overall"]["hf_speedup"]
    )
    assert rows["transformers"]["speedup"] == f"{slower:.2f}"
    assert rows["transformers"]["decoding"] == "-"  # it tells no rounds


def test_the_table_and_the_report_say_who_answered_a_part(finished, tmp_path):
    found = comparison.compare(finished[0])
    comparison.write(found, tmp_path)
    told = "5 questions, 7 turns, at most 16 new tokens, greedy"
    part = "transformers answered 2 of them and is compared on these."
    shown = io.StringIO()
    Console(width=80, file=shown).print(comparison.terminal_table(found))
    for text in (report_of(tmp_path), " ".join(shown.getvalue().split())):
        assert told in text and part in text
        assert "kangaroo answered" not in text
    assert {image.stem for image in tmp_path.glob("*.png")} == {
        "speedup",
        "speedup_by_task",
        "cr_by_task",
    }


def test_a_run_goes_on_where_one_of_the_folders_ends(finished, bench, tmp_path):
    """It was killed after the first of two lines."""
    whole = {
        name: (finished[0] / name / "records-0.jsonl").read_bytes().splitlines(keepends=True)
        for name in ("kangaroo", "lookup")
    }
    for name, kept in (("kangaroo", 3), ("lookup", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text((finished[0] / name / "run.json").read_text())
        (tmp_path / name / "records-0.jsonl").write_bytes(b"".join(whole[name][:kept]))
    asked = []
    summaries = run(tmp_path, bench, log=asked.append)
    assert len(asked) == 3
    assert {k.split(".")[0] for k in asked[0]} == {"kangaroo", "lookup"}
    assert [summary["questions"] for summary in summaries] == [5, 5]
    assert asked[-1]["lookup.speedup"] == summaries[1]["overall"]["speedup"]


def test_who_goes_first_changes_and_all_take_part(bench, tmp_path, monkeypatch):
    calls = []
    generate = kangaroo.engine.engine.Engine.generate

    def noted(engine, *args, **kwargs):
        calls.append(type(engine.drafter).__name__)
        return generate(engine, *args, **kwargs)

    monkeypatch.setattr(kangaroo.engine.engine.Engine, "generate", noted)
    run(tmp_path, bench, question_begin=2, question_end=4, baselines=[Baseline.vanilla])
    order = ["Vanilla", "Kangaroo", "PromptLookup"]
    assert calls == [*order, *order[::-1]]


def test_the_conversation_goes_on_with_the_first_ones_answers(bench, tmp_path, monkeypatch):
    """All have the same prompts, whoever would have written another text."""
    by_engine = kangaroo.evaluation.run.by_engine
    prompts = []

    def noted(engine, tokenizer, sampling):
        write = by_engine(engine, tokenizer, sampling)

        def answer(prompt, limit, seed):
            prompts.append(tuple(prompt))
            return write(prompt, limit, seed)

        return answer

    monkeypatch.setattr(kangaroo.evaluation.run, "by_engine", noted)
    run(tmp_path, bench, question_end=1, baselines=[Baseline.vanilla])
    assert len(prompts) == 6 and len(set(prompts[:3])) == len(set(prompts[3:])) == 1


@pytest.mark.parametrize(
    "names", [("kangaroo", "kangaroo"), ("kangaroo", "vanilla"), ("transformers", "x")]
)
def test_two_methods_of_one_name_are_refused(bench, tmp_path, names):
    with pytest.raises(ConfigError, match=r"two of the methods are called '\w+'"):
        run(tmp_path, bench, lambda lm: both(lm, names))
    assert not list(tmp_path.iterdir())


def test_vanilla_can_be_a_contestant_where_it_is_no_baseline(bench, tmp_path):
    start = time.perf_counter()
    options = {"baselines": [Baseline.hf], "question_end": 1}
    summaries = run(tmp_path, bench, lambda lm: both(lm, ("vanilla", "x")), **options)
    seconds = time.perf_counter() - start
    assert [summary["drafter"] for summary in summaries] == ["vanilla", "x"]
    assert 0 < summaries[0]["overall"]["verify_seconds"] < seconds
