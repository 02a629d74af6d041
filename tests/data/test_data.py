"""Self-synthesis and mixes: what they write and keep of the target's distributions, how it resumes,
and several processes at it.

Shapes: M tokens of the assistant, K likeliest tokens of each, V vocabulary.
"""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import data_cases
import numpy as np
import pytest
import torch
from data_cases import NO_FILTERS, settings
from helpers import forward_logits

from kangaroo import ConfigError, CorruptFile, DataError, Sampling
from kangaroo.data import store
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.filters import FilterConfig, answer_spans
from kangaroo.data.making import MixConfig
from kangaroo.data.writing import Dialogue
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import topk_logits
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, StepRecord
from kangaroo.models.loading import TINY
from kangaroo.models.prompts import prompt_ids, user_header
from kangaroo.utils.ranks import Ranks

target = pytest.fixture(scope="module")(data_cases.target)
brief = pytest.fixture(scope="module")(data_cases.brief)
HALF = {"rtol": 1e-3, "atol": 1e-7}  # float16 keeps 11 bits


def test_shards_hold_what_the_engine_writes_for_their_seeds(target, tmp_path):
    """The definition of a shard of one turn: any change here orphans shards that exist."""
    lm, tokenizer = target
    settings(tmp_path / "data", shards=2, seed=5).make(lm, tokenizer)
    engine = Engine(lm, Vanilla(), tokenizer)
    header, end = user_header(tokenizer)
    for number, temperature in enumerate([0.0, 0.7]):
        seeds = range(5 * 1_000_003 + number * 4, 5 * 1_000_003 + number * 4 + 4)
        questions = engine.generate([header] * 4, 8, Sampling(temperature=1.0), 3, seeds, [end])
        lines = (tmp_path / f"data.shards/{number:05d}.jsonl").read_text().splitlines()
        assert len(lines) == 4
        for line, question, seed in zip(lines, questions, seeds, strict=True):
            text = tokenizer.decode(question.tokens, skip_special_tokens=True)
            turns = [{"role": "user", "content": text.removesuffix(end).strip()}]
            prompt = prompt_ids(tokenizer, turns)
            (written,) = engine.generate([prompt], 12, Sampling(temperature), seeds=[seed])
            answer = tokenizer.decode(written.tokens, skip_special_tokens=True)
            assert json.loads(line) == {
                "messages": [*turns, {"role": "assistant", "content": answer}],
                "input_ids": prompt + written.tokens,
                "loss_mask": [0] * len(prompt) + [1] * len(written.tokens),
            }


def times(tmp_path):
    return {file: file.stat().st_mtime_ns for file in (tmp_path / "data.shards").glob("*.jsonl")}


def test_shards_stay_for_more_and_other_filters_and_other_settings_are_refused(target, tmp_path):
    settings(tmp_path / "data", shards=1).make(*target)
    first, (few, _) = times(tmp_path), store.load(tmp_path / "data")
    settings(tmp_path / "data").make(*target)
    more, _ = store.load(tmp_path / "data")
    before = times(tmp_path)
    assert first.items() < before.items()
    assert more[: len(few)] == few and len(more) > len(few)
    with pytest.raises(ConfigError, match="seed=0 there, 7 now"):
        settings(tmp_path / "data", seed=7).make(*target)
    with pytest.raises(ConfigError, match="teacher=0 there, 4 now"):
        settings(tmp_path / "data", teacher=4).make(*target)
    settings(tmp_path / "data", filters=FilterConfig(min_answer_tokens=12)).make(*target)
    samples, about = store.load(tmp_path / "data")
    assert times(tmp_path) == before
    assert all(sum(sample["loss_mask"]) >= 12 for sample in samples)
    assert about["asked"] == 12 == len(samples) + sum(about["dropped"].values())
    shard = tmp_path / "data.shards/00001.jsonl"
    shard.write_text(shard.read_text()[:-40])
    with pytest.raises(CorruptFile, match=r"00001\.jsonl cannot be read.*Delete it"):
        settings(tmp_path / "data", filters=FilterConfig(1)).make(*target)


