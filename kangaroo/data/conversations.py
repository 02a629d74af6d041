"""Datasets of existing conversations, answered anew by the target or kept as they are."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kangaroo.data import store
from kangaroo.data.filters import LATER_TURNS, answer_spans, cut, list_reasons
from kangaroo.data.making import WrittenConfig, finish
from kangaroo.data.reading import BadRecord, Source, alternating_turns, read
from kangaroo.data.writing import Dialogue, DialogueWriter
from kangaroo.models.prompts import Message, Sample, Tokenizer, masked_ids, unknown_token
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError, DataError
from kangaroo.utils.ranges import Count
from kangaroo.utils.ranks import ALONE, Ranks
from kangaroo.utils.terminal import progress_bar

log = logging.getLogger(__name__)


@dataclass
class ConversationsConfig(WrittenConfig, Source):
    """Conversations of a `Source` to train on.

    Args:
        limit: read only the first `limit` conversations; None reads all.
        skip_bad: leave out records that cannot be read, such as one with a tool's turn, and count
            them by reason; false refuses the first one.
        max_length: most tokens of a conversation, which ends before the turn that exceeds them.
        keep_system: false leaves out system turns, which some templates refuse.
        regenerate: the target answers every user turn itself, after its own earlier answers, so
            that the adapter learns the target's text; false keeps the source's.
    """

    # the name of a shard says which conversations it answers
    not_in_shards = """
        source subset split revision column limit skip_bad keep_system regenerate filters
    """.split()
    name: str = "conversations"  # of this kind of data
    limit: Count | None = None
    skip_bad: bool = False
    max_length: Count = 2048
    keep_system: bool = True
    regenerate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher and not self.regenerate:
            raise ConfigError(
                f"data.teacher={self.teacher} keeps what the target computes while it writes, and "
                "with data.regenerate=false it writes nothing. Pass only one of the two."
            )

    def make(self, lm: TargetModel, tokenizer: Tokenizer, ranks: Ranks = ALONE) -> None:
        """Write what is missing of the dataset to `path`; processes share it as for
        `SynthesisConfig.make`. Errors: `DataError` if no conversation can be used; `ConfigError`
        for a template that hides answers."""
        dropped: Counter[str] = Counter()
        check = partial(self._check_tokens, tokenizer, lm.config.vocab_size)
        is_longer = max(tokenizer.get_vocab().values()) >= lm.config.vocab_size
        unreadable = dropped if self.skip_bad else None
        records = read(self, self.limit, unreadable, check if is_longer else None)
        count = len(records) + dropped.total()
        conversations = self._usable(records, dropped)
        usable = f"{len(conversations)} conversations in {self.source} are usable"
        log.info(f"{usable}; not usable or cut: {list_reasons(dropped)}")
        settings = self.settings(lm) | {"conversations": _hash(conversations)}
        if ranks.broadcast(store.has_settings(Path(self.path), settings)):
            return
        if self.regenerate:
            writers = {}
            for number, first in enumerate(range(0, len(conversations), self.shard_size)):
                shard = conversations[first : first + self.shard_size]
                writers[f"{number:05d}-{_hash(shard)}"] = partial(self._write, number, shard)
            raw = self.write_shards(lm, tokenizer, writers, longest=self.max_length, ranks=ranks)
            dropped["too long"] = len(conversations) - len(raw)  # without room for an answer
        elif ranks.is_first:
            raw = self._tokenize(tokenizer, conversations, dropped)
        if ranks.is_first:
            finish(self, settings, raw, count=count, dropped=dropped, model=lm.name)

    def _check_tokens(
        self, tokenizer: Tokenizer, vocab_size: int, messages: Sequence[Message]
    ) -> None:
        """Errors: `BadRecord` for a token in the used turns that the model does not know."""
        for message in messages:
            if message["role"] == "assistant" and self.regenerate:
                continue
            ids = tokenizer.encode(message["content"], add_special_tokens=False)
            if fault := unknown_token(ids, vocab_size, tokenizer):
                raise BadRecord(f"it holds {fault}")

    def _usable(
        self, conversations: Sequence[list[Message]], dropped: Counter[str]
    ) -> list[list[Message]]:
        """The used turns of each conversation; dropped and cut ones are counted."""
        usable = []
        last = "user" if self.regenerate else "assistant"
        roles = {"user", last} | ({"system"} if self.keep_system else set())
        for messages in conversations:
            turns, reason = alternating_turns(messages)
            turns = [turn for turn in turns if turn["role"] in roles]
            while turns and turns[-1]["role"] != last:
                turns.pop()
            if turns:
                usable.append(turns)
            if reason or not turns:
                dropped[LATER_TURNS + reason if turns else reason or "no answer"] += 1
        if not usable:
            raise DataError(
                f"none of the {len(conversations)} conversations in {self.source} has a user turn"
                f"{'' if self.regenerate else ' with an answer'}: {list_reasons(dropped)}."
            )
        return usable

    def _write(
        self, number: int, conversations: Sequence[list[Message]], writer: DialogueWriter
    ) -> list[Dialogue]:
        dialogues, temperature = self.begin_shard(number, len(conversations))
        turns_left = {d.seed: iter(c) for d, c in zip(dialogues, conversations, strict=True)}

        def proceed(dialogue: Dialogue) -> None:
            """Add the next user turn, with a system turn before it; without one, close."""
            for turn in turns_left[dialogue.seed]:
                dialogue.messages.append(turn)
                if turn["role"] == "user":
                    return
            dialogue.open = False

        for dialogue in dialogues:
            proceed(dialogue)
        # with further questions each row needs room for the longest conversation
        has_more = any(sum(m["role"] == "user" for m in turns) > 1 for turns in conversations)
        writer.answer(dialogues, self.max_answer_tokens, temperature, proceed if has_more else None)
        return dialogues

    def _tokenize(
        self, tokenizer: Tokenizer, conversations: Sequence[list[Message]], dropped: Counter[str]
    ) -> list[Sample]:
        """Samples up to the last answer within `max_length`; dropped and cut ones are counted."""
        samples = []
        for messages in progress_bar(conversations, unit="conversation", desc="tokenising"):
            ids, mask = masked_ids(tokenizer, messages)
            weights = [m.get("weight", 1) for m in messages if m["role"] == "assistant"]
            for weight, (start, stop) in zip(weights, answer_spans(mask), strict=False):
                mask[start:stop] = [weight] * (stop - start)
            ends = [stop for _, stop in answer_spans(mask)]
            fitting = sum(stop <= self.max_length for stop in ends)
            if fitting:
                dropped[f"{LATER_TURNS}too long"] += fitting < len(ends)
                sample = Sample(messages=messages, input_ids=ids, loss_mask=mask)
                samples.append(cut(sample, fitting))
            else:
                dropped["too long" if ends else "no answer"] += 1
        return samples


def _hash(conversations: Sequence[list[Message]]) -> str:
    digest = hashlib.sha256()
    for messages in conversations:
        digest.update(json.dumps(messages).encode())
    return digest.hexdigest()[:12]
