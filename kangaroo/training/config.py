"""How adapters are trained: the options of a run, and its learning rate."""

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from kangaroo.utils import ranges
from kangaroo.utils.ranges import Count, CountOrZero, NotNegative, Positive, Ranged, Threshold

LOGIT_BYTES = 26  # of a logit in half precision: it, p, log q and gradients
MOVES_NOTHING = """
    evaluate_every save_every decode_every decode_prompts decode_tokens zero_stage shard_target
""".split()  # options that no weight depends on
ADDED_LATER = "use_stored_logits", "muon"  # runs from before do not have them


@dataclass
class TrainerConfig(Ranged):
    """How adapters are trained.

    Args:
        learning_rate: the peak, reached after `warmup_steps` optimizer steps; then a cosine to 0.
        batch_tokens: padded tokens of a micro-batch (or one sample).
        cache_target_states: only the first epoch runs the target; micro-batches stay the same, in
            another order every epoch.
        use_stored_logits: learn from the distributions that were stored when the data was written
            (`data.teacher`): the target runs no layer that no adapter reads, nor its head. None:
            where the data has them.
        muon: linear layers, but for LM heads, are moved by Muon, and all else by AdamW.
        accumulate: micro-batches an optimizer step, in all processes together; None is one in each
            process, and a run that is resumed keeps the number it began with.
        clip: largest gradient norm of each adapter.
        max_length: samples are cut here, in tokens.
        holdout: this many samples at the end are never trained on.
        loss_chunk: assistant positions whose logits exist at a time; None is `loss_chunk_of`, or
            what a run that is resumed began with.
        evaluate_every, save_every, decode_every: optimizer steps, and once more after the last.
        decode_prompts, decode_tokens: held-out prompts to decode for real (a sharded target decodes
            nothing), and the new tokens of each.
        seed: order of the samples.
        vocabulary: draft from this many of the data's most frequent tokens; None is from all.
        zero_stage: 0 is plain torch, each process with AdamW's whole state; 1 and 2 are DeepSpeed
            ZeRO, which spreads it.
        shard_target: each process holds a part of the target's layers and gathers one at a time.
    """

    epochs: Count = 3
    learning_rate: Positive = 5e-3
    betas: tuple[Threshold, Threshold] = (0.9, 0.95)
    weight_decay: NotNegative = 0.0
    muon: bool = False
    warmup_steps: CountOrZero = 30
    batch_tokens: Count = 512
    cache_target_states: bool = False
    use_stored_logits: bool | None = None
    accumulate: Count | None = None
    clip: Positive = 1.0
    max_length: ranges.TextLength = 2048
    holdout: Count = 128
    loss_chunk: Count | None = None
    evaluate_every: Count = 200
    save_every: Count = 50
    decode_every: Count = 1000
    decode_prompts: CountOrZero = 16
    decode_tokens: Count = 128
    seed: ranges.Seed = 0
    vocabulary: Count | None = None
    zero_stage: Annotated[int, ranges.Range(0, 2)] = 0
    shard_target: bool = False

    def identity(self) -> dict[str, Any]:
        """The options that move a weight: a run goes on with the same ones only."""
        settings = {k: v for k, v in asdict(self).items() if k not in MOVES_NOTHING}
        return {k: v for k, v in settings.items() if v or k not in ADDED_LATER}


def loss_chunk_of(memory: int, vocabulary: int) -> int:
    """Positions whose logits a device with so many bytes (0 is a CPU) computes at a time: on a CPU
    few, which stay in its caches; on a GPU a power of two whose logits and what is made of them
    fill a 32nd of its memory."""
    fitting = memory // (32 * LOGIT_BYTES * vocabulary)
    return max(256, min(4096, 1 << fitting.bit_length() >> 1))


def schedule(config: TrainerConfig, step: int, total: int) -> float:
    """Share of the peak learning rate at a step of `total`: linear warm-up, then a cosine to 0."""
    warmup = min(config.warmup_steps, total - 1)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))
