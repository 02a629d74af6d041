"""Count on held-out texts how often what a lookup and an adapter's chain say next is right.

Shapes: T tokens of a text, M assistant positions, C choices, D hidden size, K draft vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from kangaroo.drafters.acceptance import CHOICES, AcceptanceTable, assumed
from kangaroo.drafters.suffix import SuffixAutomaton, shared
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, Ranged

ASSUMED = 4  # how many positions what is assumed counts for, so that a rare case has a number

Choices = list[tuple[int, float]]  # tokens and their probabilities, the likeliest first


@dataclass
class CalibrateConfig(Ranged):
    """On how much is counted.

    Args:
        holdout: conversations at the end of the data: no more than the adapter's run held out.
        max_length: tokens of each.
    """

    holdout: Count = 128
    max_length: Count = 2048


@dataclass
class Round:
    """What both sources would say at a place of a text.

    Args:
        length: of the lookup's match; 0 is none.
        lookup: what followed there.
        chain: the adapter's choices for each token, where all before it are right.
        coming: what the text has there.
    """

    length: int
    lookup: list[int]
    chain: list[Choices]
    coming: list[int]


class AcceptanceCounts:
    """Right tokens and all tokens, in each cell of the tables of `AcceptanceTable`."""

    def __init__(self) -> None:
        self.assumed = assumed()
        self.right: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.all: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.rounds = 0

    def add(self, table: str, cell: tuple[int, ...], right: bool) -> None:
        """Count a token."""
        self.all[table, cell] += 1
        self.right[table, cell] += right

    def add_round(self, now: Round) -> None:
        """Count what both say, as far as the text follows the chain."""
        self.rounds += 1
        length, lookup, acceptance = now.length, now.lookup, self.assumed
        for depth, (choices, token) in enumerate(zip(now.chain, now.coming, strict=True)):
            best, confidence = choices[0]
            column = acceptance.column(confidence)
            self._add_further(choices, lookup[depth : depth + 1], token)
            if depth >= len(lookup):
                self.add("chain", (column,), best == token)
                self.add("adds", (0,), best == token)
            else:
                row, guess = acceptance.row(length + depth), lookup[depth]
                self.add("lookup", (row,), guess == token)
                self.add("adds", (1 + row,), best == token != guess)
                if guess == best:
                    self.add("same", (row, column), guess == token)
                else:
                    chosen = any(guess == choice for choice, _ in choices)
                    self.add("further" if chosen else "other", (row, column), guess == token)
                    self.add("against", (row, column), best == token)
                if guess != token:
                    lookup = []  # what it says next comes after a wrong token
            if best != token:
                return

    def _add_further(self, choices: Choices, guesses: list[int], token: int) -> None:
        """The choices after the first, each where no better one and not the lookup is right."""
        if token in guesses:
            return
        for rank, (choice, probability) in enumerate(choices):
            if rank and choice not in guesses:
                self.add("runner_up", (self.assumed.column(probability),), choice == token)
            if choice == token:
                return

    def acceptance(self) -> AcceptanceTable:
        """The share of right tokens in each cell; one with few stays near what is assumed."""
        tables: dict[str, Any] = {}
        for name, table in asdict(self.assumed).items():
            if name in ("lengths", "probabilities"):
                tables[name] = table
            elif isinstance(table[0], list):
                rows = enumerate(table)
                tables[name] = [self._shares(name, row, (number,)) for number, row in rows]
            else:
                tables[name] = self._shares(name, table, ())
        return AcceptanceTable(**tables)

    def _shares(self, name: str, before: list[float], row: tuple[int, ...]) -> list[float]:
        shares = []
        for column, expected in enumerate(before):
            cell = name, (*row, column)
            share = (self.right[cell] + ASSUMED * expected) / (self.all[cell] + ASSUMED)
            shares.append(round(share, 3))
        return shares


def count(
    lm: TargetModel,
    layer: Layer,
    head: DraftHead,
    samples: Sequence[Sample],
    steps: int,
    max_length: int,
) -> AcceptanceCounts:
    """Count the rounds of what the assistant wrote.

    Texts should be the target's own, decoded greedily.

    Args:
        steps: the longest chain.
        max_length: tokens of each text.

    Errors: `ConfigError` where the texts have no token to count.
    """
    tally = AcceptanceCounts()
    for sample in tqdm(samples, unit="conversation", desc="counting"):
        tokens = sample["input_ids"][:max_length]
        wanted = torch.tensor(sample["loss_mask"][1 : len(tokens)]).nonzero()[:, 0].tolist()
        if wanted:
            drafted = look(lm, layer, head, tokens, wanted, steps)
            for now in rounds(tokens, wanted, drafted, steps):
                tally.add_round(now)
    if not tally.rounds:
        raise ConfigError(
            f"none of the {len(samples)} held-out conversations has a token of the assistant among "
            f"its first {max_length}; raise calibrate.max_length or calibrate.holdout."
        )
    return tally


@torch.no_grad()
def look(
    lm: TargetModel,
    layer: Layer,
    head: DraftHead,
    tokens: Sequence[int],
    wanted: Sequence[int],
    steps: int,
) -> list[dict[int, Choices]]:
    """The adapter's choices for the token after each of the wanted places, at each draft step:
    where its draft began so many tokens earlier and was right. Steps beyond the last are like it.
    """
    tokens_1T = torch.tensor([tokens], device=lm.device)
    meta = lm.chunk(0, len(tokens), row=0, n_slots=len(tokens))
    last = layer.exit_layer if layer.deep_tap is None else layer.deep_tap
    x_1TD, taps = lm.run(lm.embed(tokens_1T), None, meta, range(last), (layer.exit_layer,))
    f_1TD = taps[layer.exit_layer]
    deep_1TD = f_1TD if layer.deep_tap is None else lm.norm(x_1TD).to(f_1TD.device)
    graded = layer.architecture.graded_steps(steps)
    states = layer.states(taps, deep_1TD, meta.to(f_1TD.device), graded)
    choices_by_step = []
    for state_1TD in states:
        logits_MK = head(state_1TD[0, list(wanted)]).float()
        probs_MC, index_MC = logits_MK.softmax(-1).topk(min(CHOICES, head.size))
        ids, probs = head.token_of(index_MC).tolist(), probs_MC.tolist()
        choices = [list(zip(*both, strict=True)) for both in zip(ids, probs, strict=True)]
        choices_by_step.append(dict(zip(wanted, choices, strict=True)))
    return choices_by_step


def rounds(
    tokens: list[int], wanted: Sequence[int], drafted: list[dict[int, Choices]], steps: int
) -> Iterator[Round]:
    """Rounds of up to `steps` tokens of the same answer, one after another as in decoding: each
    begins after the token that neither source had right. So hard places count as often as rounds
    begin there, which is more often than their share of the text."""
    automaton, begin = SuffixAutomaton(), 0
    for place in wanted:
        if place < begin:
            continue
        automaton.extend(tokens[len(automaton.tokens) : place + 1])
        chain = []
        for depth in range(steps):
            choices = drafted[min(depth, len(drafted) - 1)].get(place + depth)
            if choices is None:
                break
            chain.append(choices)
        coming = tokens[place + 1 : place + 1 + len(chain)]
        length, _ = automaton.match
        lookup = automaton.continuation(steps)
        yield Round(length, lookup, chain, coming)
        best = [choices[0][0] for choices in chain]
        begin = place + 1 + max(shared(best, coming), shared(lookup, coming))
