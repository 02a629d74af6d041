"""What else a user could pick: ways to speculate that transformers' `generate` has itself."""

from __future__ import annotations

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.evaluation.speed_trials import Method, timed_generate
from kangaroo.export import draft_model, truncated
from kangaroo.model import LM

# name: what `generate` is told
RIVALS = {
    "hf_lookup": "prompt_lookup_num_tokens=10",
    "hf_early_exit": "assistant_early_exit: the target's first layers, its own norm and head",
    "hf_truncated": "assistant_model: the same as a model with a cache of its own",
    "hf_assistant": "assistant_model: the adapter, exported",
}


def rivals(lm: LM, drafter: Kangaroo) -> dict[str, Method]:
    """Those that this target and this adapter can have, by name."""
    exit_layer, parts = drafter.exit_layer, drafter.adapter.architecture
    found = {
        "hf_lookup": timed_generate(lm, prompt_lookup_num_tokens=10),
        "hf_early_exit": timed_generate(lm, assistant_early_exit=exit_layer),
        "hf_truncated": timed_generate(lm, assistant_model=truncated(lm, exit_layer)),
    }
    if parts.attention and not parts.fused:
        found["hf_assistant"] = timed_generate(lm, assistant_model=draft_model(lm, drafter.adapter))
    return found
