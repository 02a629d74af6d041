"""The target in two parts, so that no token runs through the lower one twice.

Drafting runs the pending token and all drafted tokens but the last through the layers below the
exit, and writes their keys into the target's own pages. Verification then runs these layers only
for the last drafted token, and the layers above for all.

Shapes: N tokens of a step, M of them new, D hidden size, R rows that draft, W blocks of a row, K
draft vocabulary, P tokens of a CUDA graph: one of vLLM's sizes, filled up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata, subclass_attention_backend
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from kangaroo_vllm.checks import Unsupported
from kangaroo_vllm.model import KangarooAdapter, copies_inputs


@support_torch_compile(dynamic_arg_dims={"input_ids": {0: "b"}, "positions": {0: "b"}})
class Below(nn.Module):
    """The target's embeddings and its layers below the exit."""

    def __init__(self, *, stack: Any, exit_layer: int, vllm_config: VllmConfig):
        super().__init__()
        # in a tuple, so that they are no submodules
        self.parts = (stack.embed_tokens, *stack.layers[:exit_layer])

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        embed, *layers = self.parts
        x_ND, residual_ND = embed(input_ids), None
        for layer in layers:
            x_ND, residual_ND = layer(positions, x_ND, residual_ND)
        return x_ND + residual_ND


@support_torch_compile(dynamic_arg_dims={"f_ND": {0: "b"}, "positions": {0: "b"}})
class Above(nn.Module):
    """The target's layers above the exit and its last norm."""

    def __init__(self, *, stack: Any, exit_layer: int, vllm_config: VllmConfig):
        super().__init__()
        self.parts = (*stack.layers[exit_layer:], stack.norm)

    def forward(self, f_ND: Tensor, positions: Tensor) -> Tensor:
        *layers, norm = self.parts
        x_ND, residual_ND = f_ND, None
        for layer in layers:
            x_ND, residual_ND = layer(positions, x_ND, residual_ND)
        x_ND, _ = norm(x_ND, residual_ND)
        return x_ND


@dataclass
class DraftRow:
    """A row's draft."""

    index: int  # of the row in the target's last step
    start: int  # the position of its pending token
    end: int  # the first position for which the row has no slot: vLLM reserves none ahead
    blocks: list[int]  # of the cache, from the text's first to the last that drafting may write
    ids: list[int]  # the pending token, then the drafted tokens
    states_D: list[Tensor] = field(default_factory=list)  # at the exit, for all ids but the last

    @property
    def position(self) -> int:
        """The position of the last id."""
        return self.start + len(self.ids) - 1


