"""Write the missing shards and make a finished dataset, whatever asks the questions."""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.data.filters import FilterConfig, list_reasons, select
from kangaroo.data.writing import Dialogue, DialogueWriter
from kangaroo.engine import topk_logits
from kangaroo.engine.topk_logits import Likeliest
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import DataError
from kangaroo.utils.ranges import Count, Filled, NotNegative, Ranged, Seed
from kangaroo.utils.ranks import Ranks

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 32  # text, id and mask, once as JSON in a shard and once in the dataset
COPIES = 2  # of a record of the target's distribution: likewise
ADDED_LATER = ("teacher", "skip_bad")  # options that datasets from before do not have


@dataclass
class WrittenConfig(Ranged):
    """A dataset that the target writes, in shards.

    Every shard is a pure function of the model, settings, its number and the questions it answers,
    and is renamed into place when complete. So a killed run can continue and ends with the same
    data, and only the shards that are missing or whose questions have changed are written.

    Args:
        path: folder of the finished dataset; work in progress lies in `<path>.shards`.
        shard_size: conversations in a shard; a killed run loses at most the shard in progress.
        batch_size: rows decoded at the same time.
        max_answer_tokens: limit of an answer, which is kept if it reaches it and ends its
            conversation.
        answer_temperatures: the shards use them in turn; 0 is greedy, as most evaluation is.
        teacher: of the distribution behind every token of an answer, keep this many of the
            likeliest tokens (64 at most) with their probabilities, so that training need not run
            the whole target again (`trainer.use_stored_logits`); 0 keeps nothing.
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
        unset = [name for name in ADDED_LATER if not settings.get(name)]
        return {k: v for k, v in settings.items() if k not in ("path", *leave_out, *unset)}

    def begin_shard(self, number: int, count: int) -> tuple[list[Dialogue], float]:
        """So many dialogues of a shard, and the temperature of its answers."""
        first = self.seed * 1_000_003 + number * self.shard_size
        temperature = self.answer_temperatures[number % len(self.answer_temperatures)]
        return [Dialogue(seed) for seed in range(first, first + count)], temperature


@dataclass
class Part:
    """What one shard takes at most, and how to write it.

    Args:
        name: of its file.
        answers: how many are asked for.
        prompt_tokens: of its samples, beside those of answers.
        write: returns the finished dialogues, and calls its second argument after every answer.
    """

    name: str
    answers: int
    prompt_tokens: int
    write: Callable[[DialogueWriter, Callable[[], object]], list[Dialogue]]


def write_parts(
    lm: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    config: WrittenConfig,
    parts: Sequence[Part],
    longest: int,
    settings: dict[str, Any],
    ranks: Ranks,
) -> list[Sample]:
    """Write the shards that are missing, and log beforehand what that takes.

    Process r of W writes the missing shards r, r + W, ... So shares differ by one shard at most, no
    file says whose a shard is, and what a killed process did not finish is simply missing at the
    next start. All return when the last shard is written.

    Args:
        longest: no conversation grows beyond this many tokens.
        settings: of the shards.
        ranks: the processes that share the work, on one disk.

    Returns the samples of all parts, in the first process alone.

    Errors: `DataError` where the disk has not enough room, or the folder was begun with other
    settings.
    """
    shards = store.Shards(Path(config.path + ".shards"), settings)
    there = ranks.broadcast({part.name for part in parts if shards.path(part.name).exists()})
    if missing := [part for part in parts if part.name not in there]:
        written = sum(part.answers for part in missing) * config.max_answer_tokens
        tokens = written + sum(part.prompt_tokens for part in missing)
        size = tokens * BYTES_PER_TOKEN
        if config.teacher:
            record = topk_logits.layout(lm.config.vocab_size, config.teacher)
            size += written * COPIES * record.itemsize
        check_room(shards.folder, size)
        counts = len(missing), len(parts), tokens, size / 1e6
        log.info("%d of %d shards to write: up to %d tokens, %.1f MB on disk", *counts)
        writer = DialogueWriter(lm, tokenizer, config.batch_size, longest, config.teacher)
        started, mine, ended = time.perf_counter(), missing[ranks.rank :: ranks.world], 0
        answers = sum(part.answers for part in mine)
        # a bar of the first process is enough: no share is larger
        is_hidden = not ranks.is_first
        with tqdm(total=answers, unit="answer", desc="writing", disable=is_hidden) as bar:
            for part in mine:
                dialogues = part.write(writer, bar.update)
                shards.write(part.name, [d.sample() for d in dialogues if d.input_ids])
                ended += part.answers
                bar.update(ended - bar.n)  # answers that were not asked for in the end
        written = sum(ranks.all_gather(writer.written))
        rate = written / (time.perf_counter() - started)
        log.info("wrote %d tokens at %.1f tokens/s", written, rate)
    return [sample for part in parts for sample in shards.read(part.name)] if ranks.is_first else []


def finish(
    path: Path,
    settings: dict[str, Any],
    raw: Sequence[Sample],
    count: int,
    dropped: Counter[str],
    filters: FilterConfig,
    wrote: str | None = None,
) -> None:
    """Filter raw samples, save them as a dataset, and log what became of them. In one process.

    Args:
        count: how many conversations there should have been.
        dropped: counts, by reason, the conversations that are not in `raw`, and those that are and
            were cut; takes what the filters do.
        wrote: the model whose distributions are kept beside the samples, if they are.

    Errors: `DataError` where nothing is left.
    """
    samples = list(select(raw, filters, dropped))
    dropped = +dropped  # without zeros
    reasons = list_reasons(dropped)
    if not samples:
        raise DataError(
            f"none of {count} conversations is usable ({reasons}). Is the target a chat model, and "
            "does its template end a user turn? data.filters.* and the limits on tokens set what "
            "is kept."
        )
    log.info("%d of %d conversations kept; not kept or cut: %s", len(samples), count, reasons)
    records = next((sample["teacher"] for sample in samples if "teacher" in sample), None)
    kept = None
    if records is not None:
        kept = {"model": wrote, "likeliest": records.dtype["tokens"].shape[0]}
    facts = {"asked": count, "dropped": dict(dropped), "teacher": kept}
    store.save(samples, path, settings, facts)


def check_room(folder: Path, size: int) -> None:
    """Errors: `DataError` where the disk has not enough room for that many bytes."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DataError(
            f"the dataset may take {size / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB "
            "left. Make room, pass data.path= on another disk, or ask for fewer conversations."
        )
