"""What else a user could pick: ways to speculate that transformers' `generate` has itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.evaluation.speed.speed_trials import Method, timed_generate
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.export import draft_model, truncated
from kangaroo.models.target import LM


def static_cache(lm: LM, prompt: list[int], new_tokens: int) -> dict[str, float]:
    """Milliseconds of a token by `generate` with a static cache, and of the first.

    On a GPU torch compiles the passes over one token, and again for every length of the cache. So
    one text is written three times, and the last of them counts.
    """
    write = timed_generate(lm, cache_implementation="static")
    *_, last = (write(prompt, new_tokens) for _ in range(3))
    return {
        "context": len(prompt),
        "ms_per_token": 1e3 * last.seconds_per_token,
        "first_ms": 1e3 * last.first_seconds,
    }


class Generating(Protocol):
    """A model of transformers by the one method that is wrapped here."""

    generate: Callable[..., Any]


def rivals(lm: LM, drafter: Kangaroo) -> dict[str, Method]:
    """Those that this target and this adapter can have, by name: prompt lookup; the target's first
    layers with its own norm and head, by `generate`'s early exit and as a model with a cache of its
    own; the adapter, exported.
    """
    exit_layer, adapter = drafter.exit_layer, drafter.adapter
    found = {
        "hf_lookup": timed_generate(lm, prompt_lookup_num_tokens=10),
        "hf_early_exit": timed_generate(lm, assistant_early_exit=exit_layer),
        "hf_truncated": timed_generate(lm, assistant_model=assistant(truncated(lm, exit_layer))),
    }
    if isinstance(adapter, Adapter) and adapter.architecture.attention and adapter.deep_tap is None:
        found["hf_assistant"] = timed_generate(
            lm, assistant_model=assistant(draft_model(lm, adapter))
        )
    return found


def assistant(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, which `generate` can use as it is meant to.

    transformers 5.23 hands its assistant no attention mask where nothing is masked. The assistant
    then takes the whole text again, on top of its cache, in every round, and drafts after a text
    that repeats itself. With a mask it goes on where it stopped.
    """
    generating = cast(Generating, model)
    generate = generating.generate

    def masked(*, input_ids: Tensor, **kwargs: Any) -> Any:
        kwargs["attention_mask"] = torch.ones_like(input_ids)
        return generate(input_ids=input_ids, **kwargs)

    generating.generate = masked
    return model
