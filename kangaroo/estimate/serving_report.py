"""A plan to serve two models, as Markdown: commands, memory, expected gain, and what is assumed."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kangaroo.estimate.serving import (
    Drafting,
    ServingConfig,
    adapter_drafting,
    best_round,
    held,
    model_drafting,
    room,
    whole_pass,
)
from kangaroo.models.loading import ModelConfig
from kangaroo.models.target import LM
from kangaroo.training.recipe import AdapterRecipe
from kangaroo.utils import tables
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.tables import Row, number

PLACE = re.compile(r"(<!-- serving: ([\w.-]+) -->\n).*?(<!-- end -->)", re.S)
WIDTH = 120  # of the page's lines
ADAPTER, MODEL = "Kangaroo adapter", "draft model"


@dataclass(frozen=True)
class Serving:
    """A target, and both ways to draft for it.

    Args:
        lm, draft: their shapes.
        model: the target's names.
        recipe: of the adapter.
        vocabulary: how many tokens the adapter drafts from; None is all.
    """

    lm: LM
    draft: LM
    model: ModelConfig
    recipe: AdapterRecipe
    vocabulary: int | None
    plan: ServingConfig

    def drafting(self, gpus: int) -> dict[str, Drafting]:
        """By name, on one of so many GPUs."""
        plan = self.plan
        return {
            MODEL: model_drafting(self.draft, gpus, plan.draft_acceptance),
            ADAPTER: adapter_drafting(
                self.lm, self.recipe, self.vocabulary, gpus, plan.adapter_acceptance
            ),
        }


def markdown(serving: Serving) -> str:
    """The whole plan.

    Errors: `ConfigError` for a draft model with other tokens, an adapter that vLLM cannot run, or a
    target that does not fit.
    """
    target, draft = (lm.config.vocab_size for lm in (serving.lm, serving.draft))
    if target != draft:
        raise ConfigError(
            f"serving.draft={serving.plan.draft.name} has {draft} tokens and {serving.model.name} "
            f"{target}: vLLM refuses that. Choose a draft model of the target's family."
        )
    parts = [_commands(serving, gpus) for gpus in serving.plan.gpus]
    return "\n\n".join(
        [
            _premises(serving),
            *parts,
            "Memory of one GPU:",
            tables.markdown(memory(serving)),
            f"Expected tokens/s of one text, and times as fast as {serving.model.name} alone:",
            tables.markdown(gains(serving)),
        ]
    )


def memory(serving: Serving) -> list[Row]:
    """What one GPU holds, by their number and what drafts.

    Errors: `ConfigError` where not even one text fits.
    """
    plan, rows = serving.plan, []
    for gpus in plan.gpus:
        target, token = held(serving.lm, gpus), whole_pass(serving.lm, gpus).token
        ways: dict[str, Drafting | None] = {"alone": None}
        for name, drafting in (ways | serving.drafting(gpus)).items():
            each = token + (drafting.token if drafting else 0)
            left = room(target, drafting, plan)
            texts = int(left // (each * plan.context))
            if texts < 1:
                raise ConfigError(
                    f"{serving.model.name} ({name}) takes {target / 1e9:.1f} GB or more of each of "
                    f"{gpus} GPUs, and no text of {plan.context} tokens fits beside it. Pass "
                    "serving.gpus= more of them, or a smaller serving.context=."
                )
            rows.append(
                {
                    "GPUs": str(gpus),
                    "drafts": name,
                    "weights, GB": number(target / 1e9, 1),
                    "drafter's weights, GB": number((drafting.weights if drafting else 0) / 1e9, 2),
                    "KV of a token, kB": number(each / 1e3, 1),
                    f"KV of {plan.texts[-1]} texts of {plan.context} tokens, GB": number(
                        each * plan.context * plan.texts[-1] / 1e9, 1
                    ),
                    "room for KV, GB": number(left / 1e9, 1),
                    f"texts of {plan.context} tokens that fit": str(texts),
                }
            )
    return rows


def gains(serving: Serving) -> list[Row]:
    """What drafting brings, by the number of GPUs and of texts."""
    plan, rows = serving.plan, []
    for gpus in plan.gpus:
        target = whole_pass(serving.lm, gpus)
        for texts in plan.texts:
            row: Row = {"GPUs": str(gpus), "texts": str(texts)}
            for name, drafting in serving.drafting(gpus).items():
                alone, best = best_round(target, drafting, texts, plan)
                row["alone"] = number(alone.speed, 0)
                row |= {
                    f"{name}: draft tokens": str(best.steps),
                    f"{name}: tokens a round": number(best.tokens),
                    f"{name}: tokens/s": number(best.speed, 0),
                    f"{name}: gain": number(best.speed / alone.speed),
                }
            rows.append(row)
    return rows


def rewrite(page: Path, name: str, text: str) -> None:
    """Write a plan into its place in a page: between `<!-- serving: NAME -->` and `<!-- end -->`.

    Errors: `ConfigError` where the page has no such place.
    """
    known = page.read_text(encoding="utf-8") if page.is_file() else ""
    if name not in [found for _, found, _ in PLACE.findall(known)]:
        raise ConfigError(
            f"serving.page='{page}' has no line '<!-- serving: {name} -->' with a line "
            "'<!-- end -->' below it."
        )

    def put(place: re.Match[str]) -> str:
        return f"{place[1]}\n{text}\n\n{place[3]}" if place[2] == name else place[0]

    page.write_text(PLACE.sub(put, known), encoding="utf-8")


def _premises(serving: Serving) -> str:
    plan, lm = serving.plan, serving.lm
    facts = (
        f"{serving.model.name}: {_billions(lm)} parameters, {lm.n_layers} layers, "
        f"{str(lm.dtype).removeprefix('torch.')}. {plan.draft.name}: {_billions(serving.draft)} "
        f"parameters. The adapter: {serving.recipe.name}, exit layer "
        f"{min(serving.recipe.places(lm).values())}, drafting from {serving.vocabulary or 'all'} "
        f"tokens. One {plan.gpu}: {plan.memory / 1e9:g} GB, {plan.bandwidth / 1e12:g} TB/s, "
        f"{plan.flops / 1e12:g} TFLOP/s. vLLM takes {plan.memory_share:.0%} of the memory."
    )
    assumed = (
        "Assumed: a draft token is right, if those before it are, with a chance of "
        f"{plan.draft_acceptance} (draft model) or {plan.adapter_acceptance} (adapter). Decoding "
        f"reaches {plan.bandwidth_share:.0%} of the bandwidth and {plan.flops_share:.0%} of the "
        f"arithmetic. The GPUs add up results twice a layer, in {plan.sum_seconds * 1e6:g} µs each "
        f"time. {plan.reserved / 1e9:g} GB of a GPU hold neither weights nor keys and values. A "
        f"text has {plan.context} tokens."
    )
    return "\n\n".join(textwrap.fill(text, WIDTH) for text in (facts, assumed))


def _commands(serving: Serving, gpus: int) -> str:
    """How to start vLLM, each way with the draft tokens that are best for the middle number of
    texts."""
    plan = serving.plan
    middle = plan.texts[len(plan.texts) // 2]
    target, path = whole_pass(serving.lm, gpus), f"outputs/export/{serving.model.name}-vllm"
    steps = {
        name: max(1, best_round(target, drafting, middle, plan)[1].steps)
        for name, drafting in serving.drafting(gpus).items()
    }
    start = (
        f"vllm serve {serving.model.path} --tensor-parallel-size {gpus} --max-model-len "
        f"{plan.context} \\\n  --max-num-seqs {plan.texts[-1]} --gpu-memory-utilization "
        f"{plan.memory_share:g}"
    )
    lines = [
        f"# {serving.model.name} + {plan.draft.name} on {gpus} GPUs",
        f"{start} \\\n  {_speculative(plan.draft.path, steps[MODEL], gpus)}",
        f"# {serving.model.name} + {ADAPTER} on {gpus} GPUs, with kangaroo-vllm installed",
        # what the plugin needs on a GPU: integrations/vllm/README.md
        f"VLLM_USE_V2_MODEL_RUNNER=0 {start} --enforce-eager \\\n"
        f"  {_speculative(path, steps[ADAPTER], gpus)} \\\n"
        f"  --additional-config '{json.dumps({'kangaroo_threshold': 0})}'",
    ]
    return "```\n" + "\n".join(lines) + "\n```"


def _speculative(model: str, steps: int, gpus: int) -> str:
    said: dict[str, Any] = {"method": "draft_model", "model": model}
    said |= {"num_speculative_tokens": steps, "draft_tensor_parallel_size": gpus}
    return f"--speculative-config '{json.dumps(said)}'"


def _billions(lm: LM) -> str:
    return f"{sum(p.numel() for p in lm.parameters()) / 1e9:.2f} B"
