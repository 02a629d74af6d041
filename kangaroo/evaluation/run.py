"""Run an evaluation: every question by every method in turn, then the artefacts from the records.

Read it top to bottom: the run, one question; `config.py` comes before. What is measured are one or
several drafters, the *contestants*, and the baselines that they share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Rule
from kangaroo.evaluation import records as store
from kangaroo.evaluation import report, summary
from kangaroo.evaluation.bench import Question, check_first_turns, seed_of
from kangaroo.evaluation.config import (
    Baseline,
    Contestant,
    EvaluateConfig,
    asked,
    folders,
    foretell,
    noise_floor,
    settings_of,
)
from kangaroo.evaluation.footprint import footprint
from kangaroo.evaluation.lossless import fork
from kangaroo.evaluation.methods import Method, by_engine, by_transformers
from kangaroo.evaluation.metrics import metrics, scalars
from kangaroo.evaluation.records import METHOD, Record, Turn
from kangaroo.models.prompts import Message
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError, DataError, NotLossless
from kangaroo.utils.provenance import flat, git_revision
from kangaroo.utils.ranks import Ranks

logger = logging.getLogger(__name__)


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

    Errors: those of `begin` and `finish`.
    """
    examiner = begin(lm, tokenizer, contestants, config, model_name=model_name, ranks=ranks)
    return finish(examiner, log)


def begin(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    contestants: Sequence[Contestant],
    config: EvaluateConfig,
    *,
    model_name: str,
    ranks: Ranks | None = None,
) -> Examiner:
    """Everything before the first question; the arguments are those of `evaluate`.

    Errors: `ConfigError`, `DataError`, `CorruptFile`, `PromptError`.
    """
    if config.noise_floor:
        contestants = [*contestants, noise_floor(contestants[0], config)]
    ranks, places = ranks or Ranks(), folders(contestants, config)
    questions, limit = asked(config)
    check_first_turns(questions, lm, tokenizer)
    fixed = settings_of(lm, config, questions, limit)
    if ranks.is_first:
        foretell(contestants, config, model_name, len(questions))
        for one, place in zip(contestants, places, strict=True):
            about = {"model": model_name, "drafter": one.name} | fixed | flat(one.settings)
            parameters = footprint(one.drafter, [lm]).parameters
            cost = {"parameters": parameters, "training": one.made_by}
            store.enter(place, about, cost, config.resume)
    ranks.wait()  # no rank reads before the folders are this run's
    found = [store.read(place) for place in places]
    known = set.intersection(*({record.question_id for record in some} for some in found))
    if known:
        check_revision(places[0], len(known), len(questions))
    done = [[record for record in some if record.question_id in known] for some in found]
    return Examiner(lm, tokenizer, contestants, config, limit, questions, places, done, ranks)


def finish(
    examiner: Examiner, log: Callable[[dict[str, float]], None] | None = None
) -> list[dict[str, Any]]:
    """Ask all that is left, and report; see `evaluate`.

    Errors: `NotLossless`, after all artefacts are written, where a text leaves vanilla's and
    rounding does not explain it; `PromptError`, `DataError`.
    """
    ranks, places, config = examiner.ranks, examiner.places, examiner.config
    examiner.share(log)
    ranks.wait()
    results = [_reported(place, examiner.questions, ranks) for place in places]
    ranks.wait()
    if ranks.is_first:  # the others wait while it reports
        if len(places) > 1:
            for baseline in config.baselines:
                summary.write_baseline(baseline.value, places[0], Path(config.output))
        for result, place in zip(results, places, strict=True):
            check_lossless(result, place)
    return results


def _reported(folder: Path, questions: Sequence[Question], ranks: Ranks) -> dict[str, Any]:
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


def check_revision(folder: Path, known: int, asked: int) -> None:
    """Say what a folder holds already. Where all is there, its report is written again, whichever
    revision measured it; but one report is never of two revisions.

    Errors: `ConfigError`.
    """
    then, now = store.begun(folder)["provenance"]["git_revision"], git_revision()
    holds = f"{known} of {asked} questions are in '{folder}' already"
    if then == now:
        logger.info(holds)
        return
    holds += f", measured at git revision {then}; this is {now}."
    again = "resume=false (or another output=) measures all again"
    if known < asked:
        raise ConfigError(f"{holds} {again}; to go on, check that revision out.")
    logger.warning("%s %s.", holds, again)


class Examiner:
    """Asks questions of the contestants and the baselines.

    Args:
        places: the folders of the contestants.
        done: of each contestant, the questions that all of them have answered already.
        ranks: the processes that share the questions out.
    """

    def __init__(
        self,
        lm: LM,
        tokenizer: PreTrainedTokenizerBase,
        contestants: Sequence[Contestant],
        config: EvaluateConfig,
        limit: int,
        questions: Sequence[Question],
        places: Sequence[Path],
        done: Sequence[list[Record]],
        ranks: Ranks,
    ):
        self.questions, self.places, self.done, self.ranks = questions, places, done, ranks
        self.lm, self.tokenizer, self.config, self.limit = lm, tokenizer, config, limit
        sampling, self.contestants = config.sampling, contestants
        self.engines = [Engine(lm, one.drafter) for one in contestants]
        # contestants by their index, baselines by their name; vanilla first, far from the last
        # contestant, which is vanilla again
        self.methods: dict[int | str, Method] = {}
        if Baseline.vanilla in config.baselines:
            self.methods["vanilla"] = by_engine(Engine(lm, Vanilla()), tokenizer, sampling)
        for i, engine in enumerate(self.engines):
            self.methods[i] = by_engine(engine, tokenizer, sampling)
        if Baseline.hf in config.baselines:
            self.methods["hf"] = by_transformers(lm, tokenizer, sampling)
        comparable = sampling.greedy or sampling.rule is Rule.match
        self.compares = comparable and "vanilla" in self.methods

    def share(self, log: Callable[[dict[str, float]], None] | None) -> None:
        """Answer this rank's share of the questions, those aside that are answered already."""
        questions, done, ranks = self.questions, self.done, self.ranks
        known = {record.question_id for record in done[0]}
        own = list(enumerate(questions))[ranks.rank :: ranks.world]
        todo = [(at, question) for at, question in own if question.question_id not in known]
        if not todo:
            return
        for _ in range(self.config.warmup):
            self.ask(questions[0], list(self.methods))
        writers = [store.Writer(place, ranks.rank) for place in self.places]
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
            Record(*about, list(own), finished=now, drafter_bytes=size, task=question.task)
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
        prompt = question.prompt(self.lm, self.tokenizer, messages)
        limit = min(self.limit, self.lm.context - len(prompt))
        seed = seed_of(question.question_id, number, self.config.seed)
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
