"""Run an evaluation: every question by every method in turn, then the artefacts from the records.

Read it top to bottom: configuration, the run, one question.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import Engine
from kangaroo.errors import ConfigError, DataError, NotLossless, PromptError
from kangaroo.evaluation import records as store
from kangaroo.evaluation import report, summary
from kangaroo.evaluation.bench import BenchConfig, Question, fingerprint, load_questions
from kangaroo.evaluation.footprint import footprint
from kangaroo.evaluation.lossless import fork
from kangaroo.evaluation.methods import Method, by_engine, by_transformers
from kangaroo.evaluation.metrics import metrics, scalars
from kangaroo.evaluation.records import METHOD, Record, Turn
from kangaroo.model import LM
from kangaroo.prompts import Message, prompt_ids
from kangaroo.ranks import Ranks
from kangaroo.sampling import Rule, Sampling

logger = logging.getLogger(__name__)


class Baseline(Enum):
    """What the method is timed against."""

    vanilla = "vanilla"  # the same engine, proposing nothing
    hf = "hf"  # transformers' generate


@dataclass
class EvaluateConfig:
    """What is asked and how it is answered.

    Args:
        output: folder of records and artefacts; a run that was stopped goes on from there.
        question_begin, question_end: indices into the bench's list, the end excluded (Spec-Bench's
            flags of these names); None is the end of the list.
        question_every: of these, every n-th: Spec-Bench is sorted by task, so 20 takes 4 of each.
        max_new_tokens: a turn; None takes the bench's own.
        seed: with a question's id and turn it fixes the sampled text; `sampling.seed` is not read.
        baselines: each answers every turn from the same prompt as the method.
        warmup: the first question is answered this often by every method, and discarded.
        resume: false forgets what `output` holds.
    """

    output: str
    bench: BenchConfig = field(default_factory=BenchConfig)
    question_begin: int = 0
    question_end: int | None = None
    question_every: int = 1
    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    baselines: list[Baseline] = field(default_factory=lambda: list(Baseline))
    warmup: int = 3
    resume: bool = True


def evaluate(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Drafter,
    config: EvaluateConfig,
    *,
    model_name: str,
    drafter_name: str,
    settings: dict[str, Any] | None = None,
    made_by: dict[str, Any] | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Answer the bench and write the artefacts to `config.output`; returns the summary.

    Args:
        settings: whatever else fixes the result (the model's and the drafter's settings, a hash of
            an adapter's weights); a run is resumed under the same settings only.
        made_by: what it took to make the drafter (`DrafterConfig.made_by`).
        log: called after each question with the metrics of all that are answered.
        ranks: the processes that share the questions out, of which the first writes the artefacts.
            None: there is only this one.

    Errors: `NotLossless`, after all artefacts are written, where a text leaves vanilla's and
    rounding does not explain it; `ConfigError`, `DataError`, `CorruptFile`, `PromptError`.
    """
    output, ranks = Path(config.output), ranks or Ranks()
    questions, limit = asked(config)
    names = {"model": model_name, "drafter": drafter_name}
    about = names | _settings(lm, config, questions, limit) | _flat(settings or {})
    cost = {"parameters": footprint(drafter, [lm]).parameters, "training": made_by or {}}
    if ranks.is_first:
        store.enter(output, about, cost, config.resume)
    ranks.wait()  # no rank reads before the folder is this run's
    examiner = Examiner(lm, tokenizer, drafter, config, limit)
    done = store.read(output)
    if done:
        logger.info("%d of %d questions are in %s already", len(done), len(questions), output)
    examiner.share(questions, done, output, ranks, log)
    ranks.wait()
    found = store.read(output)
    if len(found) < len(questions):
        raise DataError(
            f"'{output}' holds {len(found)} of {len(questions)} questions after the run; under "
            "torchrun it must be a folder that all ranks share."
        )
    result = summary.summarise(found, store.begun(output))
    if ranks.is_first:
        summary.write(found, result, output)
        report.write(result, output)
    ranks.wait()
    if ranks.is_first:  # the others wait while it reports
        check_lossless(result, output)
    return result


def asked(config: EvaluateConfig) -> tuple[list[Question], int]:
    """The questions of a run, and the most new tokens of a turn.

    Errors: `ConfigError` for settings that leave nothing to ask or to write; those of
    `load_questions`.
    """
    all_questions = load_questions(config.bench)
    if config.question_every < 1:
        raise ConfigError(f"question_every must be 1 or more, not {config.question_every}.")
    questions = all_questions[config.question_begin : config.question_end : config.question_every]
    if not questions:
        raise ConfigError(
            f"question_begin={config.question_begin}, question_end={config.question_end} select "
            f"none of the {len(all_questions)} questions of {config.bench.name}."
        )
    limit = config.max_new_tokens
    if limit is None:
        limit = config.bench.max_new_tokens
    if limit < 1:
        raise ConfigError(f"max_new_tokens must be 1 or more, not {limit}.")
    return questions, limit


