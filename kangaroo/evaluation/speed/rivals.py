"""What else a user could pick: ways to speculate that transformers' `generate` has itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.evaluation.speed.trials import Method, timed_generate
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.export import draft_model, truncated
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError


def rivals(lm: TargetModel, drafter: Kangaroo, names: Sequence[str]) -> dict[str, Method]:
    """Those of these names: prompt lookup; the target's first layers with its own norm and head, by
    `generate`'s early exit and as a model with a cache of its own; the adapter, exported.

    Errors: `ConfigError` for another name, and for an adapter that cannot be exported.
    """
    adapter = cast(Adapter, drafter.adapter)
    speculations: dict[str, Callable[[], dict[str, Any]]] = {
        "hf_lookup": lambda: {"prompt_lookup_num_tokens": 10},
        "hf_early_exit": lambda: {"assistant_early_exit": drafter.exit_layer},
        "hf_truncated": lambda: {"assistant_model": assistant(truncated(lm, drafter.exit_layer))},
        "hf_assistant": lambda: {"assistant_model": assistant(draft_model(lm, adapter))},
    }
    if unknown := set(names) - set(speculations):
        there = ", ".join(speculations)
        raise ConfigError(f"speed.rivals: there is no rival '{min(unknown)}'; there are {there}.")
    return {name: timed_generate(lm, **speculations[name]()) for name in names}


def assistant(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, which `generate` can use as it is meant to.

    transformers 5.23 hands its assistant no attention mask where nothing is masked. The assistant
    then takes the whole text again, on top of its cache, in every round, and drafts after a text
    that repeats itself. With a mask it goes on where it stopped.
    """
    wrapped = cast(Any, model)
    generate = wrapped.generate

    def masked(*, input_ids: Tensor, **kwargs: Any) -> Any:
        kwargs["attention_mask"] = torch.ones_like(input_ids)
        return generate(input_ids=input_ids, **kwargs)

    wrapped.generate = masked
    return model
