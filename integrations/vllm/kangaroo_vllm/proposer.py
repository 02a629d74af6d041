"""The proposer that vLLM creates for `"method": "custom_class"`.

Shapes: R rows that draft, K draft vocabulary.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn
from vllm.config import VllmConfig
from vllm.triton_utils import HAS_TRITON

from kangaroo_vllm import checks, cpu_sampling, touched
from kangaroo_vllm.model import load_adapter
from kangaroo_vllm.target import DraftRow, SplitTarget


class Kangaroo:
    """Drafts by the target's own layers, with vLLM's interface of custom proposers."""

    def __init__(self, vllm_config: VllmConfig):
        self.vllm_config = vllm_config

    def load_model(self, target: nn.Module) -> None:
        """Load the adapter, and replace the target's stack of layers by one cut at the exit.
        Errors: `Unsupported`; here, since vLLM would wrap errors of `__init__`."""
        touched.check()
        self.options = checks.options(self.vllm_config)
        if not HAS_TRITON:
            cpu_sampling.repair()
        self.adapter = load_adapter(self.vllm_config, self.options, target)
        given = self.options.threshold
        self.threshold = self.adapter.facts.threshold if given is None else given
        self.target = SplitTarget(self.vllm_config, self.adapter, target)
        self.followed = 0  # the number of rows whose tokens are in the draft vocabulary

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The drafts of all rows, of different lengths.

        Args:
            sampled_token_ids: each row's new tokens in the last step; none during its prefill.
            num_tokens_no_spec: each row's number of tokens, of which the last is in no cache.
            token_ids_cpu: the rows' tokens, followed by others.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if len(drafts) > self.options.max_batch:
            self.followed = 0
            return drafts
        if self.adapter.room and (self.target.enters or len(drafts) != self.followed):
            # when a text enters or leaves, as in our engine
            self.followed, lengths = len(drafts), num_tokens_no_spec[: len(drafts)].tolist()
            self.adapter.follow([token_ids_cpu[i, :n] for i, n in enumerate(lengths)])
        rows = [
            self.target.row(i, int(num_tokens_no_spec[i]) - 1, tokens[-1])
            for i, tokens in enumerate(sampled_token_ids)
            if tokens
        ]
        active = rows
        for _ in range(self.vllm_config.speculative_config.num_speculative_tokens):
            active = [row for row in active if row.position < row.end]
            if not active:
                break
            active = self._step(active)
        for row in rows:
            drafts[row.index] = row.ids[1:]
        self.target.keep(rows)
        return drafts

    def _step(self, rows: list[DraftRow]) -> list[DraftRow]:
        """Draft a token in each row; returns the rows that continue."""
        logits_RK = self.target.draft(rows)
        tokens_R = self.adapter.tokens(logits_RK.argmax(-1))
        sure_R = torch.ones_like(tokens_R)
        if self.threshold:
            sure_R = logits_RK.float().softmax(-1).amax(-1) > self.threshold
        # one copy from the device
        chosen = torch.stack([tokens_R, sure_R.to(tokens_R.dtype)], 1).tolist()
        for row, (token, _) in zip(rows, chosen, strict=True):
            row.ids.append(token)
        # a token with a low confidence is still verified
        return [row for row, (_, sure) in zip(rows, chosen, strict=True) if sure]
