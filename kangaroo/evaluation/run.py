"""An evaluation: what is asked, and every question by every method and by their baselines."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

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
from kangaroo.models.prompts import Message, Tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError, DataError, NotLossless
from kangaroo.utils.folders import write_json
from kangaroo.utils.memory import footprint
from kangaroo.utils.provenance import flat, git_revision
from kangaroo.utils.ranges import Count, CountOrZero, Index, Ranged, Seed
from kangaroo.utils.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)

Log = Callable[[dict[str, float], int], None]  # takes metrics, and of how many questions


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


def select_questions(config: EvaluateConfig) -> tuple[list[Question], int]:
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
    return chosen, config.max_new_tokens or config.bench.max_new_tokens


class Evaluator:
    """An evaluation before its first question: everything is checked, and the folders are its own.
    `ranks` share the questions out; the first writes what is not a record.

    Errors: `ConfigError`, `DataError`, `CorruptFile`, `PromptError`.
    """

    def __init__(
        self,
        lm: TargetModel,
        tokenizer: Tokenizer,
        methods: Sequence[MethodSpec],
        config: EvaluateConfig,
        *,
        model_name: str,
        ranks: Ranks = ALONE,
    ):
        self.lm, self.tokenizer, self.config, self.ranks = lm, tokenizer, config, ranks
        self.methods, self.folders = methods, self._folders(methods)
        self.questions, self.limit = select_questions(config)
        for question in self.questions:  # whether it fits; later turns have answers in them
            question.prompt(lm, tokenizer, [Message(role="user", content=question.turns[0])])
        shared = self._settings()
        for method, folder in zip(methods, self.folders, strict=True):
            named = {"model": model_name, "drafter": method.name}
            parameters = footprint(method.drafter, [lm]).parameters
            cost = {"parameters": parameters, "training": method.made_by}
            if self.ranks.is_first:
                store.start_run(folder, named | shared | flat(method.settings), cost, config.resume)
        self.ranks.wait()  # no rank reads before the folders are this run's
        records = [store.read(folder) for folder in self.folders]
        complete = set.intersection(*({r.question_id for r in answered} for answered in records))
        if complete:
            check_revision(self.folders[0], len(complete), len(self.questions))
        # of each method, the questions that all of them have answered
        self.records = [[r for r in answered if r.question_id in complete] for answered in records]
        self.engines = [Engine(lm, method.drafter) for method in methods]
        # the methods by their index, baselines by their name, None where transformers decodes;
        # vanilla first, far from a last method that is vanilla again
        self.decoders: dict[int | str, Engine | None] = {}
        if Baseline.vanilla in config.baselines:
            self.decoders["vanilla"] = Engine(lm, Vanilla())
        self.decoders |= enumerate(self.engines)
        if Baseline.hf in config.baselines:
            self.decoders["hf"] = None
        comparable = config.sampling.greedy or config.sampling.rule is Rule.match
        self.compares = comparable and "vanilla" in self.decoders

    def _folders(self, methods: Sequence[MethodSpec]) -> list[Path]:
        """Where the results of each are: in `output`, of several in a folder of its name there."""
        output = Path(self.config.output)
        names = [method.name for method in methods]
        if len(names) == 1:
            return [output]
        counts = Counter(names + [each.value for each in {*self.config.baselines}])
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(
                f"two of the methods are called '{twice[0]}'; call a further drafter otherwise: "
                "+drafter@more.NAME=... (the baselines are measured anyway)."
            )
        return [output / name for name in names]

    def _settings(self) -> dict[str, Any]:
        """What fixes the results of all methods, by name."""
        config, device = self.config, self.lm.device
        which = "task", "question_begin", "question_end", "question_every"
        return {
            "bench": config.bench.name,
            "bench.fingerprint": fingerprint(self.questions),
            **{name: getattr(config, name) for name in which},
            "max_new_tokens": self.limit,
            "dtype": str(self.lm.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            **flat({"sampling": asdict(config.sampling)}),
            **{name: getattr(config, name) for name in ("seed", "hf_every", "warmup")},
            "baselines": [baseline.name for baseline in config.baselines],
        }

    def finish(self, log: Log | None = None) -> list[dict[str, Any]]:
        """Ask all that is left, each rank its share; the first then writes each method's summary to
        its folder, and the baselines' to folders of their own. Returns the methods' summaries.

        Args:
            log: called after each question with the metrics of all that are answered; of several
                methods as `name.metric`.

        Errors: `NotLossless`, after all is written, where a text leaves vanilla's and rounding does
        not explain it; `PromptError`; `DataError` where ranks share no folder.
        """
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
        """Ask those of this rank's share of the questions that are not answered already."""
        ranks, complete = self.ranks, {record.question_id for record in self.records[0]}
        share = list(enumerate(self.questions))[ranks.rank :: ranks.world]
        missing = [(i, each) for i, each in share if each.question_id not in complete]
        for _ in range(self.config.warmup if missing else 0):
            self.ask(self.questions[0], list(self.decoders))
        writers = [store.Writer(folder, ranks.rank) for folder in self.folders]
        done, hidden = len(share) - len(missing), not ranks.is_first
        bar = tqdm(missing, "", len(share), initial=done, unit="question", disable=hidden)
        for i, question in bar:
            records = self.ask(question, self.order(i))
            for writer, answered, record in zip(writers, self.records, records, strict=True):
                writer.append(record)
                answered.append(record)
            numbers = {
                method.name: scalars(metrics(answered))
                for method, answered in zip(self.methods, self.records, strict=True)
            }
            first = next(iter(numbers.values()))
            if log is not None:
                log(flat(numbers) if len(numbers) > 1 else first, len(self.records[0]))
            bar.set_postfix({k: first[k] for k in ("speedup", "compression_rate") if k in first})
        for writer in writers:
            writer.close()

    def order(self, index: int) -> list[int | str]:
        """Who answers this question in turn; a machine that slows down shall favour nobody."""
        with_hf = index % self.config.hf_every == 0
        names = [name for name in self.decoders if name != "hf" or with_hf]
        return names[::-1] if index // self.ranks.world % 2 else names

    def ask(self, question: Question, names: Sequence[int | str]) -> list[Record]:
        """All turns by these decoders in order, a record a method; all go on from the first."""
        messages: list[Message] = []
        turns: list[list[Turn]] = []
        for number, text in enumerate(question.turns):
            messages.append(Message(role="user", content=text))
            turns.append(self._turn(question, number, messages, names))
            answer = turns[-1][0].runs[METHOD].text
            messages.append(Message(role="assistant", content=answer))
        sizes = [footprint(e.drafter, [self.lm, e.batch]).bytes for e in self.engines]
        about, now = (question.question_id, question.category), time.time()
        return [
            Record(*about, list(of_method), finished=now, drafter_bytes=size, task=question.task)
            for of_method, size in zip(zip(*turns, strict=True), sizes, strict=True)
        ]

    def _turn(
        self, question: Question, number: int, messages: list[Message], names: Sequence[int | str]
    ) -> list[Turn]:
        prompt = question.prompt(self.lm, self.tokenizer, messages)
        limit = min(self.limit, self.lm.context - len(prompt))
        seed = turn_seed(question.question_id, number, self.config.seed)
        runs = {name: self._decode(name, prompt, limit, seed) for name in names}
        baselines = {b.name: runs[b.name] for b in Baseline if b.name in runs}
        turns = []
        for i in range(len(self.methods)):
            turn = Turn(len(prompt), limit, {METHOD: runs[i]} | baselines, None)
            if self.compares:
                texts = runs[i].tokens, runs["vanilla"].tokens
                turn.fork = fork(self.lm, prompt, *texts, self.config.sampling, seed)
            turns.append(turn)
        return turns

    def _decode(self, name: int | str, prompt: list[int], limit: int, seed: int) -> MethodRun:
        """What a decoder writes, and its time. transformers samples by noise of its own."""
        engine, sampling, start = self.decoders[name], self.config.sampling, now(self.lm.device)
        if engine is None:
            text = generate(self.lm, prompt, limit, sampling, seed, self.lm.eos_ids())
            return as_run(self.tokenizer, text, text.seconds)
        (text,) = engine.generate([prompt], limit, sampling, seeds=[seed])
        return as_run(self.tokenizer, text, now(self.lm.device) - start)


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


def check_revision(folder: Path, answered: int, questions: int) -> None:
    """Say what a folder holds; another revision may report it, and not go on."""
    then, now = store.read_run(folder)["provenance"]["git_revision"], git_revision()
    holds = f"{answered} of {questions} questions are in '{folder}' already"
    if then == now:
        logger.info(holds)
        return
    holds += f", measured at git revision {then}; this is {now}."
    again = "resume=false (or another output=) measures all again"
    if answered < questions:
        raise ConfigError(f"{holds} {again}; to go on, check that revision out.")
    logger.warning("%s %s.", holds, again)
