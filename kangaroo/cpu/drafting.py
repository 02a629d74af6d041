"""How drafters draft in native code, by their classes; a drafter's `propose` defines the result."""

from collections.abc import Sequence

import numpy as np

from kangaroo.cpu import native, structs
from kangaroo.cpu.backend import CpuBackend
from kangaroo.cpu.blocks import IN_BYTES
from kangaroo.cpu.buffers import DraftBuffers
from kangaroo.cpu.int8 import Int8Weights, head_struct, int8_weights
from kangaroo.drafters.base import Drafter, TreesFromText
from kangaroo.drafters.block import Block
from kangaroo.drafters.cascade import Cascade
from kangaroo.drafters.draft_model import DraftModel
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.drafters.expected_gain import best_tree
from kangaroo.drafters.hybrid import Hybrid
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import KVCache
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.heads.eagle3_head import Eagle3Head
from kangaroo.models.target import TargetModel

UNREAD = 4  # most unread tokens that a draft model reads in a round; more are read as a prompt


class Drafting:
    """A drafter in native code for one batch; the base class is vanilla decoding."""

    nodes = 0  # the most places that its nodes take in a round
    # how many layers give the states that it reads and verification uses again; None if it has none
    exit_layer: int | None = None

    def layer(self, cache: KVCache) -> structs.Drafting | None:
        """The drafting layer, if there is one, whose cache must exist; `cache` is the target's."""
        return None

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        """Add nodes below the pending tokens of these rows."""


def native_drafting(lm: TargetModel, drafter: Drafter, sampling: Sampling) -> Drafting | None:
    """How a drafter drafts natively for a batch; None if the batch has to decode on tensors."""
    by_match = sampling.greedy or sampling.rule is Rule.match
    if not (isinstance(lm.backend, CpuBackend) and by_match):
        return None
    if isinstance(drafter, EarlyExit) and not drafter.adapter.mixes_natively:
        return None
    match drafter:
        case Vanilla():
            return Drafting()
        case TreesFromText():
            return TextDrafting(drafter)
        case Hybrid():
            return HybridDrafting(drafter)
        case KangarooTree() if drafter.top_k > native.MOST_CHOICES:
            return None
        case Kangaroo() | KangarooTree() | Block():
            return ChainDrafting(drafter)
        case DraftModel() if isinstance(drafter.lm.backend, CpuBackend):
            return DraftModelDrafting(drafter)
        case Cascade() if isinstance(drafter.first, TreesFromText):
            second = native_drafting(lm, drafter.second, sampling)
            return second and CascadeDrafting(TextDrafting(drafter.first), second)
    return None


class TextDrafting(Drafting):
    """Chains and trees from the text."""

    def __init__(self, drafter: TreesFromText):
        self.drafter = drafter
        self.nodes = drafter.max_nodes

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        for row in rows:
            buffers.add(row, *self.drafter.tree_of(batch, row))


class LayerDrafting(Drafting):
    """Drafting with a layer on the target's shallow states, in eight bits if that is allowed. Then
    a draft token costs the `cost_share` of one in the model's numbers: more than half, since
    attention and barriers take as long."""

    def __init__(self, drafter: EarlyExit):
        self.drafter = drafter
        self.nodes = drafter.max_nodes
        self.exit_layer = drafter.exit_layer
        lm = drafter.lm
        assert isinstance(lm.backend, CpuBackend)
        in_int8 = drafter.adapter.int8 and lm.backend.multiplies_bytes(lm.dtype)
        self.int8: Int8Weights | None = int8_weights(drafter) if in_int8 else None
        self.taps = np.array(drafter.deep_taps, np.int64)  # kept while native code reads them
        self.cost_share = 0.75 if in_int8 else 1.0

    def layer(self, cache: KVCache) -> structs.Drafting:
        drafter = self.drafter
        adapter = drafter.adapter
        int8 = self.int8
        stack = int8.layer if int8 else native.stack_of(adapter.fast_layers)
        struct = structs.Drafting(
            stack=stack.as_struct(
                drafter.cache, range(adapter.depth), first_slot=adapter.first_seen
            ),
            norm=native.pointer(getattr(adapter.norm, "weight", None)),
            head=self.head(),
            deep=native.pointer(drafter.deep_BSD),
            taps=self.taps.ctypes.data,
            n_taps=len(self.taps),
            mix=native.pointer(adapter.fuse.weight) if isinstance(adapter, Eagle3Head) else 0,
            unseen=adapter.first_seen,
        )
        if isinstance(adapter.fast_fusing, native.Fusing):
            struct.fusing = adapter.fast_fusing.as_struct()
        if int8:
            if int8.shallow:
                struct.shallow = int8.shallow.as_struct(cache, range(drafter.exit_layer))
            if int8.fuse:
                struct.fusing.weight, struct.fusing.scales = map(native.pointer, int8.fuse)
                struct.fusing.kind = IN_BYTES
        return struct

    def head(self) -> structs.Head:
        return self.int8.head.as_struct() if self.int8 else head_struct(self.drafter.head)

    def catch_up(self, buffers: DraftBuffers, batch: Batch) -> None:
        """Let the drafter catch up, and update native code's head if the vocabulary changed."""
        if self.drafter.catch_up(batch):
            assert buffers.drafting is not None
            buffers.drafting.head = self.head()


