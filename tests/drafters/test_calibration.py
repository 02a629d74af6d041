"""What is counted of a lookup and a chain, the file it is kept in, and the command."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from cases import Case, case_of, choices_without_cache
from commands import python
from helpers import adapter_for, longest_earlier_match

from kangaroo.drafters import acceptance
from kangaroo.drafters.calibration import ASSUMED, AcceptanceCounts, Round, count, look, rounds
from kangaroo.drafters.hybrid import HybridConfig
from kangaroo.engine.sampling import Sampling
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.loading import TINY, Dtype, ModelConfig, load
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, ConfigError, CorruptFile

KNOWN = acceptance.assumed()


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama", "greedy")


def counted(*some: Round) -> dict[tuple[str, tuple[int, ...]], tuple[int, int]]:
    """Right and all of every cell that has any."""
    tally = AcceptanceCounts()
    for now in some:
        tally.add_round(now)
    assert tally.rounds == len(some)
    return {cell: (tally.right[cell], total) for cell, total in tally.all.items()}


def test_without_a_match_the_chain_counts_up_to_its_first_wrong_token():
    chain = [[(5, 0.6), (8, 0.2), (9, 0.08)], [(6, 0.4)], [(7, 0.95)]]
    assert counted(Round(0, [], chain, [5, 0, 7])) == {
        ("chain", (5,)): (1, 1),
        ("chain", (4,)): (0, 1),  # the third would come after a wrong token
        ("adds", (0,)): (1, 2),
    }


def test_further_choices_count_where_all_before_them_are_wrong():
    chain = [[(5, 0.6), (8, 0.25), (9, 0.08)]]
    told = counted(*(Round(0, [], chain, [token]) for token in (5, 8, 9, 4)))
    assert told["runner_up", (3,)] == (1, 3) and told["runner_up", (1,)] == (1, 2)
    told = counted(*(Round(2, [8], chain, [token]) for token in (5, 8, 9, 4)))
    assert ("runner_up", (3,)) not in told and told["runner_up", (1,)] == (1, 2)


def test_what_both_say_and_what_they_say_against_each_other_are_counted_apart():
    chain = [[(5, 0.6), (8, 0.2)], [(6, 0.4), (1, 0.1)], [(7, 0.95)]]
    told = counted(Round(2, [5, 4, 3], chain, [5, 6, 7]))
    assert told == {
        ("lookup", (1,)): (1, 1),  # a match of two tokens
        ("lookup", (2,)): (0, 1),  # and of three, since the first is right
        ("same", (1, 5)): (1, 1),
        ("other", (2, 4)): (0, 1),
        ("against", (2, 4)): (1, 1),
        ("adds", (2,)): (0, 1),
        ("adds", (3,)): (1, 1),
        ("adds", (0,)): (1, 1),  # from there on the chain is alone
        ("chain", (7,)): (1, 1),
    }
    told = counted(Round(2, [8], chain[:1], [8]))
    assert told["further", (1, 5)] == (1, 1) and told["against", (1, 5)] == (0, 1)


def test_a_rare_case_stays_near_what_is_assumed_and_a_frequent_one_is_as_counted():
    tally = AcceptanceCounts()
    before = KNOWN.chain[5]
    for right in (True, True, False):
        tally.add("chain", (5,), right)
    for _ in range(10_000):
        tally.add("same", (3, 2), False)
    told = tally.acceptance()
    assert told.chain[5] == pytest.approx((2 + ASSUMED * before) / (3 + ASSUMED), abs=5e-4)
    assert told.same[3][2] == 0 and told.lookup == KNOWN.lookup


@pytest.mark.parametrize("fused", [False, True])
def test_the_adapters_choices_are_those_of_drafting(case, fused):
    """Those of an adapter that reads deep states differ from draft step to draft step."""
    text = case.texts[0]
    wanted = list(range(10, len(text) - 1))
    head = DraftHead(case.lm, None, None)
    if fused:
        adapter = adapter_for(case.lm, architecture=AdapterHeadConfig(fused=True))
        steps = look(case.lm, adapter, head, text, wanted, 3)
        assert len(steps) == 3 and steps[0] != steps[1]
        return
    (told,) = look(case.lm, case.adapter, head, text, wanted, 3)
    assert list(told) == wanted
    for place, choices in told.items():
        expected = choices_without_cache(case, text[: place + 1], Sampling(), 0)
        assert [token for token, _ in choices] == [token for token, _ in expected]
        assert [p for _, p in choices] == pytest.approx([p for _, p in expected], abs=1e-5)


def test_rounds_follow_each_other_as_in_decoding_and_stay_in_their_answer():
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4]
    wanted = [3, 4, 5, 8, 9]  # two answers
    drafted = [{place: [(place, 0.5)] for place in wanted}]
    some = list(rounds(text, wanted, drafted, steps=2))
    # nothing is right after the first place, two tokens of the lookup are after the next one
    for now, place in zip(some, (3, 4, 8), strict=True):
        assert now.length == longest_earlier_match(text[: place + 1])[0]
        assert now.coming == text[place + 1 : place + 3]
        assert now.chain == [[(place + i, 0.5)] for i in range(2)]
    assert [now.lookup for now in some] == [[], [2, 3], [2, 3]]
    drafted[0][3], drafted[0][4] = [(1, 0.5)], [(2, 0.5)]  # now the first chain is right
    some = list(rounds(text, wanted, drafted, steps=2))
    assert [now.coming for now in some] == [[1, 2], [2, 3]]
    assert [len(now.chain) for now in rounds(text, [3, 4, 5], drafted, steps=4)] == [3]


def test_texts_of_no_assistant_are_refused(case):
    head = DraftHead(case.lm, None, None)
    silent = Sample(messages=[], input_ids=[1, 2, 3], loss_mask=[0, 0, 0])
    with pytest.raises(ConfigError, match="none of the 1 held-out conversations"):
        count(case.lm, case.adapter, head, [silent], steps=2, max_length=10)


def test_the_tally_of_a_text_is_that_of_its_rounds(case):
    text = case.texts[1]
    sample = Sample(messages=[], input_ids=text, loss_mask=[0] * 20 + [1] * (len(text) - 20))
    head = DraftHead(case.lm, None, None)
    tally = count(case.lm, case.adapter, head, [sample, sample], steps=4, max_length=2048)
    assert 2 < tally.rounds <= 2 * (len(text) - 20)
    assert sum(n for (table, _), n in tally.all.items() if table == "chain") > 10
    assert 0 < sum(tally.right.values()) < sum(tally.all.values())


@pytest.fixture
def saved(tmp_path):
    """A model of the command line's, and the folder of an adapter for it."""
    lm = TargetModel(load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))[0])
    adapter = adapter_for(lm)
    about = adapter_files.describe(lm, adapter, {"progress": {"assistant_tokens": 7}})
    return lm, adapter_files.save(adapter, about, torch.tensor([3]), tmp_path / "adapters/tiny")


