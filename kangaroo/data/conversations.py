"""Conversations that others wrote, answered anew by the target or taken as they are."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from kangaroo.data import store
from kangaroo.data.filters import answers, cut, cut_by, list_reasons
from kangaroo.data.making import WrittenConfig, finish
from kangaroo.data.reading import Source, read, alternating_turns
from kangaroo.data.writing import Dialogue, DialogueWriter
from kangaroo.models.prompts import Message, Sample, Tokenizer, masked_ids
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError, DataError
from kangaroo.utils.ranges import Count
from kangaroo.utils.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

# settings that change no shard; a shard's name says which conversations it answers
NOT_IN_SHARDS = """
    source subset split revision column limit skip_bad keep_system regenerate filters
""".split()


@dataclass
class ConversationsConfig(WrittenConfig, Source):
    """Conversations to train on, from a `Source`; where the target answers them anew, as
    `WrittenConfig` says.

    Args:
        limit: read this many conversations, from the first on; None reads all.
        skip_bad: leave out records that cannot be read, such as one with a tool's turn, and count
            them by reason; false refuses the first one.
        max_length: tokens of a conversation; it ends before the turn that would exceed them.
        keep_system: false leaves out system turns, which some templates refuse.
        regenerate: the target answers every user turn itself, after its own earlier answers, so
            that the adapter learns what the target says; false keeps the text as it is.
    """

    name: str = "conversations"
    limit: Count | None = None
    skip_bad: bool = False
    max_length: Count = 2048
    keep_system: bool = True
    regenerate: bool = True

    def make(self, lm: TargetModel, tokenizer: Tokenizer, ranks: Ranks = ALONE) -> None:
        """Write the dataset to `path`, or what is still missing of it; processes as in synthesis.
        Errors: `DataError` for a source that cannot be read or has nothing usable; `ConfigError`
        for a template that does not show which part is the assistant's."""
        if self.teacher and not self.regenerate:
            raise ConfigError(
                f"data.teacher={self.teacher} keeps what the target computes while it writes, and "
                "with data.regenerate=false it writes nothing. Pass only one of the two."
            )
        dropped: Counter[str] = Counter()
        records = read(self, self.limit, dropped if self.skip_bad else None)
        count = len(records) + dropped.total()
        conversations = self._usable(records, dropped)
        usable = len(conversations), self.source, list_reasons(dropped)
        log.info("%d conversations in %s are usable; not usable or cut: %s", *usable)
        settings = self.settings(lm) | {"conversations": _hash(conversations)}
        if ranks.broadcast(store.is_of(Path(self.path), settings)):
            return
        if self.regenerate:
            writers = {}
            for number, first in enumerate(range(0, len(conversations), self.shard_size)):
                some = conversations[first : first + self.shard_size]
                writers[f"{number:05d}-{_hash(some)}"] = partial(self._write, number, some)
            raw = self.write_shards(lm, tokenizer, writers, self.max_length, NOT_IN_SHARDS, ranks)
            dropped["too long"] = len(conversations) - len(raw)  # there was no room for an answer
        elif ranks.is_first:
            raw = self._as_they_are(tokenizer, conversations, dropped)
        if ranks.is_first:
            finish(self, settings, raw, count, dropped, lm.name)

    def _usable(
        self, conversations: Sequence[list[Message]], dropped: Counter[str]
    ) -> list[list[Message]]:
        """The turns that are used of each conversation; what is dropped or cut is counted."""
        usable, last = [], "user" if self.regenerate else "assistant"
        unused = {"assistant"} if self.regenerate else set()
        unused |= set() if self.keep_system else {"system"}
        for messages in conversations:
            turns, reason = alternating_turns(messages)
            turns = [turn for turn in turns if turn["role"] not in unused]
            while turns and turns[-1]["role"] != last:
                turns.pop()
            if turns:
                usable.append(turns)
            if reason or not turns:
                dropped[cut_by(reason) if turns else reason or "no answer"] += 1
        if not usable:
            raise DataError(
                f"none of the {len(conversations)} conversations in {self.source} has a user turn"
                f"{'' if self.regenerate else ' with an answer'}: {list_reasons(dropped)}."
            )
        return usable

    def _write(
        self, number: int, conversations: Sequence[list[Message]], writer: DialogueWriter
    ) -> list[Dialogue]:
        """One shard's conversations."""
        dialogues, temperature = self.begin_shard(number, len(conversations))
        waiting = {d.seed: iter(turns) for d, turns in zip(dialogues, conversations, strict=True)}

        def proceed(dialogue: Dialogue) -> None:
            """Add the next user turn, with a system turn before it; without one, close."""
            for turn in waiting[dialogue.seed]:
                dialogue.messages.append(turn)
                if turn["role"] == "user":
                    return
            dialogue.open = False

        for dialogue in dialogues:
            proceed(dialogue)
        # a further question takes room for the longest conversation
        several = any(sum(m["role"] == "user" for m in turns) > 1 for turns in conversations)
        writer.answer(dialogues, self.max_answer_tokens, temperature, proceed if several else None)
        return dialogues

    def _as_they_are(
        self, tokenizer: Tokenizer, conversations: Sequence[list[Message]], dropped: Counter[str]
    ) -> list[Sample]:
        """Samples, each up to the last answer within `max_length`; dropped and cut ones counted."""
        samples = []
        for messages in tqdm(conversations, unit="conversation", desc="tokenising"):
            ids, mask = masked_ids(tokenizer, messages)
            ends = [stop for _, stop in answers(mask)]
            fitting = sum(stop <= self.max_length for stop in ends)
            if fitting:
                dropped[cut_by("too long")] += fitting < len(ends)
                whole = Sample(messages=messages, input_ids=ids, loss_mask=mask)
                samples.append(cut(whole, fitting))
            else:
                dropped["too long" if ends else "no answer"] += 1
        return samples


def _hash(conversations: Sequence[list[Message]]) -> str:
    digest = hashlib.sha256()
    for messages in conversations:
        digest.update(json.dumps(messages).encode())
    return digest.hexdigest()[:12]
