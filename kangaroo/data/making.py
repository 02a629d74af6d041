"""Write the missing shards and make a finished dataset, whatever asks the questions."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.data.filters import FilterConfig, list_reasons, select
from kangaroo.data.shards import Shards
from kangaroo.data.statistics import statistics
from kangaroo.data.writing import Dialogue, Speed, Writer
from kangaroo.engine import topk_logits
from kangaroo.models.prompts import Sample
from kangaroo.models.target import LM
from kangaroo.utils.errors import DataError
from kangaroo.utils.ranks import Ranks

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 32  # text, id and mask, once as JSON in a shard and once in the dataset
COPIES = 2  # of a record of the target's distribution: likewise


@dataclass
class Part:
    """What one shard takes at most, and how to write it.

    Args:
        name: name of its file.
        answers: number of answers that are asked for.
        tokens: number of tokens in its samples.
        written: how many of them are the answers'.
        write: returns the finished dialogues, and calls its second argument after every answer.
    """

    name: str
    answers: int
    tokens: int
    written: int
    write: Callable[[Writer, Callable[[], object]], list[Dialogue]]


def write_parts(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    shards: Shards,
    parts: Sequence[Part],
    batch_size: int,
    longest: int,
    keep: int,
    ranks: Ranks,
) -> tuple[list[Sample], dict[str, float] | None]:
    """Write the shards that are missing, and log beforehand what that takes.

    Args:
        batch_size: rows decoded at the same time, in each process.
        longest: no conversation grows beyond this many tokens.
        keep: likeliest tokens that are kept of every distribution an answer is written from.
        ranks: the processes that share the work, on one disk; they return when the last shard is
            written.

    Returns the samples of all parts (in the first process alone, none in the others), and how fast
    they were written (None where nothing was missing).

    Errors: `DataError` where the disk has not enough room.
    """
    there = ranks.broadcast({part.name for part in parts if shards.path(part.name).exists()})
    missing = [part for part in parts if part.name not in there]
    facts = None
    if missing:
        tokens, written = _expected_tokens(shards, parts, missing)
        size = tokens * BYTES_PER_TOKEN
        if keep:
            size += written * COPIES * topk_logits.layout(lm.config.vocab_size, keep).itemsize
        check_room(shards.folder, size)
        writer = Writer(lm, tokenizer, batch_size, longest, keep)
        facts = _write(shards, parts, missing, tokens, size, writer, ranks)
    raw = [sample for part in parts for sample in shards.read(part.name)] if ranks.is_first else []
    return raw, facts


def _write(
    shards: Shards,
    parts: Sequence[Part],
    missing: Sequence[Part],
    tokens: int,
    size: int,
    writer: Writer,
    ranks: Ranks,
) -> dict[str, float]:
    """Process r of W writes the missing shards r, r + W, ...

    So shares differ by one shard at most, no file says whose a shard is, and what a killed process
    did not finish is simply missing at the next start.

    Args:
        tokens, size: at most so many will be written, and so many bytes of disk taken.
    """
    mine = missing[ranks.rank :: ranks.world]
    if mine:
        writer.time_trials()
    own, all_of_us = writer.speed, Speed.together(ranks.all_gather(writer.speed))
    log.info(
        f"{len(missing)} of {len(parts)} shards to write: up to {tokens} tokens, "
        f"{timedelta(seconds=int(tokens / all_of_us.trial))} at {all_of_us.trial:.0f} tokens/s "
        f"(the first steps; shards at a time: {min(ranks.world, len(missing))}; a plain forward "
        f"runs {all_of_us.forward:.0f}), {size / 1e6:.1f} MB on disk"
    )
    answers, ended = sum(part.answers for part in mine), 0
    # the bar of the first process is enough: no share is larger
    with tqdm(total=answers, unit="answer", desc="writing", disable=not ranks.is_first) as bar:
        for part in mine:
            shards.write(part.name, _samples(part, writer, bar.update))
            ended += part.answers
            bar.update(ended - bar.n)  # answers that were not asked for in the end
            bar.set_postfix(tokens_per_second=own.written / own.seconds)
    facts = Speed.together(ranks.all_gather(own)).facts()
    log.info(
        f"wrote {facts['tokens_written']} tokens at {facts['tokens_per_second']:.1f} tokens/s: "
        f"with the prompts {facts['share_of_forward']:.0%} of a plain forward's "
        f"{facts['forward_tokens_per_second']:.1f}"
    )
    return facts


def finish(
    path: Path,
    settings: dict[str, Any],
    raw: Sequence[Sample],
    asked: int,
    dropped: Counter[str],
    filters: FilterConfig,
    speed: dict[str, float] | None = None,
    wrote: str | None = None,
) -> None:
    """Filter raw samples, save them as a dataset, and log what became of them. In one process.

    Args:
        asked: how many conversations there should have been.
        dropped: counts, by reason, the conversations that are not in `raw`, and those that are and
            were cut; takes what the filters do.
        speed: how fast they were written (`Speed.facts`), if this run wrote them.
        wrote: the model whose distributions are kept beside the samples, if they are.

    Errors: `DataError` where nothing is left.
    """
    samples = list(select(raw, filters, dropped))
    dropped = +dropped  # without zeros
    reasons = list_reasons(dropped)
    if not samples:
        raise DataError(
            f"none of {asked} conversations is usable ({reasons}). Is the target a chat model, and "
            "does its template end a user turn? data.filters.* and the limits on tokens set what "
            "is kept."
        )
    facts = {"asked": asked, "dropped": dict(dropped), "statistics": statistics(samples)}
    facts |= {"speed": speed, "teacher": _kept(samples, wrote)}
    log.info("%d of %d conversations kept; not kept or cut: %s", len(samples), asked, reasons)
    log.info("%s", facts["statistics"])
    store.save(samples, path, settings, facts)


def check_room(folder: Path, size: int) -> None:
    """Errors: `DataError` where the disk has not enough room for that many bytes."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DataError(
            f"the dataset may take {size / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB "
            "left. Make room, pass data.path= on another disk, or ask for fewer conversations."
        )


