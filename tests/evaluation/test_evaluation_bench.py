"""Where questions come from, and what is said when they don't."""

import hashlib
import json
from datetime import date

import pytest
import yaml
from commands import ROOT
from datasets import Dataset

from kangaroo.evaluation.bench import BenchConfig, fingerprint, load_questions, seed_of
from kangaroo.utils.errors import ConfigError, CorruptFile, DataError

GOOD = {"question_id": 1, "category": "qa", "turns": ["Why?"]}
SPEC_BENCH = ROOT.parent / "shared" / "spec_bench" / "question.jsonl"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KANGAROO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "benches"


def served(tmp_path):
    """A bench whose home is a file, and the right checksum."""
    content = json.dumps(GOOD).encode()
    home = tmp_path / "question.jsonl"
    home.write_bytes(content)
    return BenchConfig("far", url=home.as_uri(), sha256=hashlib.sha256(content).hexdigest()), home


def test_the_demo_is_shipped_and_the_fingerprint_follows_what_is_asked():
    questions = load_questions(BenchConfig("demo"))
    assert len(questions) == 66
    tasks = "mt_bench translation summarization qa math_reasoning rag"
    assert {question.task for question in questions} == set(tasks.split())
    assert fingerprint(questions) == fingerprint(load_questions(BenchConfig("demo")))
    assert fingerprint(questions) != fingerprint(questions[1:])


SPEED_BENCH = {  # of its schema, written by us
    "question_id": ["coding-1", "qa-2", "qa-3"],
    "category": ["coding", "qa", "qa"],
    "sub_category": ["python", "short", "short"],
    "turns": [["Write f.", "And g?"], ["Why?"], ["FULL BENCHMARK DATA SHOULD BE FETCHED ..."]],
    "source": ["ours"] * 3,
    "src_id": ["1", "2", "3"],
    "difficulty": [None, "easy", None],
    "multiturn": [True, False, False],
    "written": [date(2026, 1, 1)] * 3,  # a column of a file's own; JSON has no dates
}


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
        assert "1 questions of" in caplog.text and "bench.path=" in caplog.text
        caplog.clear()
    assert requests == [(("nvidia/SPEED-Bench", "qualitative"), {"split": "test"})]
    (tmp_path / "8k").mkdir()
    more.to_parquet(tmp_path / "8k/test.parquet")
    parts = {"hub": "nvidia/SPEED-Bench", "subset": "throughput_1k+throughput_8k"}
    for place in (parts, {"path": str(tmp_path)}):
        assert len(load_questions(BenchConfig("speed_bench", **place))) == 3


def test_a_download_is_kept_and_a_wrong_checksum_refused(tmp_path, cache):
    config, home = served(tmp_path)
    content = home.read_bytes()
    home.write_text(json.dumps(GOOD | {"turns": ["How?"]}))
    with pytest.raises(CorruptFile, match=r"far from file:.* sha256 \w+, not \w+\. Try again"):
        load_questions(config)
    assert not cache.exists()  # nothing is kept
    home.write_bytes(content)
    assert load_questions(config)[0].turns == ["Why?"]
    home.unlink()
    assert load_questions(config)[0].turns == ["Why?"]
    assert [file.name for file in cache.iterdir()] == ["far.jsonl"]
    (cache / "far.jsonl").write_text("{}")
    with pytest.raises(CorruptFile, match=r"far\.jsonl' have sha256 .* Delete it"):
        load_questions(config)


@pytest.mark.parametrize(
    "config, error, message",
    [
        (BenchConfig("dmeo"), ConfigError, r"no bench 'dmeo' is shipped, only demo"),
        (BenchConfig("far", url="http://127.0.0.1:9/x"), DataError, r"127.* .*bench\.path="),
        (BenchConfig(path="none.jsonl"), DataError, r"bench\.path=none\.jsonl .*: No such file"),
        (
            BenchConfig("b", hub="a/b", subset="c"),
            DataError,
            r"a/b \(c\) cannot be read from the h",
        ),
    ],
)
def test_questions_that_are_nowhere_are_named_with_the_way_out(config, error, message, cache):
    with pytest.raises(error, match=message):
        load_questions(config)


