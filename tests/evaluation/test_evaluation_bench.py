"""Where questions come from, and what is said when they don't."""

import hashlib
import json
from dataclasses import replace
from datetime import date

import pytest
import yaml
from commands import ROOT
from datasets import Dataset

from kangaroo.evaluation.bench import BenchConfig, fingerprint, load_questions, turn_seed
from kangaroo.utils.errors import ConfigError, CorruptFile, DataError

USER, SYSTEM = ({"role": role, "content": "Why?"} for role in ("user", "system"))
GOOD = {"question_id": 1, "category": "qa", "turns": ["Why?"]}
SPEC_BENCH = ROOT.parent / "shared" / "spec_bench" / "question.jsonl"
SPEED_BENCH = {  # of its schema, written by us
    "question_id": ["coding-1", "qa-2", "qa-3"],
    "category": ["coding", "qa", "qa"],
    "turns": [["Write f.", "And g?"], ["Why?"], ["FULL BENCHMARK DATA SHOULD BE FETCHED ..."]],
    "difficulty": [None, "easy", None],
    "written": [date(2026, 1, 1)] * 3,  # a column of a file's own; JSON has no dates
}
# A row of some of each named bench's columns, written by us, with its category and its turns.
NAMED = {
    "gsm8k": ({"question": "1 + 1?", "answer": "#### 2"}, "gsm8k", ["1 + 1?"]),
    "math500": ({"problem": "$x^2 = 4$", "subject": "Algebra"}, "Algebra", ["$x^2 = 4$"]),
    "humaneval": ({"task_id": "T/0", "prompt": "def one():\n"}, "humaneval", ["def one():\n"]),
    "mbpp": ({"task_id": 11, "text": "Write f.", "test_list": []}, "mbpp", ["Write f."]),
    "livecodebench": ({"question_content": "Sum.", "difficulty": "easy"}, "easy", ["Sum."]),
    "mt_bench": ({"prompt": ["A?", "B?"], "category": "writing"}, "writing", ["A?", "B?"]),
    "alpaca": ({"instruction": "Sort.", "input": "b, a"}, "alpaca", ["Sort.\n\nb, a"]),
    "arena_hard": ({"category": "hard_prompt", "prompt": "Why?"}, "hard_prompt", ["Why?"]),
    "cnn_dailymail": ({"article": "A dog."}, "cnn_dailymail", ["Summarize: A dog."]),
    "speculator_benchmarks": ({"prompt": "Why?"}, "HumanEval", ["Why?"]),
}
BENCHES = yaml.safe_load((ROOT / "configs/groups/bench.yaml").read_text())


def test_the_demo_is_shipped_and_the_fingerprint_follows_what_is_asked():
    questions = load_questions(BenchConfig("demo"))
    assert len(questions) == 66
    tasks = "mt_bench translation summarization qa math_reasoning rag"
    assert {question.task for question in questions} == set(tasks.split())
    assert fingerprint(questions) == fingerprint(load_questions(BenchConfig("demo")))
    assert fingerprint(questions) != fingerprint(questions[1:])


def test_speed_benchs_questions_come_from_parquet_files_or_the_hub(tmp_path, monkeypatch, caplog):
    table = Dataset.from_dict(SPEED_BENCH)
    table.to_parquet(tmp_path / "test.parquet")
    more = table.select([1]).map(lambda row: row | {"question_id": "more"})
    requests = []

    def load_dataset(*place, **options):
        requests.append((place, options))
        return more if place[1] == "throughput_8k" else table

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for place in ({"path": str(tmp_path / "test.parquet")}, {"hub": "nvidia/SPEED-Bench"}):
        questions = load_questions(BenchConfig("speed_bench", **place, subset="qualitative"))
        assert [question.task for question in questions] == ["coding", "qa"]
        assert questions[0].turns == ["Write f.", "And g?"]
        assert len({question.question_id for question in questions}) == 2
        assert "1 question of" in caplog.text and "bench.path=" in caplog.text
        caplog.clear()
    options = {"split": "test", "revision": None}
    assert requests == [(("nvidia/SPEED-Bench", "qualitative"), options)]
    (tmp_path / "8k").mkdir()
    more.to_parquet(tmp_path / "8k/test.parquet")
    parts = {"hub": "nvidia/SPEED-Bench", "subset": "throughput_1k+throughput_8k"}
    for place in (parts, {"path": str(tmp_path)}):
        assert len(load_questions(BenchConfig("speed_bench", **place))) == 3
    assert len(load_questions(BenchConfig("speed_bench", path=str(tmp_path), subset="8k"))) == 1
    with pytest.raises(DataError, match=r"has no folder or \.jsonl file '4k', only 8k\. Pass"):
        load_questions(BenchConfig("speed_bench", path=str(tmp_path), subset="4k+8k"))


