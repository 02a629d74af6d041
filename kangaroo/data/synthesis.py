"""Self-synthesis: the target writes its own training conversations; nothing is downloaded.

Fed the chat template's user header, an aligned model writes a question (Magpie, arXiv 2406.08464);
asked that question, it writes the answer that the adapter is to predict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.data.chat import Message, Sample, prompt_ids, user_header
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import Engine, Generation, Request
from kangaroo.errors import DataError
from kangaroo.model import LM
from kangaroo.provenance import changes
from kangaroo.sampling import Sampling


@dataclass
class SynthesisConfig:
    """What the target is asked to write.

    Args:
        path: folder of the finished dataset; work in progress lies in `<path>.shards`.
        shards: parts of the dataset; asking for more of them later keeps those that are there.
        shard_size: conversations a shard, of which a few are dropped (unfinished, repeated); a
            killed run loses at most the shard at hand.
        batch_size: rows decoded at a time.
        max_question_tokens, max_answer_tokens: an answer is kept as far as it goes.
        keep_unfinished_questions: so is a question; by default one that reaches its limit is
            dropped.
        question_temperature: questions want variety.
        answer_temperatures: shards take them in turn; 0 is greedy, as most evaluation is.
        seed: with the model and these settings it fixes the data.
    """

    name: str = "self_synthesis"
    path: str = "???"
    shards: int = 3
    shard_size: int = 512
    batch_size: int = 64
    max_question_tokens: int = 128
    max_answer_tokens: int = 320
    keep_unfinished_questions: bool = False
    question_temperature: float = 1.0
    answer_temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7])
    seed: int = 0


def synthesise(lm: LM, tokenizer: PreTrainedTokenizerBase, config: SynthesisConfig) -> None:
    """Write the dataset to `config.path`, or what is still missing of it.

    Every shard is a pure function of model, settings and shard number, and is renamed into place
    when complete, so a run that was killed goes on and ends with the same data.
    """
    settings: dict[str, Any] = {"model": lm.name} | asdict(config)
    del settings["path"]
    path, folder = Path(config.path), Path(config.path + ".shards")
    if store.is_complete(path) and store.about(path)["settings"] == settings:
        return
    _check_settings(folder, {k: v for k, v in settings.items() if k != "shards"})
    engine = Engine(lm, Vanilla(), tokenizer)
    total = config.shards * config.shard_size
    with tqdm(total=total, unit="conversation", desc="self-synthesis") as bar:
        for number in range(config.shards):
            if _shard(folder, number).exists():
                bar.update(config.shard_size)
                continue
            part = _shard(folder, number).with_suffix(".part")
            with part.open("w") as file:
                for sample in _write(engine, tokenizer, config, number, bar):
                    file.write(json.dumps(sample) + "\n")
            os.replace(part, _shard(folder, number))
    samples = list(_distinct(folder, config.shards))
    if not samples:
        raise DataError(
            f"the model wrote no usable conversation in {total} tries; is it a chat model, and "
            f"does its template end a user turn? See {folder}."
        )
    store.save(samples, path, settings)


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "settings.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n")
        return
    changed = changes(json.loads(path.read_text()), settings)
    if changed:
        raise DataError(
            f"{folder} was begun with other settings ({changed}). Go on with the same ones, pass "
            "data.path= another folder, or delete it."
        )


def _shard(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.jsonl"


def _write(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, config: SynthesisConfig, number: int,
    bar: tqdm,
) -> Iterator[Sample]:  # fmt: skip
    """One shard's conversations: all questions first, then all answers."""
    first = config.seed * 1_000_003 + number * config.shard_size
    seeds = range(first, first + config.shard_size)
    header, end_of_turn = user_header(tokenizer)
    asked = _decode(
        engine,
        [Request(header, config.max_question_tokens, seed, [end_of_turn]) for seed in seeds],
        Sampling(temperature=config.question_temperature),
        config.batch_size,
    )
    questions = []
    for generation in asked:
        text = tokenizer.decode(generation.tokens, skip_special_tokens=True)
        finished = generation.finish != "length" or config.keep_unfinished_questions
        questions.append(text.removesuffix(end_of_turn).strip() if finished else "")
    kept = [(seed, text) for seed, text in zip(seeds, questions, strict=True) if text]
    bar.update(len(seeds) - len(kept))
    messages = [[Message(role="user", content=text)] for _, text in kept]
    prompts = [prompt_ids(tokenizer, turns) for turns in messages]
    temperatures = config.answer_temperatures
    answered = _decode(
        engine,
        [
            Request(prompt, config.max_answer_tokens, seed)
            for prompt, (seed, _) in zip(prompts, kept, strict=True)
        ],
        Sampling(temperature=temperatures[number % len(temperatures)]),
        config.batch_size,
        bar,
    )
    for turns, prompt, generation in zip(messages, prompts, answered, strict=True):
        text = tokenizer.decode(generation.tokens, skip_special_tokens=True)
        yield Sample(
            messages=[*turns, Message(role="assistant", content=text)],
            input_ids=prompt + generation.tokens,
            loss_mask=[0] * len(prompt) + [1] * len(generation.tokens),
        )


def _decode(
    engine: Engine, requests: Sequence[Request], sampling: Sampling, batch_size: int,
    bar: tqdm | None = None,
) -> list[Generation]:  # fmt: skip
    done = {}
    for index, generation in engine.completions(requests, sampling, batch_size):
        done[index] = generation
        if bar is not None:
            bar.update()
    return [done[index] for index in range(len(requests))]


def _distinct(folder: Path, shards: int) -> Iterator[Sample]:
    """Samples in order; a question that came before is dropped, so held-out ones stay unseen."""
    seen = set()
    for number in range(shards):
        for line in _shard(folder, number).read_text().splitlines():
            sample = json.loads(line)
            question = sample["messages"][0]["content"]
            if question not in seen:
                seen.add(question)
                yield sample
