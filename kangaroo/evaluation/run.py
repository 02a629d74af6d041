"""An evaluation: every method and the baselines answer every question of a bench."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kangaroo.drafters.base import Drafter, DrafterConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.clock import now
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.evaluation import records as store
from kangaroo.evaluation import summary
from kangaroo.evaluation.bench import BenchConfig, Question, fingerprint, load_questions, turn_seed
from kangaroo.evaluation.lossless import fork
from kangaroo.evaluation.methods import as_run, generate
from kangaroo.evaluation.metrics import metrics, scalars
from kangaroo.evaluation.records import METHOD, Baseline, MethodRun, Record, Turn
from kangaroo.models.loading import ModelConfig, meta_model
from kangaroo.models.prompts import Tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError, DataError, NotLossless
from kangaroo.utils.folders import write_json
from kangaroo.utils.memory import footprint
from kangaroo.utils.provenance import flatten, git_revision
from kangaroo.utils.ranges import Count, CountOrZero, Index, Ranged, Seed
from kangaroo.utils.ranks import ALONE, Ranks
from kangaroo.utils.terminal import progress_bar

logger = logging.getLogger(__name__)

Log = Callable[[dict[str, float], int], None]  # takes metrics and the number of questions
Decoder = Callable[[list[int], int, int], MethodRun]  # takes a prompt, a limit and a seed


@dataclass
class EvaluateConfig(Ranged):
    """Questions and settings of an evaluation.

    Args:
        output: folder of records and results; a run that was stopped is resumed from it.
        task: ask only the questions of this task; None asks all.
        question_begin, question_end: slice of the bench's questions, as Spec-Bench's flags.
        question_every: step of the slice: Spec-Bench is sorted by task, so 20 takes 4 of each.
        max_new_tokens: limit of a turn; None takes the bench's.
        seed: fixes sampled texts, together with a question's id and turn; replaces `sampling.seed`.
        baselines: each answers every turn from the same prompt as the methods.
        hf_every: transformers, the slowest, answers only every n-th of the questions.
        warmup: how often every method answers the first question before the measurement.
        resume: false deletes what `output` holds.
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
    """A drafter, the settings that must match when its run is resumed, and its training cost."""

    name: str
    drafter: Drafter
    settings: dict[str, Any] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, drafter: DrafterConfig, lm: TargetModel, model: dict[str, Any]
    ) -> MethodSpec:
        settings = {"model": model, "drafter": drafter.settings()}
        return cls(name, drafter.build(lm), settings, drafter.made_by())


def select_questions(config: EvaluateConfig) -> tuple[list[Question], int]:
    """The questions of a run, and a turn's token limit. Errors: those of `load_questions`."""
    questions = load_questions(config.bench)
    if config.task is not None:
        tasks = dict.fromkeys(question.task for question in questions)
        questions = [question for question in questions if question.task == config.task]
        if not questions:
            raise ConfigError(
                f"{config.bench.name} has no task '{config.task}'; it has {', '.join(tasks)}."
            )
    selected = questions[config.question_begin : config.question_end : config.question_every]
    if not selected:
        raise ConfigError(
            f"question_begin={config.question_begin}, question_end={config.question_end} select "
            f"none of the {len(questions)} questions of {config.bench.name}."
        )
    return selected, config.max_new_tokens or config.bench.max_new_tokens


def method_folders(config: EvaluateConfig, names: Sequence[str]) -> list[Path]:
    """The methods' folders: `output` for one method, else a folder of its name in `output`."""
    output = Path(config.output)
    if len(names) == 1:
        return [output]
    counts = Counter([*names, *(baseline.value for baseline in {*config.baselines})])
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"two of the methods are called '{twice[0]}'; call a further drafter otherwise: "
            "+drafter@more.NAME=... (the baselines are measured anyway)."
        )
    return [output / name for name in names]


def settings_of(config: EvaluateConfig, questions: list[Question], limit: int) -> dict[str, Any]:
    """The settings of all methods on which results depend, but for the model's."""
    selection = "task", "question_begin", "question_end", "question_every"
    return {
        "bench": config.bench.name,
        "bench.fingerprint": fingerprint(questions),
        **{name: getattr(config, name) for name in selection},
        "max_new_tokens": limit,
        **flatten({"sampling": asdict(config.sampling)}),
        **{name: getattr(config, name) for name in ("seed", "hf_every", "warmup")},
        "baselines": [baseline.name for baseline in config.baselines],
    }


