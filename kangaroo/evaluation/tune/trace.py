"""What a target writes and what its drafters would have drafted everywhere in it, kept as files.

A file holds one question. A run that was killed loses the question at hand and nothing else.

Shapes: P positions where a round can begin, S draft steps, C choices for a token, L nodes of a
level.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kangaroo.utils.errors import ConfigError, CorruptFile
from kangaroo.utils.provenance import changes, provenance

ABOUT = "trace.json"
FORMAT = 2  # of what is kept; another one is refused


@dataclass
class Drafted:
    """What one drafter drafts from every position of a text, on and on, right or wrong.

    Args:
        tokens_PS: the chain that begins after each position, by its own choices.
        chances_PS: the probability of each of these, which is the drafter's confidence.
        further_PSC: the next best choices for each of these, and
        further_chances_PSC: their probabilities.
    """

    tokens_PS: np.ndarray
    chances_PS: np.ndarray
    further_PSC: np.ndarray
    further_chances_PSC: np.ndarray

    @property
    def steps(self) -> int:
        """The longest chain that is known."""
        return self.tokens_PS.shape[1]

    def cut(self, positions: int) -> Drafted:
        """From the first positions alone."""
        return Drafted(*(getattr(self, part.name)[:positions] for part in fields(self)))


@dataclass
class Grown:
    """What a drafter of trees drafts from every position, level by level, L nodes each.

    Args:
        tokens_PSL: of the nodes.
        parents_PSL: their parents' places in the level before; 0 in the first level.
        scores_PSL: the product of the probabilities on their paths, the highest first.
    """

    tokens_PSL: np.ndarray
    parents_PSL: np.ndarray
    scores_PSL: np.ndarray

    @property
    def steps(self) -> int:
        """How many levels are known."""
        return self.tokens_PSL.shape[1]

    def cut(self, positions: int) -> Grown:
        """From the first positions alone."""
        return Grown(*(getattr(self, part.name)[:positions] for part in fields(self)))


Kind = TypeVar("Kind", Drafted, Grown)


@dataclass
class Turn:
    """One turn of a question: the target's own text, and what was drafted along it.

    Position p is that of the p-th new token while it is the last one committed: the text's last
    token is no position, since no round begins there.

    Args:
        prompt: token ids.
        text: what the target wrote after it, greedily, EOS included.
        drafted: chains, by the drafter's name.
        grown: trees, likewise.
    """

    prompt: list[int]
    text: list[int]
    drafted: dict[str, Drafted]
    grown: dict[str, Grown] = field(default_factory=dict)

    def cut(self, count: int) -> Turn:
        """The same turn where the text is no longer than so many tokens."""
        text = self.text[:count]
        drafted = {name: known.cut(len(text) - 1) for name, known in self.drafted.items()}
        grown = {name: known.cut(len(text) - 1) for name, known in self.grown.items()}
        return Turn(self.prompt, text, drafted, grown)


@dataclass
class TracedQuestion:
    """All turns of a question, the answers being the target's own."""

    question_id: int
    task: str
    turns: list[Turn]


def enter(folder: Path, settings: dict[str, Any]) -> str:
    """Make a folder this trace's, or go on with the one that it holds; what its files are known by.

    Args:
        settings: all that fixes what is recorded, by name, as JSON values.

    Errors: `ConfigError` names the settings that differ.
    """
    file, settings = folder / ABOUT, json.loads(json.dumps(settings | {"format": FORMAT}))
    if file.is_file():
        try:
            known = json.loads(file.read_text(encoding="utf-8"))["settings"]
        except (ValueError, KeyError) as error:
            raise CorruptFile(
                f"'{file}' cannot be read ({error}). Delete the folder '{folder}', and its "
                "questions are traced again."
            ) from error
        if difference := changes(known, settings):
            raise ConfigError(
                f"'{folder}' holds a trace of other settings: {difference}. Pass another output=, "
                "or resume=false to trace again."
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        about = {"settings": settings, "provenance": provenance()}
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, file)
    return fingerprint(settings)


def fingerprint(settings: dict[str, Any]) -> str:
    """Hash of settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def file_of(folder: Path, question_id: int) -> Path:
    """Where a question's trace is kept."""
    return folder / f"question-{question_id}.safetensors"


def save(traced: TracedQuestion, key: str, folder: Path) -> None:
    """Write a question's trace, whole or not at all.

    Args:
        key: of the settings and the question that it was made for.
    """
    tensors: dict[str, np.ndarray] = {}
    for number, turn in enumerate(traced.turns):
        tensors[f"{number}/prompt"] = np.array(turn.prompt, np.int32)
        tensors[f"{number}/text"] = np.array(turn.text, np.int32)
        drafts: list[tuple[str, Drafted | Grown]] = [*turn.drafted.items(), *turn.grown.items()]
        for name, known in drafts:
            for part in fields(known):
                array = np.ascontiguousarray(getattr(known, part.name))
                tensors[f"{number}/{part.name}/{name}"] = array
    file = file_of(folder, traced.question_id)
    partial = file.with_suffix(".partial")
    about = {"key": key, "task": traced.task, "turns": str(len(traced.turns))}
    save_file(tensors, partial, about)
    os.replace(partial, file)


def load(question_id: int, key: str, folder: Path) -> TracedQuestion | None:
    """A question's trace; None where it was not traced yet.

    Errors: `CorruptFile`, and `ConfigError` where it was made for other settings or weights.
    """
    file = file_of(folder, question_id)
    if not file.is_file():
        return None
    try:
        with safe_open(file, "np") as opened:
            about = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        known, count = about["key"], int(about["turns"])
        turns = [_turn(tensors, number) for number in range(count)]
        task = about["task"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CorruptFile(
            f"'{file}' is no trace ({type(error).__name__}: {error}). Delete it, and its question "
            "is traced again."
        ) from error
    if known != key:
        raise ConfigError(
            f"'{file}' was made with other settings or weights, or of another question. Delete "
            "it, pass another output=, or resume=false to trace again."
        )
    return TracedQuestion(question_id, task, turns)


def _turn(tensors: dict[str, np.ndarray], number: int) -> Turn:
    def known(kind: type[Kind]) -> dict[str, Kind]:
        names = [part.name for part in fields(kind)]
        prefix = f"{number}/{names[0]}/"
        found = sorted(name.removeprefix(prefix) for name in tensors if name.startswith(prefix))
        return {one: kind(*(tensors[f"{number}/{name}/{one}"] for name in names)) for one in found}

    prompt, text = (tensors[f"{number}/{part}"].tolist() for part in ("prompt", "text"))
    return Turn(prompt, text, known(Drafted), known(Grown))
