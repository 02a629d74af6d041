"""Datasets of shards that the target writes, whatever asks the questions, or of other datasets."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kangaroo.data import store
from kangaroo.data.filters import FilterConfig, list_reasons, select
from kangaroo.data.writing import Dialogue, DialogueWriter
from kangaroo.engine.topk_logits import Likeliest
from kangaroo.models.prompts import Sample, Tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import DataError
from kangaroo.utils.ranges import Count, Filled, NotNegative, Ranged, Seed
from kangaroo.utils.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

ADDED_LATER = ("teacher", "skip_bad")  # options that datasets from before do not have


@dataclass
class WrittenConfig(Ranged):
    """A dataset that the target writes, in shards: each a pure function of the model, settings, its
    number and the questions it answers, and renamed into place when complete. So a killed run can
    continue and ends with the same data, and only what is missing is written.

    Args:
        path: folder of the finished dataset; work in progress lies in `<path>.shards`.
        shard_size: conversations in a shard; a killed run loses at most the shard in progress.
        batch_size: rows decoded at the same time.
        max_answer_tokens: limit of an answer; one that reaches it is kept, and ends its dialogue.
        answer_temperatures: the shards use them in turn; 0 is greedy, as most evaluation is.
        teacher: of the distribution behind every token of an answer, keep this many of the
            likeliest tokens with their probabilities (`trainer.use_stored_logits`).
        seed: the data depend on it, the model, these settings and the source alone.
        filters: what the finished dataset leaves out; the shards do not depend on it.
    """

    path: str = "???"
    shard_size: Count = 512
    batch_size: Count = 64
    max_answer_tokens: Count = 320
    answer_temperatures: Filled[NotNegative] = field(default_factory=lambda: [0.0, 0.7])
    teacher: Likeliest = 0
    seed: Seed = 0
    filters: FilterConfig = field(default_factory=FilterConfig)

    def settings(self, lm: TargetModel, leave_out: Collection[str] = ()) -> dict[str, Any]:
        """What a dataset, or without some of it a shard, is a function of."""
        settings = {"model": lm.name} | asdict(self)
        kept = {k: v for k, v in settings.items() if k not in ("path", *leave_out)}
        return {k: v for k, v in kept.items() if v or k not in ADDED_LATER}

    def begin_shard(self, number: int, count: int) -> tuple[list[Dialogue], float]:
        """So many dialogues of a shard, and the temperature of its answers."""
        first = self.seed * 1_000_003 + number * self.shard_size
        temperature = self.answer_temperatures[number % len(self.answer_temperatures)]
        return [Dialogue(seed) for seed in range(first, first + count)], temperature

    def write_shards(
        self,
        lm: TargetModel,
        tokenizer: Tokenizer,
        writers: Mapping[str, Callable[[DialogueWriter], list[Dialogue]]],
        longest: int,
        leave_out: Collection[str],
        ranks: Ranks,
    ) -> list[Sample]:
        """Write the shards that are missing: process r of W the missing shards r, r + W, ... All
        return when the last one is written; the first with the samples of all shards.

        Args:
            writers: what writes the dialogues of each shard, by its name.
            longest: the most tokens of a conversation.
            leave_out: settings that change no shard.

        Errors: `DataError` where the folder was begun with other settings of shards.
        """
        shards = store.Shards(Path(self.path + ".shards"), self.settings(lm, leave_out))
        there = ranks.broadcast({name for name in writers if shards.path(name).exists()})
        if missing := [name for name in writers if name not in there]:
            log.info("%d of %d shards to write", len(missing), len(writers))
            started, mine = time.perf_counter(), missing[ranks.rank :: ranks.world]
            with tqdm(unit="token", disable=not ranks.is_first) as bar:
                writer = DialogueWriter(lm, tokenizer, self.batch_size, longest, self.teacher, bar)
                for number, name in enumerate(mine, start=1):
                    bar.set_description(f"writing shard {number} of {len(mine)}")
                    dialogues = writers[name](writer)
                    shards.write(name, [d.sample() for d in dialogues if d.input_ids])
            written = sum(ranks.all_gather(writer.written))
            rate = written / (time.perf_counter() - started)
            log.info("wrote %d tokens at %.1f tokens/s", written, rate)
        names = writers if ranks.is_first else ()
        return [sample for name in names for sample in shards.read(name)]


def finish(
    config: WrittenConfig | MixConfig,
    settings: dict[str, Any],
    raw: Sequence[Sample],
    count: int,
    dropped: Counter[str],
    wrote: str | None,
) -> None:
    """Filter raw samples, save them as a dataset, and log what became of them. In one process.

    Args:
        count: how many conversations there should have been.
        dropped: counts, by reason, those that are not in `raw`, or were cut; grows.
        wrote: the model whose distributions are kept beside the samples, if they are.

    Errors: `DataError` where nothing is left.
    """
    samples = list(select(raw, config.filters, dropped))
    dropped = +dropped  # without zeros
    reasons = list_reasons(dropped)
    if not samples:
        raise DataError(
            f"none of {count} conversations is usable ({reasons}). Is the target a chat model? "
            "data.filters.* and the limits on tokens set what is kept."
        )
    log.info("%d of %d conversations kept; not kept or cut: %s", len(samples), count, reasons)
    records = next((sample["teacher"] for sample in samples if "teacher" in sample), None)
    kept = None
    if records is not None:
        kept = {"model": wrote, "likeliest": records.dtype["tokens"].shape[0]}
    facts = {"asked": count, "dropped": dict(dropped), "teacher": kept}
    store.save(samples, Path(config.path), settings, facts)


@dataclass
class SynthesisConfig(WrittenConfig):
    """Self-synthesis: the target writes its own training conversations; nothing is downloaded. An
    aligned model that reads the chat template's user header writes a question (Magpie, arXiv
    2406.08464), and then answers it. Beside what `WrittenConfig` says:

    Args:
        shards: parts of the dataset; a later run that asks for more keeps those that exist.
        turns: questions with their answers in a conversation; the shards use these numbers in turn.
            A conversation ends earlier at a turn that reaches its limit, or at the model's context.
        max_question_tokens: limit of a question.
        keep_unfinished_questions: also keep a question that reaches its limit; by default its
            conversation is dropped.
        openings: how first questions begin; the conversations use them in turn. An empty one leaves
            the beginning to the target, which seldom asks for a translation or a summary by itself.
        question_temperature: a high one gives different questions.
    """

    name: str = "self_synthesis"
    shards: Count = 3
    turns: Filled[Count] = field(default_factory=lambda: [1])
    max_question_tokens: Count = 128
    keep_unfinished_questions: bool = False
    openings: Filled[str] = field(default_factory=lambda: [""])
    question_temperature: NotNegative = 1.0

    def make(self, lm: TargetModel, tokenizer: Tokenizer, ranks: Ranks = ALONE) -> None:
        """Write the dataset to `path`, or what is still missing of it. The processes share the
        shards; the first makes the dataset, and the others do not wait for it. Errors: `DataError`
        where nothing is usable, or the folder was begun with other settings."""
        settings = self.settings(lm)
        if ranks.broadcast(store.is_of(Path(self.path), settings)):
            return
        writers = {f"{number:05d}": partial(self._write, number) for number in range(self.shards)}
        not_in_shards = "shards", "filters"
        raw = self.write_shards(lm, tokenizer, writers, lm.context, not_in_shards, ranks)
        if ranks.is_first:
            count = self.shards * self.shard_size
            dropped = Counter({"no finished question": count - len(raw)})
            finish(self, settings, raw, count, dropped, lm.name)

    def _write(self, number: int, writer: DialogueWriter) -> list[Dialogue]:
        """One shard's conversations, turn by turn: all questions, then all answers."""
        dialogues, temperature = self.begin_shard(number, self.shard_size)
        for dialogue in dialogues:
            dialogue.opening = self.openings[dialogue.seed % len(self.openings)]
        for _ in range(self.turns[number % len(self.turns)]):
            limits = self.max_question_tokens, self.question_temperature
            writer.ask(dialogues, *limits, self.keep_unfinished_questions)
            writer.answer(dialogues, self.max_answer_tokens, temperature)
        return dialogues


