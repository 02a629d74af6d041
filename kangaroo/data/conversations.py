"""Conversations that others wrote, answered anew by the target or taken as they are."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.data.filters import FilterConfig, answers, cut, cut_by, list_reasons
from kangaroo.data.making import BYTES_PER_TOKEN, Part, check_room, finish, write_parts
from kangaroo.data.reading import Source, read, regular
from kangaroo.data.shards import Shards
from kangaroo.data.writing import Dialogue, Writer
from kangaroo.engine.topk_logits import Likeliest
from kangaroo.models.prompts import Message, Sample, masked_ids
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError, DataError
from kangaroo.utils.ranges import Count, Filled, NotNegative, Ranged, Seed
from kangaroo.utils.ranks import Ranks

log = logging.getLogger(__name__)

CHARACTERS = 3  # a token; most texts have more


@dataclass
class ConversationsConfig(Ranged):
    """Conversations to train on.

    Args:
        path: folder of the finished dataset; work in progress lies in `<path>.shards`.
        source: a .json or .jsonl file in ShareGPT or chat form, a file or folder that `datasets`
            reads, a dataset's id on the hub, or one file of it, `hf://datasets/owner/name/file`.
        subset, split, revision: of a dataset on the hub or in a folder.
        column: the column that holds the conversation; None finds the usual names.
        limit: read this many conversations, from the first on; None reads all.
        max_length: tokens of a conversation; it ends before the turn that would exceed them.
        skip_bad: leave out records that cannot be read, such as one with a tool's turn, and count
            them by reason; false refuses the first one.
        keep_system: false leaves out system turns, which some templates refuse.
        regenerate: the target answers every user turn itself, after its own earlier answers, so
            that the adapter learns what the target says; false keeps the text as it is.
        max_answer_tokens: limit of a regenerated answer; one that reaches it ends its conversation.
        answer_temperatures: the shards use them in turn; 0 is greedy.
        teacher: of the distribution behind every token of a regenerated answer, keep this many of
            the likeliest tokens (64 at most) with their probabilities, so that training need not
            run the whole target again (`trainer.use_stored_logits`); 0 keeps nothing.
        batch_size: rows decoded at the same time.
        shard_size: conversations in a shard; a killed run loses at most the shard in progress.
        seed: the data depend on it, the model, these settings and the source alone.
        filters: what the finished dataset leaves out; the shards do not depend on it.
    """

    name: str = "conversations"
    path: str = "???"
    source: str = "???"
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str | None = None
    limit: Count | None = None
    skip_bad: bool = False
    max_length: Count = 2048
    keep_system: bool = True
    regenerate: bool = True
    max_answer_tokens: Count = 320
    answer_temperatures: Filled[NotNegative] = field(default_factory=lambda: [0.0, 0.7])
    teacher: Likeliest = 0
    batch_size: Count = 64
    shard_size: Count = 512
    seed: Seed = 0
    filters: FilterConfig = field(default_factory=FilterConfig)

    def make(self, lm: LM, tokenizer: PreTrainedTokenizerBase, ranks: Ranks | None = None) -> None:
        """Write the dataset to `path`, or what is still missing of it.

        With `regenerate`, every shard is a pure function of model, settings, its number and the
        questions it answers, and is renamed into place when complete. So a killed run can continue,
        and where the source has changed or grown, only the shards concerned are written again.

        Args:
            ranks: the processes that share the shards between them. The first makes the dataset,
                and the others do not wait for it. None: there is only this process.

        Errors: `DataError` for a source that cannot be read or has nothing usable, or a full disk;
        `ConfigError` for a template that does not show which part is the assistant's.
        """
        if self.teacher and not self.regenerate:
            raise ConfigError(
                f"data.teacher={self.teacher} keeps what the target computes while it writes, and "
                "with data.regenerate=false it writes nothing. Pass only one of the two."
            )
        source = Source(self.source, self.subset, self.split, self.revision, self.column)
        dropped: Counter[str] = Counter()
        records = read(source, self.limit, dropped if self.skip_bad else None)
        asked = len(records) + dropped.total()
        conversations = _usable(records, self, dropped)
        log.info(
            "%d conversations in %s are usable; not usable or cut: %s",
            *(len(conversations), self.source, list_reasons(dropped)),
        )
        settings: dict[str, Any] = {"model": lm.name} | asdict(self)
        settings["conversations"] = _hash(conversations)
        del settings["path"]
        for option in ("teacher", "skip_bad"):
            if not settings[option]:
                del settings[option]  # as in datasets from before there was such an option
        path, ranks = Path(self.path), ranks or Ranks()
        if ranks.broadcast(store.is_of(path, settings)):
            return
        if self.regenerate:
            raw, speed = _regenerated(lm, tokenizer, self, conversations, ranks)
            dropped["too long"] = len(conversations) - len(raw)  # there was no room for an answer
        elif ranks.is_first:
            raw, speed = _as_they_are(tokenizer, self, conversations, dropped), None
        if ranks.is_first:
            finish(path, settings, raw, asked, dropped, self.filters, speed, lm.name)


# Settings that change no shard; a shard's name says which conversations it answers.
_OF_SOURCE = {f.name for f in fields(Source)}
_NOT_IN_SHARDS = _OF_SOURCE | {
    "source",
    "limit",
    "skip_bad",
    "keep_system",
    "regenerate",
    "filters",
}


def _usable(
    conversations: Sequence[list[Message]], config: ConversationsConfig, dropped: Counter[str]
) -> list[list[Message]]:
    """The turns that are used of each conversation that has something to learn from.

    Args:
        dropped: counts those that are dropped or cut, by reason.

    Errors: `DataError` where nothing is left.
    """
    usable = []
    for messages in conversations:
        turns, reason = _shown(messages, config)
        if turns:
            usable.append(turns)
            reason = reason and cut_by(reason)
        if reason:
            dropped[reason] += 1
    if not usable:
        raise DataError(
            f"none of the {len(conversations)} conversations in {config.source} has a user turn"
            f"{'' if config.regenerate else ' with an answer'}: {list_reasons(dropped)}."
        )
    return usable


def _shown(messages: list[Message], config: ConversationsConfig) -> tuple[list[Message], str]:
    """The turns of a conversation that are used, none if there is nothing to learn from them; and
    what is wrong with the turn after them, or an empty string.
    """
    turns, reason = regular(messages)
    if not config.keep_system:
        turns = [turn for turn in turns if turn["role"] != "system"]
    if config.regenerate:
        turns = [turn for turn in turns if turn["role"] != "assistant"]
    wanted = "user" if config.regenerate else "assistant"
    while turns and turns[-1]["role"] != wanted:
        turns = turns[:-1]
    return turns, reason or ("" if turns else "no answer")


def _as_they_are(
    tokenizer: PreTrainedTokenizerBase,
    config: ConversationsConfig,
    conversations: Sequence[list[Message]],
    dropped: Counter[str],
) -> list[Sample]:
    """Conversations as samples, each up to the last answer that ends within `max_length`.

    Args:
        dropped: counts those that are dropped or cut, by reason.
    """
    folder = Path(config.path).parent
    folder.mkdir(parents=True, exist_ok=True)
    characters = sum(len(turn["content"]) for turns in conversations for turn in turns)
    check_room(folder, characters // CHARACTERS * BYTES_PER_TOKEN)
    samples = []
    for messages in tqdm(conversations, unit="conversation", desc="tokenising"):
        ids, mask = masked_ids(tokenizer, messages)
        whole = Sample(messages=messages, input_ids=ids, loss_mask=mask)
        ends = [stop for _, stop in answers(mask)]
        fitting = sum(stop <= config.max_length for stop in ends)
        if fitting:
            dropped[cut_by("too long")] += fitting < len(ends)
            samples.append(cut(whole, fitting))
        else:
            dropped["too long" if ends else "no answer"] += 1
    return samples


def _regenerated(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    config: ConversationsConfig,
    conversations: Sequence[list[Message]],
    ranks: Ranks,
) -> tuple[list[Sample], dict[str, float] | None]:
    settings = {"model": lm.name} | asdict(config)
    fixed = {k: v for k, v in settings.items() if k not in _NOT_IN_SHARDS}
    if not config.teacher:
        del fixed["teacher"]
    shards = Shards(Path(config.path + ".shards"), fixed)
    parts = []
    for first in range(0, len(conversations), config.shard_size):
        asked = conversations[first : first + config.shard_size]
        number = first // config.shard_size
        questions = sum(turn["role"] == "user" for turns in asked for turn in turns)
        characters = sum(len(turn["content"]) for turns in asked for turn in turns)
        written = questions * config.max_answer_tokens
        tokens = characters // CHARACTERS + written
        write = partial(_answer, config, number, asked)
        parts.append(Part(f"{number:05d}-{_hash(asked)}", questions, tokens, written, write))
    limits = config.batch_size, config.max_length, config.teacher
    return write_parts(lm, tokenizer, shards, parts, *limits, ranks)


def _answer(
    config: ConversationsConfig,
    number: int,
    asked: Sequence[list[Message]],
    writer: Writer,
    done: Callable[[], object],
) -> list[Dialogue]:
    """One shard's conversations."""
    first = config.seed * 1_000_003 + number * config.shard_size
    dialogues = [Dialogue(first + index) for index in range(len(asked))]
    temperature = config.answer_temperatures[number % len(config.answer_temperatures)]
    waiting = {d.seed: iter(turns) for d, turns in zip(dialogues, asked, strict=True)}

    def proceed(dialogue: Dialogue) -> None:
        _put_question(dialogue, waiting[dialogue.seed])

    for dialogue in dialogues:
        proceed(dialogue)
    one_each = all(sum(turn["role"] == "user" for turn in turns) == 1 for turns in asked)
    more = None if one_each else proceed  # which takes room for the longest conversation
    writer.answer(dialogues, config.max_answer_tokens, temperature, done, more)
    return dialogues


def _put_question(dialogue: Dialogue, turns: Iterator[Message]) -> None:
    """Add the next user turn, with a system turn before it; without one, close the dialogue."""
    for turn in turns:
        dialogue.messages.append(turn)
        if turn["role"] == "user":
            return
    dialogue.open = False


def _hash(conversations: Sequence[list[Message]]) -> str:
    """Hash of their text, in order."""
    digest = hashlib.sha256()
    for messages in conversations:
        digest.update(json.dumps(messages).encode())
    return digest.hexdigest()[:12]
