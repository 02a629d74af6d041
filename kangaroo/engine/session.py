"""A batch that decodes: prompts enter its rows, and steps write all of its texts.

Shapes: T tokens of a prompt, D hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kangaroo.engine import prefill, topk_logits
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import Chunk
from kangaroo.engine.clock import now, running
from kangaroo.engine.requests import Generation, Request, StepRecord, Stream, Token
from kangaroo.engine.sampling import pick
from kangaroo.engine.stepper import Stepper
from kangaroo.models.prompts import UNFINISHED
from kangaroo.utils.errors import ConfigError

if TYPE_CHECKING:
    from kangaroo.engine.engine import Engine


@dataclass(eq=False)
class Session:
    """A batch of texts, until the engine opens another session."""

    engine: "Engine"
    batch: Batch
    stepper: Stepper
    is_closed: bool = False  # another session owns the drafter's state now

    def admit(self, row: int, request: Request) -> Generation:
        """Put a request into a free row and write its first token. Errors: `PromptError` if it
        cannot be served, or does not fit into this batch; `ConfigError` in a closed session."""
        prompt = Prompt(self, row, request)
        while (generation := prompt.advance()) is None:
            pass
        return generation

    @torch.inference_mode()
    def step(self, drafts: bool = True) -> list[StepRecord]:
        """Write one token or more in each active row, without drafts exactly one. Returns a record
        of each row. Errors: `ConfigError` in a closed session."""
        self.check_open()
        start = running()
        records = self.stepper.step(drafts)
        seconds = running() - start
        for record in records:
            on_device = record.draft_seconds + record.verify_seconds
            record.host_seconds = max(seconds - on_device, 0.0)  # the device may have begun before
        return records

    def record(
        self, row: int, record: StepRecord, request: Request, generation: Generation
    ) -> None:
        """Append a step to a row's generation, and set its `finish` if the text ends."""
        before = len(generation.tokens)
        generation.steps.append(record)
        generation.tokens += record.tokens
        end = self._stop_end(generation.tokens, before, request.stop) if request.stop else None
        if end is not None:
            del generation.tokens[end:], record.tokens[end - before :]
            record.accepted = min(record.accepted, len(record.tokens))
            generation.finish = "stop"
            self.batch.stop(row)
        elif generation.tokens[-1] in self.batch.ends[row]:
            generation.finish = "eos"
        elif len(generation.tokens) >= request.max_new_tokens:
            generation.finish = "length"

    def _stop_end(self, tokens: list[int], before: int, stop: Sequence[str]) -> int | None:
        """The end of the first token, from `before` on, that completes a stop string."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        # a string of n bytes spans at most n tokens; SentencePiece strips the first one's space
        reach = 1 + max(len(s.encode()) for s in stop)
        for end in range(before + 1, len(tokens) + 1):
            first = max(0, end - reach)
            for start in range(first, max(-1, first - 4), -1):
                tail = tokenizer.decode(tokens[start:end], clean_up_tokenization_spaces=False)
                if any(s in tail for s in stop):
                    return end
                if UNFINISHED not in tail:
                    break  # otherwise it may begin inside a character, and hide the next ones
        return None

    def stream(self, request: Request) -> Stream:
        """Decode a request in the only row, token by token as steps write them; the next turn of
        the conversation may follow. Errors: as `admit`."""
        assert self.batch.size == 1
        generation = self.admit(0, request)
        return Stream(generation, self._tokens(self.batch.texts[0], request, generation))

    def _tokens(self, text: list[int], request: Request, generation: Generation) -> Iterator[Token]:
        yield Token(generation.tokens[0], drafted=False)
        while not generation.finish:
            self.check_open(self.batch.texts[0] is text)  # and not that of another stream
            (record,) = self.step()
            self.record(0, record, request, generation)
            for i, token in enumerate(record.tokens):
                yield Token(token, drafted=i < record.accepted)

    def match_prefix(self, row: int, prompt: Sequence[int]) -> tuple[int, int]:
        """The row with the longest prefix of a prompt, preferably `row`, and how many tokens of
        that need not be read again."""
        if not self.engine.prefix_cache:
            return row, 0
        lengths = {x: self.batch.common_prefix(x, prompt) for x in (row, *range(self.batch.size))}
        source = max(lengths, key=lengths.__getitem__)
        return source, max(lengths[source] - self.stepper.rereads, 0)

    def check_open(self, is_current: bool = True) -> None:
        """Errors: `ConfigError` in a closed session, or for a text that another one replaced."""
        if self.is_closed or not is_current:
            raise ConfigError(
                "an engine decodes one batch, or one stream, at a time: finish this one before the "
                "next, or make an Engine with a drafter of its own for each."
            )


class Prompt:
    """A prompt that enters a row in chunks, so that other rows may step in between. The row stays
    free until the last chunk is read. Errors: as `Session.admit`."""

    def __init__(self, session: Session, row: int, request: Request):
        session.check_open()
        session.engine.check(request)
        request.check_fits("this batch was opened for texts of", session.batch.longest)
        self.session = session
        self.row = row
        self.request = request
        self.tokens_T = torch.tensor(request.text, device=session.batch.device)
        self.seconds = 0.0
        self.reused = -1  # tokens that a row had read already
        self.read = -1  # tokens that are read now
        self.unread: list[Chunk] = []  # those that the drafter has not read

    @torch.inference_mode()
    def advance(self) -> Generation | None:
        """Read a chunk. Returns the generation, with its first token, after the last chunk."""
        self.session.check_open()
        engine = self.session.engine
        batch = self.session.batch
        row = self.row
        end = len(self.tokens_T)
        start = now(batch.device)
        if self.read < 0:
            self._share_prefix()
        chunk = min(engine.prefill_chunk or end, engine.lm.prompt_chunk(end))
        part_1T = self.tokens_T[None, self.read : self.read + chunk]
        last_11D, chunk_read = prefill.read(
            engine.lm, part_1T, self.read, cache=batch.cache, row=row, taps=engine.drafter.taps
        )
        self.unread.append(chunk_read)
        self.read += part_1T.shape[1]
        # otherwise later, since a step in between would change the drafter's state of the row
        if batch.size == 1 or self.session.stepper.leaves_other_rows or self.read == end:
            for tokens_1T, meta, taps in self.unread:
                engine.drafter.prefill(batch, tokens_1T, meta, taps)
            self.unread.clear()
        generation = None
        if self.read == end:
            generation = self._write_first(last_11D)
        else:  # so that steps in between write only above the tokens that were read
            batch.tokens_BS[row, : self.read] = self.tokens_T[: self.read]
            batch.texts[row] = [*self.request.text[: self.read], 0]
            batch.length_B[row] = self.read + 1
        self.seconds += now(batch.device) - start
        if generation is not None:
            generation.prefill_seconds = self.seconds
        return generation

    def _share_prefix(self) -> None:
        """Begin behind the prefix that this row, or another one, has read."""
        session = self.session
        row = self.row
        source, self.reused = session.match_prefix(row, self.request.text)
        session.batch.prompt_read[row] = False  # an interrupted prompt is no prefix of others
        if self.reused and source != row:
            session.batch.cache.copy(source, row, self.reused)
            session.engine.drafter.copy_prefix(source, row, self.reused)
        if self.reused:
            self.unread = session.stepper.unread(source, row, self.tokens_T[: self.reused])
        self.read = self.reused

    def _write_first(self, last_11D: Tensor) -> Generation:
        """Begin the row's text and write its first token, from the last layer's output."""
        session = self.session
        batch = session.batch
        batch.begin(self.row, self.tokens_T, self.request)
        rows = slice(self.row, self.row + 1)
        at_11 = torch.full((1, 1), len(self.tokens_T), device=last_11D.device)
        logits_11V = session.engine.lm.logits(last_11D)
        if (constraint := batch.constraints[self.row]) is not None:
            logits_11V = logits_11V + torch.from_numpy(constraint.after([0], [0])).to(logits_11V)
        sampling = batch.sampling.reading(batch.settings_B3[rows])
        token = int(pick(logits_11V, at_11, sampling, batch.seeds_B[rows]))
        batch.write_first(self.row, token)
        (topk,) = topk_logits.likeliest(logits_11V, torch.zeros_like(at_11), self.request.keep)
        generation = Generation(list(self.request.written), reused=self.reused)
        session.record(self.row, StepRecord([token], topk=topk), self.request, generation)
        return generation
