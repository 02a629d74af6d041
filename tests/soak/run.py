"""Decode until so many tokens are compared with vanilla's, and certify that none was another.

A *cell* is one drafter in one setting, all of it from a seed.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from cases import DRAFTERS, SCRIPTED, Case
from helpers import ARCHITECTURES, BY_MODULES, VOCABULARY, adapter_for, tiny_model
from tqdm import tqdm

from kangaroo import ConfigError, Dtype, NotLossless, Rule, Sampling
from kangaroo.api import load_target, model_config
from kangaroo.drafters.base import Drafter
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.clock import running
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.evaluation import records
from kangaroo.evaluation.comparison import bullet_list, environment_lines
from kangaroo.evaluation.lossless import fork
from kangaroo.models.target import TargetModel
from kangaroo.utils import tables
from kangaroo.utils.provenance import git_revision, provenance
from kangaroo.utils.tables import share

SOAKED = {name: build for name, build in DRAFTERS.items() if name not in SCRIPTED}
# Under the rejection rule the text is promised to be vanilla's in greedy decoding alone.
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "greedy, rejection rule": Sampling(rule=Rule.rejection),
    "top-p": Sampling(temperature=1.2, top_p=0.8),
    "top-k": Sampling(temperature=1.5, top_k=5, top_p=0.95),
}
COMPILED = ", compiled"
FAMILIES = [
    f"{name}{how}"
    for name in ARCHITECTURES
    for how in (("",) if name in BY_MODULES else (COMPILED, ""))
]
REQUESTS = 40
PROMPT, LIMIT = (1, 100), (1, 160)  # tokens of a prompt, and the most of its text
EOS_SHARE = 0.75  # of the settings; in the others every text ends at its limit
BATCHES = (1, 4, 20, 20)  # rows at a time; the largest twice, since it is the cheapest
FEWEST = 8  # requests of a cell, and at least twice as many as rows, so that rows are refilled
CERTIFICATE, CELLS = "certificate.json", "cells.jsonl"
BY = ("drafter", "sampling", "target", "rows at a time")  # what the certificate has tables of
COUNTS = ("texts", "tokens", "drafted", "accepted", "ended_by_eos")  # of every cell

Build = Callable[[Case], Drafter]
Cell = dict[str, Any]  # options, counts, seconds, and texts that differ with all that makes them


@dataclass(frozen=True)
class Setting:
    """Requests to one target, and what vanilla decoding writes for each of them, alone."""

    family: str
    sampling: str
    lm: TargetModel
    requests: Sequence[Request]
    texts: Sequence[list[int]]
    eos_ids: frozenset[int]
    prefill_chunks: Sequence[int]


@cache
def target(family: str, device: str, dtype: torch.dtype = torch.float32) -> TargetModel:
    architecture, fields = ARCHITECTURES[family.removesuffix(COMPILED)]
    hf = tiny_model(architecture, **fields)
    for parameter in hf.parameters():  # RoPE's frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    lm = TargetModel(hf.requires_grad_(False).to(device))
    return lm.compile_for_decoding() if family.endswith(COMPILED) else lm


@cache
def loaded(model: str) -> TargetModel:
    return load_target(model_config(model))[0]


@lru_cache(1)  # its drafters come one after the other
def setting_of(
    number: int,
    seed: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    model: str | None = None,
) -> Setting:
    """Every family with every sampling, in turn: prompts of random tokens. Usually one token of
    vanilla's texts is made the EOS, which ends them, and drafts, in the middle. In half precision
    only native code and kernels keep the promise, for prompts that enter in the same chunks. A
    `model` takes the families' place, as it is loaded."""
    exact, rng = dtype == torch.float32, Random(f"{seed}/tiny/{number}")
    families = [name for name in FAMILIES if exact or name.endswith(COMPILED)]
    family, sampling = families[number % len(families)], list(SAMPLINGS)[number % len(SAMPLINGS)]
    lm = loaded(model) if model else target(family, device, dtype)
    exact, family = lm.dtype == torch.float32, model or family
    requests = []
    for _ in range(REQUESTS):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(*PROMPT))]
        requests.append(Request(prompt, rng.randint(*LIMIT), rng.randrange(1 << 31)))
    vanilla = Engine(lm, Vanilla())
    vanilla.eos_ids = frozenset()
    done = dict(vanilla.completions(requests, SAMPLINGS[sampling], 1))
    texts, eos_ids = [done[index].tokens for index in range(REQUESTS)], frozenset[int]()
    if rng.random() < EOS_SHARE:
        longest = max(texts, key=len)
        eos = max(longest, key=longest.index)  # the last one to occur
        texts = [text[: text.index(eos) + 1] if eos in text else text for text in texts]
        eos_ids = frozenset({eos})
    return Setting(family, sampling, lm, requests, texts, eos_ids, (16, 1024) if exact else (1024,))


