"""Filters of raw conversations: degenerate text and repeated questions are dropped."""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kangaroo.models.prompts import Message, Sample
from kangaroo.utils.ranges import Chance, CountOrZero, Ranged

NGRAM = 4  # tokens or words of a phrase; any text repeats shorter ones
SHINGLE = 5  # characters, not words: some languages have no spaces between words
BANDS = 16  # of the MinHash
ROWS = 4  # of a band; two texts of similarity 0.7 share one with a chance of 98.8%
LATER_TURNS = "later turns: "  # before the reason for which a conversation was cut
_PRIME = (1 << 31) - 1


@dataclass
class FilterConfig(Ranged):
    """What a dataset leaves out of its shards, which stay as they were written.

    Args:
        min_answer_tokens: a shorter answer is degenerate; its end-of-turn token counts.
        max_repetition: an answer is degenerate if a larger share of its token 4-grams are repeats
            of earlier ones; for a question 4-grams of words count. 1 keeps all.
        near_duplicate: drop a conversation whose first question is this similar to an earlier one
            (estimated Jaccard similarity of 5-character shingles); at 1 only if they are equal but
            for case and punctuation.
    """

    min_answer_tokens: CountOrZero = 4
    max_repetition: Chance = 0.7
    near_duplicate: Chance = 0.7


def select(
    samples: Iterable[Sample], config: FilterConfig, dropped: Counter[str]
) -> Iterator[Sample]:
    """Samples in order, cut before their first degenerate turn or dropped; `dropped` counts both by
    reason. Of two similar samples the first stays, so a dataset that grows keeps its samples."""
    questions = Questions(config.near_duplicate)
    for sample in samples:
        turns, reason = healthy_turns(sample, config)
        question = next(m["content"] for m in sample["messages"] if m["role"] == "user")
        if turns == 0:
            dropped[reason] += 1
        elif duplicate := questions.add(question):
            dropped[duplicate] += 1
        elif reason:
            dropped[LATER_TURNS + reason] += 1
            yield cut(sample, turns)
        else:
            yield sample


def list_reasons(dropped: Counter[str]) -> str:
    """The counts by reason as text, the most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) or "none"


def healthy_turns(sample: Sample, config: FilterConfig) -> tuple[int, str]:
    """The number of answers before the first degenerate turn, and what is wrong with that turn."""
    messages = sample["messages"]
    places = learnt_answers(messages)
    for turn, (start, stop) in enumerate(answer_spans(sample["loss_mask"])):
        if repetition(messages[places[turn] - 1]["content"].split()) > config.max_repetition:
            return turn, "repetitive question"
        if not messages[places[turn]]["content"].strip():
            return turn, "empty answer"
        if stop - start < config.min_answer_tokens:
            return turn, "short answer"
        if repetition(sample["input_ids"][start:stop]) > config.max_repetition:
            return turn, "repetitive answer"
    return len(places), ""


def learnt_answers(messages: Sequence[Message]) -> list[int]:
    """The places of the assistant's turns but for those of weight 0."""
    answers = (i for i, m in enumerate(messages) if m["role"] == "assistant")
    return [i for i in answers if messages[i].get("weight") != 0]


def answer_spans(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of each learnt answer, which is a run of ones in a loss mask."""
    steps = np.diff([0, *mask, 0])
    starts, stops = (np.flatnonzero(steps == step).tolist() for step in (1, -1))
    return list(zip(starts, stops, strict=True))


def cut(sample: Sample, turns: int) -> Sample:
    """The conversation up to its `turns`-th answer."""
    _, end = answer_spans(sample["loss_mask"])[turns - 1]
    shorter = Sample(
        messages=sample["messages"][: learnt_answers(sample["messages"])[turns - 1] + 1],
        input_ids=sample["input_ids"][:end],
        loss_mask=sample["loss_mask"][:end],
    )
    if "teacher" in sample:
        shorter["teacher"] = sample["teacher"][: sum(shorter["loss_mask"])]
    return shorter


def repetition(items: Sequence[object]) -> float:
    """The share of 4-grams that are repeats of earlier ones, from 0 to nearly 1 (a loop)."""
    grams = [tuple(items[i : i + NGRAM]) for i in range(len(items) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


class Questions:
    """A set of questions without near duplicates. MinHash with banding (Broder 1997; Leskovec et
    al., Mining of Massive Datasets, chapter 3) compares only questions that share a band."""

    def __init__(self, similarity: float):
        self.similarity = similarity
        self.exact: set[str] = set()
        self.signatures: list[np.ndarray] = []
        self.bands: defaultdict[bytes, list[int]] = defaultdict(list)
        generator = np.random.default_rng(0)
        self.factor_H, self.offset_H = generator.integers(1, _PRIME, (2, BANDS * ROWS, 1))

    def add(self, question: str) -> str:
        """Add a new question; of any other return why it is not new, else an empty string."""
        text = re.sub(r"\W+", " ", question.casefold()).strip() or question.strip()
        if text in self.exact:
            return "duplicate"
        last = max(len(text) - SHINGLE, 0)
        # crc32: Python's own hash of a string differs from run to run
        shingles = {zlib.crc32(text[i : i + SHINGLE].encode()) % _PRIME for i in range(last + 1)}
        hashes_HS = (self.factor_H * np.array(sorted(shingles)) + self.offset_H) % _PRIME
        signature_H = hashes_HS.min(1).astype(np.uint32)
        bands = enumerate(signature_H.reshape(BANDS, ROWS))
        keys = [bytes([band]) + values.tobytes() for band, values in bands]
        if self.similarity < 1:
            for index in {i for key in keys for i in self.bands[key]}:
                if (self.signatures[index] == signature_H).mean() >= self.similarity:
                    return "near duplicate"
        self.exact.add(text)
        for key in keys:
            self.bands[key].append(len(self.signatures))
        self.signatures.append(signature_H)
        return ""
