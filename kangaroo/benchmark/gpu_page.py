"""What `scripts/gpu.sh` found, as a page: its results, and by name what is still unproven."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kangaroo import tables
from kangaroo.benchmark import speed_report
from kangaroo.tables import number

OF_LIMIT, WIDTH, OF_ONE = 0.75, 7, 1.10  # what is asked of a 7B shape

INTRO = """# On a GPU

`scripts/gpu.sh` runs the stages below, each in a few minutes, and this page is what
`python scripts/gpu_page.py outputs/gpu docs/gpu.md` made of their results.
`DRY=1 scripts/gpu.sh` runs the same stages, with the same lengths, on small random models on a CPU
(`tests/test_gpu_script.py`).
"""

KERNELS = """## Kernels

On one GPU a step of decoding runs in Triton's kernels (`kangaroo/cuda/`): targets of all supported
families with heads of up to 256, in float16, bfloat16 and float32, and what drafts with layers and
heads of theirs. Prompts, training, and whatever the kernels cannot run go through transformers'
modules; a warning says why. `KANGAROO_NO_PDL=1` keeps kernels from starting before the last one has
ended.

Without a GPU `tests/test_cuda.py` shows, in Triton's interpreter, that each kernel computes its
formula, whole tiny models what transformers' modules compute, and that a token's bits are the same
alone, in a chain, in a tree and in a batch; and that for sm_80, sm_89 and sm_90 each kernel
compiles to one kind of matrix instruction whatever the number of tokens, within the card's shared
memory.

**No card has run these kernels yet**: neither their bits nor their speed there are proven. A sketch
that they were made from was measured on one H100 (Vicuna-7B's shape, random weights, float16, one
token at context 256): 5.09 ms, 84% of the rate at which the card reads memory, where transformers'
modules in CUDA graphs took 8.75 ms; a verification of 8 took 1.02 of that, and one pass of 8 tokens
gave the bits of 8 passes of one.
"""

BEYOND = """## What no stage covers

Several GPUs and several nodes (training over nccl, `model.device_map=auto`), targets above 8B, and
the real weights of Vicuna and Llama: `shapes` has their shapes with random weights.
"""


def page(folder: Path) -> str:
    """The page in Markdown.

    Args:
        folder: the script's results; a stage without any is named as not run.
    """
    speeds = {file.parent.name: _json(file) for file in sorted(folder.glob("shapes/*/speed.json"))}
    parts = [
        INTRO,
        _where([_json(file)["provenance"] for file in sorted(folder.rglob("speed.json"))]),
        KERNELS,
        _section("Tests that need a GPU", _tests(folder / "check.log")),
        _section("7B and 8B shapes against the memory's limit", _aims(speeds)),
        *(f"### {name}\n\n{speed_report.markdown(speed)}" for name, speed in speeds.items()),
        _section("Training text and adapters", _text(folder / "adapters/compare/compare.md")),
        _section(
            "An adapter against the memory's limit", _text(folder / "adapters/speed/speed.md")
        ),
        _section("All methods, at the papers' sizes", _text(folder / "methods/report.md")),
        BEYOND,
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _section(title: str, found: str | None) -> str:
    return f"## {title}\n\n{found or 'Not run yet: unproven.'}"


def _tests(log: Path) -> str | None:
    """pytest's last line."""
    if not log.is_file():
        return None
    said = [line for line in log.read_text().splitlines() if re.search(r" in [\d.]+s", line)]
    return f"`pytest -m gpu`: {said[-1].strip('= ')}." if said else "The tests did not end."


def _aims(speeds: dict[str, Any]) -> str | None:
    if not speeds:
        return None
    rows = []
    for name, speed in speeds.items():
        vanilla, phases = speed["methods"]["vanilla"], speed["phases"]
        of_width = {row["tokens"]: row["ms"] for row in phases["verification"]}
        ratio, of_limit = of_width[WIDTH] / of_width[1], vanilla["share_of_limit"]
        rows.append(
            {
                "shape": name,
                "vanilla, tokens/s": number(vanilla["tokens_per_second"], 1),
                "of the limit (asked: 75%)": f"{of_limit:.0%} {_mark(of_limit >= OF_LIMIT)}",
                "verification of 7 over one (asked: 1.10)": f"{ratio:.2f} {_mark(ratio <= OF_ONE)}",
                "a draft token over a vanilla token": number(phases["cost"], 3),
            }
        )
    return tables.markdown(rows)


def _mark(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def _where(provenances: Sequence[dict[str, Any]]) -> str:
    places = sorted(
        f"{made['hardware']['cuda']}, torch {made['versions']['torch']}, "
        f"revision {made['git_revision']}"
        for made in provenances
        if made["hardware"]["cuda"]
    )
    if places:
        return f"Measured on {'; '.join(dict.fromkeys(places))}."
    dry = " What follows is a dry run on a CPU, which says nothing of one." if provenances else ""
    return f"**Nothing here has run on a GPU yet.**{dry}"


def _text(file: Path) -> str | None:
    """A table that a command wrote, one level of headings lower."""
    if not file.is_file():
        return None
    return re.sub(r"^#", "##", file.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
