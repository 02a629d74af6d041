"""A study's files: `NAME.json`, `NAME.md` and `NAME.png` beside the results that it is made of."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from kangaroo.evaluation.records import write_json
from kangaroo.evaluation.report import assigned, circumstances, listed
from kangaroo.evaluation.study import plots
from kangaroo.evaluation.study.points import fixed
from kangaroo.evaluation.study.published import PAPER
from kangaroo.evaluation.study.results import Study
from kangaroo.evaluation.study.rows import WIDE, claim_rows, long, reasons, table, wide
from kangaroo.utils import tables


def write(study: Study, folder: Path) -> None:
    """The study's files."""
    name, about = study.config.name, study.methods[0].summary
    found = {
        "study": asdict(study.config),
        **{key: about[key] for key in ("model", "bench", "dtype", "device", "questions")},
        "max_new_tokens": about["settings"]["max_new_tokens"],
        "points": [asdict(point) for point in study.points],
        "published": [asdict(point) for point in study.published],
        "checked": [asdict(one) for one in study.checked],
        "table": table(study),
        "provenance": {one.name: one.summary["provenance"] for one in study.methods},
    }
    write_json(folder / f"{name}.json", found)
    text = f"# {study.config.title}\n\n{body(study, f'{name}.png')}\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    plot = plots.plot(study.config, study.points, study.published, subtitle(study))
    plot.savefig(folder / f"{name}.png", dpi=120)


def terminal_table(study: Study) -> Table:
    """What was measured, without the paper's values, for a rich console of 80 columns."""
    own = replace(study, published=[])
    rows = wide(own, intervals=False) if study.config.x in WIDE else long(own)
    return tables.terminal(rows, study.config.title, size(study))


def body(study: Study, image: str) -> str:
    """The study as Markdown, without a title.

    Args:
        image: where the plot lies, from where the Markdown is read.
    """
    parts = [
        size(study),
        tables.markdown(table(study)),
        f"![{study.config.title}]({image})",
        *([tables.markdown(claim_rows(study.checked))] if study.checked else []),
        *reasons(study.checked),
        *([study.config.note.strip()] if study.config.note else []),
        "<details><summary>How this was made</summary>\n\n"
        + listed(provenance_lines(study))
        + "\n\n</details>",
    ]
    return "\n\n".join(parts)


def subtitle(study: Study) -> str:
    """What the plot is of, in words."""
    about = study.methods[0].summary
    return "{model} on {bench}, {dtype}, {device}".format(**about)


def size(study: Study) -> str:
    """What was asked, and how it was answered."""
    about = study.methods[0].summary
    settings = about["settings"]
    greedy = all(one.summary["settings"]["sampling.temperature"] == 0 for one in study.methods)
    task = f" of the task {settings['task']}" if settings.get("task") else ""
    return (
        f"{about['model']} on {about['bench']}: {about['questions']} questions{task}, "
        f"{about['lossless']['turns']} turns, at most {settings['max_new_tokens']} new tokens, "
        f"{'greedy' if greedy else 'sampled'}, batch 1, {about['dtype']} on {about['device']}. "
        "Intervals are at 95%."
    )


def provenance_lines(study: Study) -> list[str]:
    """Commands, revisions, versions, hardware, settings and the source of published values."""
    about = [one.summary["provenance"] for one in study.methods]
    lines = [f"`{one['command']}`" for one in about]
    lines += [f"git {one['git_revision']}" for one in about]
    lines += [line for one in about for line in circumstances(one)]
    lines.append(assigned(fixed(study.config, study.methods[0].summary)))
    lines += [f"{one.model}: {PAPER}, {one.source}" for one in study.published]
    return list(dict.fromkeys(lines))