def test_odds_are_read_as_they_were_written(saved):
    lm, folder = saved
    tally = AcceptanceCounts()
    tally.add("further", (2, 1), True)
    weights = adapter_files.weights_hash(str(folder))
    acceptance.write(tally.acceptance(), weights, {"rounds": 1}, folder)
    assert acceptance.read(folder, weights, "count again") == tally.acceptance() != KNOWN
    config = HybridConfig(adapter=str(folder))
    assert config.build(lm).acceptance == tally.acceptance()
    assert config.settings()["odds"] == acceptance.fingerprint(tally.acceptance())
    with pytest.raises(AdapterMismatch, match=r"calibration.json was counted for .* abc"):
        acceptance.write(tally.acceptance(), "abc", {}, folder)
        config.build(lm)


def test_without_a_file_the_odds_are_assumed_which_is_said(saved, caplog):
    lm, folder = saved
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert HybridConfig(adapter=str(folder)).build(lm).acceptance == KNOWN
    (said,) = [record.message for record in caplog.records if "has no" in record.message]
    assert "has no calibration.json" in said and "scripts/prepare.py calibrate" in said


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda known: known["odds"].pop("same"), "same"),
        (lambda known: known["odds"]["chain"].pop(), "chain must hold 8 numbers"),
        (lambda known: known["odds"]["lookup"].__setitem__(2, 1.5), "lookup must hold 7 numbers"),
        (lambda known: known["odds"]["other"].pop(), "other must have 7 rows, not 6"),
        (lambda known: known["odds"].update(lengths=[2, 3]), "lengths must begin with 1"),
        (lambda known: known.pop("weights"), "weights"),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_refused_by_name(tmp_path, change, told):
    file = acceptance.write(KNOWN, "abc", {}, tmp_path)
    known = json.loads(file.read_text())
    change(known)
    file.write_text(json.dumps(known))
    with pytest.raises(CorruptFile, match=rf"calibration.json cannot be read .*{told}"):
        acceptance.read(tmp_path, "abc", "count again")
    file.write_text("{")
    with pytest.raises(CorruptFile, match="count again"):
        acceptance.read(tmp_path, "abc", "count again")


def test_the_command_writes_the_file_beside_the_adapter_and_hybrid_takes_it(saved, tmp_path):
    _, folder = saved
    talk = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d e f c d e f"}]
    (tmp_path / "talks.json").write_text(json.dumps([{"conversations": talk}] * 3))
    asked = "data=conversations data.source=talks.json data.regenerate=false"
    asked += " data.filters.near_duplicate=1 data.filters.max_repetition=1 calibrate.holdout=2"
    done = python("scripts/prepare.py calibrate", "model=tiny", *asked.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    known = json.loads((folder / acceptance.FILE).read_text())
    assert known["rounds"] > 0 and known["settings"]["holdout"] == 2
    assert "prepare.py calibrate" in known["command"] and known["data"]["conversations"] == 1
    assert acceptance.read(folder, adapter_files.weights_hash(str(folder)), "") != KNOWN
    done = python("scripts/prepare.py calibrate", "model=tiny", "drafter=vanilla", cwd=tmp_path)
    assert done.returncode == 1
    assert "ConfigError: drafter=vanilla has nothing to calibrate" in done.stderr
