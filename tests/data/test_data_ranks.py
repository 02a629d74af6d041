"""Several processes write one dataset: what each writes, and that the bytes do not show it."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from data_cases import settings, target

from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.store import Shards
from kangaroo.utils.ranks import Ranks


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
    targets = [target() for _ in range(world)]  # here, as all threads have one random generator

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


def written_by_rank(monkeypatch):
    """Who writes which shard, as it happens."""
    write, writers = Shards.write, {}

    def noted(self, name, samples):
        writers[name] = threading.current_thread().name.removeprefix("rank_")
        write(self, name, samples)

    monkeypatch.setattr(Shards, "write", noted)
    return writers


@pytest.fixture
def conversations(tmp_path):
    talks = [{"messages": [{"role": "user", "content": f"Say {i}."}]} for i in range(10)]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))

    def config(name):
        return ConversationsConfig(
            path=str(tmp_path / name),
            source=str(tmp_path / "talks.jsonl"),
            shard_size=2,
            batch_size=2,
            max_answer_tokens=12,
        )

    return config


@pytest.mark.parametrize("world", [2, 5])
def test_any_number_of_processes_write_the_same_bytes(world, tmp_path, conversations, monkeypatch):
    kinds = {
        "synthesis": lambda name: settings(tmp_path / name, shards=3, teacher=3),
        "conversations": conversations,
    }
    for kind, config in kinds.items():
        make(config(f"{kind}-alone"), 1)
        writers = written_by_rank(monkeypatch)
        make(config(f"{kind}-shared"), world)
        monkeypatch.undo()
        assert written(tmp_path, f"{kind}-shared") == written(tmp_path, f"{kind}-alone") != {}
        assert [int(writers[name]) % world for name in sorted(writers)] == [
            number % world for number in range(len(writers))
        ]
