"""Measure finished adapters side by side on texts that none of them was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kangaroo.heads import adapter_files
from kangaroo.heads.base import Trainable
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.training.config import TrainerConfig
from kangaroo.training.decode import decode, prompts_of
from kangaroo.training.loop import evaluate
from kangaroo.training.recipe import AdapterRecipe, Trainee
from kangaroo.training.results import STEPS, below
from kangaroo.utils import tables
from kangaroo.utils.errors import CorruptFile
from kangaroo.utils.ranges import Count, CountOrZero, Ranged
from kangaroo.utils.ranks import Ranks


@dataclass
class CompareConfig(Ranged):
    """Which adapters are compared, and on how much.

    Args:
        adapters: their folders or hub ids.
        holdout: conversations at the end of the data: no more than the adapters' runs held out.
        prompts: how many of them are decoded too.
        new_tokens: of each text.
    """

    adapters: list[str] = field(default_factory=list)
    holdout: Count = 128
    prompts: CountOrZero = 24
    new_tokens: Count = 96


def compare(
    lm: TargetModel, samples: Sequence[Sample], config: CompareConfig
) -> list[dict[str, Any]]:
    """A row for each adapter: what it is, its held-out results, and those of decoding.

    Errors: those of `adapter_files.load`; `CorruptFile` for an adapter without provenance.
    """
    held_out = samples[-config.holdout :]
    prompts = prompts_of(held_out, config.prompts, lm.context, config.new_tokens)
    loaded = [_trainee(lm, path) for path in config.adapters]
    results = decode(lm, [trainee for trainee, _ in loaded], prompts, config.new_tokens)
    rows = []
    for trainee, about in loaded:
        results |= evaluate(lm, [trainee], held_out, TrainerConfig(), Ranks())[0]
        of_text = below(results, f"held_out/{trainee.name}/")
        decoded = below(results, f"decode/{trainee.name}/")
        rows.append(about | {"held_out": of_text, "decoded": decoded})
    return rows


def _trainee(lm: TargetModel, path: str) -> tuple[Trainee, dict[str, Any]]:
    """A finished adapter as training sees one, graded by the paper's loss whatever it learnt by."""
    saved = adapter_files.read_config(path)
    adapter, heads = adapter_files.load(path, lm, Trainable)  # type: ignore[type-abstract]
    recipe = AdapterRecipe(path, saved.architecture, exit_layers=[saved.exit_layer])
    targets = DraftHead(lm, None, heads[0].vocabulary_K)
    learnt = saved.training
    if not {"adapter", "progress"} <= learnt.keys():
        raise CorruptFile(
            f"adapter '{path}' does not say in its config.json how it was trained, which the table "
            "wants; leave it out of compare.adapters, or train it again."
        )
    about = {
        "adapter": Path(path).name,
        "exit_layer": saved.exit_layer,
        "parameters": saved.parameters,
        "loss": learnt["adapter"]["loss"],
        "draft_steps": learnt["adapter"]["draft_steps"],
        "positions": learnt["progress"]["assistant_tokens"],
    }
    return Trainee(path, adapter, heads, targets, recipe), about


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table, the best decoding compression rate first."""
    ordered = sorted(rows, key=lambda row: -row["decoded"]["compression_rate"])
    return tables.markdown([_cells(row) for row in ordered]) + "\n"


def _cells(row: dict[str, Any]) -> tables.Row:
    held_out, decoded = row["held_out"], row["decoded"]
    return {
        "adapter": row["adapter"],
        "exit": str(row["exit_layer"]),
        "M parameters": f"{row['parameters'] / 1e6:.2f}",
        "loss": row["loss"],
        "k positions": f"{row['positions'] / 1e3:.0f}",
        "agreement": tables.number(held_out["agreement"], 3),
        "expected acceptance": tables.number(held_out["expected_acceptance"], 3),
        "CR": tables.number(held_out["compression_rate"]),
        **{f"CTAR({w})": tables.number(held_out[f"ctar{w}"], 3) for w in range(1, STEPS + 1)},
        "decoded: CR": tables.number(decoded["compression_rate"]),
        "decoded: CTAR(1)": tables.number(decoded["ctar1"], 3),
        "acceptance": tables.number(decoded.get("sampled_acceptance"), 3),  # not of Medusa's heads
    }
