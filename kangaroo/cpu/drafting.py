"""How each drafter drafts in native code: here alone a drafter's class decides what the CPU runs.

Each takes its settings and its parts from the drafter, whose `propose` is the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from functools import singledispatch
from typing import Any

import torch

from kangaroo.cpu import native
from kangaroo.cpu.buffers import DraftBuffers
from kangaroo.drafters.base import FromText
from kangaroo.drafters.block import Block
from kangaroo.drafters.cascade import Cascade
from kangaroo.drafters.draft_model import DraftModel
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.drafters.hybrid import Hybrid
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.drafters.rest import Rest
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.batch import Batch
from kangaroo.heads.layer import weight

UNREAD = 4  # tokens of a text that a draft model reads along with its draft; more, like a prompt


class NativeDrafting:
    """A drafter in native code, for one batch; by itself, vanilla decoding.

    Attributes:
        nodes: the most places that its nodes take in a round.
        exit_layer: verification shares the states of the layers below this one; 0 is none.
    """

    nodes = 0
    exit_layer = 0

    def layer(self) -> Structure | None:
        """The layer that drafts, once its cache is there; None for a drafter that has none."""
        return None

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        """Add nodes below the pending tokens of these rows."""


@singledispatch
def native_drafting(drafter: Any) -> NativeDrafting | None:
    """How this drafter drafts in native code; None where its tensors do."""
    return None


@native_drafting.register
def _(drafter: Vanilla) -> NativeDrafting:
    return NativeDrafting()


@native_drafting.register
def _(drafter: FromText) -> NativeDrafting:
    return TextDrafting(drafter)


@native_drafting.register
def _(drafter: Rest) -> NativeDrafting:
    return RestDrafting(drafter)


@native_drafting.register
def _(drafter: Kangaroo) -> NativeDrafting | None:
    return ChainDrafting(drafter) if is_native(drafter) else None


@native_drafting.register
def _(drafter: Block) -> NativeDrafting | None:
    return BlockDrafting(drafter) if is_native(drafter) else None


@native_drafting.register
def _(drafter: KangarooTree) -> NativeDrafting | None:
    fits = drafter.top_k <= native.MOST_CHOICES
    return TreeDrafting(drafter) if fits and is_native(drafter) else None


@native_drafting.register
def _(drafter: Hybrid) -> NativeDrafting | None:
    return HybridDrafting(drafter) if is_native(drafter) else None


@native_drafting.register
def _(drafter: DraftModel) -> NativeDrafting | None:
    return DraftModelDrafting(drafter) if drafter.lm.native_layers is not None else None


@native_drafting.register
def _(drafter: Cascade) -> NativeDrafting | None:
    first, second = native_drafting(drafter.first), native_drafting(drafter.second)
    text_alone = isinstance(drafter.first, FromText) and not drafter.extend
    if not text_alone or first is None or second is None:
        return None
    return CascadeDrafting(first, second)


def is_native(drafter: EarlyExit) -> bool:
    """Whether native code can run its layer."""
    return drafter.adapter.native_inputs() is not None


class TextDrafting(NativeDrafting):
    """Chains that are read from the text."""

    def __init__(self, drafter: FromText):
        self.drafter, self.nodes = drafter, drafter.max_nodes

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        length = self.drafter.chain_length(batch.budget, len(rows))
        for row in rows:
            buffers.add(row, self.drafter.continuation(row, batch.texts[row])[:length])


class RestDrafting(NativeDrafting):
    """Trees of a datastore."""

    def __init__(self, drafter: Rest):
        self.drafter, self.nodes = drafter, drafter.max_nodes

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        for row in rows:
            buffers.add(row, *self.drafter.tree(batch.texts[row]))


class LayerDrafting(NativeDrafting):
    """Drafts by a layer on the target's shallow states."""

    def __init__(self, drafter: EarlyExit):
        self.drafter, self.nodes = drafter, drafter.max_nodes
        self.exit_layer = drafter.exit_layer

    def layer(self) -> Structure:
        drafter, adapter = self.drafter, self.drafter.adapter
        layer, head, inputs = adapter.native_layer, drafter.head.native, adapter.native_inputs()
        assert layer is not None and head is not None and inputs is not None
        return native.NativeDrafting(
            stack=layer.native(drafter.cache, range(adapter.depth)),
            norm=native.pointer(weight(adapter.norm)),
            head=head.native(ids_N=drafter.head.vocabulary_K),
            deep=native.pointer(drafter.deep_BSD),
            deep_tap=drafter.deep_tap or 0,
            **inputs,
        )


class ChainDrafting(LayerDrafting):
    """Kangaroo's chain, and EAGLE's."""

    drafter: Kangaroo

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        drafter = self.drafter
        min_chances = batch.budget.min_chain_chances(len(rows), drafter.steps, drafter.draft_cost)
        if min_chances[0] >= 1:  # no row drafts, so prompts need not be read yet
            return
        drafter.read_prompts()
        buffers.draft(rows, drafter.steps, drafter.threshold, min_chances)


class BlockDrafting(LayerDrafting):
    """Chains from one pass."""

    drafter: Block

    def __init__(self, drafter: Block):
        super().__init__(drafter)
        parts = drafter.adapter.places, drafter.neighbours_VR, drafter.table_KR
        rank = drafter.adapter.architecture.rank
        self.places = native.NativePlaces(*map(native.pointer, parts), rank)

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        drafter = self.drafter
        min_chances = batch.budget.min_chain_chances(len(rows), drafter.steps, drafter.draft_cost)
        if min_chances[0] >= 1:
            return
        drafter.read_prompts()
        limits = drafter.steps, drafter.threshold, min_chances
        buffers.draft_block(rows, self.places, *limits)