class SplitTarget:
    """Replaces the forward pass of a target's stack of layers, and drafts by its lower part.

    vLLM passes a step's rows to the metadata builder of each attention. The adapter's builder is
    ours: it keeps the rows' metadata, and builds that of further batches of the same rows.
    """

    def __init__(self, vllm_config: VllmConfig, adapter: KangarooAdapter, target: Any):
        self.vllm_config, self.adapter, stack = vllm_config, adapter, target.model
        cut: Any = {"stack": stack, "exit_layer": adapter.facts.exit_layer}
        with set_current_vllm_config(copies_inputs(vllm_config)):
            with set_model_tag("kangaroo_below"):  # a key of vLLM's compilation cache
                self.below = Below(**cut, vllm_config=vllm_config)
            with set_model_tag("kangaroo_above"):
                self.above = Above(**cut, vllm_config=vllm_config)
        stack.forward, stack.do_not_compile = self.forward, True
        attention = adapter.attention.attn
        shallow = [layer.self_attn.attn for layer in stack.layers[: adapter.facts.exit_layer]]
        self.attention_names = [attention.layer_name, *(x.layer_name for x in shallow)]
        self.step: CommonAttentionMetadata | None = None
        # of the step's rows, on the host once they are needed: the length, then the blocks
        self.pages_RX: NDArray[np.int64] | None = None
        # by the slot of each pending token; valid only in the next step, after which a row may have
        # lost its pages
        self.drafted: dict[int, DraftRow] = {}

        backend, split = attention.get_attn_backend(), self
        if any(x.get_attn_backend() is not backend for x in shallow):
            raise Unsupported(
                "vLLM gives the target's attention another backend than the adapter's. Name one by "
                "--attention-backend."
            )

        class Builder(backend.get_builder_cls()):  # type: ignore[misc]
            def build(
                self,
                common_prefix_len: int,
                common_attn_metadata: CommonAttentionMetadata,
                fast_build: bool = False,  # vLLM's name for drafting
            ) -> Any:
                if not fast_build:
                    split.step, split.builder = common_attn_metadata, self
                    split.pages_RX = None
                return super().build(common_prefix_len, common_attn_metadata, fast_build)

        attention.attn_backend = subclass_attention_backend("Kangaroo", backend, Builder)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> Tensor:
        """The target's last hidden states, `[N, D]`."""
        drafted, self.drafted = self.drafted, {}
        if get_forward_context().attn_metadata is None:  # vLLM measures memory, and compiles
            f_ND = self.below(input_ids, positions)
            self.adapter(f_ND, positions)
        else:
            f_ND = self._join(drafted, input_ids, positions)
        # keys of rejected tokens lie beyond the text's end, where later tokens overwrite them
        self.adapter.write_keys(f_ND, positions)
        return self.above(f_ND, positions)

    @property
    def enters(self) -> bool:
        """Whether the last step had a part of a prompt."""
        return bool(self.step.is_prefilling.any())

    def pages(self) -> NDArray[np.int64]:
        """Each row's length and its blocks, `[R, 1 + W]`: one copy from the device a step."""
        if self.pages_RX is None:
            lengths_R1 = self.step.seq_lens[:, None].long()
            table_RW = self.step.block_table_tensor[: len(lengths_R1)].long()
            self.pages_RX = torch.cat([lengths_R1, table_RW], 1).cpu().numpy()
        return self.pages_RX

    def row(self, index: int, position: int, token: int) -> DraftRow:
        """A draft that starts with the pending token at this position."""
        length, *blocks = self.pages()[index].tolist()
        size = self.builder.kv_cache_spec.block_size
        count = -(-length // size)
        return DraftRow(index, position, count * size, blocks[:count], [token])

    def draft(self, rows: list[DraftRow]) -> Tensor:
        """Logits after the last token of each row, `[R, K]`."""
        size, device = self.builder.kv_cache_spec.block_size, self.step.seq_lens.device
        places = []
        for row in rows:
            p = row.position
            places.append([row.index, p, row.blocks[p // size] * size + p % size, row.ids[-1]])
        # one copy to the device for all
        index_R, positions_R, slots_R, ids_R = torch.tensor(places).T.contiguous().to(device)
        ends = torch.arange(len(rows) + 1, dtype=torch.int32)
        lengths = torch.tensor([row.position + 1 for row in rows], dtype=torch.int32)
        tokens = ids_R.int(), positions_R, slots_R
        with self._batch(ends, lengths, self.step.block_table_tensor[index_R], tokens) as padded:
            ids_P, positions_P = padded
            f_PD = self.below(ids_P, positions_P)
            hidden_RD = self.adapter(f_PD, positions_P)[: len(rows)]
        # a copy, since the next replay of a graph writes to the same memory
        for row, f_D in zip(rows, f_PD[: len(rows)].clone(), strict=True):
            row.states_D.append(f_D)
        return self.adapter.draft_logits(hidden_RD)

    def keep(self, rows: list[DraftRow]) -> None:
        """Keep these rows' states for the step that verifies them."""
        size = self.builder.kv_cache_spec.block_size
        for row in rows:
            if row.states_D:
                row.blocks = row.blocks[: row.position // size + 1]
                slot = row.blocks[row.start // size] * size + row.start % size
                self.drafted[slot] = row

    @cached_property
    def graphs(self) -> CudagraphDispatcher:
        """Which of vLLM's CUDA graphs runs a number of tokens; the runner has another one of these,
        which gives the same answers."""
        graphs = CudagraphDispatcher(self.vllm_config)
        graphs.initialize_cudagraph_keys(self.vllm_config.compilation_config.cudagraph_mode)
        return graphs

    @contextmanager
    def _batch(
        self, ends: Tensor, lengths: Tensor, table_RW: Tensor, tokens_M: tuple[Tensor, ...]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run attention on the last tokens of rows. Yields their ids and positions `[P]`, filled up
        to the size of a graph if one is to run.

        Args:
            ends: each row's start in the batch, and the end of the last one, on the host.
            lengths: the rows' lengths, including these tokens, on the host.
            tokens_M: their ids, positions and slots.
        """
        both = torch.cat([ends, lengths]).to(table_RW.device)  # one copy to the device
        count = len(tokens_M[0])
        mode, graph = self.graphs.dispatch(count)
        if missing := graph.num_tokens - count:
            fills = zip(tokens_M, (0, 0, -1), strict=True)  # -1: no slot
            tokens_M = tuple(F.pad(x_M, (0, missing), value=fill) for x_M, fill in fills)
        ids_P, positions_P, slots_P = tokens_M
        batch = CommonAttentionMetadata(
            query_start_loc=both[: len(ends)],
            query_start_loc_cpu=ends,
            seq_lens=both[len(ends) :],
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(lengths),
            num_actual_tokens=count,
            max_query_len=int(ends.diff().max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table_RW,
            slot_mapping=slots_P,
        )
        metadata = self.builder.build(0, batch, fast_build=True)
        with set_forward_context(
            dict.fromkeys(self.attention_names, metadata),
            self.vllm_config,
            num_tokens=graph.num_tokens,
            cudagraph_runtime_mode=mode,
            batch_descriptor=graph,
            slot_mapping=dict.fromkeys(self.attention_names, slots_P),
        ):
            yield ids_P, positions_P

    def _join(self, drafted: dict[int, DraftRow], input_ids: Tensor, positions: Tensor) -> Tensor:
        """The states at the exit `[N, D]`; the lower part computes those that drafting has not."""
        step = self.step
        if not drafted:
            return self.below(input_ids, positions)
        # one copy from the device for all that the host has to know, and one of the pages
        count = step.num_actual_tokens
        parts = (input_ids, positions, step.slot_mapping)
        ids, places, slots = torch.stack([x[:count].long() for x in parts]).tolist()
        starts = step.query_start_loc_cpu.tolist()
        enters = step.is_prefilling.tolist()  # on the host, too
        new: list[int] = []
        drafted_indices: list[int] = []
        drafted_states: list[Tensor] = []
        ends = [0]  # of the new tokens
        for i, (first, end) in enumerate(pairwise(starts)):
            row = None  # one token has no draft
            if end - first > 1 and not enters[i]:
                row = drafted.get(slots[first])
            states_D = self._computed(row, i, ids[first:end], places[first])
            drafted_indices += range(first, first + len(states_D))
            drafted_states += states_D
            new += range(first + len(states_D), end)
            ends.append(len(new))
        if not drafted_states:
            return self.below(input_ids, positions)
        indices = torch.tensor([*new, *drafted_indices]).to(input_ids.device)
        new_M, drafted_M = indices.split([len(new), len(drafted_indices)])
        lengths = torch.from_numpy(self.pages()[:, 0]).int()
        ends_cpu = torch.tensor(ends, dtype=torch.int32)
        tokens = input_ids[new_M], positions[new_M], step.slot_mapping[new_M]
        with self._batch(ends_cpu, lengths, step.block_table_tensor, tokens) as padded:
            f_MD = self.below(*padded)[: len(new)]
        f_ND = f_MD.new_zeros(len(input_ids), f_MD.shape[-1])  # may end with a graph's fillers
        f_ND[new_M] = f_MD
        f_ND[drafted_M] = torch.stack(drafted_states)
        return f_ND

    def _computed(
        self, row: DraftRow | None, index: int, ids: list[int], position: int
    ) -> list[Tensor]:
        """The states of this row's first tokens that drafting has computed.

        A draft may have been cut, for example by a grammar, and its slot given to another text,
        which then has other blocks.
        """
        if row is None or row.start != position:
            return []
        count = min(len(row.states_D), len(ids) - 1)
        blocks = self.pages()[index, 1 : 1 + len(row.blocks)].tolist()
        is_same = blocks == row.blocks and ids[:count] == row.ids[:count]
        return row.states_D[:count] if is_same else []