def test_a_local_file_needs_no_network_and_warns_of_other_questions(tmp_path, caplog):
    config, home = served(tmp_path)
    config.path, config.url = str(home), "http://127.0.0.1:9/"
    assert len(load_questions(config)) == 1
    assert not caplog.records
    home.write_text(json.dumps(GOOD | {"turns": ["How?"]}))
    assert len(load_questions(config)) == 1
    assert "does not hold the questions of far" in caplog.text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "JSON object"),
        (json.dumps(GOOD | {"question_id": 1.5}), "question_id must be an integer"),
        (json.dumps(GOOD | {"question_id": 2**63}), "question_id must be an integer of 64 bits"),
        (json.dumps(GOOD | {"category": 5}), "category must be a string"),
        ("[" * 100_000, "recursion"),
        (json.dumps(GOOD | {"turns": []}), "at least one string"),
        (json.dumps(GOOD | {"turns": ["Why?", " "]}), "none of them blank"),
        (json.dumps(GOOD | {"turns": ["half \ud83d pair"]}), "half of a surrogate pair"),
        (json.dumps(GOOD | {"category": "\udcff"}), "half of a surrogate pair"),
        (json.dumps(GOOD), "question_id 1 again"),
    ],
)
def test_a_malformed_line_is_named(line, reason, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(DataError, match=rf"mine\.jsonl, line 3: .*{reason}"):
        load_questions(BenchConfig(path=str(file)))


def test_turns_alone_make_a_bench_that_is_called_as_its_file(tmp_path):
    lines = [{"turns": ["Why?"]}, {"turns": ["How?"], "category": "writing"}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = BenchConfig(path=str(tmp_path / "mine.jsonl"))
    assert config.name == "mine" and BenchConfig().name == "demo"
    named = [(q.question_id, q.category, q.task) for q in load_questions(config)]
    assert named == [(1, "mine", "mine"), (2, "writing", "writing")]
    (named,) = load_questions(BenchConfig("spec_bench", path=config.path))[1:]
    assert named.task == "mt_bench"


def test_a_file_of_conversations_is_told_what_makes_a_bench_of_it(tmp_path):
    (tmp_path / "talks.json").write_text(json.dumps([{"conversations": [{"role": "user"}]}]))
    message = r"talks\.json, line 1: it is no JSON .* scripts/prepare\.py split .*talks\.json"
    with pytest.raises(DataError, match=message):
        load_questions(BenchConfig(path=str(tmp_path / "talks.json")))


def test_the_seed_of_a_turn_has_64_bits_and_small_ones_are_as_ever():
    assert seed_of(81, 1, 7) == 81008 and seed_of(-1, 0, 0) == -1000
    seeds = {seed_of(2**63 - 1, turn, 2**63 - 1) for turn in range(3)}
    assert len(seeds) == 3 and all(0 <= seed < 2**63 for seed in seeds)


def test_null_in_a_question_is_as_good_as_left_out_and_an_empty_file_holds_none(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"turns": ["Why?"], "category": None, "question_id": None}))
    (question,) = load_questions(BenchConfig(path=str(file)))
    assert (question.question_id, question.category, question.reference) == (1, "mine", None)
    file.write_text("\n")
    with pytest.raises(DataError, match="holds no questions"):
        load_questions(BenchConfig(path=str(file)))


@pytest.mark.skipif(not SPEC_BENCH.is_file(), reason="needs Spec-Bench's questions")
def test_spec_bench_has_480_questions_and_560_turns(caplog):
    benches = ROOT / "configs/groups/bench.yaml"
    settings = yaml.safe_load(benches.read_text())["spec_bench"]
    del settings["defaults"]
    questions = load_questions(BenchConfig(**settings, path=str(SPEC_BENCH)))
    assert not caplog.records  # its checksum is the right one
    assert len(questions) == 480
    assert sum(len(question.turns) for question in questions) == 560
