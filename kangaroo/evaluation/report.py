"""`report.md` and the table for the terminal, made from a summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from kangaroo.evaluation import plots

PLOTS = {"speedup": plots.speedup, "ctar": plots.ctar, "time": plots.time_split}

DEFINITIONS = {
    "Speedup": (
        "seconds of vanilla decoding (same engine, cache and kernels, a drafter that proposes "
        "nothing) over seconds of the method, prefill included, summed over questions; in each "
        "turn both are timed up to the same number of tokens. The interval is a bootstrap over "
        "questions."
    ),
    "Spec-Bench": (
        "the speedup by the formula of Spec-Bench's own report: a ratio of mean tokens/s, in which "
        "vanilla's tokens are its text tokenised again, EOS not counted."
    ),
    "CR": (
        "compression rate: tokens emitted per forward of the target, bonus token included; "
        "vanilla's is 1."
    ),
    "CTAR(w)": "share of rounds whose first w draft tokens were all accepted.",
    "Accepted": "accepted over drafted tokens.",
    "tokens/s": (
        "all tokens over all seconds, prefill included, of each method's own texts; hf is "
        "`generate` of transformers."
    ),
    "Fork": (
        "the first token of a turn that is not vanilla's. The gap says how far below the best "
        "score the lower of the two tokens lies under teacher forcing; a near-tie is within what "
        "rounding does."
    ),
}


def write(summary: dict[str, Any], folder: Path) -> None:
    """`report.md` and its plots."""
    (folder / "report.md").write_text(markdown(summary), encoding="utf-8")
    for name, plot in PLOTS.items():
        plot(summary).savefig(folder / f"{name}.png", dpi=150)


def terminal_table(summary: dict[str, Any]) -> Table:
    """The main table, for a rich console of 80 columns."""
    heads, *rows = speeds(summary)
    shown = [i for i, head in enumerate(heads) if head not in ("questions", "accepted")]
    result = terminal(title(summary), verdict(summary), [heads[i] for i in shown])
    for row in rows:
        task, *rest = (row[i] for i in shown)
        style = "bold" if task == "overall" else None
        result.add_row(plots.NAMES.get(task, task), *rest, style=style)
    return result


def terminal(title: str, caption: str, heads: list[str]) -> Table:
    """An empty table for a rich console; names in the first column fold where room is short."""
    result = Table(
        title=title, title_justify="left", caption=caption, caption_justify="left",
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    result.add_column(heads[0], overflow="fold")
    for head in heads[1:]:
        result.add_column(head, justify="right", no_wrap=True)
    return result


def markdown(summary: dict[str, Any]) -> str:
    """The whole report."""
    forks = summary["lossless"]["forks"]
    parts = [
        f"# {title(summary)}",
        headline(summary),
        markdown_table(speeds(summary)),
        "![speedup by task](speedup.png)",
        "## Losslessness",
        verdict(summary),
        *([markdown_table(fork_rows(forks))] if forks else []),
        "## Acceptance by position",
        markdown_table(ctars(summary)),
        "![CTAR by position](ctar.png)",
        "## Where the time goes",
        "Milliseconds per token of the method; vanilla's total beside it.",
        markdown_table(times(summary)),
        "![time split](time.png)",
        "## How to read this",
        defined(DEFINITIONS),
        "## Provenance",
        "\n".join(f"- {line}" for line in provenance_lines(summary)),
    ]
    return "\n\n".join(parts) + "\n"


def title(summary: dict[str, Any]) -> str:
    return "{model} with {drafter} on {bench}".format(**summary)


def headline(summary: dict[str, Any]) -> str:
    overall = summary["overall"]
    if overall["speedup"] is None:
        return f"{number(overall['tokens_per_second'], 1)} tokens/s. {asked(summary)}"
    return (
        f"**{overall['speedup']:.2f}x** the speed of vanilla decoding (95% interval "
        f"{span(overall)}), {overall['compression_rate']:.2f} tokens per forward of the target. "
        f"{asked(summary)}"
    )


def asked(summary: dict[str, Any]) -> str:
    """What was asked, and how it was answered."""
    settings = summary["settings"]
    greedy = settings["sampling.temperature"] == 0
    how = "greedy" if greedy else f"temperature {settings['sampling.temperature']}"
    return (
        f"{summary['questions']} questions, {summary['lossless']['turns']} turns, at most "
        f"{settings['max_new_tokens']} new tokens, {how}, batch 1, {summary['dtype']} on "
        f"{summary['device']}."
    )


def verdict(summary: dict[str, Any]) -> str:
    """What the comparison with vanilla's texts found, in a sentence or two."""
    found, settings = summary["lossless"], summary["settings"]
    if found["identical"] is None:
        why = (
            "the rejection rule keeps the distribution, not the text"
            if "vanilla" in settings["baselines"]
            else "vanilla did not run"
        )
        return f"Texts were not compared: {why}."
    labels = [fork["label"] for fork in found["forks"]]
    text = f"{found['identical']} of {found['turns']} turns are vanilla's token for token"
    if labels:
        ties = labels.count("near-tie")
        text += f"; forks explained by rounding: {ties}, not explained: {len(labels) - ties}"
    if found["hf_identical"] is not None:
        text += f". transformers wrote vanilla's text in {found['hf_identical']}"
    return text + "."


