"""Conversations that others wrote: reading them, answering them anew, what is refused; and a split
of their questions into some to learn from and some to measure on."""

import json
import re
from collections import Counter

import pytest
from data_cases import NO_FILTERS, brief
from datasets import Dataset

from kangaroo.data import reading, store
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.filters import FilterConfig, answer_spans
from kangaroo.data.reading import HELD_OUT, SHARED, TRAINING, Source, alternating_turns, read, split
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import masked_ids, prompt_ids
from kangaroo.training.batches import check_trainable
from kangaroo.utils.errors import DataError, KangarooError, PromptError

target = pytest.fixture(scope="module")(brief)
QUESTIONS = ["Why is the sky blue?", "How are bridges built?", "Who was Ada Lovelace?"]
QUESTIONS += ["What does a compiler do?", "Name a dish with lentils."]
BEYOND = r"a token outside the model's vocabulary of 259: 259 \('\[PAD\]'\)"
FILES = [f"hf://datasets/{path}" for path in ("some/talks/talks.json", "some/talks", "some", "")]
KEPT = "ua:ua au:u sua:sua saua:sua uau:uau uua:u uaa:ua s:s a: : suas:sua uaeua:ua ue:u eua:"
PASSAGE = " ".join(f"word{i}" for i in range(SHARED))


def chat(*contents, system=None):
    turns = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def sharegpt(messages):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[m["role"]], "value": m["content"]} for m in messages]


TALKS = [chat(q, f"An answer to: {q}", f"And why {i}?", "So.") for i, q in enumerate(QUESTIONS)]


def config(tmp_path, source, **changes):
    fields = {"path": str(tmp_path / "data"), "source": str(source), "filters": NO_FILTERS}
    fields |= {"shard_size": 2, "batch_size": 3, "max_answer_tokens": 20}
    return ConversationsConfig(**(fields | {"answer_temperatures": [0.7]} | changes))


def written(tmp_path, records):
    """A file of JSON lines; a list is a conversation."""
    records = [{"messages": each} if isinstance(each, list) else each for each in records]
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def read_from(tmp_path, *records, **options):
    return read(Source(str(written(tmp_path, records)), **options), None)


def test_every_form_gives_the_same_conversations(tmp_path):
    records = [{"id": str(i), "conversations": sharegpt(talk)} for i, talk in enumerate(TALKS)]
    table = Dataset.from_list([{"messages": talk} for talk in TALKS])
    (tmp_path / "list.json").write_text("\n " + json.dumps(records, indent=1))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, records)))
    mark = "\ufeff" + "\n\n".join(map(json.dumps, records)) + "\n\n"
    (tmp_path / "mark.jsonl").write_text(mark, encoding="utf-8")
    table.to_parquet(tmp_path / "table.parquet")
    (tmp_path / "folder").mkdir()
    table.to_parquet(tmp_path / "folder/train-00000.parquet")
    cells = Dataset.from_list([{"messages": json.dumps(talk)} for talk in TALKS])
    cells.to_csv(tmp_path / "cells.csv")
    table.save_to_disk(tmp_path / "saved")
    files = "list.json lines.json mark.jsonl table.parquet folder cells.csv saved"
    for name in [*files.split(), "saved/data-00000-of-00001.arrow"]:
        assert read(Source(str(tmp_path / name)), None) == TALKS, name
    assert read(Source(str(tmp_path / "list.json")), 2) == TALKS[:2]


