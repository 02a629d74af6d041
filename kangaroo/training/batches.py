"""What a run trains on, in which micro-batches (a pure function of samples and options), and what
is done with one: a frozen forward of the target, then every adapter's losses and gradients.

Shapes: B rows, T tokens of a row, M wanted positions, the assistant's, J stored tokens, D hidden
size.
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

from kangaroo.data.filters import answers
from kangaroo.engine import topk_logits
from kangaroo.engine.cache import ForwardMeta
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.training.distill import StoredDistributions, Student, WholeDistributions, distill
from kangaroo.training.recipe import Trainee, TrainerConfig
from kangaroo.utils.errors import ConfigError, DataError


class Work:
    """What a run trains on, and what it holds out. Errors: those of the two checks.

    Attributes:
        tokens, positions: how many of each training sample are read, and how many of those learnt.
        batches: the micro-batches of all epochs, as indices into `training`.
    """

    def __init__(self, samples: Sequence[Sample], config: TrainerConfig):
        check_trainable(samples, config.max_length)
        check_holdout(config.holdout, len(samples))
        self.training, self.held_out = samples[: -config.holdout], samples[-config.holdout :]
        self.tokens = lengths_of(self.training, config.max_length)
        how = config.max_length, bool(config.use_stored_logits)
        self.positions = [int(wanted_of(sample, *how).sum()) for sample in self.training]
        same = (config.accumulate or 1) if config.cache_target_states else 0
        self.batches = [
            batch
            for epoch in range(config.epochs)
            for batch in plan(self.tokens, config.batch_tokens, config.seed, epoch, same)
        ]


def check_holdout(holdout: int, count: int) -> None:
    """Errors: `ConfigError` where nothing of so many samples is left to train on."""
    if holdout >= count:
        fix = f"Pass trainer.holdout={max(1, count // 10)}" if count > 1 else "Give it more data"
        raise ConfigError(
            f"trainer.holdout={holdout} leaves nothing to train on of {count} conversations. {fix}."
        )


def check_trainable(samples: Sequence[Sample], max_length: int) -> None:
    """Errors: `DataError` for a sample without a token to learn from: it would pass in silence."""
    for index, sample in enumerate(samples):
        if any(sample["loss_mask"][1:max_length]):
            continue
        spans = ", ".join(f"{start} to {stop - 1}" for start, stop in answers(sample["loss_mask"]))
        text = "; ".join(f"{m['role']}: {m['content'][:200]!r}" for m in sample["messages"])
        raise DataError(
            f"sample {index} has no trainable token among its first {max_length}: the assistant's "
            f"are {spans or 'none'}. Raise trainer.max_length or drop the sample. It reads: {text}"
        )


def lengths_of(samples: Sequence[Sample], max_length: int) -> list[int]:
    """How many tokens of each are read."""
    return [min(len(sample["input_ids"]), max_length) for sample in samples]


def reach_of(lengths: Sequence[int]) -> int:
    """How far back attention may look that has learnt from texts of these lengths, in blocks of 64
    tokens: as far as one in a hundred of them, which it has seen often enough."""
    return 64 * max(4, math.ceil(float(np.percentile(lengths, 99)) / 64))


def frequent_tokens(samples: Sequence[Sample]) -> Tensor:
    """Every token that the assistant wrote, the most frequent first; ties by id."""
    counts = Counter[int]()
    for sample in samples:
        counts.update(compress(sample["input_ids"], sample["loss_mask"]))
    return torch.tensor(sorted(counts, key=lambda token: (-counts[token], token)))


def plan(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int, same: int = 0
) -> list[list[int]]:
    """Micro-batches of at most `batch_tokens` padded tokens (or one sample) of similar lengths, in
    shuffled order. Unless `same` is 0, they are those of epoch 0 in another order, in which the
    n-th of a step of so many nearly always is the n-th of another, whose process has its states."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    if same and epoch:
        batches = plan(lengths, batch_tokens, seed, 0)
        count = len(batches)  # epochs follow each other without a gap, wherever steps begin
        order = torch.randperm(count, generator=generator).tolist()
        before = sorted(order, key=lambda i: i % same)
        places = sorted(range(count), key=lambda i: (epoch * count + i) % same)
        return [batches[i] for _, i in sorted(zip(places, before, strict=True))]
    # the order within one length is random, else the same samples would meet every epoch
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    batches = [[]]
    for index in sorted(shuffled, key=lambda i: lengths[i]):  # so the last one is the longest
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


