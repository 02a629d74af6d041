"""Questions to learn from and questions to measure on have nothing in common."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kangaroo.data.reading import Source, read
from kangaroo.data.splitting import HELD_OUT, SHARED, TRAINING, split
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.utils.errors import DataError

PASSAGE = " ".join(f"word{i}" for i in range(SHARED))


def source_of(folder: Path, records: list[dict]) -> Source:
    file = folder / "asked.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Source(str(file))


def question(text: str, **more: str) -> dict:
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": f"About {text}"}]
    return more | {"conversations": turns}


def texts(records: list[dict]) -> list[str]:
    return [record["conversations"][0]["value"] for record in records]


def mixed(tmp_path: Path) -> Source:
    sums = [question(f"Add {i} to it", task="math", source="s") for i in range(9)]
    others = [question(f"Say {i}", category="talk") for i in range(7)]
    return source_of(tmp_path, [*sums, *others, question("Bare")])


def test_every_question_is_on_one_side_as_many_of_each_task_held_out(tmp_path):
    source = source_of(tmp_path, [question(f"Add {i}", task=f"t{i % 2}") for i in range(20)])
    made = split(source, held=3, seed=0)
    assert made.tasks == {"t0": 3, "t1": 3} and made.left_out == 0
    asked = [question["turns"][0] for question in made.held_out]
    assert sorted(asked + texts(made.training)) == sorted(f"Add {i}" for i in range(20))
    assert [question["question_id"] for question in made.held_out] == list(range(6))
    assert made == split(source, held=3, seed=0)
    assert made != split(source, held=3, seed=1)


def test_both_files_are_read_by_what_they_are_for(tmp_path):
    source = mixed(tmp_path)
    with pytest.raises(DataError, match=r"task 'all' of .*asked.jsonl has 1 questions, and 1 were"):
        split(source, held=1, seed=0)
    source = source_of(tmp_path, [question(f"Add {i}", task="math") for i in range(5)])
    made = split(source, held=2, seed=0)
    made.write(tmp_path / "made")
    assert len(read(Source(str(tmp_path / "made" / TRAINING)), None)) == 3
    bench = load_questions(BenchConfig(path=str(tmp_path / "made" / HELD_OUT)))
    assert [one.category for one in bench] == ["math", "math"]
    assert not {one.turns[0] for one in bench} & set(texts(made.training))


def test_the_name_of_a_task_is_a_field_of_the_record(tmp_path):
    records = [question(f"{i}", task="a") for i in range(3)]
    records += [question(f"{i} b", category="b") for i in range(3)]
    records += [question(f"{i} none") for i in range(3)]
    made = split(source_of(tmp_path, records), held=1, seed=0)
    assert made.tasks == {"a": 1, "all": 1, "b": 1}


def test_half_a_surrogate_pair_becomes_a_character_in_both_files(tmp_path):
    """Where it is said, in a record's other fields, and in the name of its task."""
    broken = [question(f"Add {i} \ud83d", task="\udcff", source="\ud83e") for i in range(3)]
    made = split(source_of(tmp_path, broken), held=1, seed=0)
    assert made.tasks == {"?": 1}
    made.write(tmp_path / "made")
    (held_out,) = load_questions(BenchConfig(path=str(tmp_path / "made" / HELD_OUT)))
    assert held_out.turns[0].endswith(" ?") and held_out.category == "?"
    assert len(read(Source(str(tmp_path / "made" / TRAINING)), None)) == 2


def test_who_shares_a_passage_with_a_held_out_question_is_not_learnt_from(tmp_path):
    """A run of `SHARED` words in any turn; one word less is what many questions have."""
    alike = [question(f"Q{i} {PASSAGE}") for i in range(6)]
    short = [question(f"Q{i} {PASSAGE.rsplit(' ', 1)[0]}") for i in range(6)]
    made = split(source_of(tmp_path, alike), held=1, seed=0)
    assert len(made.held_out) == 1 and not made.training and made.left_out == 5
    made = split(source_of(tmp_path, short), held=1, seed=0)
    assert len(made.training) == 5 and made.left_out == 0


def test_records_without_a_question_are_left_out_and_bad_ones_are_named(tmp_path):
    empty = {"conversations": [{"from": "gpt", "value": "Hello"}]}
    made = split(source_of(tmp_path, [empty, question("a"), question("b")]), held=1, seed=0)
    assert len(made.training) == len(made.held_out) == 1
    with pytest.raises(DataError, match="holds no questions"):
        split(source_of(tmp_path, [empty]), held=1, seed=0)
    with pytest.raises(DataError, match=r"has 3 questions, and 3 were .* Pass a --held= below 3"):
        split(source_of(tmp_path, [question(x) for x in "abc"]), held=3, seed=0)
    with pytest.raises(DataError, match="0 questions of each task cannot be held out"):
        split(source_of(tmp_path, [question("a")]), held=0, seed=0)
    with pytest.raises(DataError, match="record 1: it has no conversation"):
        split(source_of(tmp_path, [{"text": "a"}]), held=1, seed=0)
    left_out = Counter()
    bad = source_of(tmp_path, [{"text": "a"}, question("a"), question("b")])
    assert len(split(bad, held=1, seed=0, left_out=left_out).training) == 1
    assert left_out == {"no conversation": 1}
