"""Questions to learn from and questions to measure on have nothing in common."""

import json
from collections import Counter

import pytest

from kangaroo.data.reading import HELD_OUT, SHARED, TRAINING, Source, read, split
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.utils.errors import DataError

PASSAGE = " ".join(f"word{i}" for i in range(SHARED))


@pytest.fixture
def source_of(tmp_path):
    def write(records):
        file = tmp_path / "asked.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return Source(str(file))

    return write


def question(text, **more):
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": f"About {text}"}]
    return more | {"conversations": turns}


def texts(records):
    return [record["conversations"][0]["value"] for record in records]


def test_every_question_is_on_one_side_as_many_of_each_task_held_out(source_of, tmp_path):
    """A task is what the record calls it, and the files are read by what they are for."""
    records = [question(f"Add {i}", task="math") for i in range(9)]
    records += [question(f"Say {i}", category="talk") for i in range(7)]
    records += [question(f"Do {i}") for i in range(4)]
    source = source_of(records)
    made = split(source, held=3, seed=0)
    assert Counter(one["category"] for one in made.held_out) == {"all": 3, "math": 3, "talk": 3}
    assert made.left_out == 0
    asked = [question["turns"][0] for question in made.held_out]
    assert sorted(asked + texts(made.training)) == sorted(texts(records))
    assert [question["question_id"] for question in made.held_out] == list(range(9))
    assert made == split(source, held=3, seed=0)
    assert made != split(source, held=3, seed=1)
    made.write(tmp_path / "made")
    assert len(read(Source(str(tmp_path / "made" / TRAINING)), None)) == 11
    bench = load_questions(BenchConfig(path=str(tmp_path / "made" / HELD_OUT)))
    assert [one.turns[0] for one in bench] == asked


@pytest.mark.parametrize(
    ("passage", "learnt"), [(PASSAGE, 0), (PASSAGE.rsplit(" ", 1)[0], 5)], ids=["shared", "short"]
)
def test_who_shares_a_passage_with_a_held_out_question_is_not_learnt_from(
    passage, learnt, source_of
):
    """A run of `SHARED` words in any turn; one word less is what many questions have."""
    made = split(source_of([question(f"Q{i} {passage}") for i in range(6)]), held=1, seed=0)
    assert len(made.held_out) == 1 and len(made.training) == learnt == 5 - made.left_out


def test_records_without_a_question_are_left_out_and_bad_ones_are_named(source_of):
    empty, bad = {"conversations": [{"from": "gpt", "value": "Hello"}]}, {"text": "a"}
    made = split(source_of([empty, question("a"), question("b")]), held=1, seed=0)
    assert len(made.training) == len(made.held_out) == 1
    three = [question(x) for x in "abc"]
    refused = [
        ([empty], 1, "holds no questions"),
        (three, 3, r"task 'all' of .* has 3 questions, and 3 were .* Pass held= below 3"),
        ([bad], 1, "record 1: no conversation"),
    ]
    for records, held, message in refused:
        with pytest.raises(DataError, match=message):
            split(source_of(records), held=held, seed=0)
    left_out = Counter()
    made = split(source_of([bad, question("a"), question("b")]), held=1, seed=0, left_out=left_out)
    assert len(made.training) == 1 and left_out.total() == 1