@dataclass
class Tokens:
    """A micro-batch, a row for each sample, padded on the right.

    Args:
        wanted_BT: where the *next* token is the assistant's: there the adapter would have drafted.
        stored: likeliest tokens and their chances at those positions, each `[M, J]`.
    """

    input_BT: Tensor
    wanted_BT: Tensor
    stored: tuple[Tensor, Tensor] | None = None


def wanted_of(sample: Sample, length: int, stored: bool = False) -> np.ndarray:
    """`[length - 1]`: which of a sample's tokens, from the second on, are learnt: the assistant's,
    but for those whose distribution should have been `stored` and is not known."""
    wanted_T = np.array(sample["loss_mask"][:length], dtype=bool)
    if stored:
        wanted_T[wanted_T] = topk_logits.nonempty(sample["teacher"][: wanted_T.sum()])
    return wanted_T[1:]


def row_width(lengths: Sequence[int], device: torch.device) -> int:
    """Tokens of a row. On a GPU a multiple of 8: torch's fused attention wants a mask aligned,
    and without it a training of several draft steps took eight times as long on an H100."""
    return -(-max(lengths) // 8) * 8 if device.type == "cuda" else max(lengths)


def collate(
    samples: Sequence[Sample], max_length: int, device: torch.device, stored: bool = False
) -> Tokens:
    """Samples cut at `max_length` tokens, with the distributions that were stored if asked for."""
    lengths = lengths_of(samples, max_length)
    input_BT = torch.zeros(len(samples), row_width(lengths, device), dtype=torch.long)
    wanted_BT = torch.zeros_like(input_BT, dtype=torch.bool)
    records = []
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        input_BT[row, :length] = torch.tensor(sample["input_ids"][:length])
        # the last token of a sample has no next one to learn
        wanted_BT[row, : length - 1] = torch.from_numpy(wanted_of(sample, length, stored))
        if stored:
            mask = sample["loss_mask"][:length]
            records_M = sample["teacher"][mask[0] : sum(mask)]
            records.append(records_M[topk_logits.nonempty(records_M)])
    tokens = Tokens(input_BT.to(device), wanted_BT.to(device))
    if stored:
        likeliest, chances = topk_logits.tensors(np.concatenate(records))
        tokens.stored = likeliest.to(device), chances.to(device)
    return tokens


@dataclass
class TargetOutputs:
    """A text as the frozen target sees it: hidden states `[B, T, D]` by the number of layers below
    them, `deep` ones normed, and what it says at the wanted positions."""

    wanted_BT: Tensor
    meta: ForwardMeta
    taps: dict[int, Tensor]
    deep: dict[int, Tensor]
    distributions: WholeDistributions | StoredDistributions


@torch.no_grad()
def forward_target(lm: TargetModel, tokens: Tokens, trained: Sequence[Trainee]) -> TargetOutputs:
    """The one frozen forward that all adapters learn from; with stored distributions it leaves out
    the head, and ends where the last adapter reads."""
    rows, width = tokens.input_BT.shape
    meta = replace(lm.chunk(0, width, row=0, n_slots=width), rows=slice(0, rows))
    taps = {tap for trainee in trained for tap in trainee.adapter.taps}
    deep = {tap for trainee in trained if (tap := trainee.adapter.deep_tap) is not None}
    stop = lm.n_layers if tokens.stored is None else max(taps | deep)
    x_BTD, states = lm.run(lm.embed(tokens.input_BT), None, meta, range(stop), taps | deep)
    wanted_BT = tokens.wanted_BT.to(x_BTD.device)
    final_MD = lm.norm(x_BTD[wanted_BT]) if stop == lm.n_layers else x_BTD[..., :0][wanted_BT]
    head = trained[0].heads[0]
    normed = {tap: lm.norm(states[tap]) for tap in deep}
    shallow = {tap: states[tap] for tap in taps}
    if tokens.stored is None:
        whole = WholeDistributions(lm, final_MD, head.vocabulary_K)
        return TargetOutputs(tokens.wanted_BT, meta, shallow, normed, whole)
    stored = StoredDistributions(final_MD, *tokens.stored, head)
    return TargetOutputs(tokens.wanted_BT, meta, shallow, normed, stored)


def train_step(
    lm: TargetModel,
    outputs: TargetOutputs,
    trained: Sequence[Trainee],
    loss_chunk: int,
    weight: float,
) -> list[list[Student]]:
    """Add `weight` x the gradient of each adapter's summed loss to its parameters; its draft steps,
    graded."""
    students = [students_of(lm, outputs, x, x.recipe.steps, weight) for x in trained]
    distill(outputs.distributions, list(chain(*students)), loss_chunk)
    for trainee, steps in zip(trained, students, strict=True):
        # one walk through the adapter, for all its steps and chunks
        pairs = [pair for student in steps for pair in student.gradients]
        side = trainee.adapter.side_loss(*together(steps), outputs.distributions.state_MD)
        if side is not None:
            pairs.append((side, torch.full_like(side, weight)))
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
    return students


@torch.no_grad()
def grade(
    lm: TargetModel, outputs: TargetOutputs, trained: Sequence[Trainee], loss_chunk: int, steps: int
) -> list[list[Student]]:
    """Of each adapter the first `steps` draft steps, as far as they differ, graded."""
    counts = [trainee.recipe.architecture.graded_steps(steps) for trainee in trained]
    students = [students_of(lm, outputs, *x) for x in zip(trained, counts, strict=True)]
    distill(outputs.distributions, list(chain(*students)), loss_chunk)
    return students


def students_of(
    lm: TargetModel, outputs: TargetOutputs, trainee: Trainee, steps: int, weight: float = 1.0
) -> list[Student]:
    """The states of an adapter at its first draft steps, to be graded."""
    adapter, wanted_BT = trainee.adapter, outputs.wanted_BT
    parameter = next(adapter.parameters())
    taps = {tap: outputs.taps[tap].to(parameter) for tap in adapter.taps}
    deep_BTD = parameter.new_empty(*wanted_BT.shape, 0)
    if adapter.deep_tap is not None:
        deep_BTD = outputs.deep[adapter.deep_tap].to(parameter)
    meta = outputs.meta.to(parameter.device)
    # matrix products in bfloat16 under a half-precision target; float32 stays exact
    is_half = lm.dtype != torch.float32
    with torch.autocast(lm.device.type, torch.bfloat16, enabled=is_half):
        states = adapter.states(taps, deep_BTD, meta, steps)
    students, valid_BT = [], wanted_BT
    for step, state_BTD in enumerate(states):
        head = trainee.heads[min(step, len(trainee.heads) - 1)]
        discounted = weight * trainee.recipe.step_decay**step
        state_MD, valid_M = state_BTD[wanted_BT.to(state_BTD.device)], valid_BT[wanted_BT]
        students.append(Student(state_MD, valid_M, head, trainee.recipe.loss, discounted))
        # one step on, the draft began a token earlier, which the assistant must have written
        valid_BT = valid_BT & F.pad(valid_BT[:, :-1], (1, 0))
    return students


def together(students: Sequence[Student]) -> tuple[list[Tensor], Tensor]:
    """The states of all draft steps, and where a draft has that step, `[steps, M]`."""
    states = [student.state_MD for student in students]
    return states, torch.stack([student.valid_M for student in students])
