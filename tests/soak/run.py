"""Decode until so many tokens are compared with vanilla's, and certify that none was another.

A *cell* is one drafter in one setting. A finished cell is one line of the records, on disk as soon
as it is known, so a killed run loses the cell at hand and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kangaroo.engine.clock import running
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation
from kangaroo.evaluation import records
from kangaroo.evaluation.lossless import fork
from kangaroo.evaluation.report import circumstances, listed
from kangaroo.models.loading import Dtype
from kangaroo.utils import tables
from kangaroo.utils.errors import NotLossless
from kangaroo.utils.provenance import git_revision, provenance
from kangaroo.utils.tables import share
from soak.settings import SAMPLINGS, Build, Draw, Setting, setting_of

BATCHES = (1, 4, 20, 20)  # rows at a time; the largest twice, since it is the cheapest
FEWEST = 8  # requests of a cell, and at least twice as many as rows, so that rows are refilled
CERTIFICATE = "certificate.json"
BY = {"drafter": "drafter", "sampling": "sampling", "target": "family", "rows at a time": "batch"}


@dataclass(frozen=True)
class Cell:
    """All requests of a setting by one drafter.

    Args:
        options: the drafter's and the engine's, as they were drawn.
        tokens: that vanilla wrote, and that were compared.
        seconds: of decoding, without vanilla's.
        differences: texts that are not vanilla's, each a `records.Fork` with all that makes it
            again; `found` and `vanilla` are the tokens there, empty where a text has ended.
    """

    number: int
    drafter: str
    options: dict[str, Any]
    family: str
    sampling: str
    batch: int
    texts: int
    tokens: int
    drafted: int
    accepted: int
    ended_by_eos: int
    seconds: float
    differences: list[dict[str, Any]]

    @property
    def where(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.number}/{self.drafter} ({self.family}, {self.sampling}, {options})"


def soak(
    builds: Mapping[str, Build],
    folder: Path,
    tokens: int = 1_000_000,
    seed: int = 0,
    device: str = "cpu",
    dtype: Dtype = Dtype.float32,
) -> dict[str, Any]:
    """Decode by each drafter in turn until so many tokens are compared. Write `certificate.json`
    and `certificate.md`, and return the former. What `folder` holds already is gone on from.

    Errors: `NotLossless`, after everything is written; `ConfigError`, `CorruptFile`.
    """
    settings = {"seed": seed, "device": device, "dtype": dtype.value}
    records.enter(folder, settings | {"git_revision": git_revision()}, {}, True)
    cells = list(records.lines(folder, lambda fields: Cell(**fields)))
    done = {(cell.number, cell.drafter) for cell in cells}
    writer, bar = records.Writer(folder, 0), tqdm(total=tokens, unit_scale=True)
    bar.update(total := sum(cell.tokens for cell in cells))
    for number, name in ((number, name) for number in itertools.count() for name in builds):
        if total >= tokens:
            break
        if (number, name) not in done:
            setting = setting_of(number, seed, device, dtype.torch)
            cells.append(cell := decode(number, name, setting, builds[name], seed))
            writer.append(cell)
            bar.update(cell.tokens)
            total += cell.tokens
    writer.close()
    bar.close()
    certificate = certify(cells, records.begun(folder))
    records.write_json(folder / CERTIFICATE, certificate)
    (folder / "certificate.md").write_text(markdown(certificate), encoding="utf-8")
    if certificate["differences"]:
        raise NotLossless(
            f"{len(certificate['differences'])} of {certificate['texts']} texts are not vanilla's; "
            f"drafter, prompt, seed and position of each are in '{folder / CERTIFICATE}'."
        )
    return certificate


def decode(number: int, name: str, setting: Setting, build: Build, seed: int) -> Cell:
    """Requests of a setting by one drafter, compared with vanilla's texts.

    The batch, the drafter's options, the size of prompt chunks and whether rows draft where it does
    not pay are drawn at random. A row that is done takes the next request. The last quarter comes
    after all others have ended, in the cache that the engine has kept.
    """
    started = running()
    draw = Draw(f"{seed}/tiny/{number}/{name}")
    drafter = build(setting, draw)
    chunk = draw.of("prefill_chunk", *setting.prefill_chunks)
    rows = draw.of("batch", *BATCHES)
    count = min(max(FEWEST, 2 * rows), len(setting.requests))
    chosen = draw.sample(range(len(setting.requests)), count)
    always = draw.of("always_drafts", True, False)
    engine = Engine(setting.lm, drafter, prefill_chunk=chunk, always_drafts=always)
    engine.eos_ids = setting.eos_ids
    done: dict[int, Generation] = {}
    for wave in (chosen[: -(count // 4)], chosen[-(count // 4) :]):
        requests = [setting.requests[index] for index in wave]
        for index, generation in engine.completions(requests, SAMPLINGS[setting.sampling], rows):
            done[wave[index]] = generation
    steps = [step for generation in done.values() for step in generation.steps]
    return Cell(
        number=number,
        drafter=name,
        options=draw.chosen,
        family=setting.family,
        sampling=setting.sampling,
        batch=rows,
        texts=len(done),
        tokens=sum(len(setting.texts[index]) for index in done),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(step.accepted for step in steps),
        ended_by_eos=sum(generation.finish == "eos" for generation in done.values()),
        seconds=running() - started,
        differences=list(differences(setting, done)),
    )


def differences(setting: Setting, done: Mapping[int, Generation]) -> Iterator[dict[str, Any]]:
    """Where texts are not vanilla's, each judged by teacher forcing; `done` by request."""
    for index, generation in done.items():
        request, text, tokens = setting.requests[index], setting.texts[index], generation.tokens
        if tokens == text:
            continue
        prompt, sampling = list(request.prompt), SAMPLINGS[setting.sampling]
        judged = fork(setting.lm, prompt, tokens, text, sampling, request.seed)
        assert judged is not None
        yield asdict(judged) | {
            "prompt": prompt,
            "seed": request.seed,
            "max_new_tokens": request.max_new_tokens,
            "eos_ids": sorted(setting.eos_ids),
            "vanilla": text[judged.position : judged.position + 1],
            "found": tokens[judged.position : judged.position + 1],
        }


