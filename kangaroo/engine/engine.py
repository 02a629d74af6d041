"""Decodes whole requests: prefill a row, step until its text ends, take the next request."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kangaroo.cpu.drafting import native_drafting
from kangaroo.cpu.stepper import CpuStepper
from kangaroo.drafters.base import Drafter
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget
from kangaroo.engine.cache import BUCKET, KVCache
from kangaroo.engine.costs import verify_costs
from kangaroo.engine.late_stepper import LateStepper, needs_no_host
from kangaroo.engine.requests import Generation, Request, Stream
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.engine.session import Session
from kangaroo.engine.stepper import Stepper, TensorStepper
from kangaroo.models.prompts import Tokenizer, unknown_token
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError, PromptError


@dataclass(eq=False)
class Engine:
    """Decodes one batch at a time with a target and a drafter.

    Args:
        tokenizer: needed only for stop strings.
        prefill_chunk: the most tokens of a prompt in a pass; None leaves it to the target.
        prefix_cache: read a prompt that begins like a row's text only from where they differ.
        always_drafts: every row of a batch drafts as if it was alone, even where that does not pay.
    """

    lm: TargetModel
    drafter: Drafter
    tokenizer: Tokenizer | None = None
    prefill_chunk: int | None = None
    prefix_cache: bool = False
    always_drafts: bool = False

    def __post_init__(self) -> None:
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be 1 or more tokens, not {self.prefill_chunk}.")
        self.eos_ids = frozenset(self.lm.eos_ids())
        self.session: Session | None = None  # the last one
        self.cache: KVCache | None = None  # for the next session, too, unless it needs more

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        batch_size: int | None = None,
        seeds: Sequence[int] | None = None,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Decode all prompts, `batch_size` at a time (by default all), with `seeds` (by default
        `sampling.seed`, `sampling.seed + 1`, ...). Errors: `PromptError`, `ConfigError`."""
        sampling = sampling or Sampling()
        seeds = seeds or range(sampling.seed, sampling.seed + len(prompts))
        pairs = zip(prompts, seeds, strict=True)
        requests = [Request(prompt, max_new_tokens, seed, stop) for prompt, seed in pairs]
        rows = len(prompts) or 1 if batch_size is None else batch_size
        return [generation for _, generation in sorted(self.completions(requests, sampling, rows))]

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Stream:
        """Decode a prompt in a new session, token by token. Errors: `PromptError`."""
        sampling = sampling or Sampling()
        request = Request(prompt, max_new_tokens, sampling.seed, stop)
        self.check(request)
        return self.open(1, len(prompt) + max_new_tokens, sampling).stream(request)

    def completions(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        batch_size: int,
        after: Callable[[int, Generation], Request | None] = lambda index, generation: None,
        longest: int | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """Decode all requests, `batch_size` at a time, and yield (index, generation) when one ends.

        Args:
            after: gives the request that follows in the same row, a conversation's next turn.
            longest: tokens of the longest text, prompt included; by default of `requests`.

        Errors: `PromptError`, `ConfigError`.
        """
        for request in requests:
            self.check(request)
        if batch_size < 1:
            raise ConfigError(f"batch_size must be 1 or more, not {batch_size}.")
        if not requests:
            return
        longest = longest or max(len(r.prompt) + r.max_new_tokens for r in requests)
        session = self.open(min(batch_size, len(requests)), longest, sampling)
        waiting = enumerate(requests)
        active: dict[int, tuple[int, Request, Generation]] = {}  # by row
        while True:
            for row in range(session.batch.size):
                entry = None if row in active else next(waiting, None)
                if entry is not None:
                    active[row] = (*entry, session.admit(row, entry[1]))
            if not active:
                return
            if not any(generation.finish for _, _, generation in active.values()):
                records = session.step()
                for row, (_, request, generation) in active.items():
                    session.record(row, records[row], request, generation)
            for row, (index, _, generation) in list(active.items()):
                if generation.finish:
                    del active[row]
                    follower = after(index, generation)
                    if follower is not None:
                        active[row] = index, follower, session.admit(row, follower)
                    yield index, generation

    @torch.no_grad()
    def open(self, batch_size: int, longest: int, sampling: Sampling) -> Session:
        """A session of free rows for texts of at most `longest` tokens, prompts included. It closes
        the last session. Errors: `ConfigError` for a rule that the drafter cannot follow."""
        lm = self.lm
        drafter = self.drafter
        by_match = sampling.greedy or sampling.rule is Rule.match
        if not by_match and drafter.max_nodes and not drafter.keeps_probs:
            raise ConfigError(
                f"sampling.rule={sampling.rule.value} needs a drafter of chains that keeps the "
                f"probabilities it drew from, such as kangaroo, and {type(drafter).__name__} keeps "
                "none. Choose such a drafter, or sampling.rule=match, which takes any."
            )
        if self.session is not None:
            self.session.is_closed = True
            self.session = None
        native = native_drafting(lm, drafter, sampling)
        # for a draft's nodes, as many slots before a text, and the bonus token
        spare = max(2 * drafter.max_nodes, native.nodes if native else 0) + 2
        # attention kernels need masks with aligned rows
        n_slots = -(-(longest + spare) // BUCKET) * BUCKET
        same_size = self.cache is not None and self.cache.batch_size == batch_size
        if self.cache is None or not same_size or n_slots > self.cache.n_slots:
            self.cache = None  # frees its memory for the new one
            self.cache = lm.new_cache(batch_size, n_slots)
        budget = Budget(lambda rows, nodes: verify_costs(lm).curve(rows, nodes), self.always_drafts)
        if lm.backend.records and lm.device.type == "cuda":  # else drafts cost what they read
            budget.vanilla_seconds = lambda: verify_costs(lm).seconds[0]
        batch = Batch(
            self.cache,
            longest,
            default=sampling,
            eos_ids=self.eos_ids,
            device=lm.device,
            budget=budget,
        )
        drafter.begin(batch)
        in_batch = batch_size > 1 and drafter.max_nodes and not self.always_drafts
        if drafter.needs_costs or in_batch:
            budget.cost(batch_size, 1)  # measure now, which may take a second
        stepper: Stepper
        if native is not None:
            stepper = CpuStepper(lm, native, batch)
        elif lm.backend.records and needs_no_host(lm, drafter, batch_size):
            stepper = LateStepper(lm, drafter, batch)
        else:
            stepper = TensorStepper(lm, drafter, batch)
        self.session = Session(self, batch, stepper)
        return self.session

    def check(self, request: Request) -> None:
        """Errors: `PromptError` for a request that cannot be served."""
        if not request.prompt:
            raise PromptError("the prompt is empty; give one token or more (such as the BOS).")
        if fault := unknown_token(request.prompt, self.lm.config.vocab_size, self.tokenizer):
            fix = "Encode it with this model's tokenizer."
            raise PromptError(f"the prompt holds {fault}. {fix}")
        if request.max_new_tokens < 1:
            raise PromptError(f"max_new_tokens must be 1 or more, not {request.max_new_tokens}.")
        request.check_fits("the model's context is", self.lm.context)
        if request.stop and self.tokenizer is None:
            raise PromptError("stop strings need the engine's tokenizer: Engine(..., tokenizer=).")
