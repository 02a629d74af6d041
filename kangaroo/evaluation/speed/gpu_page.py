"""What `scripts/gpu.sh` found, as a page: its results, and by name what did not run or end."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from kangaroo.evaluation.speed import speed_report
from kangaroo.utils import tables
from kangaroo.utils.tables import Row, number, share

MARK = "<!-- From here on written by scripts/gpu_page.py. -->"
STAGES = {
    "check": "Tests that need a GPU",
    "7b": "7B shape, float16",
    "8b": "8B shape, bfloat16",
    "methods": "SmolLM2-135M by all methods",
    "train": "Training at 7B",
    "soak": "Every drafter against vanilla in bfloat16",
}
OUT_OF_TIME = (124, 137)  # what timeout(1) returns
LAST_LINES = 12

# What is asked of a shape: of the read rate by context, of verifying one token by tokens, and of a
# draft token over the time that its bytes take.
OF_READ_RATE = {256: 0.82, 1900: 0.76}
OF_ONE = {8: 1.03, 16: 1.05, 32: 1.15}
DRAFT_TOKEN = 1.2
METHODS = "Asked: vanilla 1,200 tokens/s, Kangaroo and its tree 1.3 times that, hybrid 1.5 times."


def write(results: Path, file: Path) -> None:
    """Write the results into a page, below what people wrote in it."""
    written = file.read_text(encoding="utf-8") if file.is_file() else "# On a GPU\n"
    by_hand = written.partition(MARK)[0].rstrip()
    file.write_text(f"{by_hand}\n\n{MARK}\n\n{page(results)}", encoding="utf-8")


def page(results: Path) -> str:
    """The results in Markdown.

    Args:
        results: the script's folder; a stage that is not there is named as not run.
    """
    sections = [f"## {title}\n\n{_stage(results, name)}" for name, title in STAGES.items()]
    return "\n\n".join(sections) + "\n"


def _stage(results: Path, name: str) -> str:
    record = results / f"{name}.json"
    if not record.is_file():
        return "Not run."
    ran = _json(record)
    parts = [_ended(ran), _found(results, name)]
    if ran["status"]:
        log = (results / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in re.split(r"[\r\n]+", log) if line.strip()]
        parts.append("```\n" + "\n".join(lines[-LAST_LINES:]) + "\n```")
    return "\n\n".join(filter(None, parts))


def _ended(ran: dict[str, Any]) -> str:
    about, status, seconds = ran["about"], ran["status"], ran["seconds"]
    end = f"Done in {seconds} s"
    if status in OUT_OF_TIME:
        end = f"**Ran out of its {ran['limit']} s**"
    elif status:
        end = f"**Failed after {seconds} s, with status {status}**"
    place = about["hardware"]["cuda"] or "a CPU, which says nothing of a GPU"
    torch, transformers = about["versions"]["torch"], about["versions"]["transformers"]
    return (
        f"{end} on {place}; torch {torch}, transformers {transformers}, revision "
        f"{about['git_revision']}, {about['time']}."
    )


def _found(results: Path, name: str) -> str:
    """What a stage wrote, however it ended; empty if nothing."""
    if name == "check":
        log = (results / "check.log").read_text(encoding="utf-8", errors="replace")
        said = [line for line in log.splitlines() if re.search(r" in [\d.]+s", line)]
        return f"`pytest -m gpu`: {said[-1].strip('= ')}." if said else ""
    if name in ("7b", "8b"):
        speed = results / name / "speed.json"
        return _shape(_json(speed)) if speed.is_file() else ""
    if name == "train":
        return _training(results / "train/metrics.jsonl")
    if name == "methods":  # the first table; the others compare each with each
        report = _text(results / "methods/report.md").partition("\n![")[0]
        return METHODS + report[report.index("\n") :].rstrip() if report else ""
    return _text(results / "soak/certificate.md").partition("\n\n")[2].strip()


def _shape(speed: dict[str, Any]) -> str:
    sheets = [
        f"**{title}**\n\n{tables.markdown(rows)}"
        for title, rows in speed_report.sheets(speed).items()
        if not title.startswith("Speedup")  # of drafts by random weights
    ]
    notes = speed_report.notes(speed).replace("\n", "\n\n")
    return "\n\n".join([tables.markdown(_aims(speed)), *sheets, notes])


def _aims(speed: dict[str, Any]) -> list[Row]:
    """What is asked of a shape, reached or missed."""
    at_context = {row["context"]: row["vanilla"]["share_of_limit"] for row in speed["contexts"]}
    of_width = {row["tokens"]: row["ms"] for row in speed["phases"]["verification"]}
    draft = speed["phases"]["steps"]["draft token"]["over_limit"]
    rows = []
    for context, asked in OF_READ_RATE.items():
        if (rate := at_context.get(context)) is not None:
            what = f"vanilla of the read rate, context {context}"
            rows.append(_aim(what, share(rate), f"at least {share(asked)}", rate >= asked))
    ratios = {
        f"verification of {n} over one": (of_width[n] / of_width[1], OF_ONE[n]) for n in OF_ONE
    }
    ratios["draft token over its bytes' time"] = draft, DRAFT_TOKEN
    for what, (ratio, asked) in ratios.items():
        rows.append(_aim(what, number(ratio), f"at most {number(asked)}", ratio <= asked))
    return rows


def _aim(what: str, measured: str, asked: str, reached: bool) -> Row:
    verdict = "reached" if reached else "**missed**"
    return {"aim": what, "measured": measured, "asked": asked, "": verdict}


def _training(metrics: Path) -> str:
    if not metrics.is_file():
        return ""
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    rate = statistics.median(step["tokens_per_second"] for step in steps)
    peak = max(step["peak_memory_gib"] for step in steps)
    return (
        f"{len(steps)} steps of random text by the paper's recipe, random weights in Vicuna-7B's "
        f"shape: **{rate:,.0f} tokens/s** (the median step), at most {peak:.1f} GiB."
    )


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