def _kept(samples: Sequence[Sample], wrote: str | None) -> dict[str, Any] | None:
    """What is kept of the target's distributions, for the provenance; None if nothing is."""
    kept = [sample["teacher"] for sample in samples if "teacher" in sample]
    if not kept:
        return None
    there = sum(int(topk_logits.known(records).sum()) for records in kept)
    tokens, record = sum(map(len, kept)), kept[0].dtype
    likeliest = topk_logits.likeliest_kept(kept[0])
    mass = sum(float(records["chances"].sum(dtype=np.float64)) for records in kept) / max(there, 1)
    log.info(
        "of %d of %d answer tokens the %d likeliest are kept, with %.2f%% of the probability: %d "
        "bytes a token",
        *(there, tokens, likeliest, 100 * mass, record.itemsize),
    )
    return {
        "model": wrote,
        "likeliest": likeliest,
        "known": round(there / tokens, 6),
        "mass": round(mass, 6),
        "bytes_per_token": record.itemsize,
    }


def _samples(part: Part, writer: Writer, done: Callable[[], object]) -> Iterator[Sample]:
    for dialogue in part.write(writer, done):
        if dialogue.input_ids:
            yield dialogue.sample()


def _expected_tokens(
    shards: Shards, parts: Sequence[Part], missing: Sequence[Part]
) -> tuple[int, int]:
    """Tokens to write, and those of answers among them: the maximum, scaled by what the first
    existing shard took of its own.
    """
    most, answers = sum(part.tokens for part in missing), sum(part.written for part in missing)
    for part in parts:
        if part.tokens and shards.path(part.name).exists():
            there = sum(len(sample["input_ids"]) for sample in shards.read(part.name))
            return most * there // part.tokens, answers * there // part.tokens
    return most, answers
