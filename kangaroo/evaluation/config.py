"""What an evaluation is asked for: settings, the methods, which questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from kangaroo.drafters.base import Drafter, DrafterConfig
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.bench import BenchConfig, Question, fingerprint, load_questions
from kangaroo.evaluation.records import BASELINES
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import flat
from kangaroo.utils.ranges import Count, CountOrZero, Index, Ranged, Seed


class Baseline(Enum):
    """What the methods are timed against."""

    vanilla = "vanilla"  # the same engine, proposing nothing
    hf = "hf"  # transformers' generate


@dataclass
class EvaluateConfig(Ranged):
    """What is asked and how it is answered.

    Args:
        output: folder of records and artefacts; a run that was stopped goes on from there.
        task: ask only the questions of this task; None is all.
        question_begin, question_end: indices into the bench's list, the end excluded, None all, as
            Spec-Bench's flags.
        question_every: of these, every n-th: Spec-Bench is sorted by task, so 20 takes 4 of each.
        max_new_tokens: a turn; None takes the bench's own.
        seed: with a question's id and turn it fixes the sampled text; `sampling.seed` is not read.
        baselines: each answers every turn from the same prompt as the methods.
        hf_every: of the questions asked, transformers, which takes longest, answers every n-th.
        warmup: the first question is answered this often by every method, and discarded.
        resume: false forgets what `output` holds.
    """

    output: str
    bench: BenchConfig = field(default_factory=BenchConfig)
    task: str | None = None
    question_begin: Index = 0
    question_end: Index | None = None
    question_every: Count = 1
    max_new_tokens: Count | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: Seed = 0
    baselines: list[Baseline] = field(default_factory=lambda: list(Baseline))
    hf_every: Count = 1
    warmup: CountOrZero = 3
    resume: bool = True


@dataclass(frozen=True)
class MethodSpec:
    """A drafter, the settings under which alone its run is resumed, and what it took to make it."""

    name: str
    drafter: Drafter
    settings: dict[str, Any] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, drafter: DrafterConfig, lm: TargetModel, model: dict[str, Any]
    ) -> MethodSpec:
        """Of a drafter's config; `model` are the target's settings."""
        settings = {"model": model, "drafter": drafter.settings()}
        return cls(name, drafter.build(lm), settings, drafter.made_by())


def questions_of(config: EvaluateConfig) -> tuple[list[Question], int]:
    """The questions of a run, and the most new tokens of a turn. Errors: `ConfigError` for none,
    those of `load_questions`."""
    questions = load_questions(config.bench)
    if config.task is not None:
        tasks = list(dict.fromkeys(question.task for question in questions))
        if config.task not in tasks:
            raise ConfigError(
                f"{config.bench.name} has no task '{config.task}'; it has {', '.join(tasks)}."
            )
        questions = [question for question in questions if question.task == config.task]
    chosen = questions[config.question_begin : config.question_end : config.question_every]
    if not chosen:
        raise ConfigError(
            f"question_begin={config.question_begin}, question_end={config.question_end} select "
            f"none of the {len(questions)} questions of {config.bench.name}."
        )
    limit = config.max_new_tokens
    return chosen, config.bench.max_new_tokens if limit is None else limit


def folders(methods: Sequence[MethodSpec], config: EvaluateConfig) -> list[Path]:
    """Where the results of each are: in `output`, of several in a folder of its name there."""
    if len(methods) == 1:
        return [Path(config.output)]
    names = [method.name for method in methods]
    counts = Counter(names + [BASELINES[baseline.value] for baseline in config.baselines])
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"two of the methods are called '{twice[0]}'; call a further drafter otherwise: "
            "+drafter@more.NAME=... (the baselines are measured anyway)."
        )
    return [Path(config.output, name) for name in names]


def settings_of(
    lm: TargetModel, config: EvaluateConfig, questions: list[Question], limit: int
) -> dict[str, Any]:
    """What fixes the result, by name."""
    cuda = lm.device.type == "cuda"
    which = ("task", "question_begin", "question_end", "question_every")
    how = ("seed", "hf_every", "warmup")
    return {
        "bench": config.bench.name,
        "bench.fingerprint": fingerprint(questions),
        **{name: getattr(config, name) for name in which},
        "max_new_tokens": limit,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(lm.device) if cuda else lm.device.type,
        **flat({"sampling": asdict(config.sampling)}),
        **{name: getattr(config, name) for name in how},
        "baselines": [baseline.value for baseline in config.baselines],
    }
