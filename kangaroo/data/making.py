"""Datasets that the target writes in shards, and mixes of datasets."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kangaroo.data import store
from kangaroo.data.filters import FilterConfig, list_reasons, select
from kangaroo.data.writing import Dialogue, DialogueWriter
from kangaroo.engine.topk_logits import Likeliest
from kangaroo.models.prompts import Sample, Tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import DataError
from kangaroo.utils.ranges import Count, Filled, NotNegative, Ranged, Seed
from kangaroo.utils.ranks import ALONE, Ranks
from kangaroo.utils.terminal import progress_bar

log = logging.getLogger(__name__)


@dataclass
class WrittenConfig(Ranged):
    """A dataset that the target writes in shards. Each shard is a pure function of the model,
    settings, its number and the questions it answers, and appears when it is complete. So a killed
    run can continue, and ends with the same data.

    Args:
        path: folder of the finished dataset; its shards are in `<path>.shards`.
        shard_size: conversations in a shard; a killed run loses at most the shard in progress.
        batch_size: rows decoded at the same time.
        max_answer_tokens: limit of an answer; one that reaches it is kept, and ends its dialogue.
        answer_temperatures: the shards use them in turn; 0 is greedy, as most evaluation is.
        teacher: likeliest tokens to keep, with their probabilities, of the distribution behind
            every token of an answer (`trainer.use_stored_logits`).
        seed: the data depend only on the seed, the model, these settings and the source.
        filters: what the finished dataset leaves out; the shards do not depend on it.
    """

    not_in_shards: ClassVar[Collection[str]] = ()  # settings that change no shard
    path: str = "???"
    shard_size: Count = 512
    batch_size: Count = 64
    max_answer_tokens: Count = 320
    answer_temperatures: Filled[NotNegative] = field(default_factory=lambda: [0.0, 0.7])
    teacher: Likeliest = 0
    seed: Seed = 0
    filters: FilterConfig = field(default_factory=FilterConfig)

    def settings(self, lm: TargetModel) -> dict[str, Any]:
        """All that the dataset is a function of."""
        settings = {"model": lm.name} | asdict(self)
        del settings["path"]
        return settings

    def begin_shard(self, number: int, count: int) -> tuple[list[Dialogue], float]:
        """The empty dialogues of a shard, `count` of them, and the temperature of its answers."""
        first = self.seed * 1_000_003 + number * self.shard_size
        temperature = self.answer_temperatures[number % len(self.answer_temperatures)]
        return [Dialogue(seed) for seed in range(first, first + count)], temperature

    def write_shards(
        self,
        lm: TargetModel,
        tokenizer: Tokenizer,
        writers: Mapping[str, Callable[[DialogueWriter], list[Dialogue]]],
        longest: int,
        ranks: Ranks,
    ) -> list[Sample]:
        """Write the missing shards, which the processes share, and wait for all of them. `writers`
        write a shard's dialogues, by its name, and `longest` limits their tokens. Returns all
        samples in the first process. Errors: those of `store.Shards`."""
        settings = {k: v for k, v in self.settings(lm).items() if k not in self.not_in_shards}
        shards = store.Shards(Path(self.path + ".shards"), settings)
        existing = ranks.broadcast({name for name in writers if shards.path(name).exists()})
        missing = [name for name in writers if name not in existing]
        if missing:
            log.info("%d of %d shards to write", len(missing), len(writers))
            start = time.perf_counter()
            assigned = missing[ranks.rank :: ranks.world]
            with progress_bar(unit="token", disable=not ranks.is_first) as bar:
                writer = DialogueWriter(
                    lm,
                    tokenizer,
                    batch_size=self.batch_size,
                    longest=longest,
                    keep=self.teacher,
                    bar=bar,
                )
                for number, name in enumerate(assigned, start=1):
                    bar.set_description(f"writing shard {number} of {len(assigned)}")
                    shards.write(name, [d.sample() for d in writers[name](writer) if d.input_ids])
            written = sum(ranks.all_gather(writer.written))
            rate = written / (time.perf_counter() - start)
            log.info("wrote %d tokens at %.1f tokens/s", written, rate)
        names = writers if ranks.is_first else ()
        return [sample for name in names for sample in shards.read(name)]


def finish(
    config: WrittenConfig | MixConfig,
    settings: dict[str, Any],
    raw: Sequence[Sample],
    count: int,
    dropped: Counter[str],
    model: str | None,
) -> None:
    """Filter raw samples, save them as a dataset, and log the counts: of `count` conversations,
    `dropped` by reason are not in `raw`, or were cut. The samples' records, if they have any, are
    those of `model`. Errors: `DataError` if no sample is left."""
    samples = list(select(raw, config.filters, dropped))
    dropped = +dropped  # without zeros
    reasons = list_reasons(dropped)
    if not samples:
        raise DataError(
            f"none of {count} conversations is usable ({reasons}). Is the target a chat model? "
            "data.filters.* and the limits on tokens set what is kept."
        )
    log.info("%d of %d conversations kept; not kept or cut: %s", len(samples), count, reasons)
    facts: dict[str, Any] = {"asked": count, "dropped": dict(dropped), "teacher": None}
    if records := [sample["teacher"] for sample in samples if "teacher" in sample]:
        likeliest = records[0].dtype["tokens"].shape[0]
        facts["teacher"] = {"model": model, "likeliest": likeliest}
    store.save(samples, Path(config.path), settings, facts)


@dataclass
class SynthesisConfig(WrittenConfig):
    """Self-synthesis: the target writes its own training conversations; nothing is downloaded. An
    aligned model that reads the chat template's user header writes a question (Magpie, arXiv
    2406.08464), and then answers it. These options are added to those of `WrittenConfig`:

    Args:
        shards: parts of the dataset; a later run with more shards keeps those that exist.
        turns: questions with their answers in a conversation; the shards use these numbers in turn.
            A conversation ends earlier at a turn that reaches its limit, or at the model's context.
        max_question_tokens: limit of a question.
        keep_unfinished_questions: keep a conversation whose question reaches its limit, too.
        openings: beginnings of first questions; the conversations use them in turn. With an empty
            one the target begins itself, and seldom asks for a translation or a summary.
        question_temperature: a high one gives different questions.
    """

    not_in_shards = "shards", "filters"
    name: str = "self_synthesis"  # of this kind of data
    shards: Count = 3
    turns: Filled[Count] = field(default_factory=lambda: [1])
    max_question_tokens: Count = 128
    keep_unfinished_questions: bool = False
    openings: Filled[str] = field(default_factory=lambda: [""])
    question_temperature: NotNegative = 1.0

    def make(self, lm: TargetModel, tokenizer: Tokenizer, ranks: Ranks = ALONE) -> None:
        """Write what is missing of the dataset to `path`. The processes share the shards; the first
        makes the dataset, and the others do not wait for it. Errors: `DataError` if no sample is
        usable, `ConfigError` if the folder was begun with other settings."""
        settings = self.settings(lm)
        if ranks.broadcast(store.has_settings(Path(self.path), settings)):
            return
        writers = {f"{number:05d}": partial(self._write, number) for number in range(self.shards)}
        raw = self.write_shards(lm, tokenizer, writers, longest=lm.context, ranks=ranks)
        if ranks.is_first:
            count = self.shards * self.shard_size
            dropped = Counter({"no finished question": count - len(raw)})
            finish(self, settings, raw, count=count, dropped=dropped, model=lm.name)

    def _write(self, number: int, writer: DialogueWriter) -> list[Dialogue]:
        """Write a shard turn by turn: all questions, then all answers."""
        dialogues, temperature = self.begin_shard(number, self.shard_size)
        for dialogue in dialogues:
            dialogue.opening = self.openings[dialogue.seed % len(self.openings)]
        for _ in range(self.turns[number % len(self.turns)]):
            writer.ask(
                dialogues,
                self.max_question_tokens,
                temperature=self.question_temperature,
                keeps_cut=self.keep_unfinished_questions,
            )
            writer.answer(dialogues, self.max_answer_tokens, temperature)
        return dialogues


@dataclass
class MixConfig(Ranged):
    """A mix of datasets.

    Args:
        path: folder of the new dataset.
        paths: folders of finished datasets. Records of distributions are kept if all have equally
            many likeliest tokens of the same model.
        seed: seed of the order. The parts are shuffled, since the last conversations are held out.
        filters: applied again, since the parts may share questions.
    """

    name: str = "mix"  # of this kind of data
    path: str = "???"
    paths: Filled[str] = field(default_factory=list)
    seed: Seed = 0
    filters: FilterConfig = field(default_factory=FilterConfig)

    def make(self, lm: TargetModel, tokenizer: Tokenizer, ranks: Ranks = ALONE) -> None:
        """Write the dataset to `path` in the first process; the others do not wait for it. Errors:
        `DataError` if a part is no finished dataset."""
        if not ranks.is_first:
            return
        parts = [store.load(Path(path), lm.config.vocab_size) for path in self.paths]
        settings: dict[str, Any] = asdict(self)
        del settings["path"], settings["paths"]
        settings["parts"] = [provenance["fingerprint"] for _, provenance in parts]
        if store.has_settings(Path(self.path), settings):
            return
        samples = [sample for part, _ in parts for sample in part]
        teacher, *others = (provenance.get("teacher") for _, provenance in parts)
        if any(other != teacher for other in others):
            teacher = None
            for sample in samples:
                sample.pop("teacher", None)
        random.Random(self.seed).shuffle(samples)
        model = teacher and teacher["model"]
        finish(self, settings, samples, count=len(samples), dropped=Counter(), model=model)
