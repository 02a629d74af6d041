"""Micro-batches of a run, a pure function of samples and options; the frozen forward of the target
on one of them; and the losses and gradients of all adapters.

Shapes: B rows, T tokens of a row, M learnt positions, J stored tokens, D hidden size.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.data.filters import answer_spans
from kangaroo.engine import topk_logits
from kangaroo.engine.cache import ForwardMeta
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.training.distill import StoredDistributions, Student, WholeDistributions, distill
from kangaroo.training.recipe import Trainee, TrainerConfig
from kangaroo.utils.errors import ConfigError, DataError


class Work:
    """Training and held-out samples; the `tokens` of each training sample that are read, and the
    `positions` that are learnt; and the micro-batches of all epochs, as indices into `training`.
    Errors: those of `check_trainable` and `check_holdout`."""

    def __init__(self, samples: Sequence[Sample], config: TrainerConfig):
        check_trainable(samples, config.max_length)
        check_holdout(config.holdout, len(samples))
        self.training = samples[: -config.holdout]
        self.held_out = samples[-config.holdout :]
        self.tokens = clipped_lengths(self.training, config.max_length)
        stored = bool(config.use_stored_logits)
        learnt = (learnt_positions(x, config.max_length, stored) for x in self.training)
        self.positions = [int(learnt_T.sum()) for learnt_T in learnt]
        self.batches = [
            batch
            for epoch in range(config.epochs)
            for batch in plan(self.tokens, config.batch_tokens, config.seed, epoch)
        ]


def check_holdout(holdout: int, count: int) -> None:
    """Errors: `ConfigError` where holding out so many of `count` samples leaves none to train."""
    if holdout >= count:
        fix = f"Pass trainer.holdout={max(1, count // 10)}" if count > 1 else "Give it more data"
        raise ConfigError(
            f"trainer.holdout={holdout} leaves nothing to train on of {count} conversations. {fix}."
        )


def check_trainable(samples: Sequence[Sample], max_length: int) -> None:
    """Errors: `DataError` for a sample without a token to learn from."""
    for index, sample in enumerate(samples):
        if any(sample["loss_mask"][1:max_length]):
            continue
        spans = ", ".join(f"{i} to {j - 1}" for i, j in answer_spans(sample["loss_mask"]))
        text = "; ".join(f"{m['role']}: {m['content'][:200]!r}" for m in sample["messages"])
        raise DataError(
            f"sample {index} has no trainable token among its first {max_length}: the assistant's "
            f"are {spans or 'none'}. Raise trainer.max_length or drop the sample. It reads: {text}"
        )


def clipped_lengths(samples: Sequence[Sample], max_length: int) -> list[int]:
    """How many tokens of each sample are read."""
    return [min(len(sample["input_ids"]), max_length) for sample in samples]


def attention_reach(lengths: Sequence[int]) -> int:
    """How many tokens an adapter's attention may look back after training on these lengths: their
    99th percentile, rounded up to blocks of 64, and at least 256."""
    return 64 * max(4, math.ceil(float(np.percentile(lengths, 99)) / 64))


def frequent_tokens(samples: Sequence[Sample]) -> Tensor:
    """Every token that the assistant wrote, the most frequent first, ties by id."""
    counts = Counter[int]()
    for sample in samples:
        counts.update(compress(sample["input_ids"], sample["loss_mask"]))
    return torch.tensor(sorted(counts, key=lambda token: (-counts[token], token)))


def plan(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffled micro-batches of samples of similar lengths, with at most `batch_tokens` padded
    tokens or one sample."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    # samples of one length are shuffled, so that a micro-batch differs from epoch to epoch
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = [[]]
    for index in sorted(shuffled, key=lambda i: lengths[i]):  # so a batch's last is its longest
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


@dataclass
class Tokens:
    """A micro-batch with a row for each sample, padded on the right; the learnt positions, where
    the *next* token is the assistant's; and the stored tokens and probabilities, each `[M, J]`."""

    input_BT: Tensor
    learnt_BT: Tensor
    stored: tuple[Tensor, Tensor] | None = None


def learnt_positions(sample: Sample, length: int, stored: bool = False) -> np.ndarray:
    """`[length - 1]`: where the next token is the assistant's (and its distribution `stored`)."""
    learnt_T = np.array(sample["loss_mask"][:length], dtype=bool)
    if stored:
        learnt_T[learnt_T] = topk_logits.nonempty(sample["teacher"][: learnt_T.sum()])
    return learnt_T[1:]