def soak(
    builds: Mapping[str, Build],
    folder: Path,
    tokens: int = 1_000_000,
    seed: int = 0,
    device: str = "cpu",
    dtype: Dtype = Dtype.float32,
    model: str | None = None,
) -> dict[str, Any]:
    """Decode by each drafter in turn until so many tokens are compared, and go on with the cells
    that are in `folder`. Write `certificate.json` and `certificate.md`, and return the former.
    Errors: `ConfigError` where the folder holds another soak; `NotLossless`, after all is
    written."""
    settings = {"seed": seed, "device": device, "dtype": dtype.value}
    if model:
        settings |= {"model": model, "dtype": str(loaded(model).dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    records.start_run(folder, settings | {"git_revision": git_revision()}, {}, True)
    began, cells = records.read_run(folder)["provenance"], kept(folder)
    builds = dict(builds)
    done = {(cell["number"], cell["drafter"]) for cell in cells}
    cases = ((number, name) for number in itertools.count() for name in list(builds))
    with tqdm(total=tokens, initial=sum(c["tokens"] for c in cells), unit_scale=True) as bar:
        while bar.n < tokens:
            number, name = next(cases)
            if (number, name) in done:
                continue
            setting = setting_of(number, seed, device, dtype.torch, model)
            try:
                cells.append(decode(number, name, setting, builds[name], seed))
            except ConfigError as error:
                if model is None:
                    raise
                del builds[name]  # one that this model cannot have
                tqdm.write(f"{name} is left out: {error}")
                continue
            records.append_line(folder / CELLS, cells[-1])
            bar.update(cells[-1]["tokens"])
    certificate = certify(cells) | {"settings": settings, "provenance": began}
    certificate["finished"] = provenance()["time"]
    records.write_json(folder / CERTIFICATE, certificate)
    (folder / "certificate.md").write_text(markdown(certificate), encoding="utf-8")
    if certificate["differences"]:
        raise NotLossless(
            f"{len(certificate['differences'])} of {certificate['texts']} texts are not vanilla's; "
            f"drafter, prompt, seed and position of each are in '{folder / CERTIFICATE}'."
        )
    return certificate


def kept(folder: Path) -> list[Cell]:
    """The cells that a stopped soak has finished."""
    file = folder / CELLS
    lines = records.whole_lines(file).splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines]


def decode(number: int, name: str, setting: Setting, build: Build, seed: int) -> Cell:
    """Requests of a setting by one drafter, compared with vanilla's texts. The batch, the exit
    layer, the prompt chunks and whether rows draft where it does not pay are drawn at random. The
    last quarter comes after all others have ended, in the cache that the engine has kept."""
    started, draw, lm = running(), Random(f"{seed}/tiny/{number}/{name}"), setting.lm
    exit_layer, chunk = draw.randrange(1, lm.n_layers), draw.choice(setting.prefill_chunks)
    rows, always = draw.choice(BATCHES), draw.choice((True, False))
    texts = zip(setting.requests, setting.texts, strict=True)
    whole_texts = [[*request.prompt, *text] for request, text in texts]
    drafter = build(Case(lm, adapter_for(lm, exit_layer), whole_texts))
    engine = Engine(lm, drafter, prefill_chunk=chunk, always_drafts=always)
    engine.eos_ids = setting.eos_ids
    count = min(max(FEWEST, 2 * rows), len(setting.requests))
    chosen = draw.sample(range(len(setting.requests)), count)
    done: dict[int, Generation] = {}
    for wave in (chosen[: -(count // 4)], chosen[-(count // 4) :]):
        requests = [setting.requests[index] for index in wave]
        for index, generation in engine.completions(requests, SAMPLINGS[setting.sampling], rows):
            done[wave[index]] = generation
    steps = [step for generation in done.values() for step in generation.steps]
    options: Cell = dict(zip(BY, (name, setting.sampling, setting.family, rows), strict=True))
    options |= {"number": number, "exit_layer": exit_layer}
    options |= {"prefill_chunk": chunk, "always_drafts": always}
    return options | {
        "texts": len(done),
        "tokens": sum(len(setting.texts[index]) for index in done),
        "drafted": sum(step.drafted for step in steps),
        "accepted": sum(step.accepted for step in steps),
        "ended_by_eos": sum(generation.finish == "eos" for generation in done.values()),
        "seconds": running() - started,
        "differences": [options | text for text in differences(setting, done)],
    }


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


def certify(cells: Sequence[Cell]) -> dict[str, Any]:
    def totals(some: Sequence[Cell]) -> dict[str, int]:
        counts = {count: sum(cell[count] for cell in some) for count in COUNTS}
        return counts | {"different_texts": sum(len(cell["differences"]) for cell in some)}

    def by(heading: str) -> dict[str, dict[str, int]]:
        values = dict.fromkeys(cell[heading] for cell in cells)
        return {str(x): totals([cell for cell in cells if cell[heading] == x]) for x in values}

    sums = totals(cells)
    return sums | {
        "verdict": f"{sums['tokens']:,} tokens in {sums['texts']:,} texts were compared with "
        f"vanilla's; texts that differ: {sums['different_texts']}.",
        "differences": [text for cell in cells for text in cell["differences"]],
        "by": {heading: by(heading) for heading in BY},
        "cells": len(cells),
        "seconds": sum(cell["seconds"] for cell in cells),
    }


def markdown(certificate: dict[str, Any]) -> str:
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
    about = certificate["provenance"]
    lines = [
        f"git {about['git_revision']}, begun {about['time']}, finished {certificate['finished']}, "
        f"{certificate['seconds'] / 60:.0f} minutes of decoding in {certificate['cells']} cells",
        *environment_lines(about),
        ", ".join(f"{name}={value}" for name, value in certificate["settings"].items()),
    ]
    parts = [
        "# Lossless at scale: a certificate of `make soak`",
        f"**{certificate['verdict']}**",
        "What is decoded, and how: docs/evaluation.md, 'A million tokens'. *accepted* is the "
        "share of draft tokens: were it 0 or 100% everywhere, little would be tested.",
        *map(tables.markdown, sheets),
        bullet_list(lines),
    ]
    return "\n\n".join(parts) + "\n"