def test_a_benchs_questions_and_a_column_that_is_named_are_read(tmp_path, target):
    (messages,) = read_from(tmp_path, {"question_id": 7, "turns": ["Who?", "And then?"]})
    assert [turn["content"] for turn in messages] == ["Who?", "And then?"]
    assert alternating_turns(messages) == (messages, "")  # nobody has answered yet
    (messages,) = read_from(tmp_path, {"turns": ["Who?"], "system": "Rhyme."})
    assert messages == chat("Who?", system="Rhyme.")
    (messages,) = read_from(
        tmp_path, {"messages": chat("Who?", system="Sing."), "system": "Rhyme."}
    )
    assert messages == chat("Who?", system="Sing.")
    named = {"prompt": "x", "talk": chat("Why?", "So.")}
    assert read_from(tmp_path, named, column="talk") == [chat("Why?", "So.")]
    with pytest.raises(DataError, match=r"no 'text' among its fields .*column"):
        read_from(tmp_path, named, column="text")
    # half a surrogate pair becomes a character that tokenizers take
    ((turn,),) = read_from(tmp_path, chat("a \ud83e b"))
    assert prompt_ids(target[1], [turn])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no conversations"),
        ("[{}]", r"record 1: no conversation among its fields \(none\)"),
        ('{"messages": []', r"record 1: a line that is not JSON.*data\.skip_bad=true"),
        ('{"messages": []}\n{"messages": "hello"}', "record 2: 'messages' is text, but not JSON"),
        ('{"messages": {"role": "user"}}', "'messages' is a dict, not a list"),
        ('{"messages": ["hello"]}', "a turn that is a str, not an object"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', r"of role \['user'\].*looks like"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', r"a part .* no text \(part 1, str"),
        ('{"conversations": [{"from": "human", "text": "x"}]}', "a turn .*'value' is null"),
        ("[" * 100_000, "is not JSON"),
        ('{"messages": "größe"}'.encode("latin-1"), "is not JSON in UTF-8"),
        (None, "there is no"),
    ],
)
def test_what_is_malformed_is_named_with_its_place(tmp_path, text, message):
    path = tmp_path / "talks.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=rf"{message}|talks\.json.*{message}"):
        read(Source(str(path)), None)


def test_what_is_null_is_as_good_as_absent(tmp_path):
    """In a table every record has all fields."""
    absent = {"role": None, "content": None, "messages": None}
    records = [
        {"messages": None, "conversations": [absent | turn for turn in sharegpt(TALKS[0])]},
        {"messages": [{"from": None, "value": None} | turn for turn in TALKS[1]]},
    ]
    Dataset.from_list(records).to_parquet(tmp_path / "talks.parquet")
    assert read(Source(str(tmp_path / "talks.parquet")), None) == TALKS[:2]
    assert read_from(tmp_path, *records) == TALKS[:2]
    with pytest.raises(DataError, match=r"record 2: no 'conversations' .*\(messages\)"):
        read_from(tmp_path, *records, column="conversations")


TOOL = [*chat("How warm?", None), {"role": "tool", "content": "7"}]
BAD = [
    ("a line that is not JSON", '{"messages": ['),
    ("a int, not an object", "7"),
    ("a turn of role 'tool' (in 'role' or 'from')", json.dumps({"messages": TOOL})),
]
UNUSABLE = [
    ("no user turn", []),
    ("no answer", chat("Why?")),
    ("empty user turn", chat(" ", "So.")),
    ("empty assistant turn", chat("Why?", "")),
    ("two user turns in a row", [*chat("Why?"), *chat("Why not?", "So.")]),
    ("later turns: two assistant turns in a row", [*chat("Is it?", "So."), *chat("", "So.")[1:]]),
    ("later turns: system turn in the middle", [*chat("Who?", "I."), *chat("x", system="Rhyme.")]),
    ("too long", chat("Why?", "because " * 400)),
    ("later turns: too long", chat("When?", "Now.", "Why?", "because " * 400)),
]


def test_what_is_left_out_is_counted_by_what_was_wrong(target, tmp_path, caplog):
    path = written(tmp_path, TALKS + [talk for _, talk in UNUSABLE])
    path.write_text(path.read_text() + "\n".join(line for _, line in BAD))
    options = {"regenerate": False, "max_length": 1000}
    with caplog.at_level("INFO"):
        config(tmp_path, path, skip_bad=True, **options).make(*target)
    samples, about = store.load(tmp_path / "data")
    reasons = Counter(reason for reason, _ in [*BAD, *UNUSABLE])
    assert about["dropped"] == reasons
    assert all(f"{count} {reason}" in caplog.text for reason, count in reasons.items())
    cut = sum(reason.startswith("later turns") for reason in reasons)
    assert len(samples) == len(TALKS) + cut == about["asked"] - reasons.total() + cut
    path.write_text(BAD[-1][1])
    with pytest.raises(DataError, match=r"holds no conversations \(1 a turn of role 'tool'"):
        config(tmp_path, path, skip_bad=True, **options).make(*target)