def certify(cells: Sequence[Cell], begun: dict[str, Any]) -> dict[str, Any]:
    """What the cells say together; `begun` has the settings, and the first start's provenance."""

    def totals(field: str = "", value: object = None) -> dict[str, int]:
        some = [cell for cell in cells if not field or getattr(cell, field) == value]
        counts = ("texts", "tokens", "drafted", "accepted", "ended_by_eos")
        sums = {count: sum(getattr(cell, count) for cell in some) for count in counts}
        return sums | {"different_texts": sum(len(cell.differences) for cell in some)}

    values = {field: dict.fromkeys(getattr(cell, field) for cell in cells) for field in BY.values()}
    sums = totals()
    verdict = (
        f"{sums['tokens']:,} tokens in {sums['texts']:,} texts were compared with vanilla's; texts "
        f"that differ: {sums['different_texts']}."
    )
    return sums | {
        "verdict": verdict,
        "differences": [{"cell": cell.where, **d} for cell in cells for d in cell.differences],
        "by": {name: {str(v): totals(f, v) for v in values[f]} for name, f in BY.items()},
        "cells": len(cells),
        "seconds": sum(cell.seconds for cell in cells),
        "settings": begun["settings"],
        "provenance": begun["provenance"] | {"finished": provenance()["time"]},
    }


def markdown(certificate: dict[str, Any]) -> str:
    """The certificate for people."""
    sheets = [
        [
            {
                name: value,
                "tokens": f"{of['tokens']:,}",
                "texts": f"{of['texts']:,}",
                "ended by EOS": share(of["ended_by_eos"] / of["texts"]),
                "accepted": share(of["accepted"] / of["drafted"] if of["drafted"] else None),
                "differ": str(of["different_texts"]),
            }
            for value, of in groups.items()
        ]
        for name, groups in certificate["by"].items()
    ]
    headings = ("cell", "seed", "position", "vanilla", "found", "gap", "label")
    different = [{name: str(d[name]) for name in headings} for d in certificate["differences"]]
    about = certificate["provenance"]
    lines = [
        f"git {about['git_revision']}, begun {about['time']}, finished {about['finished']}, "
        f"{certificate['seconds'] / 60:.0f} minutes of decoding in {certificate['cells']} cells",
        *circumstances(about),
        ", ".join(f"{name}={value}" for name, value in certificate["settings"].items()),
    ]
    parts = [
        "# Lossless at scale: a certificate of `make soak`",
        f"**{certificate['verdict']}**",
        "What is decoded, and how: docs/evaluation.md, 'A million tokens'. *accepted* is the "
        "share of draft tokens: were it 0 or 100% everywhere, little would be tested.",
        *(tables.markdown(rows) for rows in [*sheets, different] if rows),
        listed(lines),
    ]
    return "\n\n".join(parts) + "\n"
