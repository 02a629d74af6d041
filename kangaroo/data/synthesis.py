"""Self-synthesis: the target writes its own training conversations; nothing is downloaded.

An aligned model that reads the chat template's user header writes a question (Magpie, arXiv
2406.08464). It then answers that question, and the adapter learns to predict the answer. After the
conversation and another header, it writes what the user says next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.data.filters import FilterConfig
from kangaroo.data.making import Part, finish, write_parts
from kangaroo.data.shards import Shards
from kangaroo.data.writing import Dialogue, Writer
from kangaroo.engine.topk_logits import Likeliest
from kangaroo.models.target import LM
from kangaroo.utils.ranges import Count, Filled, NotNegative, Ranged, Seed
from kangaroo.utils.ranks import Ranks


@dataclass
class SynthesisConfig(Ranged):
    """What the target is asked to write.

    Args:
        path: folder of the finished dataset; work in progress lies in `<path>.shards`.
        shards: parts of the dataset; a later run that asks for more keeps those that exist.
        shard_size: conversations in a shard, a few of which are dropped; a killed run loses at
            most the shard in progress.
        batch_size: rows decoded at the same time.
        turns: questions with their answers in a conversation; the shards use these numbers in turn.
            A conversation ends earlier at a turn that reaches its limit, or at the model's context.
        max_question_tokens, max_answer_tokens: an answer that reaches its limit is kept.
        keep_unfinished_questions: also keep a question that reaches its limit; by default its
            conversation is dropped.
        openings: how first questions begin; the conversations use them in turn. An empty one leaves
            the beginning to the target, which seldom asks for a translation or a summary by itself.
        question_temperature: a high one gives different questions.
        answer_temperatures: the shards use them in turn; 0 is greedy, as most evaluation is.
        teacher: of the distribution behind every token of an answer, keep this many of the
            likeliest tokens (64 at most) with their probabilities, so that training need not run
            the whole target again (`trainer.use_stored_logits`); 0 keeps nothing.
        seed: the data depend on it, the model and these settings alone.
        filters: what the finished dataset leaves out; the shards do not depend on it.
    """

    name: str = "self_synthesis"
    path: str = "???"
    shards: Count = 3
    shard_size: Count = 512
    batch_size: Count = 64
    turns: Filled[Count] = field(default_factory=lambda: [1])
    max_question_tokens: Count = 128
    max_answer_tokens: Count = 320
    keep_unfinished_questions: bool = False
    openings: Filled[str] = field(default_factory=lambda: [""])
    question_temperature: NotNegative = 1.0
    answer_temperatures: Filled[NotNegative] = field(default_factory=lambda: [0.0, 0.7])
    teacher: Likeliest = 0
    seed: Seed = 0
    filters: FilterConfig = field(default_factory=FilterConfig)

    def make(self, lm: LM, tokenizer: PreTrainedTokenizerBase, ranks: Ranks | None = None) -> None:
        """Write the dataset to `path`, or what is still missing of it.

        Every shard is a pure function of model, settings and shard number, and is renamed into
        place when complete. So a killed run can continue and ends with the same data.

        Args:
            ranks: the processes that share the shards between them. The first makes the dataset,
                and the others do not wait for it. None: there is only this process.

        Errors: `DataError` where no conversation is usable, the disk has no room, or the folder was
        begun with other settings.
        """
        settings: dict[str, Any] = {"model": lm.name} | asdict(self)
        del settings["path"]
        if not self.teacher:
            del settings["teacher"]  # as in datasets from before there was such an option
        path, ranks = Path(self.path), ranks or Ranks()
        if ranks.broadcast(store.is_of(path, settings)):
            return
        fixed = {k: v for k, v in settings.items() if k not in ("shards", "filters")}
        shards = Shards(Path(self.path + ".shards"), fixed)
        a_turn = self.max_question_tokens + self.max_answer_tokens
        parts = []
        for number in range(self.shards):
            answers = self.shard_size * self.turns[number % len(self.turns)]
            write = partial(_write, self, number)
            written = answers * self.max_answer_tokens
            parts.append(Part(f"{number:05d}", answers, answers * a_turn, written, write))
        limits = self.batch_size, lm.context, self.teacher
        raw, speed = write_parts(lm, tokenizer, shards, parts, *limits, ranks)
        if ranks.is_first:
            asked = self.shards * self.shard_size
            dropped = Counter({"no finished question": asked - len(raw)})
            finish(path, settings, raw, asked, dropped, self.filters, speed, lm.name)


def _write(
    config: SynthesisConfig, number: int, writer: Writer, done: Callable[[], object]
) -> list[Dialogue]:
    """One shard's conversations, turn by turn: all questions, then all answers."""
    first = config.seed * 1_000_003 + number * config.shard_size
    openings = config.openings
    dialogues = [
        Dialogue(seed, openings[seed % len(openings)])
        for seed in range(first, first + config.shard_size)
    ]
    temperature = config.answer_temperatures[number % len(config.answer_temperatures)]
    for _ in range(config.turns[number % len(config.turns)]):
        writer.ask(
            dialogues,
            config.max_question_tokens,
            config.question_temperature,
            config.keep_unfinished_questions,
        )
        writer.answer(dialogues, config.max_answer_tokens, temperature, done)
    return dialogues