def test_a_token_beyond_the_vocabulary_is_named_by_its_record_or_left_out(target, tmp_path, caplog):
    lm, tokenizer = target[0], byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[PAD]"]})
    asked, answered = chat("What is [PAD]?", "So."), chat("What is it?", "It is [PAD].")
    path = written(tmp_path, [*TALKS, asked, answered])
    with pytest.raises(DataError, match=rf"record 6: it holds {BEYOND}\. .*skip_bad"):
        config(tmp_path, path).make(lm, tokenizer)
    for regenerate, kept in ((False, 5), (True, 6)):  # its own answer takes the place of the other
        options = {"regenerate": regenerate, "path": str(tmp_path / f"data{kept}")}
        config(tmp_path, path, skip_bad=True, **options).make(lm, tokenizer)
        samples, about = store.load(tmp_path / f"data{kept}", 259)
        assert len(samples) == kept == 7 - sum(about["dropped"].values())
        assert re.search(BEYOND, *about["dropped"])
    for words in ("sample 0 of dataset .* of 100: ", "Delete it"):
        with pytest.raises(DataError, match=words):
            store.load(tmp_path / "data5", 100)
    (tmp_path / "text").write_text("[PAD]")
    with pytest.raises(DataError, match=rf"text '.*text' holds {BEYOND}"):
        store.documents(None, [str(tmp_path / "text")], tokenizer, 259)
    with pytest.raises(PromptError, match=f"the prompt holds {BEYOND}"):
        Engine(lm, Vanilla(), tokenizer).generate([tokenizer.encode("[PAD]")], 1)


def test_an_answer_of_weight_0_is_read_and_not_learnt(target, tmp_path):
    bad, good = ({"role": "assistant", "content": x} for x in ("Wrong, wrong.", "Right, right."))
    asked = [*chat("Why?"), bad | {"weight": 0}, *chat("Again?"), good | {"weight": 1}]
    talks = [asked, [*asked, *chat("More?"), bad | {"weight": 0}], asked[:2], chat("Who?", "I do.")]
    filters = FilterConfig(min_answer_tokens=5, max_repetition=0.9, near_duplicate=1)
    records = [*talks, [{**turn, "content": f"{turn['content']} So?"} for turn in talks[1]]]
    config(tmp_path, written(tmp_path, records), regenerate=False, filters=filters).make(*target)
    samples, about = store.load(tmp_path / "data")
    assert about["dropped"] == {"no answer": 1, "duplicate": 1}
    texts = []
    for sample in samples:
        spans = answer_spans(sample["loss_mask"])
        texts += [target[1].decode(sample["input_ids"][i:j]) for i, j in spans]
    assert texts == [f"{x}<|im_end|>" for x in ("Right, right.", "I do.", "Right, right. So?")]
    for sample in samples[::2]:  # both are cut behind what is learnt
        assert "Wrong, wrong." in target[1].decode(sample["input_ids"])
        assert len(sample["messages"]) == 4
    with pytest.raises(DataError, match="a turn whose 'weight' is 7, neither 0 nor 1"):
        read_from(tmp_path, [*chat("Why?"), bad | {"weight": 7}])


def test_one_file_of_a_dataset_on_the_hub_is_fetched_and_read(tmp_path, monkeypatch):
    path = written(tmp_path, TALKS)

    def fetch(repo, file, *, repo_type, revision):
        assert (repo, file) == ("some/talks", "v1/talks.jsonl")
        assert (repo_type, revision) == ("dataset", "main")
        return str(path)

    monkeypatch.setattr(reading, "hf_hub_download", fetch)
    assert read(Source("hf://datasets/some/talks/v1/talks.jsonl", revision="main"), None) == TALKS


