"""A finished run becomes a page that follows from the results kept beside it."""

import csv
import json

import pytest
from commands import ROOT, python
from evaluation_worker import evaluate_several, tiny_lm, write_questions
from spec_bench_contract import MT_BENCH, lines, spec_bench_equal, spec_bench_report

from kangaroo.evaluation import comparison
from kangaroo.evaluation.config import Baseline
from kangaroo.models.loading import byte_tokenizer
from kangaroo.utils.tables import estimate

OTHERS = ["translation", "summarization", "qa", "math_reasoning", "rag"]
TASKS = ["mt_bench", *OTHERS]
SCHEMA = ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
TALKS = [(category, ["Tell me more.", "And shorter?"]) for category in MT_BENCH[:3]]
SINGLE = [(category, [f"{category}, part {i}."]) for category in OTHERS for i in range(2)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two drafters on questions of Spec-Bench's six tasks: its folder, the summaries with
    their metrics by task and overall, and the page that the command makes.
    """
    folder = tmp_path_factory.mktemp("finished")
    questions = [
        {"question_id": 81 + i, "category": category, "turns": turns}
        for i, (category, turns) in enumerate([*TALKS, *SINGLE])
    ]
    file = write_questions(folder / "questions.jsonl", questions)
    settings = {"max_new_tokens": 12, "baselines": [Baseline.vanilla], "noise_floor": True}
    lm, names = tiny_lm().compile_for_decoding(), ["kangaroo", "lookup"]
    settings |= {"bench_name": "spec_bench", "lm": lm}
    summaries = evaluate_several(folder / "out", file, names, **settings)
    page = folder / "docs/spec_bench.md"
    done = python("evaluate.py", f"results={folder / 'out'}", f"page={page}", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"{page} tells the results of {folder / 'out'}" in done.stdout
    return folder / "out", summaries, page


def by_task(summary):
    return summary["by_task"] | {"overall": summary["overall"]}


def table(page, heading):
    """The rows of the first table below a heading, by their first cell."""
    text = page.read_text().split(f"{heading}\n\n")[1]
    written = text[text.index("| ") :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in written]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


@pytest.mark.parametrize("task", [*TASKS, "overall"])
def test_spec_benchs_report_reads_the_answers_of_every_task(finished, task):
    output, summaries, _ = finished
    for summary in summaries:
        folder = output / summary["drafter"]
        files = folder / "answers.jsonl", folder / "baseline.jsonl"
        speedup, accepted = spec_bench_report(*files, byte_tokenizer(), task)
        metrics = by_task(summary)[task]
        assert speedup == pytest.approx(metrics["spec_bench_speedup"])
        # a turn's last round may lack the bonus token
        assert 0 <= accepted - metrics["compression_rate"] <= 0.5
        assert spec_bench_equal(*files)
        for line in [*lines(files[0]), *lines(files[1])]:
            assert list(line) == SCHEMA and line["model_id"].startswith("tiny-")


def test_every_number_of_the_page_is_that_of_the_summary(finished):
    _, summaries, page = finished
    first = table(page, "# tiny on spec_bench: methods compared")
    assert set(first) == {"kangaroo", "lookup", "vanilla", "vanilla again"}
    for summary in summaries:
        name = summary["drafter"]
        for heading, metric in (
            ("## Speedup over vanilla by task", "speedup"),
            ("## Compression rate by task", "compression_rate"),
            ("## Speedup by Spec-Bench's own formula", "spec_bench_speedup"),
        ):
            row = table(page, heading)[name]
            for task, m in by_task(summary).items():
                assert row[task] == estimate(m[metric], m.get(f"{metric}_ci95"), same=1.0)
        assert first[name]["CR"] == f"{summary['overall']['compression_rate']:.2f}"
    assert first["kangaroo"]["CTAR(1)"] == f"{summaries[0]['overall']['ctar'][0]:.2f}"
    text = page.read_text()
    assert first["kangaroo"]["lossless"] == first["vanilla again"]["lossless"] == "16/16"
    assert "13 questions, 16 turns, at most 12 new tokens, greedy" in text
    assert "Noise floor: vanilla decoded once more is" in text


def test_the_page_follows_from_what_lies_beside_it(finished):
    _, summaries, page = finished
    result = json.loads(page.with_suffix(".json").read_text())
    assert comparison.markdown(result, page.stem) == page.read_text()
    (image,) = page.parent.glob("img/*.png")
    assert image.read_bytes().startswith(b"\x89PNG") and f"img/{image.name}" in page.read_text()
    with page.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for summary in summaries:  # a line for each question and method adds up to it
        questions = [row for row in rows if row["method"] == summary["drafter"]]
        assert [int(q["question_id"]) for q in questions] == list(range(81, 94))
        assert sum(int(q["tokens"]) for q in questions) == summary["overall"]["tokens"]
        names = ("vanilla_paired_seconds", "paired_seconds")
        vanilla, seconds = (sum(float(q[name]) for q in questions) for name in names)
        assert vanilla / seconds == pytest.approx(summary["overall"]["speedup"], rel=1e-2)


@pytest.mark.parametrize(
    "words, told",
    [
        (["results=.", "page=page.md"], "DataError: '.' holds no finished evaluation"),
        (["results=none", "page=page.md"], "ConfigError: results=none is no folder"),
        (["results=."], "DataError: '.' has no training run's metrics.jsonl"),
    ],
)
def test_what_cannot_be_told_is_refused(words, told, tmp_path):
    done = python("evaluate.py", *words, cwd=tmp_path)
    assert done.returncode == 1 and told in done.stderr


@pytest.mark.parametrize("committed", sorted((ROOT / "docs/results").glob("*.csv")))
def test_a_committed_page_follows_from_its_results(committed):
    result = json.loads(committed.with_suffix(".json").read_text())
    page = committed.with_suffix(".md")
    assert comparison.markdown(result, page.stem) == page.read_text()
