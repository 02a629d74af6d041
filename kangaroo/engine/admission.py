"""How a prompt takes a row of a batch: part by part, then whole, then with its first token."""

from __future__ import annotations

import torch
from torch import Tensor

from kangaroo.engine.batch import Batch
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Rule, settings, together
from kangaroo.utils.errors import ConfigError


def fill(batch: Batch, row: int, prompt_T: Tensor) -> None:
    """A part of a prompt has entered a free row, which stays free until `place`."""
    batch.tokens_BS[row, : len(prompt_T)] = prompt_T
    batch.texts[row] = [*prompt_T.tolist(), 0]  # its last token is scratch
    batch.length_B[row] = len(prompt_T) + 1


def place(batch: Batch, row: int, prompt_T: Tensor, request: Request) -> None:
    """A request's whole text has entered a row. Errors: `ConfigError` for sampling of its own under
    acceptance by rejection."""
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
    batch.limit_B[row] = batch.limits[row] = len(request.prompt) + request.max_new_tokens
    batch.seeds_B[row] = batch.seeds[row] = request.seed
    batch.heeds_eos_B[row] = not request.ignore_eos
    batch.ends[row] = frozenset() if request.ignore_eos else batch.eos_ids
    batch.done_B[row] = batch.done[row] = False
    batch.samplings[row] = sampling or batch.default
    if sampling is None and batch.alike:  # as in a batch of thousands
        return
    batch.alike = False
    batch.settings_B3[row] = torch.tensor(settings(batch.samplings[row]))
    pairs = zip(batch.samplings, batch.done, strict=True)
    batch.sampling = together([how for how, done in pairs if not done], batch.settings_B3)


def write_first(batch: Batch, row: int, token: int) -> None:
    """Append the token that the prefill of a row's prompt gave; it is pending."""
    batch.tokens_BS[row, len(batch.texts[row])] = token
    batch.length_B[row] += 1
    batch.append(row, [token])
    batch.whole[row] = True
    batch.done_B[row] = batch.done[row]
