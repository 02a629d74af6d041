"""Trace the questions of a bench, one file each, from where an earlier run stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.evaluation.bench import Question, check_first_turns
from kangaroo.evaluation.tune import trace
from kangaroo.evaluation.tune.recording import Recorder
from kangaroo.evaluation.tune.trace import TracedQuestion, Turn
from kangaroo.models.prompts import Message, plain_text
from kangaroo.models.target import LM

SAMPLE = 256  # numbers of each weight that the target is known by


def trace_bench(
    recorder: Recorder,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    max_new_tokens: int,
    folder: Path,
    settings: dict[str, Any],
) -> list[TracedQuestion]:
    """All turns of these questions, the conversation going on with the target's own answers.

    Args:
        max_new_tokens: of a turn.
        folder: of the trace; what it holds already is not done again.
        settings: what fixes the trace beside the target, by name.

    Errors: `ConfigError` where the folder was made with others; `CorruptFile`, `PromptError`.
    """
    settings = settings | target_settings(recorder.lm) | {"max_new_tokens": max_new_tokens}
    known = trace.enter(folder, settings)
    check_first_turns(questions, recorder.lm, tokenizer)
    traced = []
    for question in tqdm(questions, unit="question", desc="tracing"):
        key = trace.fingerprint({"trace": known, "question": question.content()})
        found = trace.load(question.question_id, key, folder)
        if found is None:
            found = trace_question(recorder, tokenizer, question, max_new_tokens)
            trace.save(found, key, folder)
        traced.append(found)
    return traced


def trace_question(
    recorder: Recorder,
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    max_new_tokens: int,
) -> TracedQuestion:
    """All turns of a question.

    Errors: `PromptError` where the conversation fills the model's context.
    """
    messages: list[Message] = []
    turns: list[Turn] = []
    for text in question.turns:
        messages.append(Message(role="user", content=text))
        prompt = question.prompt(recorder.lm, tokenizer, messages)
        room = recorder.lm.context - len(prompt)
        turns.append(recorder.turn(prompt, min(max_new_tokens, room)))
        answer = plain_text(tokenizer, turns[-1].text).strip()
        messages.append(Message(role="assistant", content=answer))
    return TracedQuestion(question.question_id, question.task, turns)


def target_settings(lm: LM) -> dict[str, Any]:
    """What fixes the target's text: its weights, its number format, and what computes it."""
    return {
        "target": lm.name,
        "target_weights": weights_hash(lm),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": lm.device.type,
        "native": lm.native_layers is not None,
    }


def weights_hash(lm: LM) -> str:
    """Hash of a part of every weight: enough to know another checkpoint by, in no time."""
    found = hashlib.sha256()
    for name, weight in lm.hf.named_parameters():
        some = weight.detach().flatten()[:SAMPLE].to("cpu", torch.float32)
        found.update(name.encode() + some.numpy().tobytes())
    return found.hexdigest()[:16]