def speeds(summary: dict[str, Any]) -> list[list[str]]:
    """Heads, then a row a task and one overall; so do the functions below."""
    heads = [
        "task", "questions", "speedup", "95%", "Spec-Bench", "CR", "accepted", "tokens/s",
        "vanilla", "hf",
    ]  # fmt: skip
    rows = [
        [
            task,
            str(m["questions"]),
            number(m["speedup"]),
            span(m),
            number(m["spec_bench_speedup"]),
            number(m["compression_rate"]),
            share(m["acceptance_rate"]),
            number(m["tokens_per_second"], 1),
            number(m["vanilla_tokens_per_second"], 1),
            number(m["hf_tokens_per_second"], 1),
        ]
        for task, m in groups(summary)
    ]
    return [heads, *rows]


def ctars(summary: dict[str, Any]) -> list[list[str]]:
    longest = len(summary["overall"]["ctar"])
    rows = [
        [task, *(number(value) for value in m["ctar"]), *["-"] * (longest - len(m["ctar"]))]
        for task, m in groups(summary)
    ]
    return [["task", *(f"w = {w}" for w in range(1, longest + 1))], *rows]


def times(summary: dict[str, Any]) -> list[list[str]]:
    rows = []
    for task, m in groups(summary):
        parts = [1e3 * m[f"{part}_seconds"] / m["tokens"] for part in plots.PARTS]
        vanilla = m["vanilla_tokens_per_second"]
        rows.append(
            [
                task,
                *(f"{part:.2f}" for part in parts),
                f"{sum(parts):.2f}",
                "-" if vanilla is None else f"{1e3 / vanilla:.2f}",
            ]
        )
    return [["task", *plots.PARTS, "total", "vanilla"], *rows]


def fork_rows(forks: list[dict[str, Any]]) -> list[list[str]]:
    heads = ["question", "turn", "position", "gap", "label"]
    return [
        heads,
        *(
            [
                str(f["question_id"]),
                str(f["turn"]),
                str(f["position"]),
                number(f["gap"], 4),
                f["label"],
            ]
            for f in forks
        ),
    ]


def provenance_lines(summary: dict[str, Any]) -> Iterator[str]:
    about = summary["provenance"]
    yield f"`{about['command']}`"
    yield f"git {about['git_revision']}, {about['time']}"
    yield from circumstances(about)
    yield listed(summary["settings"])


def circumstances(about: dict[str, Any]) -> Iterator[str]:
    """Versions and hardware."""
    hardware = about["hardware"]
    yield ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    yield f"{hardware['cuda'] or hardware['cpu']}, CPU threads: {hardware['threads']}"


def listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def defined(terms: dict[str, str]) -> str:
    """A Markdown list of terms."""
    return "\n".join(f"- **{term}**: {meaning}" for term, meaning in terms.items())


def groups(summary: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [*summary["by_task"].items(), ("overall", summary["overall"])]


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def span(m: dict[str, Any], name: str = "speedup") -> str:
    """A confidence interval; of a single question there is none."""
    if m[f"{name}_ci95"] is None or m["questions"] < 2:
        return "-"
    return "{:.2f}-{:.2f}".format(*m[f"{name}_ci95"])


def markdown_table(rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    lines = [rows[0], rule, *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