class ChainDrafting(LayerDrafting):
    """The chains and trees of Kangaroo and EAGLE, and a block's chains from one pass."""

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        drafter = self.drafter
        limits = drafter.limits(batch, rows, self.cost_share)
        if (limits[:, 0] >= 1).all():  # no row drafts: prompts need not be read yet
            return
        self.catch_up(buffers, batch)
        match drafter:
            case Block():
                buffers.draft_block(rows, drafter, limits)
            case KangarooTree():
                worth = drafter.min_node_chances(batch.budget, len(rows))
                buffers.draft_trees(rows, drafter, limits, worth)
            case _:
                buffers.draft(rows, drafter.threshold, limits)


class HybridDrafting(LayerDrafting):
    """Trees from the text and a chain."""

    drafter: Hybrid

    def __init__(self, drafter: Hybrid):
        super().__init__(drafter)
        self.nodes = drafter.steps + 2 * drafter.nodes  # the chain, the lookup, and the tree

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        drafter = self.drafter
        drafter.update_costs(batch.budget, len(rows), native_share=self.cost_share)
        if not drafter.may_pay:
            return
        sources = {row: drafter.update_sources(batch, row) for row in rows}
        growing = [row for row, source in sources.items() if drafter.pays(source)]
        if growing:
            self.catch_up(buffers, batch)
        for row in growing:  # one pass computes the states of these and of the pending token
            buffers.add(row, sources[row].lookup.tokens)
        one_token = np.zeros((batch.size, 1), np.float32)  # no limit, since `drafter.pays` decides
        for _ in range(drafter.steps):
            if not growing:
                break
            buffers.draft(growing, drafter.threshold, one_token)
            for row in growing:
                chances = buffers.chances[row].tolist()
                ranked = list(zip(buffers.choices[row].tolist(), chances, strict=True))
                sources[row].chain.add(ranked[: drafter.head.size])
            growing = [row for row in growing if drafter.pays(sources[row])]
        for row, source in sources.items():
            buffers.replace_with_tree(row, *best_tree(drafter.costs, source, drafter.nodes))


class CascadeDrafting(Drafting):
    """The second drafter drafts in rows where the first, from the text, has no draft."""

    def __init__(self, first: Drafting, second: Drafting):
        self.first = first
        self.second = second
        self.nodes = max(first.nodes, second.nodes)
        self.exit_layer = second.exit_layer

    def layer(self, cache: KVCache) -> structs.Drafting | None:
        return self.second.layer(cache)

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        self.first.draft(buffers, batch, rows)
        self.second.draft(buffers, batch, [row for row in rows if buffers.count[row] == 1])


class DraftModelDrafting(Drafting):
    """Chains of a model with a cache of its own; a round's first pass reads unread tokens."""

    def __init__(self, drafter: DraftModel):
        self.drafter = drafter
        self.nodes = drafter.max_nodes
        self.buffers: DraftBuffers | None = None

    def draft(self, buffers: DraftBuffers, batch: Batch, rows: Sequence[int]) -> None:
        drafter = self.drafter
        limits = drafter.limits(batch, rows)
        rows = [row for row in rows if limits[row, 0] < 1]
        if not rows:  # prompts need not be read yet
            return
        chains = self.buffers = self.buffers or self._buffers()
        chains.count[:] = chains.end[:] = 0
        chains.draw[:] = buffers.draw
        for row in rows:
            self._catch_up(chains, batch.texts[row], row)
        pending = chains.count.tolist()
        chains.draft(rows, drafter.threshold, limits)
        for row in rows:
            new = slice(pending[row], int(chains.count[row]))
            tokens = chains.token[row, new].tolist()
            drafter.n_read[row] = len(batch.texts[row])
            drafter.drafted[row] = tokens[: int(chains.has_state[row, new].sum())]
            buffers.add(row, tokens)

    def _buffers(self) -> DraftBuffers:
        drafter = self.drafter
        lm = drafter.lm
        assert isinstance(lm.fast_head, native.Head)
        head = lm.fast_head.as_struct(lm.hf.model.norm.weight)
        head.outputs = drafter.vocab_size + min(drafter.head.padding, 0)
        stack = native.stack_of(lm.fast_layers).as_struct(drafter.cache, range(0))
        return DraftBuffers(
            lm,
            drafter.cache,
            capacity=UNREAD + drafter.steps,
            exit_layer=lm.n_layers,
            drafting=structs.Drafting(stack=stack, head=head),
        )

    def _catch_up(self, chains: DraftBuffers, text: list[int], row: int) -> None:
        """Make a row's unread tokens its nodes; the pending token is the last one."""
        drafter = self.drafter
        last = len(text) - 1
        for token in drafter.drafted[row]:
            if drafter.n_read[row] >= last or text[drafter.n_read[row]] != token:
                break
            drafter.n_read[row] += 1
        if len(text) - drafter.n_read[row] > UNREAD:
            drafter.read_text(row, last)
        first = drafter.n_read[row]
        last_id = drafter.vocab_size - 1  # the target's further ids are padding
        pending = [min(token, last_id) for token in text[first:]]
        chains.base[row] = first
        chains.token[row, 0] = pending[0]
        chains.has_state[row, 0] = 0
        chains.add(row, pending[1:])
        chains.end[row] = len(pending) - 1
