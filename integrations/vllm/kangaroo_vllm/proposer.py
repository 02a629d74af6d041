"""vLLM's proposer for draft models, drafting on the target's own layers.

Shapes: B rows, N tokens of the target's last step, S drafted tokens, D hidden size, K draft
vocabulary, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from kangaroo_vllm import ARCHITECTURE, checks
from kangaroo_vllm.halves import Drafted, Halves


class KangarooProposer(DraftModelProposer):
    """As vLLM's for any draft model but `KangarooDraft`."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        config = self.draft_model_config.hf_config
        self.is_kangaroo = ARCHITECTURE in (config.architectures or [])
        self.runner = runner
        if self.is_kangaroo:
            checks.check_options(vllm_config)
            adapter = checks.read(config)
            self.threshold = checks.threshold(adapter, vllm_config)
            # the target hands over what its layers below the exit compute, as it does to EAGLE-3
            config.eagle_aux_hidden_state_layer_ids = [adapter.exit_layer]
            runner.use_aux_hidden_state_outputs = True

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        if self.is_kangaroo:
            self.own_layers = set(self._draft_attn_layer_names)
            # metadata and slots are made for these names: they have to lie in one KV cache group
            self._draft_attn_layer_names |= self.model.attach(target_model)
            self.halves = Halves(self, target_model.model, self.model.adapter.exit_layer)
            self.model.below = self.halves.below

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> Tensor | list[list[int]]:
        """The drafts that follow `next_token_ids`, as a tensor or, with a threshold, by row.

        Args:
            num_speculative_tokens: at most this many a row, by the schedule for this batch size.
            target_hidden_states: `[N, D]`, after the layers below the exit.
            token_indices_to_sample: of each row's last accepted token; None is its last token.
        """
        if not self.is_kangaroo:
            return super().propose(
                num_speculative_tokens,
                target_token_ids,
                target_positions,
                target_hidden_states,
                next_token_ids,
                token_indices_to_sample,
                common_attn_metadata,
                sampling_metadata,
                mm_embed_inputs,
                num_rejected_tokens_gpu,
                slot_mappings,
            )
        self._last_draft_probs = None
        self._write_keys(target_hidden_states, target_positions, common_attn_metadata)
        last_B = token_indices_to_sample
        if last_B is None:
            last_B = common_attn_metadata.query_start_loc[1:] - 1
        batch = one_token_a_row(common_attn_metadata, num_rejected_tokens_gpu, self.arange)
        return self._draft(
            num_speculative_tokens,
            next_token_ids,
            target_positions[last_B],
            batch,
            sampling_metadata,
        )

    def _write_keys(
        self, f_ND: Tensor, positions_N: Tensor, batch: CommonAttentionMetadata
    ) -> None:
        """Bring the adapter's keys up to what the target has just computed. Those of rejected
        tokens lie beyond the text's end, where later tokens replace them.
        """
        slots_N = batch.slot_mapping[: len(f_ND)]
        with set_forward_context(
            None,
            self.vllm_config,
            num_tokens=len(f_ND),
            slot_mapping=dict.fromkeys(self.own_layers, slots_N),
        ):
            self.model.write_keys(f_ND, positions_N)

    def _draft(
        self,
        steps: int,
        ids_B: Tensor,
        positions_B: Tensor,
        batch: CommonAttentionMetadata,
        sampling: SamplingMetadata,
    ) -> Tensor | list[list[int]]:
        """Up to `steps` tokens after `ids_B`, whose predecessors are at `positions_B`."""
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        states: list[tuple[Tensor, Tensor, Tensor]] = []
        active_B = torch.ones_like(ids_B, dtype=torch.bool)
        count_B = torch.zeros_like(ids_B)
        for step in range(steps):
            logits_BK, f_BD = self._step(step, ids_B, positions_B, batch)
            positions_B = self.positions[: len(ids_B)]
            states.append((ids_B.int(), positions_B.clone(), f_BD))
            count_B += active_B
            if self.threshold:  # the token whose confidence is low is still verified
                active_B &= logits_BK.float().softmax(-1).amax(-1) > self.threshold
            ids_B, probs_BK = self._sample_from_logits(logits_BK, sampling)
            ids_B = self.model.tokens(ids_B)
            drafted.append(ids_B)
            if probs_BK is not None:
                probs.append(self.model.spread(probs_BK))
            if self.threshold and not active_B.any():
                break
        if states:
            rows = {name: i for i, name in enumerate(self.runner.input_batch.req_ids)}
            self.halves.drafted = Drafted(
                rows, *(torch.stack(x, 1) for x in zip(*states, strict=True))
            )
        if probs:
            self._last_draft_probs = torch.stack(probs, 1)
        tokens_BS = torch.stack(drafted, 1) if drafted else ids_B.new_empty(len(ids_B), 0)
        if not self.threshold:
            return tokens_BS
        lengths = zip(tokens_BS.tolist(), count_B.tolist(), strict=True)
        return [row[:count] for row, count in lengths]

    def _step(
        self, step: int, ids_B: Tensor, positions_B: Tensor, batch: CommonAttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Logits after one more token of each row, `[B, K]`, and its state at the exit, `[B, D]`.

        Args:
            positions_B: of the token before; like the lengths in `batch`, they are moved on by one,
                and left in `self.positions`.
        """
        size = len(ids_B)
        self._update_positions_dependent_metadata(positions_B, batch, size, size, self.block_size)
        _, metadata = self.build_per_group_and_layer_attn_metadata(batch, draft_index=step)
        self.input_ids[:size] = ids_B
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=size,
            slot_mapping=self._get_slot_mapping(size),
        ):
            hidden_BD, f_BD = self.model(
                input_ids=self.input_ids[:size], positions=self.positions[:size]
            )
        return self.model.draft_logits(hidden_BD), f_BD


def one_token_a_row(
    batch: CommonAttentionMetadata, rejected_B: Tensor | None, arange: Tensor
) -> CommonAttentionMetadata:
    """The same rows up to their last accepted token, about to take one token each."""
    rows, lengths_B = batch.batch_size(), batch.seq_lens.clone()
    if rejected_B is not None:
        lengths_B -= rejected_B
    bound_B = batch.seq_lens_cpu_upper_bound
    return batch.replace(
        query_start_loc=arange[: rows + 1],
        query_start_loc_cpu=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=lengths_B,
        seq_lens_cpu_upper_bound=None if bound_B is None else bound_B.clone(),
        num_actual_tokens=rows,
        max_query_len=1,
    )
