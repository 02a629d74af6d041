"""Decode until so many tokens are compared with vanilla's, and say whether any was another.

A *cell* is one drafter in one setting. A finished cell is one line of the records, on disk as soon
as it is known, so a killed run loses the cell at hand and nothing else.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from kangaroo.engine.clock import running
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation
from kangaroo.evaluation import records as store
from kangaroo.evaluation.lossless import first_difference, fork
from kangaroo.models.loading import Dtype
from kangaroo.soak import certificate
from kangaroo.soak.cells import Cell, Difference, cell_of
from kangaroo.soak.settings import SAMPLINGS, Build, Draw, Part, Setting
from kangaroo.utils.errors import ConfigError, NotLossless
from kangaroo.utils.provenance import git_revision
from kangaroo.utils.ranges import CountOrZero, NotNegative, Ranged, Seed

log = logging.getLogger(__name__)

BATCHES = (1, 4, 20, 20)  # rows at a time; the largest twice, since it is the cheapest
FEWEST = 8  # requests of a cell, and at least twice as many as rows, so that rows are refilled


@dataclass
class SoakConfig(Ranged):
    """How much is decoded.

    Args:
        tokens: of tiny random targets, compared with vanilla's; a finished run goes on if this
            grows.
        minutes: of decoding `model` with each of `drafters` as well; 0 leaves it out.
        seed: fixes prompts, limits, EOS and the drafters' options.
        device: of the tiny targets.
        dtype: of the tiny targets. In half precision the promise is that of native code and of the
            kernels of a GPU alone, so targets that decode by tensors are left out.
        resume: false forgets what `output` holds.
    """

    tokens: CountOrZero = 1_000_000
    minutes: NotNegative = 0.0
    seed: Seed = 0
    device: str = "cpu"
    dtype: Dtype = Dtype.float32
    resume: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens + self.minutes == 0:
            raise ConfigError("soak.tokens=0 and soak.minutes=0: one of them must be above 0.")


@dataclass(frozen=True)
class Task:
    """A part and when it has had enough.

    Args:
        done: of a finished cell, how much of `goal` that was.
    """

    part: Part
    goal: float
    done: Callable[[Cell], float]


def soak(
    tasks: Sequence[Task], config: SoakConfig, about: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Decode all tasks, write `certificate.json` and `certificate.md`, and return the former.

    Args:
        about: what else fixes the result, by name; a run is resumed under the same alone.

    Errors: `NotLossless`, after everything is written, where a text is not vanilla's;
    `ConfigError`, `CorruptFile`.
    """
    settings = {"seed": config.seed, "device": config.device, "dtype": config.dtype.value}
    settings |= {"git_revision": git_revision()}
    store.enter(folder, settings | about, {}, config.resume)
    cells = {cell.key: cell for cell in store.lines(folder, cell_of)}
    writer = store.Writer(folder, 0)
    for task in tasks:
        for cell in missing(task, config.seed, cells):
            cells[cell.key] = cell
            writer.append(cell)
            for difference in cell.differences:
                log.error("not vanilla's text: %s, %s", cell.where, difference)
    writer.close()
    found = certificate.certify(list(cells.values()), store.begun(folder))
    certificate.write(found, folder)
    if found["differences"]:
        raise NotLossless(
            f"{len(found['differences'])} of {found['texts']} texts are not vanilla's; drafter, "
            f"prompt, seed and position of each are in '{folder / certificate.NAME}'."
        )
    return found


def missing(task: Task, seed: int, known: dict[str, Cell]) -> Iterator[Cell]:
    """Decode the cells that are not known, in order, until the task's goal is reached."""
    part = task.part
    total = sum(task.done(cell) for cell in known.values() if cell.part == part.name)
    bar = tqdm(total=task.goal, initial=total, desc=part.name, unit_scale=True)
    for number in itertools.count():
        setting: Setting | None = None  # made where one of its cells is missing
        for name, build in part.drafters.items():
            if total >= task.goal:
                bar.close()
                return
            if f"{part.name}/{number}/{name}" in known:
                continue
            setting = setting or part.setting(number)
            cell = decode(part.name, number, name, setting, build, seed)
            yield cell
            total += task.done(cell)
            bar.update(task.done(cell))
            bar.set_postfix_str(cell.where)


def decode(part: str, number: int, name: str, setting: Setting, build: Build, seed: int) -> Cell:
    """Requests of a setting by one drafter, compared with vanilla's texts.

    The batch, the drafter's options, the size of prompt chunks and whether rows draft where it does
    not pay are drawn at random. A row that
    is done takes the next request. The last quarter comes after all others have ended, in the
    cache that the engine has kept.
    """
    started = running()
    draw = Draw(Random(f"{seed}/{part}/{number}/{name}"))
    drafter = build(setting, draw)
    chunk = draw.of("prefill_chunk", *setting.prefill_chunks)
    rows = draw.of("batch", *BATCHES)
    count = min(max(FEWEST, 2 * rows), len(setting.requests))
    chosen = draw.rng.sample(range(len(setting.requests)), count)
    always = draw.of("always_drafts", True, False)
    engine = Engine(setting.lm, drafter, prefill_chunk=chunk, always_drafts=always)
    engine.eos_ids = setting.eos_ids
    how, done = SAMPLINGS[setting.sampling], dict[int, Generation]()
    for wave in (chosen[: -(count // 4)], chosen[-(count // 4) :]):
        requests = [setting.requests[index] for index in wave]
        for index, generation in engine.completions(requests, how, rows):
            done[wave[index]] = generation
    steps = [step for generation in done.values() for step in generation.steps]
    return Cell(
        part=part,
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


def differences(setting: Setting, done: Mapping[int, Generation]) -> Iterator[Difference]:
    """Where texts are not vanilla's, each judged by teacher forcing.

    Args:
        done: by the request's index.
    """
    how = SAMPLINGS[setting.sampling]
    for index, generation in done.items():
        request, text = setting.requests[index], setting.texts[index]
        found, prompt = generation.tokens, list(request.prompt)
        if found == text:
            continue
        at = first_difference(found, text)
        judged = fork(setting.lm, prompt, found, text, how, request.seed)
        assert judged is not None
        yield Difference(
            prompt=prompt,
            seed=request.seed,
            max_new_tokens=request.max_new_tokens,
            eos_ids=sorted(setting.eos_ids),
            position=at,
            vanilla=text[at : at + 1],
            found=found[at : at + 1],
            gap=judged.gap,
            label=judged.label,
        )
