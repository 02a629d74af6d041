"""How often adapters are right, from one pass of the target over questions that none has read.

Shapes: Q questions, P positions where a round can begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.evaluation.speedup import interval
from kangaroo.evaluation.tune import replay
from kangaroo.evaluation.tune.bench import trace_bench
from kangaroo.evaluation.tune.recording import Recorder
from kangaroo.evaluation.tune.trace import TracedQuestion, Turn
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError, CorruptFile
from kangaroo.utils.ranges import Count, DraftSize, Positive, Ranged

MEASURES = ("agreement", "ctar1", "compression_rate")


@dataclass
class LearningCurveConfig(Ranged):
    """Which adapters, and on which questions.

    Args:
        runs: a folder of training runs (`train.py -m`), in which each adapter's provenance says how
            much it has read.
        output: folder of the trace and the results; a run that was stopped goes on from there.
        bench: questions that no adapter has read the answers to.
        question_every: take every n-th of these.
        max_new_tokens: of a turn.
        steps: draft tokens, at threshold 0.
        ahead: the fit foretells what so many times the most text would bring.
    """

    runs: str
    output: str
    bench: BenchConfig = field(default_factory=BenchConfig)
    question_every: Count = 1
    max_new_tokens: Count = 128
    steps: DraftSize = 6
    ahead: Positive = 10.0


@dataclass(frozen=True)
class Reader:
    """An adapter and how much it has read.

    Args:
        curve: the adapters of one curve differ in their text alone.
        tokens: different tokens of the assistant.
        epochs: how often it has read them.
    """

    curve: str
    tokens: int
    epochs: int
    folder: Path

    @property
    def name(self) -> str:
        """In the trace."""
        return f"{self.curve}@{self.tokens}"


@dataclass(frozen=True)
class Result:
    """What an adapter is worth on some questions.

    Args:
        values: by measure: `agreement`, the share of positions in the target's text where the
            adapter's likeliest token is the next one; `ctar1` and `compression_rate` of decoding.
        intervals: of these, 95% over questions; None of one question.
        tasks: the values on each task alone.
    """

    reader: Reader
    values: dict[str, float]
    intervals: dict[str, list[float] | None]
    tasks: dict[str, dict[str, float]]


def readers(runs: Path) -> list[Reader]:
    """The adapters below a folder of runs, by curve and then by how much they have read.

    Errors: `ConfigError` where there is none, or two of one curve have read the same;
    `CorruptFile` for an adapter that does not say how it was trained.
    """
    found = []
    for file in sorted(runs.glob(f"**/{adapter_files.CONFIG}")):
        saved = adapter_files.read_config(str(file.parent))
        if not isinstance(saved.architecture, AdapterHeadConfig):
            continue  # another drafter's
        try:
            epochs = saved.training["trainer"]["epochs"]
            read = saved.training["progress"]["assistant_tokens"]
        except KeyError as error:
            raise CorruptFile(
                f"'{file}' does not say {error}: how much the adapter has read is not known. Move "
                "its folder elsewhere, or train it again."
            ) from error
        found.append(Reader(file.parent.name, round(read / epochs), epochs, file.parent))
    found.sort(key=lambda one: (one.curve, one.tokens))
    if not found:
        raise ConfigError(f"runs={runs} has no adapter in it; train some first.")
    for one, other in itertools.pairwise(found):
        if one.name == other.name:
            raise ConfigError(
                f"'{one.folder}' and '{other.folder}' have read the same number of tokens and "
                "would be one point of a curve; move one elsewhere."
            )
    return found


def measure(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    found: Sequence[Reader],
    config: LearningCurveConfig,
    model: dict[str, Any],
) -> list[Result]:
    """All adapters on the same questions, in their order.

    Args:
        model: settings of the target, which a trace is known by.

    Errors: those of loading adapters, `trace_bench` and `load_questions`.
    """
    options = {
        one.name: KangarooConfig(adapter=str(one.folder), steps=config.steps, threshold=0)
        for one in found
    }
    drafters = {name: own.of(lm, *own.load(lm)) for name, own in options.items()}
    recorder = Recorder(lm, drafters)
    settings = {"model": model, "drafters": [own.settings() for own in options.values()]}
    traced = trace_bench(
        recorder,
        tokenizer,
        load_questions(config.bench)[:: config.question_every],
        config.max_new_tokens,
        Path(config.output, "trace"),
        settings,
    )
    return [result(one, traced, config.steps) for one in found]


def result(reader: Reader, traced: Sequence[TracedQuestion], steps: int) -> Result:
    """What one adapter is worth."""
    counts_Q6 = np.array(
        [
            np.sum([counted(turn, reader.name, steps) for turn in question.turns], axis=0)
            for question in traced
        ]
    )
    tasks = np.array([question.task for question in traced])
    return Result(
        reader,
        values(counts_Q6),
        {name: interval(pairs) for name, pairs in pairs_of(counts_Q6).items()},
        {task: values(counts_Q6[tasks == task]) for task in sorted(set(tasks.tolist()))},
    )


def counted(turn: Turn, name: str, steps: int) -> list[int]:
    """Of a turn, for each measure what it divides, and by what."""
    drafted = turn.drafted[name]
    right_P = replay.followed(turn, drafted)[:, 0]
    rounds = replay.chain(turn, drafted, 0.0, steps)
    accepted = sum(count > 0 for count in rounds.accepted)
    written, forwards = sum(rounds.emitted), len(rounds.emitted)
    return [int(right_P.sum()), len(right_P), accepted, forwards, written, forwards]


def pairs_of(counts_Q6: np.ndarray) -> dict[str, np.ndarray]:
    """By measure what it divides and by what, `[Q, 2]`."""
    return {name: counts_Q6[:, 2 * i : 2 * i + 2] for i, name in enumerate(MEASURES)}


def values(counts_Q6: np.ndarray) -> dict[str, float]:
    """The measures over all of these questions; 0 where there was no position."""
    totals = {name: pairs.sum(0) for name, pairs in pairs_of(counts_Q6).items()}
    return {name: float(over / max(under, 1)) for name, (over, under) in totals.items()}
