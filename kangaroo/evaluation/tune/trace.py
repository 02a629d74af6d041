"""What a target writes and what its drafters would have drafted everywhere in it, kept as files.

A file holds one question. A run that was killed loses the question at hand and nothing else.

Shapes: P positions where a round can begin, S draft steps, C nodes of a step.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kangaroo.utils.errors import ConfigError, CorruptFile
from kangaroo.utils.provenance import changes

FORMAT = {"format": 3}  # of what is kept; another one is refused


@dataclass
class Drafts:
    """What a drafter drafts from every position of a text, on and on, right or wrong.

    Args:
        tokens_PSC: the choices for each token of a chain, the drafted one first; of trees the nodes
            of each level.
        chances_PSC: the probability of each choice; of a node the product of those on its path, the
            highest first.
        parents_PSC: of trees alone: the places of the nodes' parents in the level before; 0 in the
            first level.
    """

    tokens_PSC: np.ndarray
    chances_PSC: np.ndarray
    parents_PSC: np.ndarray | None = None

    @property
    def steps(self) -> int:
        """The longest chain, or how many levels there are."""
        return self.tokens_PSC.shape[1]


@dataclass
class Turn:
    """One turn of a question: the target's own text, and what was drafted along it.

    Position p is that of the p-th new token while it is the last one committed: the text's last
    token is no position, since no round begins there.

    Args:
        prompt: token ids.
        text: what the target wrote after it, greedily, EOS included.
        drafts: by the drafter's name; none where the text is a single token.
    """

    prompt: list[int]
    text: list[int]
    drafts: dict[str, Drafts] = field(default_factory=dict)


@dataclass
class TracedQuestion:
    """All turns of a question, the answers being the target's own."""

    question_id: int
    task: str
    turns: list[Turn]


def file_of(folder: Path, question_id: int) -> Path:
    """Where a question's trace is kept."""
    return folder / f"question-{question_id}.safetensors"


def save(traced: TracedQuestion, settings: dict[str, Any], folder: Path) -> None:
    """Write a question's trace, whole or not at all.

    Args:
        settings: all that fixes it, by name, as JSON values.
    """
    tensors: dict[str, np.ndarray] = {}
    for number, turn in enumerate(traced.turns):
        tensors[f"{number}/prompt"] = np.array(turn.prompt, np.int32)
        tensors[f"{number}/text"] = np.array(turn.text, np.int32)
        for name, drafts in turn.drafts.items():
            for part in fields(drafts):
                if (array := getattr(drafts, part.name)) is not None:
                    tensors[f"{number}/{part.name}/{name}"] = np.ascontiguousarray(array)
    folder.mkdir(parents=True, exist_ok=True)
    file = file_of(folder, traced.question_id)
    partial = file.with_suffix(".partial")
    about = {"settings": json.dumps(settings | FORMAT), "turns": str(len(traced.turns))}
    save_file(tensors, partial, about | {"task": traced.task})
    os.replace(partial, file)


def load(question_id: int, settings: dict[str, Any], folder: Path) -> TracedQuestion | None:
    """A question's trace; None where it was not traced yet.

    Errors: `CorruptFile`; `ConfigError` names the settings that differ.
    """
    file = file_of(folder, question_id)
    if not file.is_file():
        return None
    try:
        with safe_open(file, "np") as opened:
            about = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        turns = [_turn(tensors, number) for number in range(int(about["turns"]))]
        task, earlier = about["task"], json.loads(about["settings"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CorruptFile(
            f"'{file}' is no trace ({type(error).__name__}: {error}). Delete it, and its question "
            "is traced again."
        ) from error
    if difference := changes(earlier, json.loads(json.dumps(settings | FORMAT))):
        raise ConfigError(
            f"'{file}' is a trace of other settings or of another question: {difference}. Pass "
            "another output=, or resume=false to trace again."
        )
    return TracedQuestion(question_id, task, turns)


def _turn(tensors: dict[str, np.ndarray], number: int) -> Turn:
    prompt, text = (tensors[f"{number}/{part}"].tolist() for part in ("prompt", "text"))
    first, second, third = (f"{number}/{part.name}/" for part in fields(Drafts))
    names = sorted(name.removeprefix(first) for name in tensors if name.startswith(first))
    drafts = {
        name: Drafts(tensors[first + name], tensors[second + name], tensors.get(third + name))
        for name in names
    }
    return Turn(prompt, text, drafts)
