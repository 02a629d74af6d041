"""The speed table's parts."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import prompts, written

sys.path.insert(0, str(Path(__file__).parents[1]))
import bench
from bench import Result


def test_answers_are_the_models_whatever_runs_at_once(serve):
    with serve(threshold=None) as llm:
        expected = written(llm, prompts(), max_tokens=16, ignore_eos=True)
    with serve("half") as llm:
        one = bench.answers(llm, prompts(), 16, 1)
        four = bench.answers(llm, prompts(), 16, 4)
    assert one.texts == four.texts == expected
    assert one.drafted == 3 * one.drafts and len(one.accepted) == 3
    assert one.drafts + sum(one.accepted) >= 6 * 15


def test_gaps_are_those_of_the_logits(serve, lm):
    with serve(threshold=None) as llm:
        found = bench.gaps(llm, prompts())
    for ids, gap in zip(prompts(), found, strict=True):
        first, second = lm.hf(torch.tensor([ids])).logits[0, -1].topk(2).values.tolist()
        assert gap == pytest.approx(first - second, abs=1e-3)


def test_a_fork_is_where_texts_part():
    expected = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
    assert bench.forks([[1, 2, 3], [4, 0, 6], [0, 8, 9], [1, 1, 2]], expected) == {
        1: [4],
        2: [],
        3: [1, 1],
    }
    assert bench.describe_gaps({"none": [], "Kangaroo": [0.25, 0.125]}) == (
        "Kangaroo: where a text forks, the two likeliest logits are 0.125, 0.250 apart"
    )
    assert bench.describe_gaps({"none": [], "Kangaroo": []}) == "all texts are equal"


def test_the_table_compares_with_no_drafts():
    results = {
        "none": {1: [Result([[1, 2], [3, 4]], 2.0, 0, 0, [])]},
        "Kangaroo": {1: [Result([[1, 2], [3, 5]], 1.0, 4, 8, [2, 1])] * 2},
    }
    lines = bench.table(results).splitlines()
    assert lines[2] == "| none |  |  |  |  | 2.0 |"
    assert lines[3] == "| Kangaroo | 0.500 0.250 | 2.00 | 1.750 | 1 of 2 | 4.0 |"
