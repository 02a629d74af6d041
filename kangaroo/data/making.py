"""From parts that the target has to write to a finished dataset, whatever asks the questions."""

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
from kangaroo.data.statistics import figures
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
        name: of its file.
        answers: that are asked for.
        tokens: of its samples.
        write: gives the finished dialogues, and calls its second argument after every answer.
    """

    name: str
    answers: int
    tokens: int
    write: Callable[[Writer, Callable[[], object]], list[Dialogue]]


def write_parts(
    lm: LM, tokenizer: PreTrainedTokenizerBase, shards: Shards, parts: Sequence[Part],
    batch_size: int, longest: int, ranks: Ranks,
) -> tuple[list[Sample], dict[str, float] | None]:  # fmt: skip
    """Write the shards that are missing, after saying what that will take.

    Args:
        batch_size: rows decoded at a time, in each process.
        longest: no conversation grows beyond this many tokens.
        ranks: the processes that share the work, on one disk; they return when the last shard is
            there.

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
    shards: Shards, parts: Sequence[Part], missing: Sequence[Part], tokens: int, writer: Writer,
    ranks: Ranks,
) -> dict[str, float]:  # fmt: skip
    """Process r of W writes the missing shards r, r + W, ...

    So shares differ by one shard at most, no file says whose a shard is, and what a killed process
    leaves is simply missing at the next start.

    Args:
        tokens: that will be written at most.
    """
    mine = missing[ranks.rank :: ranks.world]
    if mine:
        writer.time_trials()
    own, all_of_us = writer.speed, Speed.together(ranks.gather(writer.speed))
    log.info(
        "%d of %d shards to write: up to %d tokens, %s at %.0f tokens/s (the first steps; shards "
        "at a time: %d; a plain forward runs %.0f), %.1f MB on disk",
        len(missing), len(parts), tokens, timedelta(seconds=int(tokens / all_of_us.trial)),
        all_of_us.trial, min(ranks.world, len(missing)), all_of_us.forward,
        tokens * BYTES_PER_TOKEN / 1e6,
    )  # fmt: skip
    answers, ended = sum(part.answers for part in mine), 0
    # the first process's bar stands for all: no share is larger
    with tqdm(total=answers, unit="answer", desc="writing", disable=not ranks.is_first) as bar:
        for part in mine:
            shards.write(part.name, _samples(part, writer, bar.update))
            ended += part.answers
            bar.update(ended - bar.n)  # those that were never asked for
            bar.set_postfix(tokens_per_second=own.written / own.seconds)
    facts = Speed.together(ranks.gather(own)).facts()
    log.info(
        "wrote %d tokens at %.1f tokens/s: with the prompts %.0f%% of a plain forward's %.1f",
        facts["tokens_written"], facts["tokens_per_second"], 100 * facts["share_of_forward"],
        facts["forward_tokens_per_second"],
    )  # fmt: skip
    return facts


def finish(
    path: Path, settings: dict[str, Any], raw: Sequence[Sample], asked: int,
    filters: FilterConfig, speed: dict[str, float] | None = None,
) -> None:  # fmt: skip
    """Filter raw samples, save them as a dataset, and say what became of them: in one process.

    Args:
        asked: how many conversations there should have been; those that are not among `raw` were
            dropped while they were written.
        speed: of writing them, if this run did.

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
    facts = {"asked": asked, "dropped": dict(dropped), "figures": figures(samples), "speed": speed}
    log.info("%d of %d conversations kept; not kept or cut: %s", len(samples), asked, reasons)
    log.info("%s", facts["figures"])
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
    """At most as many as asked for; judged by the first shard that is there, if one is."""
    most = sum(part.tokens for part in missing)
    for part in parts:
        if part.tokens and shards.path(part.name).exists():
            there = sum(len(sample["input_ids"]) for sample in shards.read(part.name))
            return most * there // part.tokens
    return most
