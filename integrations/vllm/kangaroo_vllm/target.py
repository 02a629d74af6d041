"""The target in two halves, so that no token runs through the lower one twice.

Drafting runs the pending token and all drafted tokens but the last through the layers below the
exit, and writes their keys into the target's own pages. Verification then needs these layers for
the last drafted token alone, and the layers above for all.

Shapes: N tokens of a step, M of them new, D hidden size, R rows that draft, W blocks of a row, K
draft vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata, subclass_attention_backend

from kangaroo_vllm.checks import Unsupported
from kangaroo_vllm.model import KangarooAdapter


@support_torch_compile(dynamic_arg_dims={"input_ids": {0: "b"}, "positions": {0: "b"}})
class Below(nn.Module):
    """The target's embeddings and its layers below the exit."""

    def __init__(self, *, stack: Any, exit_layer: int, vllm_config: VllmConfig):
        super().__init__()
        # in a tuple they are no submodules of this one
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
    """A row's draft.

    Args:
        index: of the row in the target's last step.
        start: the position of its pending token.
        end: of the first position for which the row has no slot yet: vLLM reserves none ahead.
        blocks: of the cache, from the text's first to the last that drafting may write.
        ids: the pending token, then the drafted ones.
        states_D: at the exit, of all of `ids` but the last.
    """

    index: int
    start: int
    end: int
    blocks: list[int]
    ids: list[int]
    states_D: list[Tensor] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the last of `ids`."""
        return self.start + len(self.ids) - 1


class SplitTarget:
    """Takes the place of the forward of a target's stack of layers, and drafts by its lower half.

    vLLM describes a step's rows to the builder of each attention's metadata. That of the adapter's
    attention is ours: it keeps what it is told, and describes further batches of the same rows.
    """

    def __init__(self, vllm_config: VllmConfig, adapter: KangarooAdapter, target: Any):
        self.vllm_config, self.adapter, stack = vllm_config, adapter, target.model
        cut: Any = {"stack": stack, "exit_layer": adapter.facts.exit_layer}
        with set_model_tag("kangaroo_below"):  # compiled parts are kept by these names
            self.below = Below(**cut, vllm_config=vllm_config)
        with set_model_tag("kangaroo_above"):
            self.above = Above(**cut, vllm_config=vllm_config)
        stack.forward, stack.do_not_compile = self.forward, True
        attention = adapter.attention.attn
        shallow = [layer.self_attn.attn for layer in stack.layers[: adapter.facts.exit_layer]]
        self.attention_names = [attention.layer_name, *(x.layer_name for x in shallow)]
        self.step: CommonAttentionMetadata | None = None
        # by the slot of each pending token; good for the next step alone, since after it a row may
        # have lost its pages
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
                fast_build: bool = False,  # vLLM's word for drafts
            ) -> Any:
                if not fast_build:
                    split.step, split.builder = common_attn_metadata, self
                return super().build(common_prefix_len, common_attn_metadata, fast_build)

        attention.attn_backend = subclass_attention_backend("Kangaroo", backend, Builder)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> Tensor:
        """The target's last states `[N, D]`."""
        drafted, self.drafted = self.drafted, {}
        if get_forward_context().attn_metadata is None:  # vLLM measures its memory, and compiles
            f_ND = self.below(input_ids, positions)
            self.adapter(f_ND, positions)
        else:
            f_ND = self._join(drafted, input_ids, positions)
        # keys of rejected tokens lie beyond the text's end, where later tokens replace them
        self.adapter.write_keys(f_ND, positions)
        return self.above(f_ND, positions)

    @property
    def enters(self) -> bool:
        """A prompt, or a part of it, was in the last step."""
        assert self.step is not None and self.step.is_prefilling is not None
        return bool(self.step.is_prefilling.any())

    def row(self, index: int, position: int, token: int) -> DraftRow:
        """A draft that begins with the pending token at this position."""
        assert self.step is not None
        size = self.builder.kv_cache_spec.block_size
        count = -(-int(self.step.seq_lens[index]) // size)
        blocks = self.step.block_table_tensor[index, :count].tolist()
        return DraftRow(index, position, count * size, blocks, [token])

    def draft(self, rows: list[DraftRow]) -> Tensor:
        """Logits after the last token of each row, `[R, K]`."""
        assert self.step is not None
        size, device = self.builder.kv_cache_spec.block_size, self.step.seq_lens.device
        places = [row.position for row in rows]
        slots = [
            row.blocks[p // size] * size + p % size for row, p in zip(rows, places, strict=True)
        ]
        slots_R = torch.tensor(slots, device=device)
        positions_R = torch.tensor(places, device=device)
        ids_R = torch.tensor([row.ids[-1] for row in rows], dtype=torch.int32, device=device)
        table_RW = self.step.block_table_tensor[[row.index for row in rows]]
        ends = list(range(len(rows) + 1))
        with self._batch(ends, [place + 1 for place in places], table_RW, slots_R):
            f_RD = self.below(ids_R, positions_R)
            hidden_RD = self.adapter(f_RD, positions_R)
        for row, f_D in zip(rows, f_RD, strict=True):
            row.states_D.append(f_D)
        return self.adapter.draft_logits(hidden_RD)

    def keep(self, rows: list[DraftRow]) -> None:
        """Give what these have computed to the step that verifies them."""
        size = self.builder.kv_cache_spec.block_size
        for row in rows:
            if row.states_D:
                row.blocks = row.blocks[: row.position // size + 1]
                slot = row.blocks[row.start // size] * size + row.start % size
                self.drafted[slot] = row

    @contextmanager
    def _batch(
        self, ends: list[int], lengths: list[int], table_RW: Tensor, slots_N: Tensor
    ) -> Iterator[None]:
        """Attention runs on the last tokens of rows.

        Args:
            ends: where in the batch each row begins, and the last one ends.
            lengths: of the rows, these tokens included.
        """
        ends_cpu = torch.tensor(ends, dtype=torch.int32)
        lengths_cpu = torch.tensor(lengths, dtype=torch.int32)
        batch = CommonAttentionMetadata(
            query_start_loc=ends_cpu.to(slots_N.device),
            query_start_loc_cpu=ends_cpu,
            seq_lens=lengths_cpu.to(slots_N.device),
            seq_lens_cpu_upper_bound=lengths_cpu,
            num_reqs=len(lengths),
            num_actual_tokens=ends[-1],
            max_query_len=int(ends_cpu.diff().max()),
            max_seq_len=max(lengths),
            block_table_tensor=table_RW,
            slot_mapping=slots_N,
        )
        metadata = self.builder.build(0, batch, fast_build=True)
        with set_forward_context(
            dict.fromkeys(self.attention_names, metadata),
            self.vllm_config,
            num_tokens=ends[-1],
            slot_mapping=dict.fromkeys(self.attention_names, slots_N),
        ):
            yield

    def _join(self, drafted: dict[int, DraftRow], input_ids: Tensor, positions: Tensor) -> Tensor:
        """The states at the exit `[N, D]`, of which the lower half computes those not drafted."""
        assert self.step is not None
        starts = self.step.query_start_loc_cpu.tolist()
        new: list[int] = []
        drafted_places: list[int] = []
        drafted_states: list[Tensor] = []
        counts: list[int] = []
        for i, (first, end) in enumerate(pairwise(starts)):
            # a single token has no draft before it
            slot = int(self.step.slot_mapping[first]) if drafted and end - first > 1 else -1
            states_D = self._computed(drafted.get(slot), i, input_ids[first:end], positions[first])
            counts.append(len(states_D))
            drafted_places += range(first, first + len(states_D))
            drafted_states += states_D
            new += range(first + len(states_D), end)
        if not drafted_states:
            return self.below(input_ids, positions)
        new_M = torch.tensor(new, device=input_ids.device)
        left_out = accumulate(counts, initial=0)
        ends = [end - count for end, count in zip(starts, left_out, strict=True)]
        lengths, slots_M = self.step.seq_lens.tolist(), self.step.slot_mapping[new_M]
        with self._batch(ends, lengths, self.step.block_table_tensor, slots_M):
            f_MD = self.below(input_ids[new_M], positions[new_M])
        f_ND = f_MD.new_empty(len(input_ids), f_MD.shape[-1])
        f_ND[new_M] = f_MD
        f_ND[drafted_places] = torch.stack(drafted_states)
        return f_ND

    def _computed(
        self, row: DraftRow | None, index: int, ids_N: Tensor, position: Tensor
    ) -> list[Tensor]:
        """The states of this row's first tokens that drafting has computed.

        A draft may have been cut, say by a grammar, and its slot been given to another text, which
        then enters with other blocks.
        """
        assert self.step is not None and self.step.is_prefilling is not None
        if row is None or row.start != int(position) or self.step.is_prefilling[index]:
            return []
        count = min(len(row.states_D), len(ids_N) - 1)
        blocks = self.step.block_table_tensor[index, : len(row.blocks)].tolist()
        same = blocks == row.blocks and ids_N[:count].tolist() == row.ids[:count]
        return row.states_D[:count] if same else []
