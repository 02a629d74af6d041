"""A finished run becomes a page that follows from the results kept beside it."""

import json
import re
from pathlib import Path

import pytest
from commands import python
from evaluation_worker import tiny_lm
from helpers import adapter_for
from spec_bench_contract import MT_BENCH, spec_bench_equal, spec_bench_report

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.evaluation import result_page
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.paired import shown
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.run import Baseline, Contestant, EvaluateConfig, evaluate
from kangaroo.models.loading import byte_tokenizer
from kangaroo.utils.errors import DataError

ROOT = Path(__file__).parents[1]
OTHERS = ["translation", "summarization", "qa", "math_reasoning", "rag"]
TASKS = ["mt_bench", *OTHERS]
TALKS = [(category, ["Tell me more.", "And shorter?"]) for category in MT_BENCH[:3]]
SINGLE = [(category, [f"{category}, part {i}."]) for category in OTHERS for i in range(2)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two drafters on questions of Spec-Bench's six tasks."""
    folder = tmp_path_factory.mktemp("finished")
    questions = [
        {"question_id": 81 + i, "category": category, "turns": turns}
        for i, (category, turns) in enumerate([*TALKS, *SINGLE])
    ]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    lm = tiny_lm().compile_for_decoding()
    contestants = [
        Contestant("kangaroo", Kangaroo(lm, adapter_for(lm), 3, 0.2), {"drafter": {"steps": 3}}),
        Contestant("lookup", PromptLookup(), {"drafter": {"ngram": 3}}),
    ]
    config = EvaluateConfig(
        output=str(folder / "out"),
        bench=BenchConfig("spec_bench", path=str(file)),
        max_new_tokens=12,
        warmup=1,
        baselines=[Baseline.vanilla],
        noise_floor=True,
    )
    return folder / "out", evaluate(lm, byte_tokenizer(), contestants, config, model_name="tiny")


@pytest.fixture(scope="module")
def page(finished, tmp_path_factory):
    page = tmp_path_factory.mktemp("docs") / "spec_bench.md"
    result_page.write(result_page.gather(finished[0]), page)
    return page


def table(page, heading):
    """The rows of the first table below a heading, by their first cell."""
    text = page.read_text().split(f"## {heading}\n\n")[1]
    lines = text.split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


@pytest.mark.parametrize("task", [*TASKS, "overall"])
def test_spec_benchs_report_reads_the_answers_of_every_task(finished, task):
    output, summaries = finished
    for summary in summaries:
        folder = output / summary["drafter"]
        files = folder / "answers.jsonl", folder / "baseline.jsonl"
        speedup, accepted = spec_bench_report(*files, byte_tokenizer(), task)
        own = (summary["by_task"] | {"overall": summary["overall"]})[task]
        assert speedup == pytest.approx(own["spec_bench_speedup"])
        # a turn's last round may lack the bonus token
        assert own["compression_rate"] <= accepted <= own["compression_rate"] + 0.5
        assert spec_bench_equal(*files)


def test_every_speedup_of_the_page_is_that_of_the_summary(finished, page):
    rows = table(page, "Speedup over vanilla by task")
    assert set(rows) == {"kangaroo", "lookup", "vanilla again"}
    for summary in finished[1]:
        for task, m in (summary["by_task"] | {"overall": summary["overall"]}).items():
            told = rows[summary["drafter"]][task]
            assert told == shown(m["speedup"], m["speedup_ci95"], same=1.0)


def test_the_page_tells_what_was_accepted_and_what_was_lossless(finished, page):
    kangaroo = finished[1][0]
    row = table(page, "Acceptance, speed and cost")["kangaroo"]
    assert row["CR"] == f"{kangaroo['overall']['compression_rate']:.2f}"
    assert row["CTAR(1)"] == f"{kangaroo['overall']['ctar'][0]:.2f}"
    text = page.read_text()
    assert "kangaroo: 16 of 16 turns are vanilla's, token for token; forks: none." in text
    assert "13 questions, 16 turns, at most 12 new tokens, greedy" in text
    assert "Noise floor: vanilla decoded once more is" in text


def test_the_page_compares_the_fastest_with_the_others_by_task(finished, page):
    drafters = [method["name"] for method in result_page.read(page).drafters]
    fastest, slower = (name for name in drafters if name != AGAIN)
    rows = table(page, f"Speed of {fastest} over each of the others, by task")
    overall = table(page, "Speed, row over column")[fastest][slower]
    assert list(rows) == [slower]

    def numbers(cell: str) -> list[float]:
        return [float(number) for number in re.findall(r"[0-9.]+", cell)]

    # the seconds beside the page are rounded, so a last digit may be another
    assert numbers(rows[slower]["overall"]) == pytest.approx(numbers(overall), abs=0.011)


def test_the_page_follows_from_what_lies_beside_it(page):
    assert result_page.markdown(result_page.read(page), page.stem) == page.read_text()


def test_a_line_for_each_question_and_method_adds_up_to_the_summary(finished, page):
    kept = result_page.read(page).by_question
    assert set(kept) == {"kangaroo", "lookup", "vanilla again", "vanilla"}
    for summary in finished[1]:
        questions = kept[summary["drafter"]]
        assert [q["question_id"] for q in questions] == list(range(81, 94))
        overall = summary["overall"]
        assert sum(q["tokens"] for q in questions) == overall["tokens"]
        vanilla, own = (
            sum(q[name] for q in questions) for name in ("vanilla_paired_seconds", "paired_seconds")
        )
        assert vanilla / own == pytest.approx(overall["speedup"], rel=1e-2)  # to the microsecond


def test_the_page_has_its_plots(page):
    for image in page.parent.glob("img/*.png"):
        assert image.read_bytes().startswith(b"\x89PNG") and f"img/{image.name}" in page.read_text()
    assert len(list(page.parent.glob("img/*.png"))) == 2


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no finished evaluation"):
        result_page.gather(tmp_path)


def test_the_script_makes_the_page_and_says_what_is_wrong(finished, page, tmp_path):
    made = tmp_path / "spec_bench.md"
    done = python("scripts/result_page.py", str(finished[0]), str(made), cwd=tmp_path)
    assert done.returncode == 0 and made.read_text() == page.read_text(), done.stderr
    done = python("scripts/result_page.py", str(tmp_path), str(made), cwd=tmp_path)
    assert done.returncode == 2 and "holds no finished evaluation" in done.stderr


@pytest.mark.parametrize("committed", sorted((ROOT / "docs/results").glob("*.csv")))
def test_a_committed_page_follows_from_its_results(committed):
    page = ROOT / "docs" / f"{committed.stem}.md"
    assert result_page.markdown(result_page.read(page), page.stem) == page.read_text()