def check_lossless(result: dict[str, Any], output: Path) -> None:
    """Raise `NotLossless` where a fork of a summary is a bug."""
    bugs = [fork for fork in result["lossless"]["forks"] if fork["label"] == "bug"]
    if bugs:
        raise NotLossless(
            f"{len(bugs)} of {result['lossless']['turns']} turns leave vanilla's text where "
            f"rounding does not explain it, the first at question {bugs[0]['question_id']}, turn "
            f"{bugs[0]['turn']}, token {bugs[0]['position']} (gap {bugs[0]['gap']}). The drafter "
            f"or the engine has a bug; all forks are in {output / 'summary.json'}."
        )


class Examiner:
    """Asks questions of the method and its baselines."""

    def __init__(
        self,
        lm: LM,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter,
        config: EvaluateConfig,
        limit: int,
    ):
        self.lm, self.tokenizer, self.config, self.limit = lm, tokenizer, config, limit
        sampling = config.sampling
        self.engine = Engine(lm, drafter)
        self.methods: dict[str, Method] = {METHOD: by_engine(self.engine, tokenizer, sampling)}
        if Baseline.vanilla in config.baselines:
            self.methods["vanilla"] = by_engine(Engine(lm, Vanilla()), tokenizer, sampling)
        if Baseline.hf in config.baselines:
            self.methods["hf"] = by_transformers(lm, tokenizer, sampling)
        comparable = sampling.greedy or sampling.rule is Rule.match
        self.compares = comparable and "vanilla" in self.methods

    def share(
        self,
        questions: list[Question],
        done: list[Record],
        output: Path,
        ranks: Ranks,
        log: Callable[[dict[str, float]], None] | None,
    ) -> None:
        """Answer this rank's share of the questions, those aside that are answered already."""
        known = {record.question_id for record in done}
        own = list(enumerate(questions[ranks.rank :: ranks.world]))
        todo = [(i, question) for i, question in own if question.question_id not in known]
        if not todo:
            return
        for _ in range(self.config.warmup):
            self.ask(questions[0])
        writer = store.Writer(output, ranks.rank)
        answered = len(own) - len(todo)
        bar = tqdm(
            todo, "", len(own), initial=answered, unit="question", disable=not ranks.is_first
        )
        for i, question in bar:
            # who goes first alternates, so that a machine that slows down favours nobody
            record = self.ask(question, reverse=i % 2 == 1)
            writer.append(record)
            done = [*done, record]
            so_far = scalars(metrics(done))
            if log is not None:
                log(so_far)
            bar.set_postfix({k: so_far[k] for k in ("speedup", "compression_rate") if k in so_far})
        writer.close()

    def ask(self, question: Question, reverse: bool = False) -> Record:
        """All turns by all methods; the conversation goes on with the method's own answers."""
        messages: list[Message] = []
        turns = []
        for number, text in enumerate(question.turns):
            messages.append(Message(role="user", content=text))
            turns.append(self.turn(question, number, messages, reverse))
            messages.append(Message(role="assistant", content=turns[-1].runs[METHOD].text))
        held = footprint(self.engine.drafter, [self.lm, self.engine.batch]).bytes
        return Record(
            question.question_id, question.category, turns, finished=time.time(), drafter_bytes=held
        )

    def turn(self, question: Question, number: int, messages: list[Message], reverse: bool) -> Turn:
        """One turn by all methods.

        Errors: `PromptError` where the conversation fills the model's context.
        """
        prompt = prompt_ids(self.tokenizer, messages)
        room = self.lm.context - len(prompt)
        if room < 1:
            raise PromptError(
                f"question {question.question_id}, turn {number} has {len(prompt)} tokens, and the "
                f"model's context is {self.lm.context}. Leave it out (question_begin, "
                "question_end), or lower max_new_tokens if the answer before it is what is long."
            )
        limit = min(self.limit, room)
        seed = self.config.seed + 1000 * question.question_id + number
        names = list(reversed(self.methods)) if reverse else list(self.methods)
        runs = {name: self.methods[name](prompt, limit, seed) for name in names}
        runs = {name: runs[name] for name in self.methods}
        forked = None
        if self.compares:
            texts = runs[METHOD].tokens, runs["vanilla"].tokens
            forked = fork(self.lm, prompt, *texts, self.config.sampling, seed)
        return Turn(len(prompt), limit, runs, forked)


def _settings(
    lm: LM, config: EvaluateConfig, questions: list[Question], limit: int
) -> dict[str, Any]:
    """What fixes the result, by name."""
    cuda = lm.device.type == "cuda"
    return {
        "bench": config.bench.name,
        "bench.fingerprint": fingerprint(questions),
        "question_begin": config.question_begin,
        "question_end": config.question_end,
        "question_every": config.question_every,
        "max_new_tokens": limit,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(lm.device) if cuda else lm.device.type,
        **_flat({"sampling": asdict(config.sampling)}),
        "seed": config.seed,
        "baselines": [baseline.value for baseline in config.baselines],
        "warmup": config.warmup,
    }


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, as they are written on the command line."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value.value if isinstance(value, Enum) else value
    return flat
