"""Decode whole requests: prefill a row, step until its text ends, take the next request.

Shapes: T tokens of a prefill chunk, V vocabulary.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kangaroo.cpu.drafting import native_drafting
from kangaroo.cpu.stepper import CpuStepper
from kangaroo.drafters.base import Drafter
from kangaroo.engine import prefill, topk_logits
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget
from kangaroo.engine.cache import BUCKET, KVCache
from kangaroo.engine.clock import now, running
from kangaroo.engine.costs import verify_costs
from kangaroo.engine.requests import Generation, Request, StepRecord, Stream, Token
from kangaroo.engine.sampling import Rule, Sampling, combine, pick, settings
from kangaroo.engine.stepper import TensorStepper
from kangaroo.engine.streaming import UNFINISHED
from kangaroo.models.prompts import Tokenizer, unknown_token
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError, PromptError


@dataclass(eq=False)
class Engine:
    """Decodes one batch at a time with a target and a drafter.

    Args:
        tokenizer: needed only for stop strings.
        prefill_chunk: the most tokens of a prompt in a pass; None leaves it to the target.
        prefix_cache: read a prompt that begins like a row's text from where they differ.
        always_drafts: every row of a batch drafts as a text alone does, even where it does not pay.
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
        self.batch: Batch | None = None  # the current one
        self.stepper: Any = None  # of the current batch: a `TensorStepper` or a backend's
        self.cache: KVCache | None = None  # reused by the next batch unless that needs a larger one
        self.keep = 0  # how many likeliest tokens of each distribution are kept

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        batch_size: int | None = None,
        seeds: Sequence[int] | None = None,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Decode all prompts, `batch_size` at a time or at once; by default with the seeds
        `sampling.seed`, `sampling.seed + 1`, ... Errors: `PromptError`, `ConfigError`."""
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
        batch: Batch | None = None,
    ) -> Stream:
        """Decode one prompt, token by token as steps write them, in a new batch or in `batch`. That
        has one row and was opened with this sampling; a conversation's next turn may go on there
        (`prefix_cache`). Errors: `PromptError`; `ConfigError` if another batch replaced it."""
        sampling = sampling or Sampling()
        request = Request(prompt, max_new_tokens, sampling.seed, stop)
        self.check(request)
        if batch is None:
            batch = self.open(1, len(prompt) + max_new_tokens, sampling)
        elif batch.size > 1 or batch.default != replace(sampling, seed=0):
            raise ConfigError(
                f"stream(batch=) takes a batch of one row opened with {sampling}; this one has "
                f"{batch.size} rows and {batch.default}."
            )
        generation = self.admit(batch, 0, request)
        return Stream(generation, self._tokens(batch, batch.texts[0], request, generation))

    def _tokens(
        self, batch: Batch, text: list[int], request: Request, generation: Generation
    ) -> Iterator[Token]:
        yield Token(generation.tokens[0], drafted=False)
        while not generation.finish:
            self._check_is_current(batch.texts[0] is text)  # not another stream's
            (record,) = self.step(batch)
            self.record(batch, 0, record, request, generation)
            for i, token in enumerate(record.tokens):
                yield Token(token, drafted=i < record.accepted)

    def completions(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        batch_size: int,
        keep: int = 0,
        after: Callable[[int, Generation], Request | None] = lambda index, generation: None,
        longest: int | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """Decode all requests, `batch_size` at a time, and yield (index, generation) as each ends.
        `after` gives the request that follows in the same row, the next turn of a conversation;
        `longest` is the number of tokens of the longest text, by default of `requests`."""
        for request in requests:
            self.check(request)
        if batch_size < 1:
            raise ConfigError(f"batch_size must be 1 or more, not {batch_size}.")
        if not requests:
            return
        longest = longest or max(len(r.prompt) + r.max_new_tokens for r in requests)
        batch = self.open(min(batch_size, len(requests)), longest, sampling, keep)
        waiting = iter(enumerate(requests))
        following: dict[int, tuple[int, Request]] = {}  # by row
        active: dict[int, tuple[int, Request, Generation]] = {}
        while True:
            for row in range(batch.size):
                if row not in active and (entry := following.pop(row, None) or next(waiting, None)):
                    active[row] = (*entry, self.admit(batch, row, entry[1]))
            if not active:
                return
            if not any(generation.finish for _, _, generation in active.values()):
                records = self.step(batch)
                for row, (_, request, generation) in active.items():
                    self.record(batch, row, records[row], request, generation)
            for row, (index, _, generation) in list(active.items()):
                if generation.finish:
                    del active[row]
                    if (follower := after(index, generation)) is not None:
                        following[row] = index, follower
                    yield index, generation

    @torch.no_grad()
    def open(self, batch_size: int, longest: int, sampling: Sampling, keep: int = 0) -> Batch:
        """An empty batch for texts of at most `longest` tokens, prompts included. The `keep`
        likeliest tokens of each token's distribution are kept (`Generation.teacher`)."""
        lm, drafter, always = self.lm, self.drafter, self.always_drafts
        self.keep = min(keep, topk_logits.MOST, lm.config.vocab_size)
        native = native_drafting(lm, drafter, sampling)
        # beside the longest text: a draft's nodes, as many slots before a text, and the bonus token
        spare = max(2 * drafter.max_nodes, native.nodes if native else 0) + 2
        # rounded up, since attention kernels need aligned rows of a mask
        n_slots = -(-(longest + spare) // BUCKET) * BUCKET
        same_size = self.cache is not None and self.cache.batch_size == batch_size
        if self.cache is None or not same_size or n_slots > self.cache.n_slots:
            self.batch = self.cache = self.stepper = None  # the new ones may need their memory
            self.cache = lm.new_cache(batch_size, n_slots)
        budget = Budget(lambda *sizes: verify_costs(lm).curve(*sizes), always)
        if lm.backend.records and lm.device.type == "cuda":  # else weights say what drafts cost
            budget.vanilla_seconds = lambda: verify_costs(lm).seconds[0]
        batch = self.batch = Batch(self.cache, longest, sampling, self.eos_ids, lm.device, budget)
        drafter.begin(batch)
        if drafter.needs_costs or (batch_size > 1 and drafter.max_nodes and not always):
            budget.cost(batch_size, 1)  # measured now, since it may take a second
        if native is not None:
            self.stepper = CpuStepper(lm, native, batch, self.keep)
        else:
            self.stepper = TensorStepper(lm, drafter, batch, self.keep)
        return batch

    def admit(self, batch: Batch, row: int, request: Request) -> Generation:
        """Put a request into a free row and write its first token. Errors: `PromptError` if it
        cannot be served, or not by this batch; `ConfigError` if that is not the one opened last."""
        *_, generation = self.prefill_chunks(batch, row, request)
        assert generation is not None
        return generation

    @torch.inference_mode()
    def prefill_chunks(
        self, batch: Batch, row: int, request: Request
    ) -> Generator[Generation | None, None, None]:
        """`admit` chunk by chunk, so that other rows may step in between: yields None after each
        chunk, and the generation at the end. `close` drops the prompt, and leaves its row free."""
        self._check_is_current(batch is self.batch)
        self.check(request)
        if len(request.prompt) + request.max_new_tokens > batch.longest:
            raise PromptError(
                f"the batch was opened for texts of {batch.longest} tokens; the prompt has "
                f"{len(request.prompt)} and {request.max_new_tokens} new ones were asked for."
            )
        lm, text = self.lm, request.text
        start, seconds = now(lm.device), 0.0
        prompt_T, end = torch.tensor(text, device=lm.device), len(text)
        chunk = min(self.prefill_chunk or end, lm.prompt_chunk(end))
        source, reused = self.match_prefix(batch, row, text)
        if reused and source != row:
            batch.cache.copy(source, row, reused)
            self.drafter.copy_prefix(source, row, reused)
        unread = self.stepper.unread(source, row, prompt_T[:reused]) if reused else []
        batch.prompt_read[row] = False  # an interrupted prompt is no prefix of others
        for first in range(reused, end, chunk):
            if first > reused:  # steps in between write only above the tokens that were read
                batch.tokens_BS[row, :first] = prompt_T[:first]
                batch.texts[row], batch.length_B[row] = [*text[:first], 0], first + 1
                seconds += now(lm.device) - start
                yield None
                start = now(lm.device)
            place = first, batch.cache, row, self.drafter.taps
            last_11D, chunk_read = prefill.read(lm, prompt_T[None, first : first + chunk], *place)
            unread.append(chunk_read)
            # else later, since a step in between would change a drafter's state for the row
            if batch.size == 1 or self.stepper.leaves_other_rows or first + chunk >= end:
                for read in unread:
                    self.drafter.prefill(batch, *read)
                unread.clear()
        begin_text(batch, row, prompt_T, request)
        at_11, rows = torch.full((1, 1), end, device=lm.device), slice(row, row + 1)
        logits_11V = lm.logits(last_11D)
        sampling = batch.sampling.reading(batch.settings_B3[rows])
        token = int(pick(logits_11V, at_11, sampling, batch.seeds_B[rows]))
        write_first(batch, row, token)
        (topk,) = topk_logits.likeliest(logits_11V, torch.zeros_like(at_11), self.keep)
        seconds += now(lm.device) - start
        generation = Generation(list(request.written), prefill_seconds=seconds, reused=reused)
        self.record(batch, row, StepRecord([token], topk=topk), request, generation)
        yield generation

    def check(self, request: Request) -> None:
        """Errors: `PromptError` for a request that cannot be served."""
        if not request.prompt:
            raise PromptError("the prompt is empty; give at least one token (the BOS, say).")
        if fault := unknown_token(request.prompt, self.lm.config.vocab_size, self.tokenizer):
            fix = "was it encoded by another model's tokenizer?"
            raise PromptError(f"the prompt holds {fault}; {fix}")
        if request.max_new_tokens < 1:
            raise PromptError(f"max_new_tokens must be 1 or more, not {request.max_new_tokens}.")
        request.check_fits("the model's context is", self.lm.context)
        if request.stop and self.tokenizer is None:
            raise PromptError("stop strings need the engine's tokenizer: Engine(..., tokenizer=).")

    def match_prefix(self, batch: Batch, row: int, prompt: Sequence[int]) -> tuple[int, int]:
        """The row that has the longest prefix of a prompt, preferably `row`, and how many of its
        tokens need not be read."""
        if not (self.prefix_cache and self.stepper):
            return row, 0
        lengths = {x: batch.common_prefix(x, prompt) for x in (row, *range(batch.size))}
        source = max(lengths, key=lengths.__getitem__)
        return source, max(lengths[source] - self.stepper.rereads, 0)

    @torch.inference_mode()
    def step(self, batch: Batch, drafts: bool = True) -> list[StepRecord]:
        """Write at least a token in each active row, and return a record of each row; without
        drafts exactly one. Errors: `ConfigError` if the batch is not the one opened last."""
        self._check_is_current(batch is self.batch)
        start = running()
        records: list[StepRecord] = self.stepper.step(drafts)
        seconds = running() - start
        for record in records:
            record.host_seconds = seconds - record.draft_seconds - record.verify_seconds
        return records

    def _check_is_current(self, current: bool) -> None:
        if not current:
            raise ConfigError(
                "an engine decodes one batch, or one stream, at a time: finish this one before the "
                "next, or make an Engine with a drafter of its own for each."
            )

    def record(
        self, batch: Batch, row: int, record: StepRecord, request: Request, generation: Generation
    ) -> None:
        """Append a step to a row's generation, and set its `finish` if that ends it."""
        before = len(generation.tokens)
        generation.steps.append(record)
        generation.tokens += record.tokens
        end = self._stop_end(generation.tokens, before, request.stop) if request.stop else None
        if end is not None:
            del generation.tokens[end:], record.tokens[end - before :]
            record.accepted = min(record.accepted, len(record.tokens))
            generation.finish = "stop"
            batch.stop(row)
        elif generation.tokens[-1] in batch.ends[row]:
            generation.finish = "eos"
        elif len(generation.tokens) >= request.max_new_tokens:
            generation.finish = "length"

    def _stop_end(self, tokens: list[int], before: int, stop: Sequence[str]) -> int | None:
        """The end of the first token, from `before` on, that completes a stop string."""
        assert self.tokenizer is not None
        # a string of n bytes spans at most n tokens; SentencePiece strips the first one's space
        reach = 1 + max(len(s.encode()) for s in stop)
        for end in range(before + 1, len(tokens) + 1):
            first = max(0, end - reach)
            for start in range(first, max(-1, first - 4), -1):
                tail = self.tokenizer.decode(tokens[start:end], clean_up_tokenization_spaces=False)
                if any(s in tail for s in stop):
                    return end
                if UNFINISHED not in tail:
                    break  # else it may begin inside a character, and hide those next to it
        return None


def begin_text(batch: Batch, row: int, prompt_T: Tensor, request: Request) -> None:
    """Let a row begin the text of a request, which was read. Errors: `ConfigError` for sampling of
    its own where the batch's rule is not matched noise."""
    sampling = request.sampling
    if sampling and (batch.default.rule, sampling.rule) != (Rule.match, Rule.match):
        raise ConfigError(
            f"a text of a batch under sampling.rule={batch.default.rule.value} cannot have "
            "sampling of its own; matched noise (sampling.rule=match) can."
        )
    batch.budget.admit(row)
    batch.tokens_BS[row, : len(prompt_T)] = prompt_T
    batch.length_B[row] = len(prompt_T)
    batch.texts[row], batch.verified[row] = prompt_T.tolist(), []
    batch.limits[row] = len(request.prompt) + request.max_new_tokens
    batch.seeds_B[row] = batch.seeds[row] = request.seed
    batch.ends[row] = frozenset() if request.ignore_eos else batch.eos_ids
    batch.done_B[row] = batch.done[row] = False
    batch.samplings[row] = sampling or batch.default
    if sampling is None and batch.all_default:  # nothing to change, in a batch of thousands
        return
    batch.all_default = False
    batch.settings_B3[row] = torch.tensor(settings(batch.samplings[row]))
    batch.sampling = combine([batch.samplings[x] for x in batch.active], batch.settings_B3)


def write_first(batch: Batch, row: int, token: int) -> None:
    """Append a row's first new token, which is pending."""
    batch.tokens_BS[row, len(batch.texts[row])] = token
    batch.length_B[row] += 1
    batch.append(row, [token])
    batch.prompt_read[row] = True