@dataclass
class MixConfig(Ranged):
    """What is mixed.

    Args:
        path: folder of the new dataset.
        paths: folders of finished datasets. The target's distributions are kept where all have
            equally many likeliest tokens of the same model's.
        seed: seed of the order. The parts are shuffled, since the last conversations are held out.
        filters: applied again, since a question of one part may come again in another.
    """

    name: str = "mix"
    path: str = "???"
    paths: Filled[str] = field(default_factory=list)
    seed: Seed = 0
    filters: FilterConfig = field(default_factory=FilterConfig)

    def make(self, lm: TargetModel, tokenizer: Tokenizer, ranks: Ranks = ALONE) -> None:
        """Write the dataset to `path`; of several processes the first does it, none waits. Errors:
        `DataError` where a part is no complete dataset."""
        if not ranks.is_first:
            return
        parts = [store.load(Path(path)) for path in self.paths]
        settings: dict[str, Any] = asdict(self)
        del settings["path"], settings["paths"]
        settings["parts"] = [about["fingerprint"] for _, about in parts]
        if store.is_of(Path(self.path), settings):
            return
        samples = [sample for some, _ in parts for sample in some]
        kept, *others = (about.get("teacher") for _, about in parts)
        if any(other != kept for other in others):
            kept = None
            for sample in samples:
                sample.pop("teacher", None)
        random.Random(self.seed).shuffle(samples)
        finish(self, settings, samples, len(samples), Counter(), kept and kept["model"])
