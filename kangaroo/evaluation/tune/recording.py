"""Record a trace: the target writes, and every drafter drafts from each position of its text.

All adapters read the same pass of the target. What is drafted from a position lies in free slots
behind the text, and sees the text up to there and itself alone. So many positions draft side by
side on one cache, and where decoding is native each draft has the bits of decoding. Levels of trees
do not depend on threshold and pruning, so one record serves every setting but `top_k`.

Shapes: P positions where a round can begin, S draft steps, L nodes of a level (1 of a chain), M all
nodes of a draft, C choices for a token, T tokens of a text, W window, D hidden size, K draft
vocabulary, E occupied slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.cpu.stepper import runs_natively
from kangaroo.drafters.base import Stateless
from kangaroo.drafters.hybrid import CHOICES
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree, take
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.tree import Draft, Tree
from kangaroo.engine.verify import Verdict
from kangaroo.evaluation.bench import Question, check_first_turns, fingerprint
from kangaroo.evaluation.tune import trace
from kangaroo.evaluation.tune.trace import Drafts, TracedQuestion, Turn
from kangaroo.models.prompts import Message, plain_text
from kangaroo.models.target import TargetModel

POSITIONS = 64  # nodes of a level that are drafted side by side
WIDEST = 256  # tokens of one pass over a text


class Watcher(Stateless):
    """Proposes nothing, and keeps the target's hidden states of one text.

    Args:
        taps: which states, by the number of layers below them.
        room: slots for drafts, behind the text.

    Attributes:
        prompts: tokens, block and states of each chunk of the prompt.
        pending: states of the tokens after it, one after another.
    """

    def __init__(self, taps: Sequence[int], room: int):
        self.taps, self.max_nodes = tuple(taps), room

    def begin(self, batch: Batch) -> None:
        self.prompts: list[tuple[Tensor, ForwardMeta, dict[int, Tensor]]] = []
        self.pending: list[dict[int, Tensor]] = []

    def prefill(
        self, batch: Batch, tokens_1T: Tensor, meta: ForwardMeta, taps: dict[int, Tensor]
    ) -> None:
        self.prompts.append((tokens_1T, meta, taps))

    def propose(self, batch: Batch) -> Draft:
        return Draft.nothing(batch.last(1))

    def observe(
        self, batch: Batch, draft: Draft, verdict: Verdict, taps: dict[int, Tensor]
    ) -> None:
        self.pending.append(taps)


class Recorder:
    """Writes with the target and drafts with each of the drafters.

    Args:
        drafters: by name; each one's `steps` is the longest chain that is recorded, its threshold
            is not read.
    """

    def __init__(
        self,
        lm: TargetModel,
        drafters: Mapping[str, Kangaroo | KangarooTree],
        prefill_chunk: int | None = None,
    ):
        self.lm, self.drafters = lm, drafters
        taps = sorted({tap for drafter in drafters.values() for tap in drafter.taps})
        room = max(
            (side_by_side(drafter) * drafter.max_nodes for drafter in drafters.values()), default=0
        )
        self.watcher = Watcher(taps, room)
        self.engine = Engine(lm, self.watcher, prefill_chunk=prefill_chunk)

    def turn(self, prompt: Sequence[int], max_new_tokens: int) -> Turn:
        """The target's greedy text, and what is drafted from each of its positions.

        Errors: `PromptError`.
        """
        (generation,) = self.engine.generate([prompt], max_new_tokens)
        turn = Turn(list(prompt), generation.tokens)
        if self.watcher.pending:  # else the text is a single token
            turn.drafts = {
                name: self._everywhere(drafter) for name, drafter in self.drafters.items()
            }
        return turn

    @torch.inference_mode()
    def _everywhere(self, drafter: Kangaroo | KangarooTree) -> Drafts:
        """What it drafts from every position."""
        batch, watcher = self.engine.batch, self.watcher
        assert batch is not None
        drafter.begin(batch)
        for tokens_1T, meta, taps in watcher.prompts:
            drafter.prefill(batch, tokens_1T, meta, taps)
        drafter.read_prompts()
        states_PD = read_text(self.lm, drafter, batch, watcher.pending)
        first, size = batch.lengths[0] - 1 - len(states_PD), side_by_side(drafter)
        parts = [
            draft_from(self.lm, drafter, batch, first + at, states_PD[at : at + size])
            for at in range(0, len(states_PD), size)
        ]
        return Drafts(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def side_by_side(drafter: Kangaroo | KangarooTree) -> int:
    """From how many positions it drafts together."""
    return max(1, POSITIONS // drafter.top_k) if isinstance(drafter, KangarooTree) else POSITIONS


def read_text(
    lm: TargetModel,
    drafter: Kangaroo | KangarooTree,
    batch: Batch,
    pending: Sequence[dict[int, Tensor]],
) -> Tensor:
    """What a drafter has at each position of a text that it has read up to there, `[P, D]`.

    Its keys then lie where the text does.

    Args:
        pending: the target's states of these positions. Before them lies the prompt, which the
            drafter has read.
    """
    # In native code the prompt's keys stay as they are; elsewhere a round's first pass writes
    # those of its last tokens again, which may round otherwise.
    window = 0 if runs_natively(lm, drafter, Sampling()) else drafter.window
    f_1TD = torch.cat([taps[drafter.exit_layer] for taps in pending], 1)
    f_1TD = torch.cat([drafter.shallow_BWD[:, drafter.window - window :], f_1TD], 1)
    begin, end = batch.lengths[0] - 1 - len(pending), batch.lengths[0] - 1
    tree, start_1 = Tree.chain(end - begin + window, lm.device), torch.tensor([begin - window])
    below = 0 if begin >= window else window
    meta = lm.forward_meta(tree, start_1.to(lm.device), end, batch.n_slots, below)
    meta = replace(meta, recordable=False).to(f_1TD.device)
    if drafter.deep_tap is not None:
        deep_1TD = torch.cat([taps[drafter.deep_tap] for taps in pending], 1)
        drafter.keep_deep(meta.slots_RT[:, window:], deep_1TD)
    before_1TD = drafter.deep_before(meta)
    states = []
    for at in range(0, f_1TD.shape[1], WIDEST):
        part = meta.narrow(at, WIDEST)
        deep_part = None if before_1TD is None else before_1TD[:, at : at + WIDEST]
        past = drafter.cache.at(part)
        states.append(drafter.adapter(f_1TD[:, at : at + WIDEST], deep_part, part, past))
    return torch.cat(states, 1)[0, window:]


def draft_from(
    lm: TargetModel, drafter: Kangaroo | KangarooTree, batch: Batch, first: int, states_PD: Tensor
) -> tuple[np.ndarray, ...]:
    """What a drafter drafts from neighbouring positions: the arrays of `Drafts`.

    Args:
        first: the first of these positions, in the cache.
        states_PD: what the drafter has there.
    """
    is_tree = isinstance(drafter, KangarooTree)
    width = drafter.top_k if isinstance(drafter, KangarooTree) else 1
    choices = width if is_tree else min(CHOICES, drafter.head.size)
    count, length, room = len(states_PD), batch.lengths[0], drafter.steps * width
    base_P = first + torch.arange(count, device=lm.device)
    extent = lm.extent(batch.n_slots, length + count * room)
    hidden_PLE = (torch.arange(extent, device=lm.device) > base_P[:, None])[:, None]
    slots_PM = length + torch.arange(count * room, device=lm.device).view(count, room)
    score_PL, states_PLD = torch.ones(count, 1, device=lm.device), states_PD[:, None]
    levels: list[tuple[Tensor, ...]] = []
    for step in range(drafter.steps):
        shape = states_PLD.shape[:2]
        logits_PLK = drafter.head(states_PLD.flatten(0, 1)).float().unflatten(0, shape)
        index_PLC = logits_PLK.topk(choices).indices
        token_PLC = drafter.head.token_of(index_PLC)
        chance_PLC = logits_PLK.softmax(-1).gather(-1, index_PLC)
        if is_tree:  # the likeliest of all nodes' children
            score_PL, best_PL = (score_PL[..., None] * chance_PLC).flatten(1).topk(width)
            parent_PL = best_PL // width
            token_PL = token_PLC.flatten(1).gather(1, best_PL)
            levels.append((token_PL, score_PL, parent_PL))
        else:
            token_PL, parent_PL = token_PLC[..., 0], torch.zeros_like(token_PLC[..., 0])
            levels.append((token_PLC[:, 0], chance_PLC[:, 0]))
        if step + 1 == drafter.steps:
            break
        slots_PL = slots_PM[:, step * width : (step + 1) * width]
        hidden_PLE = take(hidden_PLE, parent_PL).scatter(2, slots_PL[..., None], False)
        at_PL = (base_P + 1 + step)[:, None].expand_as(slots_PL)
        places = slots_PL.reshape(1, -1), at_PL.reshape(1, -1), hidden_PLE.flatten(0, 1)[None]
        meta = replace(lm.forward_meta_of(*places, batch.n_slots), recordable=False)
        f_1MD, _ = lm.run(lm.embed(token_PL.reshape(1, -1)), batch.cache, meta, drafter.shallow)
        at, deep_1MD = meta.to(f_1MD.device), None
        if drafter.reads_deep:
            deep_1MD = take(states_PLD, parent_PL).flatten(0, 1)[None]
        states_1MD = drafter.adapter(f_1MD, deep_1MD, at, drafter.cache.at(at))
        states_PLD = states_1MD[0].unflatten(0, slots_PL.shape)
    kinds = np.int32, np.float32, np.int32
    return tuple(
        torch.stack(part, 1).cpu().numpy().astype(kind)
        for part, kind in zip(zip(*levels, strict=True), kinds, strict=False)
    )


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
    lm = recorder.lm
    settings = settings | {
        "max_new_tokens": max_new_tokens,
        "target": [lm.name, lm.fingerprint],
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": lm.device.type,
        "native": lm.native_layers is not None,
    }
    check_first_turns(questions, lm, tokenizer)
    traced = []
    for question in tqdm(questions, unit="question", desc="tracing"):
        about = settings | {"question": fingerprint([question])}
        recorded = trace.load(question.question_id, about, folder)
        if recorded is None:
            recorded = trace_question(recorder, tokenizer, question, max_new_tokens)
            trace.save(recorded, about, folder)
        traced.append(recorded)
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