class TreeDrafting(LayerDrafting):
    """Their trees."""

    drafter: KangarooTree

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        drafter, budget = self.drafter, batch.budget
        min_chances = budget.min_chain_chances(len(rows), drafter.steps, drafter.draft_cost)
        if min_chances[0] >= 1:
            return
        drafter.read_prompts()
        worth = drafter.min_node_chances(budget, len(rows))
        halves = drafter.min_confidence is None
        buffers.draft_trees(rows, drafter.top_k, drafter.threshold, min_chances, worth, halves)


class HybridDrafting(LayerDrafting):
    """One tree of the text's own repetitions and the chain."""

    drafter: Hybrid

    def __init__(self, drafter: Hybrid):
        super().__init__(drafter)
        # the chain, the lookup, and the tree's further choices
        self.nodes = drafter.steps + 2 * drafter.nodes

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        drafter = self.drafter
        drafter.read_prompts()
        drafter.take_costs(batch.budget, len(rows), shared_states=True)
        sources = {row: drafter.looked_up(batch, row) for row in rows}
        growing = [row for row, source in sources.items() if drafter.pays(source)]
        for row in growing:  # one pass gives their states together with the pending token's
            buffers.add(row, sources[row].lookup)
        for _ in range(drafter.steps):
            if not growing:
                break
            buffers.draft(growing, 1, drafter.threshold)
            for row in growing:
                choices = buffers.choices[row].tolist(), buffers.chances[row].tolist()
                sources[row].add(list(zip(*choices, strict=True))[: drafter.head.size])
            growing = [row for row in growing if drafter.goes_on(sources[row])]
        for row, source in sources.items():
            buffers.replace_with_tree(row, *drafter.tree(source))


class CascadeDrafting(NativeDrafting):
    """The second drafts where the first, which reads the text, says nothing."""

    def __init__(self, first: NativeDrafting, second: NativeDrafting):
        self.first, self.second = first, second
        self.nodes, self.exit_layer = max(first.nodes, second.nodes), second.exit_layer

    def layer(self) -> Structure | None:
        return self.second.layer()

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        self.first.draft(buffers, batch, rows)
        self.second.draft(buffers, batch, [row for row in rows if buffers.count[row] == 1])


class DraftModelDrafting(NativeDrafting):
    """Chains of a model with a cache of its own. A round's first pass takes whatever the model has
    not read, which may be much where drafting did not pay for a while.
    """

    def __init__(self, drafter: DraftModel):
        self.drafter, self.nodes = drafter, drafter.max_nodes
        self.buffers: DraftBuffers | None = None
        # of each row: the text that the cache is of, and the drafted tokens that lie in it after
        # those that were read, which the text may have taken
        self.texts: dict[int, list[int]] = {}
        self.drafted: dict[int, list[int]] = {}

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        drafter = self.drafter
        drafter.prompts.clear()  # the texts have them
        min_chances = batch.budget.min_chain_chances(len(rows), drafter.steps, drafter.draft_cost)
        if min_chances[0] >= 1:
            return
        chains = self.buffers = self.buffers or self._buffers()
        chains.count[:] = chains.end[:] = 0
        for row in rows:
            if batch.texts[row] is not self.texts.get(row):  # another prompt has taken the row
                self.texts[row], self.drafted[row] = batch.texts[row], []
                chains.draw[row] = buffers.draw[row]
            self._catch_up(chains, batch.texts[row], row)
        pending = chains.count.tolist()
        chains.draft(rows, drafter.steps, drafter.threshold, min_chances)
        for row in rows:
            new = slice(pending[row], int(chains.count[row]))
            tokens = chains.token[row, new].tolist()
            drafter.read[row] = len(batch.texts[row])
            self.drafted[row] = tokens[: int(chains.has_state[row, new].sum())]
            buffers.add(row, tokens)

    def _buffers(self) -> DraftBuffers:
        """Chains of this model's own: the states are the output of its last layer."""
        drafter, lm = self.drafter, self.drafter.lm
        stack, head, norm = lm.native_layers, lm.native_head, lm.hf.model.norm
        assert stack is not None and head is not None
        final = head.native(norm.weight)
        final.outputs = drafter.vocab_size + min(drafter.padding, 0)
        layer = native.NativeDrafting(stack=stack.native(drafter.cache, range(0)), head=final)
        return DraftBuffers(lm, drafter.cache, UNREAD + drafter.steps, lm.n_layers, layer)

    def _catch_up(self, chains: DraftBuffers, text: list[int], row: int) -> None:
        """A row's nodes are the tokens that are not read yet, the pending one the last of them."""
        drafter = self.drafter
        at, last = drafter.read[row], len(text) - 1
        for token in self.drafted[row]:
            if at >= last or text[at] != token:
                break
            at += 1
        if len(text) - at > UNREAD:
            chunk = drafter.lm.prompt_chunk(last)
            for first in range(at, last, chunk):
                part_1T = torch.tensor([text[first : min(first + chunk, last)]])
                drafter.read_chunk(part_1T, first, row)
            at = last
        last_id = drafter.vocab_size - 1  # the target's further ids are padding
        pending = [min(token, last_id) for token in text[at:]]
        chains.base[row], chains.token[row, 0], chains.has_state[row, 0] = at, pending[0], 0
        chains.add(row, pending[1:])
        chains.end[row] = len(pending) - 1