@pytest.mark.parametrize("source", ["some/talks", *FILES])
def test_the_error_for_what_the_hub_does_not_give_gives_the_fix(source):
    with pytest.raises(DataError, match=rf"data\.source={source} .*Pass a \.json.*network"):
        read(Source(source, subset="en"), None)


@pytest.mark.parametrize(("roles", "kept"), [pair.split(":") for pair in KEPT.split()])
def test_turns_are_kept_as_far_as_they_alternate(roles, kept):
    names = {"u": "user", "a": "assistant", "s": "system", "e": "user"}
    messages = [{"role": names[r], "content": " " if r == "e" else "x"} for r in roles]
    assert [m["role"][0] for m in alternating_turns(messages)[0]] == list(kept)


def test_text_as_it_is_gets_the_templates_mask(target, tmp_path):
    lm, tokenizer = target
    config(tmp_path, written(tmp_path, TALKS), regenerate=False).make(lm, tokenizer)
    samples, _ = store.load(tmp_path / "data")
    assert [sample["messages"] for sample in samples] == TALKS
    for sample in samples:
        ids, mask = masked_ids(tokenizer, sample["messages"])
        end = len(mask) - mask[::-1].index(1)  # after it stands the template's newline
        assert (sample["input_ids"], sample["loss_mask"]) == (ids[:end], mask[:end])
    check_trainable(samples, 2048)
    assert len(samples) == 5


def test_answers_are_the_targets_with_its_earlier_answers_before_them(target, tmp_path):
    lm, tokenizer = target
    talks = [*TALKS, chat("A last question?", system="You are brief.")]
    bench = [{"turns": [turn["content"] for turn in talk[::2]]} for talk in TALKS]
    records = [*bench, talks[-1]]  # questions without answers, and a conversation
    config(tmp_path, written(tmp_path, records)).make(lm, tokenizer)
    samples, about = store.load(tmp_path / "data")
    assert len(samples) == 6 == about["asked"]
    assert samples[-1]["messages"][0] == {"role": "system", "content": "You are brief."}
    for sample, talk in zip(samples, talks, strict=True):
        source_questions = [m["content"] for m in talk if m["role"] == "user"]
        answers = [m["content"] for m in sample["messages"] if m["role"] == "assistant"]
        assert not set(answers) & {m["content"] for m in talk}
        questions = [m["content"] for m in sample["messages"] if m["role"] == "user"]
        assert questions == source_questions[: len(answers)]
        prompt = prompt_ids(tokenizer, sample["messages"][:-1])
        assert sample["input_ids"][: len(prompt)] == prompt
        assert len(answer_spans(sample["loss_mask"])) == len(answers)
    turns = {len(answer_spans(sample["loss_mask"])) for sample in samples}
    assert turns == {1, 2}  # some first answers reach their limit, which ends a conversation


def test_regeneration_goes_on_and_follows_a_source_that_grows(target, tmp_path):
    lm, tokenizer = target
    source = written(tmp_path, TALKS)
    config(tmp_path, source, limit=4).make(lm, tokenizer)
    shards = sorted((tmp_path / "data.shards").glob("*.jsonl"))
    before = {path: path.stat().st_mtime_ns for path in shards}
    few, _ = store.load(tmp_path / "data")
    shards[1].with_suffix(".part").write_text(shards[1].read_text()[:50])
    shards[1].unlink()
    config(tmp_path, source).make(lm, tokenizer)
    more, _ = store.load(tmp_path / "data")
    assert more[:4] == few and len(more) == 5
    assert shards[0].stat().st_mtime_ns == before[shards[0]]
    talks = [*TALKS[:4], chat("Something else?", "No.")]
    config(tmp_path, written(tmp_path, talks)).make(lm, tokenizer)
    changed, _ = store.load(tmp_path / "data")
    assert changed[:4] == few and changed[4]["messages"][0]["content"] == "Something else?"


