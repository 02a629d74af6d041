"""The target in two halves, so that no token runs through the lower one twice.

Drafting runs the pending token and all drafted tokens but the last through the layers below the
exit, and writes their keys into the target's own pages. Verification then needs these layers for
the last drafted token alone, and the layers above for all.

Shapes: N tokens of a step, M of them new, D hidden size, B rows, S draft steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata


@support_torch_compile(dynamic_arg_dims={"input_ids": {0: "b"}, "positions": {0: "b"}})
class Below(nn.Module):
    """The target's embeddings and its layers below the exit."""

    def __init__(self, *, target: Any, exit_layer: int, vllm_config: VllmConfig):
        super().__init__()
        # in a tuple they are no submodules of this one
        self.parts = (target.embed_tokens, *target.layers[:exit_layer])

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        embed, *layers = self.parts
        x_ND, residual_ND = embed(input_ids), None
        for layer in layers:
            x_ND, residual_ND = layer(positions, x_ND, residual_ND)
        return x_ND + residual_ND


@support_torch_compile(dynamic_arg_dims={"f_ND": {0: "b"}, "positions": {0: "b"}})
class Above(nn.Module):
    """The target's layers above the exit and its last norm."""

    def __init__(self, *, target: Any, exit_layer: int, vllm_config: VllmConfig):
        super().__init__()
        self.parts = (*target.layers[exit_layer:], target.norm)

    def forward(self, f_ND: Tensor, positions: Tensor) -> Tensor:
        *layers, norm = self.parts
        x_ND, residual_ND = f_ND, None
        for layer in layers:
            x_ND, residual_ND = layer(positions, x_ND, residual_ND)
        x_ND, _ = norm(x_ND, residual_ND)
        return x_ND


@dataclass
class Drafted:
    """What the last draft ran through the lower half: each row's pending token, and all tokens of
    its draft but the last.

    Args:
        rows: of each request, by its id.
        f_BSD: their states.
    """

    rows: dict[str, int]
    ids_BS: Tensor
    positions_BS: Tensor
    f_BSD: Tensor


class Halves:
    """Takes the place of the forward of a target's stack of layers.

    Attributes:
        drafted: set by the drafter, and good for the next step alone: after it a request may have
            lost its pages.
    """

    def __init__(self, proposer: Any, target: Any, exit_layer: int):
        self.proposer, self.runner = proposer, proposer.runner
        config = proposer.vllm_config
        self.below = Below(target=target, exit_layer=exit_layer, vllm_config=config)
        self.above = Above(target=target, exit_layer=exit_layer, vllm_config=config)
        self.drafted: Drafted | None = None
        target.forward, target.do_not_compile = self.forward, True
        # the step's batch, which the forward is not told
        self.batch: CommonAttentionMetadata | None = None
        self._described = self.runner._build_attention_metadata
        self.runner._build_attention_metadata = self._describe

    def _describe(self, *args: Any, **kwargs: Any) -> Any:
        described = self._described(*args, **kwargs)
        self.batch = described[1]
        return described

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any, inputs_embeds: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """The target's last states, and those at the exit."""
        drafted, self.drafted = self.drafted, None
        known: list[int] = []
        if drafted is not None and get_forward_context().attn_metadata is not None:
            known = self._known(drafted, input_ids, positions)
        if drafted is None or not any(known):
            f_ND = self.below(input_ids, positions)
        else:
            f_ND = self._join(drafted, known, input_ids, positions)
        return self.above(f_ND, positions), [f_ND]

    def _known(self, drafted: Drafted, input_ids: Tensor, positions: Tensor) -> list[int]:
        """How many of each row's first tokens the draft has computed."""
        assert self.batch is not None
        starts = self.batch.query_start_loc_cpu.tolist()
        drafts = self.runner.num_decode_draft_tokens.np  # negative where a prompt enters
        most, known = drafted.ids_BS.shape[1], []
        for i, name in enumerate(self.runner.input_batch.req_ids):
            row = drafted.rows.get(name)
            count = min(most, int(drafts[i]))
            here = slice(starts[i], starts[i] + count)
            # a request may be another one's neighbour now, and its draft cut, say by a grammar
            is_known = (
                row is not None
                and count > 0
                and torch.equal(input_ids[here], drafted.ids_BS[row, :count])
                and torch.equal(positions[here], drafted.positions_BS[row, :count])
            )
            known.append(count if is_known else 0)
        return known

    def _join(
        self, drafted: Drafted, known: list[int], input_ids: Tensor, positions: Tensor
    ) -> Tensor:
        """The states at the exit `[N, D]`, of which the lower half computes the unknown."""
        assert self.batch is not None
        starts = self.batch.query_start_loc_cpu.tolist()
        f_ND = drafted.f_BSD.new_empty(len(input_ids), drafted.f_BSD.shape[-1])
        new: list[int] = []
        for i, name in enumerate(self.runner.input_batch.req_ids):
            first = starts[i] + known[i]
            new += range(first, starts[i + 1])
            if known[i]:
                f_ND[starts[i] : first] = drafted.f_BSD[drafted.rows[name], : known[i]]
        new_M = torch.tensor(new, device=input_ids.device)
        left_out = accumulate(known, initial=0)
        ends = [end - count for end, count in zip(starts, left_out, strict=True)]
        f_ND[new_M] = self._run_below(input_ids[new_M], positions[new_M], new_M, ends)
        return f_ND

    def _run_below(
        self, input_ids: Tensor, positions: Tensor, new_M: Tensor, ends: list[int]
    ) -> Tensor:
        """States `[M, D]` of the last tokens of each row; `ends` are where rows begin and end."""
        assert self.batch is not None
        ends_cpu = torch.tensor(ends, dtype=torch.int32)
        slots_M = self.batch.slot_mapping[new_M]
        batch = self.batch.replace(
            query_start_loc=ends_cpu.to(new_M.device),
            query_start_loc_cpu=ends_cpu,
            num_actual_tokens=len(new_M),
            max_query_len=int(ends_cpu.diff().max()),
            slot_mapping=slots_M,
        )
        _, metadata = self.proposer.build_per_group_and_layer_attn_metadata(batch)
        slots = dict.fromkeys(metadata, slots_M)
        context = replace(get_forward_context(), attn_metadata=metadata, slot_mapping=slots)
        with override_forward_context(context):
            return self.below(input_ids, positions)
