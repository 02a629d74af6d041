"""What `scripts/gpu.sh` measured, as a page: its results, and by name what did not run or end.

`python scripts/gpu/page.py RESULTS PAGE` keeps what people wrote above the mark.
"""

import json
import re
import statistics
import sys
from pathlib import Path

MARK = "<!-- From here on written by scripts/gpu.sh. -->"
STAGES = {  # and the file in which a stage reports
    "bits": ("Bits at every width", "bits.log"),
    "kernels": ("7B shape, float16: kernels", "kernels/speed.md"),
    "tests": ("Tests that need a GPU", "tests.log"),
    "soak": ("Every drafter against vanilla in bfloat16", "soak/certificate.md"),
    "plain": ("Training a plain adapter at 7B", "plain/metrics.jsonl"),
    "fused": ("Training a fused adapter at 7B", "fused/metrics.jsonl"),
    "7b": ("7B shape, float16", "7b/speed.md"),
    "8b": ("8B shape, bfloat16", "8b/speed.md"),
    "adapter": ("SmolLM2-135M: an adapter in a minute", "adapter/metrics.jsonl"),
    "drafters": ("SmolLM2-135M by that adapter", "drafters/report.md"),
    "methods": ("SmolLM2-135M by all methods", "methods/report.md"),
}
LAST_LINES = 12


def write(results: Path, file: Path) -> None:
    """Write the results into a page, below what people wrote in it."""
    by_hand = (_text(file) or "# On a GPU: results\n").partition(MARK)[0].rstrip()
    file.write_text(f"{by_hand}\n\n{MARK}\n\n{page(results)}", encoding="utf-8")


def page(results: Path) -> str:
    """The results in Markdown; a stage that is not in the script's folder is named as not run."""
    sections = [f"## {title}\n\n{_stage(results, name)}" for name, (title, _) in STAGES.items()]
    return "\n\n".join(sections) + "\n"


def _stage(results: Path, name: str) -> str:
    record = _text(results / f"{name}.json")
    if not record:
        return "Not run."
    ran = json.loads(record)
    about, status, last = ran["about"], ran["status"], ""
    end = f"Done in {ran['seconds']} s"
    if status:
        end = f"**Failed after {ran['seconds']} s, with status {status}**"
        lines = re.split(r"[\r\n]+", _text(results / f"{name}.log").strip())
        last = "\n".join(["```", *lines[-LAST_LINES:], "```"])
    if status in (124, 137):  # of timeout(1)
        end = f"**Ran out of its {ran['limit']} s**"
    place = about["hardware"]["cuda"] or "a CPU, which says nothing of a GPU"
    first = (
        f"{end} on {place}; torch {about['versions']['torch']}, transformers "
        f"{about['versions']['transformers']}, revision {about['git_revision']}, {about['time']}."
    )
    report = _report(name, _text(results / STAGES[name][1]))
    return "\n\n".join(filter(None, (first, report, last)))


def _report(name: str, text: str) -> str:
    """What a stage reports, however it ended; empty if nothing."""
    if name in ("bits", "tests"):
        counts = [line for line in text.splitlines() if re.search(r" in [\d.]+s", line)]
        return f"pytest: {counts[-1].strip('= ')}." if counts else ""
    if name in ("plain", "fused", "adapter") and text:
        steps = [json.loads(line) for line in text.splitlines()]
        rate = statistics.median(step["tokens_per_second"] for step in steps)
        peak = max(step["peak_memory_gib"] for step in steps)
        figures = f"**{rate:,.0f} tokens/s** (the median step), at most {peak:.1f} GiB"
        of = "" if name == "adapter" else " of random text, weights of 7B's shape"
        return f"{len(steps)} steps{of}: {figures}."
    # without its heading, and of several tables the first: the others compare each with each
    return re.sub(r"^# .*", "", text.partition("\n![")[0]).strip()


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