def test_sources_with_nothing_to_learn_from_are_refused(target, tmp_path):
    for talks, options, message in (
        ([chat("Why?")], {"regenerate": False}, "none of the 1 .*with an answer: 1 no answer"),
        ([[]], {}, "none of the 1 conversations.*has a user turn"),
        (TALKS, {"max_length": 10}, r"none of 5 conversations is usable \(5 too long\)"),
        (TALKS, {}, "max_length=10 there, 2048 now"),
        (TALKS, {"path": str(tmp_path / "talks.jsonl/data")}, "'.*/talks.jsonl' is a file"),
    ):
        with pytest.raises(KangarooError, match=message):
            config(tmp_path, written(tmp_path, talks), **options).make(*target)


def question(text, **more):
    return more | {"messages": chat(text, f"About {text}")}


def parts_of(tmp_path, records, held=1, seed=0, **options):
    return split(Source(str(written(tmp_path, records))), held, seed, **options)


def test_every_question_is_on_one_side_as_many_of_each_task_held_out(tmp_path):
    records = [question(f"Add {i}", task="math") for i in range(9)]
    records += [question(f"Say {i}", category="talk") for i in range(7)]
    records += [question(f"Do {i}") for i in range(4)]
    parts = parts_of(tmp_path, records, held=3)
    tasks = Counter(question["category"] for question in parts.held_out)
    assert tasks == {"all": 3, "math": 3, "talk": 3} and parts.left_out == 0
    held_out = [question["turns"][0] for question in parts.held_out]
    sides = held_out + [record["messages"][0]["content"] for record in parts.training]
    assert sorted(sides) == sorted(record["messages"][0]["content"] for record in records)
    assert [question["question_id"] for question in parts.held_out] == list(range(9))
    assert parts == parts_of(tmp_path, records, held=3)
    assert parts != parts_of(tmp_path, records, held=3, seed=1)
    parts.write(tmp_path / "parts")
    assert len(read(Source(str(tmp_path / "parts" / TRAINING)), None)) == 11
    bench = load_questions(BenchConfig(path=str(tmp_path / "parts" / HELD_OUT)))
    assert [question.turns[0] for question in bench] == held_out


def test_a_held_out_question_keeps_its_system_turn(tmp_path):
    records = [{"messages": chat(text, system="Rhyme.")} for text in ("Who?", "Why?")]
    parts_of(tmp_path, records).write(tmp_path)
    (question,) = load_questions(BenchConfig(path=str(tmp_path / HELD_OUT)))
    assert question.system == "Rhyme." and len(question.turns) == 1


@pytest.mark.parametrize(
    ("passage", "learnt"), [(PASSAGE, 0), (PASSAGE.rsplit(" ", 1)[0], 5)], ids=["shared", "short"]
)
def test_who_shares_a_passage_with_a_held_out_question_is_not_learnt(passage, learnt, tmp_path):
    """A run of `SHARED` words in any turn; one word less is what many questions have."""
    parts = parts_of(tmp_path, [question(f"Q{i} {passage}") for i in range(6)])
    assert len(parts.held_out) == 1 and len(parts.training) == learnt == 5 - parts.left_out


def test_records_without_a_question_are_left_out_and_bad_ones_are_named(tmp_path):
    empty, bad = chat("", "Hello")[1:], {"text": "a"}
    two, unreadable = [question("a"), question("b")], Counter()
    without_bad = parts_of(tmp_path, [bad, *two], unreadable=unreadable)
    for parts in (parts_of(tmp_path, [empty, *two]), without_bad):
        assert len(parts.training) == len(parts.held_out) == 1
    assert unreadable.total() == 1
    for records, held, message in (
        ([empty], 1, "holds no questions"),
        (two, 2, r"task 'all' of .* has 2 questions, and 2 were .* Pass held= below 2"),
        ([bad], 1, "record 1: no conversation"),
    ):
        with pytest.raises(DataError, match=message):
            parts_of(tmp_path, records, held)