def named(name, **changes):
    return BenchConfig(**{"name": name} | BENCHES[name] | changes)


@pytest.mark.parametrize("name", [name for name, x in BENCHES.items() if "question" in x])
def test_named_benches_read_their_columns_from_the_hub_and_from_files(name, tmp_path, monkeypatch):
    row, category, turns = NAMED[name]
    config, asked = named(name), []
    rows = [row, row | {name: "" for name in ("input",) if name in row}]
    is_lines = ".jsonl" in (config.subset or "")
    file = tmp_path / (config.subset.split("+")[0] if is_lines else "test-0.parquet")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not is_lines:
        Dataset.from_list(rows).to_parquet(file)

    def load_dataset(*place, split, revision):
        asked.append((*place, split))
        return Dataset.from_list(rows)

    def download(*place, repo_type, revision):
        asked.append((*place, repo_type))
        return str(file)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("kangaroo.data.reading.hf_hub_download", download)
    of_hub = load_questions(config)
    one_file = named(name, subset=config.subset.split("+")[0] if is_lines else config.subset)
    of_file = load_questions(replace(one_file, path=str(file)))
    assert of_file == load_questions(replace(one_file, path=str(tmp_path))) == of_hub[:2]
    without_input = ["Sort."] if name == "alpaca" else turns
    assert {question.category for question in of_file} == {category}
    assert [question.turns for question in of_file] == [turns, without_input]
    parts = config.subset.split("+") if config.subset else [None]
    assert asked == [(config.hub, part, "dataset" if is_lines else config.split) for part in parts]
    assert [question.question_id for question in of_hub] == [*range(1, 2 * len(parts) + 1)]


