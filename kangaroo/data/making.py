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

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.data.filters import FilterConfig, select
from kangaroo.data.shards import Shards
from kangaroo.data.statistics import statistics
from kangaroo.data.writing import Dialogue, Speed, Writer
from kangaroo.errors import DataError
from kangaroo.model import LM
from kangaroo.prompts import Sample
from kangaroo.ranks import Ranks

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 32  # text, id and mask, once as JSON in a shard and once in the dataset


@dataclass
class Part:
    """What one shard takes at most, and how to write it.

    Args:
        name: name of its file.
        answers: number of answers that are asked for.
        tokens: number of tokens in its samples.
        write: returns the finished dialogues, and calls its second argument after every answer.
    """

    name: str
    answers: int
    tokens: int
    write: Callable[[Writer, Callable[[], object]], list[Dialogue]]


def write_parts(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    shards: Shards,
    parts: Sequence[Part],
    batch_size: int,
    longest: int,
    ranks: Ranks,
) -> tuple[list[Sample], dict[str, float] | None]:
    """Write the shards that are missing, and log beforehand what that takes.

    Args:
        batch_size: rows decoded at the same time, in each process.
        longest: no conversation grows beyond this many tokens.
        ranks: the processes that share the work, on one disk; they return when the last shard is
            written.

    Returns the samples of all parts (in the first process alone, none in the others), and how fast
    they were written (None where nothing was missing).

    Errors: `DataError` where the disk has not enough room.
    """
    there = ranks.share({part.name for part in parts if shards.path(part.name).exists()})
    missing = [part for part in parts if part.name not in there]
    facts = None
    if missing:
        tokens = _expected_tokens(shards, parts, missing)
        check_room(shards.folder, tokens)
        writer = Writer(lm, tokenizer, batch_size, longest)
        facts = _write(shards, parts, missing, tokens, writer, ranks)
    raw = [sample for part in parts for sample in shards.read(part.name)] if ranks.is_first else []
    return raw, facts


def _write(
    shards: Shards,
    parts: Sequence[Part],
    missing: Sequence[Part],
    tokens: int,
    writer: Writer,
    ranks: Ranks,
) -> dict[str, float]:
    """Process r of W writes the missing shards r, r + W, ...

    So shares differ by one shard at most, no file says whose a shard is, and what a killed process
    did not finish is simply missing at the next start.

    Args:
        tokens: at most so many will be written.
    """
    mine = missing[ranks.rank :: ranks.world]
    if mine:
        writer.time_trials()
    own, all_of_us = writer.speed, Speed.together(ranks.gather(writer.speed))
    log.info(
        f"{len(missing)} of {len(parts)} shards to write: up to {tokens} tokens, "
        f"{timedelta(seconds=int(tokens / all_of_us.trial))} at {all_of_us.trial:.0f} tokens/s "
        f"(the first steps; shards at a time: {min(ranks.world, len(missing))}; a plain forward "
        f"runs {all_of_us.forward:.0f}), {tokens * BYTES_PER_TOKEN / 1e6:.1f} MB on disk"
    )
    answers, ended = sum(part.answers for part in mine), 0
    # the bar of the first process is enough: no share is larger
    with tqdm(total=answers, unit="answer", desc="writing", disable=not ranks.is_first) as bar:
        for part in mine:
            shards.write(part.name, _samples(part, writer, bar.update))
            ended += part.answers
            bar.update(ended - bar.n)  # answers that were not asked for in the end
            bar.set_postfix(tokens_per_second=own.written / own.seconds)
    facts = Speed.together(ranks.gather(own)).facts()
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
    filters: FilterConfig,
    speed: dict[str, float] | None = None,
) -> None:
    """Filter raw samples, save them as a dataset, and log what became of them. In one process.

    Args:
        asked: how many conversations there should have been; those that are not in `raw` were
            dropped while they were written.
        speed: how fast they were written (`Speed.facts`), if this run wrote them.

    Errors: `DataError` where nothing is left.
    """
    dropped: Counter[str] = Counter()
    samples = list(select(raw, filters, dropped))
    if asked > len(raw):
        dropped["unfinished"] = asked - len(raw)
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    if not samples:
        raise DataError(
            f"none of {asked} conversations is usable ({reasons}). Is the target a chat model, and "
            "does its template end a user turn? data.filters.* and the limits on tokens set what "
            "is kept."
        )
    facts = {"asked": asked, "dropped": dict(dropped), "statistics": statistics(samples)}
    facts["speed"] = speed
    log.info("%d of %d conversations kept; not kept or cut: %s", len(samples), asked, reasons)
    log.info("%s", facts["statistics"])
    store.save(samples, path, settings, facts)


def check_room(folder: Path, tokens: int) -> None:
    """Errors: `DataError` where the disk has not enough room for that many tokens."""
    needed, free = tokens * BYTES_PER_TOKEN, shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"the dataset may take {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB "
            "left. Make room, pass data.path= on another disk, or ask for fewer conversations."
        )


def _samples(part: Part, writer: Writer, done: Callable[[], object]) -> Iterator[Sample]:
    for dialogue in part.write(writer, done):
        if dialogue.input_ids:
            yield dialogue.sample()


def _expected_tokens(shards: Shards, parts: Sequence[Part], missing: Sequence[Part]) -> int:
    """Tokens to write: the maximum, scaled by what the first existing shard took of its own."""
    most = sum(part.tokens for part in missing)
    for part in parts:
        if part.tokens and shards.path(part.name).exists():
            there = sum(len(sample["input_ids"]) for sample in shards.read(part.name))
            return most * there // part.tokens
    return most
