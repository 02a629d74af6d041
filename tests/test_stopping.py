"""The rule that stops drafting where another token is not worth its time."""

import pytest
import torch

from kangaroo.drafters.stopping import MEMORY, PRIOR, ExpectedGain


def logits_of(confidence: float) -> torch.Tensor:
    """`[1, 2]` with this top-1 probability."""
    return torch.tensor([[confidence, 1 - confidence]]).log()


def rule(cost: float) -> ExpectedGain:
    stopping = ExpectedGain(cost)
    stopping.begin(1, torch.device("cpu"))
    return stopping


def round_of(stopping: ExpectedGain, drafted: int, accepted: int) -> None:
    stopping.observe(torch.tensor([drafted]), torch.tensor([accepted]))


@pytest.mark.parametrize("confidence, further", [(0.9, True), (0.61, True), (0.59, False)])
def test_a_token_is_drafted_where_it_gains_more_than_its_time(confidence, further):
    stopping = rule(cost=0.6 * PRIOR)  # at first the speed is 1, and so the bar is the cost
    assert stopping.first().item()
    assert stopping.further(logits_of(confidence)).item() is further


def test_confidences_of_a_round_multiply():
    stopping = rule(cost=0.5 * PRIOR)
    stopping.first()
    assert stopping.further(logits_of(0.8)).item()
    assert stopping.further(logits_of(0.8)).item()
    assert not stopping.further(logits_of(0.75)).item()  # 0.48
    stopping.first()
    assert stopping.further(logits_of(0.75)).item()  # the next round begins anew


def test_where_drafts_are_wrong_none_is_drafted_until_one_was_right():
    stopping, drafted = rule(cost=0.14), 0
    while stopping.first().item():
        round_of(stopping, 1, 0)
        drafted += 1
    assert MEMORY / 2 < drafted < 3 * MEMORY  # it has to be found out
    for _ in range(9):
        round_of(stopping, 0, 0)  # tells nothing
        assert not stopping.first().item()
    round_of(stopping, 1, 1)
    assert stopping.first().item()


def test_a_fast_text_asks_more_of_a_further_token():
    slow, fast = rule(cost=0.2), rule(cost=0.2)
    for _ in range(8 * MEMORY):
        round_of(slow, 2, 1)
        round_of(fast, 4, 4)
    assert fast.rate_B > 0.9 and slow.rate_B == pytest.approx(0.5, abs=0.01)
    assert fast.written_B / fast.time_B == pytest.approx(5 / 1.8, abs=0.02)


def test_tokens_after_a_wrong_one_tell_nothing():
    short, long = rule(cost=0.2), rule(cost=0.2)
    round_of(short, 2, 1)
    round_of(long, 6, 1)
    assert torch.equal(short.rate_B, long.rate_B)


def test_a_new_text_begins_without_the_memory_of_the_last():
    stopping = ExpectedGain(0.2)
    stopping.begin(2, torch.device("cpu"))
    for _ in range(4 * MEMORY):
        stopping.observe(torch.tensor([2, 2]), torch.tensor([0, 0]))
    stopping.admit(1)
    assert stopping.rate_B[0] < 0.1 and stopping.rate_B[1] == PRIOR
