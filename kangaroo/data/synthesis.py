"""Self-synthesis: the target writes its own training conversations; nothing is downloaded.

An aligned model that reads the chat template's user header writes a question (Magpie, arXiv
2406.08464), and then answers it.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.data.making import WrittenConfig, finish
from kangaroo.data.writing import Dialogue, DialogueWriter
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, Filled, NotNegative
from kangaroo.utils.ranks import Ranks


@dataclass
class SynthesisConfig(WrittenConfig):
    """What the target is asked to write, beside what `WrittenConfig` says.

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

    def make(
        self, lm: TargetModel, tokenizer: PreTrainedTokenizerBase, ranks: Ranks | None = None
    ) -> None:
        """Write the dataset to `path`, or what is still missing of it. The processes share the
        shards; the first makes the dataset, and the others do not wait for it. Errors: `DataError`
        where nothing is usable, or the folder was begun with other settings."""
        settings, ranks = self.settings(lm), ranks or Ranks()
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