@pytest.mark.parametrize(
    "name, row, reason",
    [
        ("math500", {"question": "x", "subject": "y"}, "no column 'problem', only question, sub"),
        ("math500", {"problem": "x", "answer": "y"}, "no column 'subject', only problem, answer"),
        ("alpaca", {"instruction": "x"}, "no column 'input', only instruction"),
        ("gsm8k", {"question": 5}, "question is neither text nor a list of turns"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_its_file(name, row, reason, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(row))
    ways_out = r"Pass bench\.question= and bench\.category= the names of its columns"
    with pytest.raises(DataError, match=rf"mine\.jsonl, record 1: .*{reason}.*\. {ways_out}"):
        load_questions(named(name, path=str(file)))


def test_of_a_folder_the_split_is_read_and_the_files_that_subset_names(tmp_path):
    for file in ("qa.jsonl", "rag.jsonl", "train-0.jsonl", "test-0.jsonl"):
        (tmp_path / file).write_text(json.dumps({"prompt": file}))
    config = BenchConfig(path=str(tmp_path), question="prompt")
    assert [question.turns for question in load_questions(config)] == [["test-0.jsonl"]]
    config.subset = "rag.jsonl+qa.jsonl"
    assert [question.category for question in load_questions(config)] == ["qa", "rag"]


def test_a_system_turn_comes_first_and_counts_in_the_fingerprint(tmp_path):
    talk = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    with_system = {"messages": talk}, {"turns": ["user", "user"], "system": "system"}
    file, hashes = tmp_path / "mine.jsonl", []
    for line in (*with_system, {"messages": talk[1:]}, {"turns": ["user", "user"]}):
        file.write_text(json.dumps(line))
        (question,) = questions = load_questions(BenchConfig(path=str(file)))
        begins = talk if question.system else talk[1:]
        assert question.conversation() == begins[:-2]
        assert question.conversation(["assistant"]) == begins
        hashes.append(fingerprint(questions))
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]


def test_a_download_is_kept_and_wrong_checksums_refused_but_of_local_files(tmp_path, cache, caplog):
    home, content = tmp_path / "question.jsonl", json.dumps(GOOD).encode()
    others = content.replace(b"Why", b"How")
    config = BenchConfig("far", url=home.as_uri(), sha256=hashlib.sha256(content).hexdigest())
    home.write_bytes(others)
    with pytest.raises(DataError, match=r"file:.*question\.jsonl cannot be downloaded: .* hash"):
        load_questions(config)
    assert not list((cache / "benches").iterdir())  # nothing is kept
    home.write_bytes(content)
    assert load_questions(config)[0].turns == ["Why?"]
    home.unlink()
    assert load_questions(config)[0].turns == ["Why?"]
    assert [file.name for file in (cache / "benches").iterdir()] == ["far.jsonl"]
    (cache / "benches/far.jsonl").write_text("{}")
    with pytest.raises(CorruptFile, match=r"far\.jsonl' .*sha256 differs.*Delete it"):
        load_questions(config)
    # a local file needs no network, and one of other questions is used with a warning
    config.path, config.url = str(home), "http://127.0.0.1:9/"
    for local, warns in ((content, False), (others, True)):
        home.write_bytes(local)
        assert len(load_questions(config)) == 1
        assert ("does not hold the questions of far" in caplog.text) == warns


@pytest.mark.parametrize(
    "config, error, message",
    [
        (BenchConfig("dmeo"), ConfigError, r"no bench 'dmeo' is shipped, only demo"),
        (BenchConfig("far", url="http://127.0.0.1:9/x"), DataError, r"127.* .*bench\.path="),
        (BenchConfig(path="none.jsonl"), DataError, r"there is no source '.*none\.jsonl'"),
        (BenchConfig("b", hub="a/b", subset="c"), DataError, r"hub=a/b \(subset c, .* be read"),
    ],
)
def test_questions_that_are_nowhere_are_named_with_the_way_out(config, error, message, cache):
    with pytest.raises(error, match=message):
        load_questions(config)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "a line that is not JSON"),
        ("[]", "it is no JSON object"),
        (json.dumps(GOOD | {"question_id": 2**63}), "question_id must be an integer of 64 bits"),
        (json.dumps(GOOD | {"category": 5}), "category must be a string"),
        (json.dumps(GOOD | {"system": ["Rhyme."]}), "'system' is a list, not text"),
        (json.dumps(GOOD | {"category": "overall"}), "may not be called method or overall"),
        (json.dumps(GOOD | {"category": "method"}), "may not be called method or overall"),
        (json.dumps({"messages": [USER, SYSTEM]}), "a system turn must come before all"),
        (json.dumps({"messages": [USER, SYSTEM | {"role": "tool"}]}), "a turn of role 'tool'"),
        (json.dumps({"messages": [SYSTEM | {"content": 5}, USER]}), "a turn whose 'content' or"),
        (json.dumps(GOOD | {"turns": []}), "at least one user's turn"),
        (json.dumps({"messages": ["Why?", USER]}), "a turn that is a str, not an object"),
        (json.dumps(GOOD | {"turns": ["Why?", " "]}), "none that is blank"),
        (json.dumps(GOOD), "question_id 1 again"),
    ],
)
def test_a_malformed_line_is_named(line, reason, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(DataError, match=rf"mine\.jsonl, record 2: .*{reason}.* A question looks"):
        load_questions(BenchConfig(path=str(file)))


def test_turns_alone_make_a_bench_that_is_called_as_its_file(tmp_path):
    file = tmp_path / "mine.jsonl"
    null = {"turns": ["Why?"], "category": None, "question_id": None}
    talk = [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}]
    lines = [{"turns": ["Why?"]}, null, {"conversations": talk, "category": "writing"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    config = BenchConfig(path=str(file))
    assert config.name == "mine" and BenchConfig().name == "demo"
    named = [(q.question_id, q.category, q.task, q.reference) for q in load_questions(config)]
    assert named == [*((i, "mine", "mine", None) for i in (1, 2)), (3, "writing", "writing", None)]
    assert load_questions(BenchConfig("spec_bench", path=config.path))[-1].task == "mt_bench"
    file.write_text("\n")
    with pytest.raises(DataError, match="holds no questions"):
        load_questions(config)


def test_the_seed_of_a_turn_has_64_bits_and_small_ones_are_as_ever():
    assert turn_seed(81, 1, 7) == 81008 and turn_seed(-1, 0, 0) == -1000
    seeds = {turn_seed(2**63 - 1, turn, 2**63 - 1) for turn in range(3)}
    assert len(seeds) == 3 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.skipif(not SPEC_BENCH.is_file(), reason="needs Spec-Bench's questions")
def test_spec_bench_has_480_questions_and_560_turns(caplog):
    questions = load_questions(named("spec_bench", path=str(SPEC_BENCH)))
    assert not caplog.records  # its checksum is the right one
    assert len(questions) == 480
    assert sum(len(question.turns) for question in questions) == 560
