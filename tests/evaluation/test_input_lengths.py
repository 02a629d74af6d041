"""SPEED-Bench's inputs of several lengths, of its schema and written by us: each metric by category
and by input length, with exact numbers.
"""

import numpy as np
import pytest
from datasets import Dataset
from evaluation_records import finish, record, run, vanilla_run
from evaluation_worker import evaluate_tiny

from kangaroo.evaluation import comparison
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.evaluation.metrics import estimate as estimated
from kangaroo.evaluation.run import Baseline
from kangaroo.evaluation.summary import by_length
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.utils.tables import estimate

# Of each category, how many of four draft tokens are accepted in each round; at 2k one fewer.
ACCEPTED = {"low_entropy": [4, 3, 3], "mixed": [3, 1, 2], "high_entropy": [1, 1, 1]}
SIZES = {"1k": 0, "2k": 1}

# What each metric divides for a question of each category, at 1k and at 2k. A prefill is a round,
# takes a second and drafts nothing; a round takes a second, as one of vanilla's tokens does.
COUNTS = {
    "Speedup over vanilla": ([(15, 4), (11, 4), (8, 4)], [(12, 4), (8, 4), (5, 4)]),
    "Compression rate": ([(14, 4), (10, 4), (7, 4)], [(11, 4), (7, 4), (4, 4)]),
    "Acceptance length": ([(13, 3), (9, 3), (6, 3)], [(10, 3), (6, 3), (3, 3)]),
    "CTAR(1)": ([(3, 4), (3, 4), (3, 4)], [(3, 4), (2, 4), (0, 4)]),
    "CTAR(2)": ([(3, 4), (2, 4), (0, 4)], [(3, 4), (1, 4), (0, 4)]),
    "CTAR(3)": ([(3, 4), (1, 4), (0, 4)], [(1, 4), (0, 4), (0, 4)]),
}


@pytest.fixture
def folder(tmp_path):
    """Two files as NVIDIA's script writes them; in each are two questions of a category."""
    for size in SIZES:
        rows = [
            {
                "question_id": f"{category}-{size}-{i}",
                "category": category,
                "sub_category": None,
                "turns": [f"Sum up {i}: " + "word " * 200 * int(size[0])],
                "source": "ours",
                "src_id": str(i),
                "difficulty": None,
                "multiturn": False,
            }
            for category in ACCEPTED
            for i in range(2)
        ]
        (tmp_path / f"speed/throughput_{size}").mkdir(parents=True)
        Dataset.from_list(rows).to_parquet(tmp_path / f"speed/throughput_{size}/test.parquet")
    return tmp_path / "speed"


def answered(question):
    (text,) = question.turns
    length = len(prompt_ids(byte_tokenizer(), [Message(role="user", content=text)]))
    accepted = [0, *(n - (length > 1500) for n in ACCEPTED[question.category])]
    emitted = [n + 1 for n in accepted]
    method = run(emitted, accepted, [0, 4, 4, 4], [0.0, 1.0, 1.0, 1.0])
    pair = method, vanilla_run(sum(emitted))
    return record(question.question_id, pair, category=question.category, prompts=[length])


def cell(counts):
    """Of questions that divide these, each twice."""
    return estimate(*estimated(np.repeat(counts, 2, axis=0).astype(float)))


@pytest.mark.parametrize("heading", COUNTS)
def test_each_metric_is_shown_by_category_and_by_input_length(heading, folder, tmp_path):
    questions = load_questions(BenchConfig("speed_bench", path=str(folder)))
    finish(tmp_path / "out/mine", [answered(question) for question in questions])
    text = comparison.markdown(comparison.compare(tmp_path / "out"))
    short, long = COUNTS[heading]
    overall = {"overall": short + long}
    for named, groups in (
        ("input length", {"1k": short, "2k": long}),
        ("task", dict(zip(ACCEPTED, zip(short, long, strict=True), strict=True))),
    ):
        cells = [cell(counts) for counts in (groups | overall).values()]
        _, _, table = text.partition(f"## {heading} by {named}\n\n")
        headings, _, row = table.partition("\n\n")[0].splitlines()
        assert headings == f"| method | {' | '.join(groups | overall)} |"
        assert row.replace(", no difference shown", "") == f"| mine | {' | '.join(cells)} |"


def test_of_a_question_each_turn_counts_where_its_prompt_belongs():
    pair = run([4], [3], [3], [1.0]), vanilla_run(4)
    records = [record(1, pair, pair, prompts=[40, 1100]), record(2, pair, prompts=[2900])]
    parts = by_length(records)
    questions = {name: [each.question_id for each in part] for name, part in parts.items()}
    assert questions == {"shorter": [1], "1k": [1], "4k": [2]}
    assert [turn.prompt_tokens for turn in parts["1k"][0].turns] == [1100]
    assert by_length(records[:1]) == {}  # prompts of one length have no table


def test_an_evaluation_of_several_lengths_has_the_tables(folder, tmp_path):
    settings = {"warmup": 0, "max_new_tokens": 4, "baselines": [Baseline.vanilla]}
    summary = evaluate_tiny(tmp_path / "out", folder, question_every=3, **settings)
    assert {k: part["questions"] for k, part in summary["by_length"].items()} == {"1k": 2, "2k": 2}
    text = comparison.markdown(comparison.compare(tmp_path / "out"))
    assert text.count("| method | 1k | 2k | overall |") == len(COUNTS)
