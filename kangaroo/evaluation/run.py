"""Run an evaluation: every question by every method in turn, then the artefacts from the records.

Read it top to bottom: configuration, the run, one question. What is measured are one or several
drafters, the *contestants*, and the baselines that they share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
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
from kangaroo.evaluation.bench import BenchConfig, Question, fingerprint, load_questions, task_of
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
        task: ask only the questions of this task (`bench.task_of`); None is all.
        question_begin, question_end: indices into the bench's list, the end excluded (Spec-Bench's
            flags of these names); None is the end of the list.
        question_every: of these, every n-th: Spec-Bench is sorted by task, so 20 takes 4 of each.
        max_new_tokens: a turn; None takes the bench's own.
        seed: with a question's id and turn it fixes the sampled text; `sampling.seed` is not read.
        baselines: each answers every turn from the same prompt as the method.
        hf_every: of the questions asked, transformers answers every n-th: it takes most of the time
            of a run, and a part of the questions tells its speed as well.
        warmup: the first question is answered this often by every method, and discarded.
        resume: false forgets what `output` holds.
    """

    output: str
    bench: BenchConfig = field(default_factory=BenchConfig)
    task: str | None = None
    question_begin: int = 0
    question_end: int | None = None
    question_every: int = 1
    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    baselines: list[Baseline] = field(default_factory=lambda: list(Baseline))
    hf_every: int = 1
    warmup: int = 3
    resume: bool = True


@dataclass(frozen=True)
class Contestant:
    """A drafter that is measured.

    Args:
        name: what results call it.
        settings: whatever else fixes the result (the model's and the drafter's settings, a hash of
            an adapter's weights); a run is resumed under the same settings only.
        made_by: what it took to make the drafter (`DrafterConfig.made_by`).
    """

    name: str
    drafter: Drafter
    settings: dict[str, Any] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)


def evaluate(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    contestants: Sequence[Contestant],
    config: EvaluateConfig,
    *,
    model_name: str,
    log: Callable[[dict[str, float]], None] | None = None,
    ranks: Ranks | None = None,
) -> list[dict[str, Any]]:
    """Answer the bench, write each contestant's artefacts to its folder (`folders`), and return
    the summaries. Where there are several, the baselines get a summary too, as methods.

    Args:
        log: called after each question with the metrics of all that are answered; of several
            contestants as `name.metric`.
        ranks: the processes that share the questions out, of which the first writes the artefacts.
            None: there is only this one.

    Errors: `NotLossless`, after all artefacts are written, where a text leaves vanilla's and
    rounding does not explain it; `ConfigError`, `DataError`, `CorruptFile`, `PromptError`.
    """
    ranks, places = ranks or Ranks(), folders(contestants, config)
    questions, limit = asked(config)
    fixed = _settings(lm, config, questions, limit)
    if ranks.is_first:
        for one, place in zip(contestants, places, strict=True):
            about = {"model": model_name, "drafter": one.name} | fixed | _flat(one.settings)
            parameters = footprint(one.drafter, [lm]).parameters
            cost = {"parameters": parameters, "training": one.made_by}
            store.enter(place, about, cost, config.resume)
    ranks.wait()  # no rank reads before the folders are this run's
    examiner = Examiner(lm, tokenizer, contestants, config, limit)
    examiner.share(questions, places, ranks, log)
    ranks.wait()
    results = [_reported(place, questions, ranks) for place in places]
    ranks.wait()
    if ranks.is_first:  # the others wait while it reports
        if len(places) > 1:
            for baseline in config.baselines:
                summary.write_baseline(baseline.value, places[0], Path(config.output))
        for result, place in zip(results, places, strict=True):
            check_lossless(result, place)
    return results


def folders(contestants: Sequence[Contestant], config: EvaluateConfig) -> list[Path]:
    """Where the results of each are: in `output`, or where there are several in a folder of its own
    name there.

    Errors: `ConfigError` for a name that is another's.
    """
    if len(contestants) == 1:
        return [Path(config.output)]
    names = [one.name for one in contestants]
    taken = [*names, *(summary.BASELINES[baseline.value] for baseline in config.baselines)]
    for name in names:
        if taken.count(name) > 1:
            raise ConfigError(
                f"two of the methods are called '{name}'; call a further drafter otherwise: "
                "+drafter@more.NAME=... (the baselines are measured anyway)."
            )
    return [Path(config.output, name) for name in names]


def _reported(folder: Path, questions: list[Question], ranks: Ranks) -> dict[str, Any]:
    """The summary of a complete run; the first rank writes the artefacts.

    Errors: `DataError` where questions are missing.
    """
    found = store.read(folder)
    if len(found) < len(questions):
        raise DataError(
            f"'{folder}' holds {len(found)} of {len(questions)} questions after the run; under "
            "torchrun it must be a folder that all ranks share."
        )
    result = summary.summarise(found, store.begun(folder))
    if ranks.is_first:
        summary.write(found, result, folder)
        report.write(result, folder)
    return result