def row_width(lengths: Sequence[int], device: torch.device) -> int:
    """Tokens of a row, on a GPU a multiple of 8. Torch's fused attention needs an aligned mask,
    as layers with a window have; without it, draft steps took eight times as long on an H100."""
    return -(-max(lengths) // 8) * 8 if device.type == "cuda" else max(lengths)


def collate(
    samples: Sequence[Sample], max_length: int, device: torch.device, stored: bool = False
) -> Tokens:
    """Samples cut at `max_length` tokens, with their stored distributions if asked for."""
    lengths = clipped_lengths(samples, max_length)
    input_BT = torch.zeros(len(samples), row_width(lengths, device), dtype=torch.long)
    learnt_BT = torch.zeros_like(input_BT, dtype=torch.bool)
    records = []
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        input_BT[row, :length] = torch.tensor(sample["input_ids"][:length])
        # the last token of a sample has no next one to learn
        learnt_BT[row, : length - 1] = torch.from_numpy(learnt_positions(sample, length, stored))
        if stored:
            mask = sample["loss_mask"][:length]
            records_M = sample["teacher"][mask[0] : sum(mask)]
            records.append(records_M[topk_logits.nonempty(records_M)])
    tokens = Tokens(input_BT.to(device), learnt_BT.to(device))
    if stored:
        likeliest, chances = topk_logits.tensors(np.concatenate(records))
        tokens.stored = likeliest.to(device), chances.to(device)
    return tokens


@dataclass
class TargetOutputs:
    """The frozen target's hidden states `[B, T, D]`, by the number of layers below them, the `deep`
    ones normed; and its distributions at the learnt positions."""

    learnt_BT: Tensor
    meta: ForwardMeta
    taps: dict[int, Tensor]
    deep: dict[int, Tensor]
    distributions: WholeDistributions | StoredDistributions


@torch.no_grad()
def forward_target(lm: TargetModel, tokens: Tokens, trainees: Sequence[Trainee]) -> TargetOutputs:
    """The one frozen forward that all adapters learn from. With stored distributions it stops at
    the last layer that an adapter reads, and leaves out the head."""
    rows, width = tokens.input_BT.shape
    meta = replace(lm.chunk(0, width, row=0, n_slots=width), rows=slice(0, rows))
    taps = {tap for trainee in trainees for tap in trainee.adapter.taps}
    deep = {tap for trainee in trainees if (tap := trainee.adapter.deep_tap) is not None}
    stop = lm.n_layers if tokens.stored is None else max(taps | deep)
    x_BTD, states = lm.run(lm.embed(tokens.input_BT), None, meta, range(stop), taps | deep)
    learnt_BT = tokens.learnt_BT.to(x_BTD.device)
    final_MD = lm.norm(x_BTD[learnt_BT]) if stop == lm.n_layers else x_BTD[..., :0][learnt_BT]
    head = trainees[0].heads[0]
    distributions: WholeDistributions | StoredDistributions
    if tokens.stored is None:
        distributions = WholeDistributions(lm, final_MD, head.vocabulary_K)
    else:
        distributions = StoredDistributions(final_MD, *tokens.stored, head)
    return TargetOutputs(
        tokens.learnt_BT,
        meta,
        taps={tap: states[tap] for tap in taps},
        deep={tap: lm.norm(states[tap]) for tap in deep},
        distributions=distributions,
    )


def train_step(
    lm: TargetModel,
    outputs: TargetOutputs,
    trainees: Sequence[Trainee],
    loss_chunk: int,
    weight: float,
) -> list[list[Student]]:
    """Add `weight` x the gradient of each adapter's summed loss; return its graded steps."""
    students = [
        make_students(lm, outputs, trainee, steps=trainee.recipe.steps, weight=weight)
        for trainee in trainees
    ]
    distill(outputs.distributions, list(chain(*students)), loss_chunk)
    for trainee, steps in zip(trainees, students, strict=True):
        # one backward pass through the adapter, for all its steps and chunks
        pairs = [pair for student in steps for pair in student.gradients]
        side = trainee.adapter.side_loss(*stack_steps(steps), outputs.distributions.state_MD)
        if side is not None:
            pairs.append((side, torch.full_like(side, weight)))
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
    return students


@torch.no_grad()
def grade(
    lm: TargetModel, outputs: TargetOutputs, trainees: Sequence[Trainee], loss_chunk: int, most: int
) -> list[list[Student]]:
    """The draft steps of each adapter that differ, at most `most`, graded."""
    students = [
        make_students(lm, outputs, trainee, trainee.recipe.architecture.graded_steps(most))
        for trainee in trainees
    ]
    distill(outputs.distributions, list(chain(*students)), loss_chunk)
    return students


def make_students(
    lm: TargetModel, outputs: TargetOutputs, trainee: Trainee, steps: int, weight: float = 1.0
) -> list[Student]:
    """The adapter's states at its first `steps` draft steps, to be graded."""
    adapter = trainee.adapter
    learnt_BT = outputs.learnt_BT
    parameter = next(adapter.parameters())
    taps = {tap: outputs.taps[tap].to(parameter) for tap in adapter.taps}
    deep_BTD = parameter.new_empty(*learnt_BT.shape, 0)
    if adapter.deep_tap is not None:
        deep_BTD = outputs.deep[adapter.deep_tap].to(parameter)
    # matrix products in bfloat16 for a half-precision target; float32 stays exact
    with torch.autocast(lm.device.type, torch.bfloat16, enabled=lm.dtype != torch.float32):
        states = adapter.states(taps, deep_BTD, outputs.meta.to(parameter.device), steps)
    students = []
    valid_BT = learnt_BT
    for step, state_BTD in enumerate(states):
        student = Student(
            state_MD=state_BTD[learnt_BT.to(state_BTD.device)],
            valid_M=valid_BT[learnt_BT],
            head=trainee.heads[min(step, len(trainee.heads) - 1)],
            loss=trainee.recipe.loss,
            weight=weight * trainee.recipe.step_decay**step,
        )
        students.append(student)
        # at the next step the draft began a token earlier, which the assistant must have written
        valid_BT = valid_BT & F.pad(valid_BT[:, :-1], (1, 0))
    return students


def stack_steps(students: Sequence[Student]) -> tuple[list[Tensor], Tensor]:
    """The states of all draft steps, and `[steps, M]`: whether a draft has that step."""
    states = [student.state_MD for student in students]
    return states, torch.stack([student.valid_M for student in students])
