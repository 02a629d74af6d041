"""The texts that are being decoded, and how a verdict is committed.

Shapes: B rows, S slots a row, P = 1 + the draft's largest depth, X = 2 + P.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kangaroo.engine.budget import Budget
from kangaroo.engine.cache import KVCache, Tensors
from kangaroo.engine.constraint import Constraint
from kangaroo.engine.requests import Request, StepRecord
from kangaroo.engine.sampling import Rule, Sampling, combine, settings
from kangaroo.engine.topk_logits import Rows
from kangaroo.engine.tree import Draft, Verdict
from kangaroo.utils.errors import ConfigError


@dataclass(eq=False)
class Batch:
    """Texts of different lengths in the rows of one cache; another text may take a free row.

    The last committed token of a row is *pending*: it is in no cache yet, and it is the root of the
    next draft. Slots from `length - 1` on are scratch.

    Args:
        longest: tokens of the longest text, prompt included.
        default: the sampling of texts without their own, but for its seed.
    """

    cache: KVCache
    longest: int
    default: Sampling
    eos_ids: frozenset[int]
    device: torch.device
    budget: Budget

    def __post_init__(self) -> None:
        self.size = size = self.cache.batch_size
        device = self.device
        self.n_slots = self.cache.n_slots
        self.tokens_BS = torch.zeros(size, self.n_slots, dtype=torch.long, device=device)
        self.length_B = torch.ones(size, dtype=torch.long, device=device)
        self.seeds_B = self.length_B.clone()
        self.done_B = torch.ones(size, dtype=torch.bool, device=device)
        # copies on the host: extents, and drafters that read the text, need no sync
        self.ends = [self.eos_ids] * size  # the tokens that end each row's text
        self.texts: list[list[int]] = [[0] for _ in range(size)]
        self.limits = [1] * size
        self.seeds = [0] * size
        self.ahead = 0  # tokens that the device may have written after each text
        self.done = [True] * size
        self.prompt_read = [False] * size  # whether the row's prompt was read to its end
        self.constraints: list[Constraint | None] = [None] * size
        self.drafts = [True] * size  # whether drafters may help
        self.keeps = [0] * size  # `Request.keep`
        # How many likeliest tokens after each verified node the drafter wants (set by its `begin`);
        # and by row the nodes' tokens, each with these, until the drafter clears them.
        self.likeliest = 0
        self.verified: list[list[tuple[int, list[int]]]] = [[] for _ in range(size)]
        self.samplings = [self.default] * size
        self.settings_B3 = torch.tensor([settings(self.default)] * size, device=device)
        self.sampling = combine([self.default], self.settings_B3)

    @property
    def draws(self) -> Tensors:
        """Lengths, seeds and settings: what a draw depends on, besides the logits."""
        return self.length_B, self.seeds_B, self.settings_B3

    @property
    def active(self) -> list[int]:
        """The rows whose text is still being written."""
        return [row for row, done in enumerate(self.done) if not done]

    @property
    def constrained(self) -> list[tuple[int, Constraint]]:
        """The active rows whose text is restricted, with what restricts it."""
        every = ((row, self.constraints[row]) for row in self.active)
        return [(row, constraint) for row, constraint in every if constraint is not None]

    @property
    def keep(self) -> int:
        """The largest `Request.keep` of the texts being written."""
        return max((self.keeps[row] for row in self.active), default=0)

    @property
    def lengths(self) -> list[int]:
        """`length_B` on the host."""
        return list(map(len, self.texts))

    @property
    def used(self) -> int:
        """The length of the longest row, at most."""
        return max(self.lengths) + self.ahead

    @property
    def base_B(self) -> Tensor:
        """Slot and position of each row's pending token."""
        return self.length_B - 1

    def begin(self, row: int, prompt_T: Tensor, request: Request) -> None:
        """Let a row begin the text of a request whose prompt was read. Errors: `ConfigError` for
        sampling of its own, unless its rule and the batch's is matched noise."""
        sampling = request.sampling
        if sampling and (self.default.rule, sampling.rule) != (Rule.match, Rule.match):
            raise ConfigError(
                f"a text cannot have its own sampling in a batch with sampling.rule="
                f"{self.default.rule.value}; with sampling.rule=match it can."
            )
        self.budget.admit(row)
        self.tokens_BS[row, : len(prompt_T)] = prompt_T
        self.length_B[row] = len(prompt_T)
        self.texts[row] = prompt_T.tolist()
        self.verified[row] = []
        self.limits[row] = len(request.prompt) + request.max_new_tokens
        self.seeds_B[row] = self.seeds[row] = request.seed
        self.ends[row] = frozenset() if request.ignore_eos else self.eos_ids
        self.drafts[row] = request.drafts
        self.keeps[row] = request.keep
        constraint = request.constraint() if request.constraint else None
        if constraint is not None:
            constraint.advance(request.written)
        self.constraints[row] = constraint
        self.done_B[row] = self.done[row] = False
        self.samplings[row] = sampling or self.default
        self.settings_B3[row] = torch.tensor(settings(self.samplings[row]))
        self.sampling = combine([self.samplings[x] for x in self.active], self.settings_B3)

    def write_first(self, row: int, token: int) -> None:
        """Append a row's first new token, which is pending."""
        self.tokens_BS[row, len(self.texts[row])] = token
        self.length_B[row] += 1
        self.append(row, [token])
        self.prompt_read[row] = True

    def last(self, count: int) -> Tensor:
        """The last `count` committed tokens of each row, `[B, count]`; any before its start."""
        index = self.length_B[:, None] + torch.arange(-count, 0, device=self.length_B.device)
        return self.tokens_BS.gather(1, index.clamp(min=0))

    def commit(self, written_BX: Tensor) -> None:
        """Append what a step wrote (`written`) on the device, which does not see texts end."""
        new_BP = written_BX[:, 2:]
        index_BP = self.length_B[:, None] + torch.arange(new_BP.shape[1], device=new_BP.device)
        self.tokens_BS.scatter_(1, index_BP, new_BP)  # tokens beyond the count are scratch
        self.length_B = torch.where(self.done_B, self.length_B, self.length_B + written_BX[:, 0])

    def append(self, row: int, tokens: list[int]) -> list[int]:
        """Append a row's tokens on the host. Returns those that belong to its text: none after an
        EOS or beyond the limit, which both end the text."""
        text = self.texts[row]
        room = self.limits[row] - len(text)
        eos_end = next((n for n, x in enumerate(tokens[:room], 1) if x in self.ends[row]), None)
        tokens = tokens[: eos_end or room]
        text += tokens
        if (constraint := self.constraints[row]) is not None:
            constraint.advance(tokens)
        if eos_end or len(text) >= self.limits[row]:
            self.stop(row)
        return tokens

    def take_step(
        self, wrote: Sequence[Sequence[int]], topk: Rows, drafting: float, verifying: float
    ) -> list[StepRecord]:
        """Append what a step wrote in active rows (`written`) on the host. Returns a record of each
        row; `drafting` and `verifying` are the step's seconds."""
        records = [
            StepRecord([], draft_seconds=drafting, verify_seconds=verifying, topk=x) for x in topk
        ]
        for row in self.active:
            record = records[row]
            count, record.drafted, *tokens = wrote[row]
            record.tokens = self.append(row, tokens[:count])
            record.accepted = min(count - 1, len(record.tokens))
            self.budget.observe(row, record.drafted, record.accepted)
        return records

    @torch.inference_mode()
    def stop(self, row: int) -> None:
        """End a row's text here."""
        self.done_B[row] = self.done[row] = True
        self.length_B[row] = len(self.texts[row])

    def common_prefix(self, row: int, prompt: Sequence[int]) -> int:
        """How many of a prompt's first tokens a row's text begins with, without the text's last two
        (some drafters have not read these) and the prompt's last (it predicts a token)."""
        if not self.prompt_read[row]:
            return 0
        text = self.texts[row]
        most = min(len(text) - 2, len(prompt) - 1)
        return next((i for i in range(most) if text[i] != prompt[i]), max(most, 0))


def written(draft: Draft, verdict: Verdict) -> Tensor:
    """What a step writes in each row, `[B, X]`: how many tokens are new, how many were drafted, and
    the target's choices along the accepted path, of which the last is the bonus token."""
    counts_B2 = torch.stack([verdict.count_B + 1, draft.valid_BN.sum(1) - 1], 1)
    return torch.cat([counts_B2, verdict.choice_BN.gather(1, verdict.path_BP)], 1)
