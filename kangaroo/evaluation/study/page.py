"""`docs/paper.md`: what studies found, put between the page's own words.

The page has a pair of comments for each study, `<!-- study: NAME -->` and `<!-- end -->`, and one
for what they say together, `<!-- summary -->`. What stands between is written here; all else is
the page's own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kangaroo.evaluation.study.claims import AGREES, DISAGREES, LEAST, OPEN
from kangaroo.utils import tables
from kangaroo.utils.errors import DataError
from kangaroo.utils.folders import command_line

STUDY = re.compile(r"(<!-- study: (\w+) -->\n).*?(<!-- end -->)", re.S)
SUMMARY = re.compile(r"(<!-- summary -->\n).*?(<!-- end -->)", re.S)
IMAGES = Path("img/paper")  # from where the page lies


def rewrite(page: Path, results: Path) -> None:
    """Write what is known of each study into the page, and its plot beside it.

    Args:
        results: a model's folder, in which `evaluate.py experiment=paper/...` wrote.

    Errors: `DataError` for a page without a place for a study.
    """
    text = page.read_text(encoding="utf-8")
    if not STUDY.search(text):
        raise DataError(f"'{page}' has no line '<!-- study: NAME -->' where a study could go.")
    found = {name: file for _, name, _ in STUDY.findall(text) if (file := study_in(results, name))}
    for name, file in found.items():
        (page.parent / IMAGES).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.with_suffix(".png"), page.parent / IMAGES / f"{name}.png")
    text = STUDY.sub(lambda m: f"{m[1]}\n{section(m[2], found.get(m[2]))}\n\n{m[3]}", text)
    told = [json.loads(file.read_text(encoding="utf-8")) for file in found.values()]
    text = SUMMARY.sub(lambda m: f"{m[1]}\n{summary(told)}\n\n{m[2]}", text)
    page.write_text(text, encoding="utf-8")


def study_in(results: Path, name: str) -> Path | None:
    """A study's JSON, in whichever folder its answers are."""
    return next(iter(sorted(results.glob(f"*/{name}.json"))), None)


def section(name: str, file: Path | None) -> str:
    """A study's part of the page."""
    if file is None:
        return f"Not measured yet: `{command_line('evaluate', experiment=f'paper/{name}')}`."
    _, body = file.with_suffix(".md").read_text(encoding="utf-8").split("\n\n", 1)
    return body.replace(f"]({name}.png)", f"]({(IMAGES / name).as_posix()}.png)").rstrip()


def summary(studies: Sequence[dict[str, Any]]) -> str:
    """How large the studies were, and which findings of the paper they found again."""
    if not studies:
        return "Nothing was measured yet."
    counts = Counter(one["verdict"] for study in studies for one in study["checked"])
    about = studies[0]
    parts = [
        f"{about['model']}, {about['dtype']} on {about['device']}: each experiment asked "
        f"{ends(study['questions'] for study in studies)} questions of {about['bench']}, with at "
        f"most {ends(study['max_new_tokens'] for study in studies)} new tokens.",
        f"Of {counts.total()} findings of the paper that were checked, {counts[AGREES]} agree, "
        f"{counts[DISAGREES]} disagree, and {counts[OPEN]} are open.",
    ]
    if any(study["questions"] < LEAST for study in studies):
        parts.append(
            f"With fewer than {LEAST} questions a finding is always open: such an experiment shows "
            "what the results look like, and no more."
        )
    rows = [
        {
            "finding of the paper": one["claim"]["says"],
            "experiment": f"`{study['study']['name']}`",
            "verdict": f"**{one['verdict']}**",
        }
        for study in studies
        for one in study["checked"]
    ]
    return "\n\n".join([*parts, *([tables.markdown(rows)] if rows else [])])


def ends(numbers: Any) -> str:
    """A number, or the smallest and the largest of several."""
    low, *_, high = sorted([*(found := list(numbers)), *found])
    return str(low) if low == high else f"{low} to {high}"