def test_no_turn_is_begun_that_the_context_has_no_room_for(brief, tmp_path, monkeypatch):
    lm, tokenizer = brief
    monkeypatch.setattr(lm.config, "max_position_embeddings", 120)
    settings(tmp_path / "data", shards=1, turns=[50], max_answer_tokens=30).make(lm, tokenizer)
    samples, _ = store.load(tmp_path / "data")
    assert samples and all(len(sample["input_ids"]) <= 120 for sample in samples)


def test_a_mix_holds_the_parts_spread_alike_and_the_records_that_all_have(target, tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for seed, (path, count) in enumerate(zip(paths, (4, 4, 2), strict=True)):
        settings(path, seed=seed, teacher=count, filters=NO_FILTERS).make(*target)
    first, second, *_ = parts = [str(path) for path in paths]
    mix = MixConfig(path=str(tmp_path / "mix"), paths=[first, second], filters=NO_FILTERS)
    mix.make(*target)
    (ours, about_ours), (theirs, about_theirs) = map(store.load, paths[:2])
    records = {str(sample["input_ids"]): sample["teacher"] for sample in ours + theirs}
    samples, about = store.load(tmp_path / "mix")
    texts = [str(sample["input_ids"]) for sample in samples]
    assert texts != list(records) and sorted(texts) == sorted(records)
    for sample in samples:
        assert np.array_equal(sample["teacher"], records[str(sample["input_ids"])])
    assert about["teacher"] == {"model": TINY, "likeliest": 4}
    assert about["settings"]["parts"] == [about_ours["fingerprint"], about_theirs["fingerprint"]]
    provenance = tmp_path / "mix/provenance.json"
    time = provenance.stat().st_mtime_ns
    mix.make(*target)
    assert provenance.stat().st_mtime_ns == time
    replace(mix, path=str(tmp_path / "all"), paths=parts).make(*target)
    samples, about = store.load(tmp_path / "all")
    assert about["teacher"] is None and not any("teacher" in sample for sample in samples)
    with pytest.raises(DataError, match="no complete dataset"):
        replace(mix, paths=[*parts, str(tmp_path / "nowhere")]).make(*target)


@pytest.mark.parametrize("teacher", [0, 4])
def test_an_interrupted_synthesis_ends_with_the_same_data(brief, tmp_path, teacher):
    options = {"teacher": teacher, "turns": [1, 3], "filters": NO_FILTERS}
    settings(tmp_path / "whole", **options).make(*brief)
    shards = shutil.copytree(tmp_path / "whole.shards", tmp_path / "stopped.shards")
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


def test_a_model_that_never_ends_a_question_is_an_error(target, tmp_path):
    limits = {"max_question_tokens": 1, "keep_unfinished_questions": False}
    with pytest.raises(DataError, match=r"none of 2 .* usable \(2 no finished question\)"):
        settings(tmp_path / "d", shards=1, shard_size=2, **limits).make(*target)


def generation(text, numbers):
    """A generation whose records are told apart by their likeliest token."""
    tokens = np.array(numbers)[:, None]
    kept = topk_logits.records(tokens, np.ones_like(tokens), 64)
    return Generation(text, [StepRecord(text, 0, 0, 0.0, 0.0, 0.0, kept)])


def test_earlier_answers_keep_their_records_as_far_as_their_tokens_are_the_same():
    for question, again, expected in (
        *((1, [7, 8, 9], [1, 2, 3]), (1, [7, 5, 9], [1, 2, 0]), (1, [7], [1]), (1, [4], [1])),
        (5, [7, 8, 9], [0, 0, 0]),  # another question
    ):
        dialogue = Dialogue(0)
        dialogue.append([1, 2], [0, 0], generation([7, 8, 9], [1, 2, 3]))
        assert dialogue.topk_logits["tokens"][:, 0].tolist() == [1, 2, 3]
        mask = [0, 0, *[1] * len(again), 0]
        dialogue.append([question, 2, *again, 3], mask, generation([6, 6], [4, 5]))
        assert dialogue.topk_logits["tokens"][:, 0].tolist() == [*expected, 4, 5]
        has_record = [number > 0 for number in expected]
        assert topk_logits.nonempty(dialogue.topk_logits).tolist() == [*has_record, True, True]


@pytest.mark.parametrize("native", [True, False])
def test_the_records_of_a_dataset_are_those_of_a_forward_over_its_text(native, tmp_path):
    lm, _ = brief = data_cases.brief(native)
    fields = {"shards": 2, "shard_size": 6, "turns": [1, 3], "teacher": 4, "max_answer_tokens": 30}
    settings(tmp_path / "data", filters=NO_FILTERS, **fields).make(*brief)
    samples, about = store.load(tmp_path / "data")
    assert max(len(sample["messages"]) for sample in samples) == 6
    has_records = []
    for sample in samples:
        mask = torch.tensor(sample["loss_mask"], dtype=torch.bool)
        p_MV = forward_logits(lm, sample["input_ids"]).softmax(-1)[:-1][mask[1:]]
        is_known = topk_logits.nonempty(sample["teacher"])
        assert len(is_known) == mask.sum()
        has_records += is_known.tolist()
        _, chances_MK = topk_logits.tensors(sample["teacher"][is_known])
        torch.testing.assert_close(chances_MK, p_MV[is_known].topk(4).values, **HALF)
        last = answer_spans(sample["loss_mask"])[-1]
        assert is_known[-(last[1] - last[0]) :].all()  # of the last answer all are there
    assert 0.5 < np.mean(has_records) <= 1 and about["teacher"] == {"model": TINY, "likeliest": 4}

    whole = {str(s["messages"][0]): s for s in samples}
    strict = FilterConfig(min_answer_tokens=9, max_repetition=1, near_duplicate=1)
    settings(tmp_path / "data", filters=strict, **fields).make(*brief)
    fewer, about = store.load(tmp_path / "data")
    assert any(name.startswith("later turns") for name in about["dropped"])
    for sample in fewer:
        before = whole[str(sample["messages"][0])]["teacher"]
        assert len(sample["teacher"]) == sum(sample["loss_mask"])
        assert np.array_equal(sample["teacher"], before[: len(sample["teacher"])])


def test_records_that_are_not_those_of_the_samples_are_named(target, tmp_path):
    settings(tmp_path / "data", teacher=4).make(*target)
    path = tmp_path / "data" / store.RECORDS
    kept = np.load(path)
    np.save(path, kept[:-1])
    with pytest.raises(CorruptFile, match=r"records for \d+ tokens of the assistant"):
        store.load(tmp_path / "data")
    kept["chances"][3, 0] /= 2
    np.save(path, kept)
    with pytest.raises(DataError, match="not what its provenance"):
        store.load(tmp_path / "data")
    (tmp_path / "data.shards/00001.npy").unlink()
    with pytest.raises(CorruptFile, match=r"Delete .*00001\.jsonl"):
        settings(tmp_path / "data", teacher=4, filters=NO_FILTERS).make(*target)


@dataclass(frozen=True)
class Threaded(Ranks):
    """A thread that stands in for a process; all wait for each other at the barrier."""

    barrier: threading.Barrier | None = None
    values: list = field(default_factory=list)  # of all threads

    def all_gather(self, value):
        self.values[self.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def broadcast(self, value):
        return self.all_gather(value)[0]


def make(config, world):
    barrier, values = threading.Barrier(world, timeout=60), [None] * world
    targets = [data_cases.target() for _ in range(world)]  # threads share one random generator

    def process(rank):
        try:
            config.make(*targets[rank], Threaded(rank, world, barrier, values))
        except BaseException:
            barrier.abort()  # as a process that has ended
            raise

    with ThreadPoolExecutor(world, thread_name_prefix="rank") as pool:
        list(pool.map(process, range(world)))


def written(tmp_path, name):
    files = (x for x in tmp_path.glob(f"{name}*/*") if x.suffix in (".jsonl", ".arrow", ".npy"))
    return {file.name: file.read_bytes() for file in files}


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
