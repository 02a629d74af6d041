"""Record a trace: the target writes, and every drafter drafts from each position of its text.

All exits and adapters read the same pass of the target. A chain drafted from a position lies in
free slots behind the text, and sees the text up to there and itself alone. So all positions draft
side by side on one cache, and where decoding is native each draft has the bits that it would have
in decoding.

Shapes: P positions where a round can begin, S draft steps, C choices for a token, T tokens of a
text, W window, D hidden size, K draft vocabulary, E occupied slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kangaroo.cpu.stepper import runs_natively
from kangaroo.drafters.base import Stateless
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.drafters.odds import CHOICES
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import Block
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.tree import Draft, Tree
from kangaroo.engine.verify import Verdict
from kangaroo.evaluation.tune.trace import Drafted, Grown, Turn
from kangaroo.evaluation.tune.trees import grow
from kangaroo.models.target import LM

POSITIONS = 64  # that draft side by side
WIDEST = 256  # tokens of one pass over a text


class Watcher(Stateless):
    """Proposes nothing, and keeps the target's hidden states of one text.

    Args:
        taps: which states, by the number of layers below them.
        room: slots for drafts, behind the text.

    Attributes:
        prompts: tokens, block and states of each chunk of the prompt.
        pending: states of the tokens after it, one after another.
    """

    def __init__(self, taps: Sequence[int], room: int):
        self.taps, self.max_nodes = tuple(taps), room

    def begin(self, batch: Batch) -> None:
        self.prompts: list[tuple[Tensor, Block, dict[int, Tensor]]] = []
        self.pending: list[dict[int, Tensor]] = []

    def prefill(
        self, batch: Batch, tokens_1T: Tensor, block: Block, taps: dict[int, Tensor]
    ) -> None:
        self.prompts.append((tokens_1T, block, taps))

    def propose(self, batch: Batch) -> Draft:
        return Draft.nothing(batch.last(1))

    def observe(
        self, batch: Batch, draft: Draft, verdict: Verdict, taps: dict[int, Tensor]
    ) -> None:
        self.pending.append(taps)


class Recorder:
    """Writes with the target and drafts with each of the drafters.

    Args:
        drafters: by name; each one's `steps` is the longest chain that is recorded, its threshold
            is not read.
    """

    def __init__(
        self,
        lm: LM,
        drafters: Mapping[str, Kangaroo | KangarooTree],
        prefill_chunk: int | None = None,
    ):
        self.lm, self.drafters = lm, drafters
        taps = sorted({tap for drafter in drafters.values() for tap in drafter.taps})
        # places: side by side, those of a round each
        most = max((side_by_side(own) * own.max_nodes for own in drafters.values()), default=0)
        self.watcher = Watcher(taps, most)
        self.engine = Engine(lm, self.watcher, prefill_chunk=prefill_chunk)

    def turn(self, prompt: Sequence[int], max_new_tokens: int) -> Turn:
        """The target's greedy text, and what is drafted from each of its positions.

        Errors: `PromptError`.
        """
        (generation,) = self.engine.generate([prompt], max_new_tokens)
        turn = Turn(list(prompt), generation.tokens, {})
        for name, drafter in self.drafters.items():
            if isinstance(drafter, KangarooTree):
                turn.grown[name] = Grown(*self._everywhere(drafter))
            else:
                turn.drafted[name] = Drafted(*self._everywhere(drafter))
        return turn

    @torch.inference_mode()
    def _everywhere(self, drafter: Kangaroo | KangarooTree) -> list[np.ndarray]:
        """The arrays of what it drafts from every position."""
        batch, watcher = self.engine.batch, self.watcher
        assert batch is not None
        if not watcher.pending:  # the text is a single token
            return no_positions(drafter)
        drafter.begin(batch)
        for tokens_1T, block, taps in watcher.prompts:
            drafter.prefill(batch, tokens_1T, block, taps)
        drafter.read_prompts()
        states_PD = read_text(self.lm, drafter, batch, watcher.pending)
        first, size = batch.lengths[0] - 1 - len(states_PD), side_by_side(drafter)
        parts = []
        for at in range(0, len(states_PD), size):
            place = self.lm, batch, first + at, states_PD[at : at + size]
            parts.append(
                grow(drafter, *place)
                if isinstance(drafter, KangarooTree)
                else chains(drafter, *place)
            )
        return [np.concatenate(part) for part in zip(*parts, strict=True)]


def no_positions(drafter: Kangaroo | KangarooTree) -> list[np.ndarray]:
    """The arrays of a text in which no round begins."""
    if isinstance(drafter, KangarooTree):
        grown = (0, drafter.steps, drafter.top_k)
        return [np.zeros(grown, kind) for kind in (np.int32, np.int32, np.float32)]
    chain = (0, drafter.steps)
    shapes = chain, (*chain, further_choices(drafter))
    return [np.zeros(shape, kind) for shape in shapes for kind in (np.int32, np.float32)]


def side_by_side(drafter: Kangaroo | KangarooTree) -> int:
    """From how many positions it drafts together."""
    return max(1, POSITIONS // drafter.top_k) if isinstance(drafter, KangarooTree) else POSITIONS


def further_choices(drafter: Kangaroo) -> int:
    """How many choices are kept beside the drafted one, for each token of a chain."""
    return min(CHOICES, drafter.head.size) - 1


def read_text(
    lm: LM, drafter: Kangaroo | KangarooTree, batch: Batch, pending: Sequence[dict[int, Tensor]]
) -> Tensor:
    """What a drafter has at each position of a text that it has read up to there, `[P, D]`.

    Its keys then lie where the text does.

    Args:
        pending: the target's states of these positions. Before them lies the prompt, which the
            drafter has read.
    """
    # In native code the prompt's keys stay as they are; elsewhere a round's first pass writes
    # those of its last tokens again, which may round otherwise.
    window = 0 if runs_natively(lm, drafter, Sampling()) else drafter.window
    f_1TD = torch.cat([taps[drafter.exit_layer] for taps in pending], 1)
    f_1TD = torch.cat([drafter.shallow_BWD[:, drafter.window - window :], f_1TD], 1)
    begin, end = batch.lengths[0] - 1 - len(pending), batch.lengths[0] - 1
    tree, start_1 = Tree.chain(end - begin + window, lm.device), torch.tensor([begin - window])
    below = 0 if begin >= window else window
    block = lm.block(tree, start_1.to(lm.device), end, batch.n_slots, below)
    block = replace(block, recordable=False).to(f_1TD.device)
    if drafter.deep_tap is not None:
        deep_1TD = torch.cat([taps[drafter.deep_tap] for taps in pending], 1)
        drafter.keep_deep(block.slots_RT[:, window:], deep_1TD)
    before_1TD = drafter.deep_before(block)
    read = []
    for at in range(0, f_1TD.shape[1], WIDEST):
        part = block.narrow(at, WIDEST)
        deep_part = None if before_1TD is None else before_1TD[:, at : at + WIDEST]
        past = drafter.cache.at(part)
        read.append(drafter.adapter(f_1TD[:, at : at + WIDEST], deep_part, part, past))
    return torch.cat(read, 1)[0, window:]


def chains(
    drafter: Kangaroo, lm: LM, batch: Batch, first: int, states_PD: Tensor
) -> tuple[np.ndarray, ...]:
    """What a drafter drafts from neighbouring positions: the arrays of `Drafted`.

    Args:
        first: the first of these positions, in the cache.
        states_PD: what it has there.
    """
    count, steps, length = len(states_PD), drafter.steps, batch.lengths[0]
    base_P = first + torch.arange(count, device=lm.device)
    extent = lm.extent(batch.n_slots, length + count * steps)
    hidden_PE = torch.arange(extent, device=lm.device) > base_P[:, None]
    own_P = length + steps * torch.arange(count, device=lm.device)  # where each chain begins
    choices, probabilities = [], []
    for step in range(steps):
        logits_PK = drafter.head(states_PD).float()
        index_PC = logits_PK.topk(further_choices(drafter) + 1).indices
        token_PC = drafter.head.token_of(index_PC)
        choices.append(token_PC)
        probabilities.append(logits_PK.softmax(-1).gather(1, index_PC))
        if step + 1 == steps:
            break
        slots_P1 = (own_P + step)[:, None]
        hidden_PE = hidden_PE.scatter(1, slots_P1, False)
        block = lm.block_of(slots_P1.T, (base_P + 1 + step)[None], hidden_PE[None], batch.n_slots)
        block = replace(block, recordable=False)
        x_1PD = lm.embed(token_PC[None, :, 0])
        f_1PD, _ = lm.run(x_1PD, batch.cache, block, drafter.shallow)
        at, deep_1PD = block.to(f_1PD.device), states_PD[None] if drafter.reads_deep else None
        states_PD = drafter.adapter(f_1PD, deep_1PD, at, drafter.cache.at(at))[0]
    tokens_PSC = torch.stack(choices, 1).cpu().numpy().astype(np.int32)
    chances_PSC = torch.stack(probabilities, 1).cpu().numpy().astype(np.float32)
    both = tokens_PSC, chances_PSC
    return *(x[..., 0] for x in both), *(x[..., 1:] for x in both)