def asked(config: EvaluateConfig) -> tuple[list[Question], int]:
    """The questions of a run, and the most new tokens of a turn.

    Errors: `ConfigError` for settings that leave nothing to ask or to write; those of
    `load_questions`.
    """
    all_questions = load_questions(config.bench)
    if config.task is not None:
        tasks = list(dict.fromkeys(task_of(question.category) for question in all_questions))
        if config.task not in tasks:
            raise ConfigError(
                f"{config.bench.name} has no task '{config.task}'; it has {', '.join(tasks)}."
            )
        all_questions = [x for x in all_questions if task_of(x.category) == config.task]
    for name, every in {
        "question_every": config.question_every,
        "hf_every": config.hf_every,
    }.items():
        if every < 1:
            raise ConfigError(f"{name} must be 1 or more, not {every}.")
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
    """Asks questions of the contestants and the baselines."""

    def __init__(
        self,
        lm: LM,
        tokenizer: PreTrainedTokenizerBase,
        contestants: Sequence[Contestant],
        config: EvaluateConfig,
        limit: int,
    ):
        self.lm, self.tokenizer, self.config, self.limit = lm, tokenizer, config, limit
        sampling, self.contestants = config.sampling, contestants
        self.engines = [Engine(lm, one.drafter) for one in contestants]
        # contestants by their index, baselines by their name
        self.methods: dict[int | str, Method] = {
            i: by_engine(engine, tokenizer, sampling) for i, engine in enumerate(self.engines)
        }
        if Baseline.vanilla in config.baselines:
            self.methods["vanilla"] = by_engine(Engine(lm, Vanilla()), tokenizer, sampling)
        if Baseline.hf in config.baselines:
            self.methods["hf"] = by_transformers(lm, tokenizer, sampling)
        comparable = sampling.greedy or sampling.rule is Rule.match
        self.compares = comparable and "vanilla" in self.methods

    def share(
        self,
        questions: list[Question],
        places: Sequence[Path],
        ranks: Ranks,
        log: Callable[[dict[str, float]], None] | None,
    ) -> None:
        """Answer this rank's share of the questions, those aside that all contestants have answered
        already.
        """
        found = [store.read(place) for place in places]
        known = set.intersection(*({record.question_id for record in some} for some in found))
        if known:
            told = "%d of %d questions are in %s already"
            logger.info(told, len(known), len(questions), self.config.output)
        done = [[record for record in some if record.question_id in known] for some in found]
        own = list(enumerate(questions))[ranks.rank :: ranks.world]
        todo = [(at, question) for at, question in own if question.question_id not in known]
        if not todo:
            return
        for _ in range(self.config.warmup):
            self.ask(questions[0], list(self.methods))
        writers = [store.Writer(place, ranks.rank) for place in places]
        answered = len(own) - len(todo)
        bar = tqdm(
            todo, "", len(own), initial=answered, unit="question", disable=not ranks.is_first
        )
        for at, question in bar:
            records = self.ask(question, self.order(at, ranks.world))
            for writer, some, record in zip(writers, done, records, strict=True):
                writer.append(record)
                some.append(record)
            so_far = [scalars(metrics(some)) for some in done]
            if log is not None:
                log(self._named(so_far))
            first = so_far[0]
            bar.set_postfix({k: first[k] for k in ("speedup", "compression_rate") if k in first})
        for writer in writers:
            writer.close()

    def _named(self, so_far: list[dict[str, float]]) -> dict[str, float]:
        """The numbers of all contestants in one."""
        if len(so_far) == 1:
            return so_far[0]
        pairs = zip(self.contestants, so_far, strict=True)
        return {f"{one.name}.{k}": value for one, numbers in pairs for k, value in numbers.items()}

    def order(self, at: int, world: int) -> list[int | str]:
        """Who answers, in turn; it changes, so that a machine that slows down favours nobody.

        Args:
            at: index of the question among those asked.
            world: how many processes share them out.
        """
        names = [name for name in self.methods if name != "hf" or at % self.config.hf_every == 0]
        return names[::-1] if at // world % 2 else names

    def ask(self, question: Question, names: Sequence[int | str]) -> list[Record]:
        """All turns by these methods in this order, a record a contestant; the conversation goes on
        with the first contestant's own answers.
        """
        messages: list[Message] = []
        turns: list[list[Turn]] = []
        for number, text in enumerate(question.turns):
            messages.append(Message(role="user", content=text))
            turns.append(self.turn(question, number, messages, names))
            answer = turns[-1][0].runs[METHOD].text
            messages.append(Message(role="assistant", content=answer))
        held = [footprint(e.drafter, [self.lm, e.batch]).bytes for e in self.engines]
        about, now = (question.question_id, question.category), time.time()
        return [
            Record(*about, list(own), finished=now, drafter_bytes=size)
            for own, size in zip(zip(*turns, strict=True), held, strict=True)
        ]

    def turn(
        self,
        question: Question,
        number: int,
        messages: list[Message],
        names: Sequence[int | str],
    ) -> list[Turn]:
        """One turn by these methods in this order; of each contestant with the baselines.

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
        runs = {name: self.methods[name](prompt, limit, seed) for name in names}
        baselines = {name: runs[name] for name in ("vanilla", "hf") if name in runs}
        turns = []
        for i in range(len(self.contestants)):
            forked = None
            if self.compares:
                texts = runs[i].tokens, runs["vanilla"].tokens
                forked = fork(self.lm, prompt, *texts, self.config.sampling, seed)
            turns.append(Turn(len(prompt), limit, {METHOD: runs[i]} | baselines, forked))
        return turns


def _settings(
    lm: LM, config: EvaluateConfig, questions: list[Question], limit: int
) -> dict[str, Any]:
    """What fixes the result, by name."""
    cuda = lm.device.type == "cuda"
    return {
        "bench": config.bench.name,
        "bench.fingerprint": fingerprint(questions),
        "task": config.task,
        "question_begin": config.question_begin,
        "question_end": config.question_end,
        "question_every": config.question_every,
        "max_new_tokens": limit,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(lm.device) if cuda else lm.device.type,
        **_flat({"sampling": asdict(config.sampling)}),
        "seed": config.seed,
        "baselines": [baseline.value for baseline in config.baselines],
        "hf_every": config.hf_every,
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