def check(
    config: EvaluateConfig, model: ModelConfig, drafters: Mapping[str, DrafterConfig], below: Path
) -> None:
    """Check before the model is loaded: questions, adapters, room for texts, and that all runs
    `below` a folder had the same settings. Errors: `ConfigError`, and those of each."""
    questions, limit = select_questions(config)
    shared = settings_of(config, questions, limit) | flatten({"model": asdict(model)})
    shared["model"] = model.name
    context = math.inf
    with suppress(Exception):  # loading says what is wrong with a model
        context = meta_model(model).context
    if (config.max_new_tokens or 0) >= context:
        raise ConfigError(
            f"max_new_tokens={limit} leaves no room for a prompt in the context of {model.name}, "
            f"{context} tokens. Pass fewer, or leave it out."
        )
    methods = [{"drafter": x, **flatten({"drafter": y.settings()})} for x, y in drafters.items()]
    own = dict(zip(method_folders(config, list(drafters)), methods, strict=True))
    for folder in sorted(file.parent for file in below.rglob(store.RUN)):
        if config.resume or folder not in own:
            store.check_run(folder, shared | own.get(folder, {}))


@dataclass
class Evaluator:
    """An evaluation; creating one checks everything and starts or resumes the runs in its folders.
    Questions are shared among `ranks`, and the first rank writes all files that are no records.
    Errors: `ConfigError`, `DataError`, `CorruptFile`, `PromptError`."""

    lm: TargetModel
    tokenizer: Tokenizer
    methods: Sequence[MethodSpec]
    config: EvaluateConfig
    model_name: str
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        lm = self.lm
        config = self.config
        ranks = self.ranks
        self.folders = method_folders(config, [method.name for method in self.methods])
        self.questions, self.limit = select_questions(config)
        for question in self.questions:  # first turns must fit; later ones depend on answers
            question.prompt(lm, self.tokenizer)
        cuda = lm.device.type == "cuda"
        shared = {
            "model": self.model_name,
            "dtype": str(lm.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(lm.device) if cuda else lm.device.type,
        }
        shared |= settings_of(config, self.questions, self.limit)
        for method, folder in zip(self.methods, self.folders, strict=True):
            settings = shared | {"drafter": method.name} | flatten(method.settings)
            parameters = footprint(method.drafter, [lm]).parameters
            cost = {"parameters": parameters, "training": method.made_by}
            if ranks.is_first:
                store.start_run(folder, settings, cost, config.resume)
        ranks.wait()  # no rank reads a folder before the first rank has started its run
        records = [store.read(folder) for folder in self.folders]
        complete = set.intersection(*({x.question_id for x in answers} for answers in records))
        if complete:
            check_revision(self.folders[0], len(complete), len(self.questions))
        # each method's records of the questions that all methods have answered
        self.records = [[x for x in answers if x.question_id in complete] for answers in records]
        self.engines = [Engine(lm, method.drafter) for method in self.methods]
        # methods by index, baselines by name; vanilla is first, so that it is not beside a last
        # method that is vanilla again
        self.decoders: dict[int | str, Decoder] = {}
        if Baseline.vanilla in config.baselines:
            self.decoders["vanilla"] = partial(self._by_engine, Engine(lm, Vanilla()))
        for i, engine in enumerate(self.engines):
            self.decoders[i] = partial(self._by_engine, engine)
        if Baseline.hf in config.baselines:
            self.decoders["hf"] = self._by_transformers
        comparable = config.sampling.greedy or config.sampling.rule is Rule.match
        self.compares = comparable and "vanilla" in self.decoders

    def finish(self, log: Log | None = None) -> list[dict[str, Any]]:
        """Ask the remaining questions, write all summaries, and return those of the methods. After
        each question `log` gets all metrics, as `method.metric` if there are several methods.
        Errors: `NotLossless`, after all is written, if rounding does not explain a fork;
        `PromptError`; `DataError` if ranks do not share the folder."""
        self._answer(log)
        self.ranks.wait()
        results = []
        for folder in self.folders:
            records = store.read(folder)
            if len(records) < len(self.questions):
                raise DataError(
                    f"'{folder}' holds {len(records)} of {len(self.questions)} questions after the "
                    "run; under torchrun it must be a folder that all ranks share."
                )
            results.append(summary.summarise(records, store.read_run(folder)))
        if self.ranks.is_first:
            for result, folder in zip(results, self.folders, strict=True):
                write_json(folder / store.SUMMARY, result)
            for baseline in self.config.baselines:
                summary.write_baseline(baseline, self.folders[0], Path(self.config.output))
            for result, folder in zip(results, self.folders, strict=True):
                check_lossless(result, folder)
        return results

    def _answer(self, log: Log | None) -> None:
        ranks = self.ranks
        complete = {record.question_id for record in self.records[0]}
        share = list(enumerate(self.questions))[ranks.rank :: ranks.world]
        missing = [(i, question) for i, question in share if question.question_id not in complete]
        for _ in range(self.config.warmup if missing else 0):
            self.ask(self.questions[0], list(self.decoders))
        bar = progress_bar(
            missing,
            total=len(share),
            initial=len(share) - len(missing),
            unit="question",
            disable=not ranks.is_first,
        )
        for i, question in bar:
            answers = self.ask(question, self.order(i))
            for folder, records, record in zip(self.folders, self.records, answers, strict=True):
                store.append(record, folder, ranks.rank)
                records.append(record)
            pairs = zip(self.methods, self.records, strict=True)
            numbers = {method.name: scalars(metrics(records)) for method, records in pairs}
            first = numbers[self.methods[0].name]
            if log is not None:
                log(flatten(numbers) if len(numbers) > 1 else first, len(self.records[0]))
            shown = {k: first[k] for k in ("speedup", "compression_rate") if k in first}
            bar.set_postfix(shown, refresh=False)

    def order(self, index: int) -> list[int | str]:
        """Who answers a question, in turn; the order alternates, in case the machine slows down."""
        with_hf = index % self.config.hf_every == 0
        names = [name for name in self.decoders if name != "hf" or with_hf]
        return names[::-1] if index // self.ranks.world % 2 else names

    def ask(self, question: Question, names: Sequence[int | str]) -> list[Record]:
        """Ask all turns, each after the first method's answers. Returns the methods' records."""
        answers: list[str] = []
        turns: list[list[Turn]] = []
        for _ in question.turns:
            turns.append(self._turn(question, answers, names))
            answers.append(turns[-1][0].runs[METHOD].text)
        finished = time.time()
        records = []
        for i, engine in enumerate(self.engines):
            assert engine.session is not None
            record = Record(
                question.question_id,
                question.category,
                [turn[i] for turn in turns],
                finished=finished,
                drafter_bytes=footprint(engine.drafter, [self.lm, engine.session.batch]).bytes,
                task=question.task,
                load=os.getloadavg()[0] / (os.cpu_count() or 1),
            )
            records.append(record)
        return records

    def _turn(
        self, question: Question, answers: list[str], names: Sequence[int | str]
    ) -> list[Turn]:
        prompt = question.prompt(self.lm, self.tokenizer, answers)
        limit = min(self.limit, self.lm.context - len(prompt))
        seed = turn_seed(question.question_id, len(answers), self.config.seed)
        runs = {name: self.decoders[name](prompt, limit, seed) for name in names}
        baselines = {x.name: runs[x.name] for x in Baseline if x.name in runs}
        turns = []
        for i in range(len(self.methods)):
            turn = Turn(len(prompt), limit, {METHOD: runs[i]} | baselines, fork=None)
            if self.compares:
                turn.fork = fork(
                    self.lm,
                    prompt,
                    runs[i].tokens,
                    runs["vanilla"].tokens,
                    sampling=self.config.sampling,
                    seed=seed,
                )
            turns.append(turn)
        return turns

    def _by_engine(self, engine: Engine, prompt: list[int], limit: int, seed: int) -> MethodRun:
        start = now(self.lm.device)
        (text,) = engine.generate([prompt], limit, self.config.sampling, seeds=[seed])
        return as_run(self.tokenizer, text, now(self.lm.device) - start)

    def _by_transformers(self, prompt: list[int], limit: int, seed: int) -> MethodRun:
        """transformers' answer, sampled with noise of its own."""
        eos_ids = self.lm.eos_ids()
        text = generate(self.lm, prompt, limit, self.config.sampling, seed=seed, eos_ids=eos_ids)
        return as_run(self.tokenizer, text, text.seconds)


def check_lossless(result: dict[str, Any], output: Path) -> None:
    """Raise `NotLossless` if a fork of a summary is a bug."""
    bugs = [fork for fork in result["lossless"]["forks"] if fork["label"] == "bug"]
    if bugs:
        raise NotLossless(
            f"{len(bugs)} of {result['lossless']['turns']} turns leave vanilla's text where "
            f"rounding does not explain it, the first at question {bugs[0]['question_id']}, turn "
            f"{bugs[0]['turn']}, token {bugs[0]['position']} (gap {bugs[0]['gap']}). The drafter "
            f"or the engine has a bug; all forks are in {output / 'summary.json'}."
        )


def check_revision(folder: Path, answered: int, questions: int) -> None:
    """Log what a folder holds. Errors: `ConfigError` to resume a run of another git revision."""
    then = store.read_run(folder)["provenance"]["git_revision"]
    now = git_revision()
    message = f"{answered} of {questions} questions are in '{folder}' already"
    if then == now:
        logger.info(message)
        return
    message += f", measured at git revision {then}; this is {now}."
    fix = "resume=false (or another output=) measures all again"
    if answered < questions:
        raise ConfigError(f"{message} {fix}; to go on, check that revision out.")
    logger.warning("%s %s.", message, fix)
