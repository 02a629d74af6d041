"""Self-synthesis and mixes: what they write, how it resumes, and several processes at it."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import data_cases
import pytest
from data_cases import HEALTHY, NO_FILTERS, settings

from kangaroo.data import store
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.filters import FilterConfig
from kangaroo.data.making import MixConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.models.prompts import prompt_ids, user_header
from kangaroo.utils.errors import CorruptFile, DataError
from kangaroo.utils.ranks import Ranks

target = pytest.fixture(scope="module")(data_cases.target)
brief = pytest.fixture(scope="module")(data_cases.brief)


def test_shards_hold_what_the_engine_writes_for_their_seeds(target, tmp_path):
    """The definition of a shard of one turn: any change here orphans shards that exist."""
    lm, tokenizer = target
    settings(tmp_path / "data", shards=2, seed=5).make(lm, tokenizer)
    engine = Engine(lm, Vanilla(), tokenizer)
    header, end = user_header(tokenizer)
    for number, temperature in enumerate([0.0, 0.7]):
        seeds = range(5 * 1_000_003 + number * 4, 5 * 1_000_003 + number * 4 + 4)
        asked = engine.generate([header] * 4, 8, Sampling(temperature=1.0), 3, seeds, [end])
        lines = (tmp_path / f"data.shards/{number:05d}.jsonl").read_text().splitlines()
        assert len(lines) == 4
        for line, question, seed in zip(lines, asked, seeds, strict=True):
            text = tokenizer.decode(question.tokens, skip_special_tokens=True)
            turns = [{"role": "user", "content": text.removesuffix(end).strip()}]
            prompt = prompt_ids(tokenizer, turns)
            sampling = Sampling(temperature=temperature)
            (said,) = engine.generate([prompt], 12, sampling, seeds=[seed])
            answer = tokenizer.decode(said.tokens, skip_special_tokens=True)
            assert json.loads(line) == {
                "messages": [*turns, {"role": "assistant", "content": answer}],
                "input_ids": prompt + said.tokens,
                "loss_mask": [0] * len(prompt) + [1] * len(said.tokens),
            }


def test_other_filters_put_the_same_shards_together_anew(target, tmp_path):
    settings(tmp_path / "data").make(*target)
    shards = tmp_path / "data.shards"
    before = {p: p.stat().st_mtime_ns for p in shards.glob("*.jsonl")}
    settings(tmp_path / "data", filters=FilterConfig(min_answer_tokens=12)).make(*target)
    samples, about = store.load(tmp_path / "data")
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert all(sum(sample["loss_mask"]) >= 12 for sample in samples)
    assert about["asked"] == 12 == len(samples) + sum(about["dropped"].values())
    (shards / "00001.jsonl").write_text((shards / "00001.jsonl").read_text()[:-40])
    with pytest.raises(CorruptFile, match=r"00001\.jsonl cannot be read.*delete it"):
        settings(tmp_path / "data", filters=FilterConfig(1)).make(*target)


def test_no_turn_is_begun_that_the_context_has_no_room_for(brief, tmp_path, monkeypatch):
    lm, tokenizer = brief
    monkeypatch.setattr(lm.config, "max_position_embeddings", 120)
    settings(tmp_path / "data", shards=1, turns=[50], max_answer_tokens=30).make(lm, tokenizer)
    samples, _ = store.load(tmp_path / "data")
    assert samples and all(len(sample["input_ids"]) <= 120 for sample in samples)


def test_a_mix_holds_the_parts_spread_alike(target, tmp_path):
    paths = [str(tmp_path / "0"), str(tmp_path / "1")]
    for seed, path in enumerate(paths):
        settings(path, seed=seed, filters=NO_FILTERS).make(*target)
    mix = MixConfig(path=str(tmp_path / "mix"), paths=paths, filters=NO_FILTERS)
    mix.make(*target)
    parts = [store.load(tmp_path / f"{seed}") for seed in (0, 1)]
    samples, about = store.load(tmp_path / "mix")
    joined = parts[0][0] + parts[1][0]
    assert samples != joined and sorted(map(str, samples)) == sorted(map(str, joined))
    assert about["settings"]["parts"] == [part["fingerprint"] for _, part in parts]
    made = (tmp_path / "mix" / "provenance.json").stat().st_mtime_ns
    mix.make(*target)
    assert (tmp_path / "mix" / "provenance.json").stat().st_mtime_ns == made
    with pytest.raises(DataError, match="no complete dataset"):
        replace(mix, paths=[*paths, str(tmp_path / "nowhere")]).make(*target)


@pytest.mark.parametrize("teacher", [0, 4])
def test_an_interrupted_synthesis_ends_with_the_same_data(brief, tmp_path, teacher):
    options = {"teacher": teacher, "turns": [1, 3], "filters": HEALTHY}
    settings(tmp_path / "whole", **options).make(*brief)
    settings(tmp_path / "stopped", **options).make(*brief)
    shutil.rmtree(tmp_path / "stopped")
    shards = tmp_path / "stopped.shards"
    text = (shards / "00001.jsonl").read_text()
    (shards / "00001.part").write_text(text[: len(text) // 2])  # with records, between two files
    for number in (1, 2):
        (shards / f"{number:05d}.jsonl").unlink()
    settings(tmp_path / "stopped", **options).make(*brief)
    for path in sorted((tmp_path / "whole.shards").glob("0*")):
        assert (shards / path.name).read_bytes() == path.read_bytes()
    whole, stopped = (store.load(tmp_path / name) for name in ("whole", "stopped"))
    assert list(map(str, whole[0])) == list(map(str, stopped[0]))
    assert whole[1]["fingerprint"] == stopped[1]["fingerprint"]


def test_more_shards_keep_those_that_are_there_and_other_settings_are_refused(target, tmp_path):
    settings(tmp_path / "data", shards=1).make(*target)
    (first,) = (tmp_path / "data.shards").glob("*.jsonl")
    written = first.stat().st_mtime_ns
    few, _ = store.load(tmp_path / "data")
    settings(tmp_path / "data").make(*target)
    more, _ = store.load(tmp_path / "data")
    assert first.stat().st_mtime_ns == written
    assert more[: len(few)] == few and len(more) > len(few)
    with pytest.raises(DataError, match="seed=0 there, 7 now"):
        settings(tmp_path / "data", seed=7).make(*target)


def test_a_model_that_never_ends_a_question_is_an_error(target, tmp_path):
    limits = {"max_question_tokens": 1, "keep_unfinished_questions": False}
    with pytest.raises(DataError, match=r"none of 2 .* usable \(2 no finished question\)"):
        settings(tmp_path / "d", shards=1, shard_size=2, **limits).make(*target)


def test_changed_or_missing_data_is_refused(target, tmp_path):
    with pytest.raises(DataError, match="no complete dataset"):
        store.load(tmp_path / "none")
    settings(tmp_path / "data").make(*target)
    path = tmp_path / "data" / store.PROVENANCE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "0" * 16}))
    with pytest.raises(DataError, match="not what its provenance"):
        store.load(tmp_path / "data")


# ---- several processes ---------------------------------------------------------------------


class Meeting:
    """Where the threads that stand in for processes wait for each other."""

    def __init__(self, world):
        self.barrier, self.values = threading.Barrier(world, timeout=60), [None] * world


@dataclass(frozen=True)
class Threaded(Ranks):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def all_gather(self, value):
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.values)
        self.meeting.barrier.wait()
        return values

    def broadcast(self, value):
        return self.all_gather(value)[0]


def make(config, world):
    """Make a dataset in that many threads."""
    meeting = Meeting(world)
    targets = [
        data_cases.target() for _ in range(world)
    ]  # here, as all threads have one random generator

    def process(rank):
        try:
            config.make(*targets[rank], Threaded(rank, world, meeting))
        except BaseException:
            meeting.barrier.abort()  # as a process that has ended
            raise

    with ThreadPoolExecutor(world, thread_name_prefix="rank") as pool:
        for done in [pool.submit(process, rank) for rank in range(world)]:
            done.result()


def written(tmp_path, name):
    """Shards, the dataset's table and records."""
    patterns = ("*.jsonl", "*.arrow", "*.npy")
    folders = (tmp_path / f"{name}.shards", tmp_path / name)
    found = [path for folder in folders for pattern in patterns for path in folder.glob(pattern)]
    return {path.name: path.read_bytes() for path in found}


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("kind", ["synthesis", "conversations"])
def test_any_number_of_processes_write_the_same_bytes(kind, world, tmp_path, monkeypatch):
    if kind == "synthesis":
        config = settings(tmp_path / "alone", teacher=3)
    else:
        talks = [{"messages": [{"role": "user", "content": f"Say {i}."}]} for i in range(10)]
        (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
        sizes = {"shard_size": 2, "batch_size": 2, "max_answer_tokens": 12}
        source, path = str(tmp_path / "talks.jsonl"), str(tmp_path / "alone")
        config = ConversationsConfig(path=path, source=source, **sizes)
    make(config, 1)
    write, writers = store.Shards.write, {}  # who writes which shard

    def noted(self, name, samples):
        writers[name] = int(threading.current_thread().name.removeprefix("rank_"))
        write(self, name, samples)

    monkeypatch.setattr(store.Shards, "write", noted)
    make(replace(config, path=str(tmp_path / "shared")), world)
    assert written(tmp_path, "shared") == written(tmp_path, "alone") != {}
    assert [writers[name] for name in sorted(writers)] == [i % world for i in range(len(writers))]
