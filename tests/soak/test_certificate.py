"""The soak compares what it says it does, goes on where it was stopped, and sees what is broken."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT
from helpers import adapter_for

import kangaroo.engine.stepper
from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Rule
from kangaroo.models.loading import Dtype
from kangaroo.utils.discovery import classes
from kangaroo.utils.errors import ConfigError, NotLossless
from soak import run, settings
from soak.drafters import DRAFTERS
from soak.settings import FAMILIES, SAMPLINGS, alone, setting_of


def test_every_drafter_and_family_and_sampling_is_soaked():
    assert set(DRAFTERS) == set(classes("kangaroo.drafters", DrafterConfig))
    numbers = range(len(FAMILIES) * len(SAMPLINGS))  # without a common divisor they all meet
    assert len({(n % len(FAMILIES), n % len(SAMPLINGS)) for n in numbers}) == len(numbers)
    assert all(max(run.FEWEST, 2 * rows) > rows for rows in run.BATCHES)  # rows are refilled
    # under the rejection rule only greedy texts are promised to be vanilla's
    rejecting = [sampling for sampling in SAMPLINGS.values() if sampling.rule is Rule.rejection]
    assert rejecting and all(sampling.greedy for sampling in rejecting)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few and short texts."""
    monkeypatch.setattr(settings, "REQUESTS", 8)
    monkeypatch.setattr(settings, "LIMIT", (1, 24))
    setting_of.cache_clear()


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records-0.jsonl").read_text().splitlines()]


def test_a_setting_is_the_same_every_time_and_another_by_another_seed_or_number():
    first = setting_of(0, 0)
    setting_of.cache_clear()
    again = setting_of(0, 0)
    assert (first.requests, first.texts, first.eos_ids) == (
        again.requests,
        again.texts,
        again.eos_ids,
    )
    for other in (setting_of(0, 1), setting_of(len(FAMILIES), 0)):
        assert other.family == first.family and other.requests != first.requests


def test_in_half_precision_only_targets_that_keep_the_promise_are_soaked(tmp_path):
    half = [setting_of(number, 0, "cpu", torch.bfloat16) for number in range(3)]
    assert all(s.family.endswith(", compiled") and s.prefill_chunks == (1024,) for s in half)
    assert half[0].lm.dtype == torch.bfloat16
    certificate = run.soak(DRAFTERS, tmp_path, 600, dtype=Dtype.bfloat16)
    assert certificate["different_texts"] == 0 and certificate["settings"]["dtype"] == "bfloat16"


def test_an_eos_ends_texts_in_the_middle():
    numbers = itertools.count()
    setting = next(some for some in (setting_of(n, 0) for n in numbers) if some.eos_ids)
    sampling = SAMPLINGS[setting.sampling]
    whole = alone(setting.lm, setting.requests, sampling)
    assert any(len(text) < len(long) for text, long in zip(setting.texts, whole, strict=True))
    # the cut is what decoding with that EOS does
    assert setting.texts == alone(setting.lm, setting.requests, sampling, setting.eos_ids)


def test_the_certificate_adds_up(tmp_path):
    certificate = run.soak(DRAFTERS, tmp_path, 300)
    assert certificate["tokens"] == sum(cell["tokens"] for cell in lines(tmp_path)) >= 300
    assert certificate["differences"] == [] and certificate["different_texts"] == 0
    for groups in certificate["by"].values():
        assert sum(group["tokens"] for group in groups.values()) == certificate["tokens"]
    drafters = list(certificate["by"]["drafter"])
    assert drafters == list(DRAFTERS)[: len(drafters)]
    text = (tmp_path / "certificate.md").read_text()
    assert f"{certificate['tokens']:,} tokens in" in text and "texts that differ: 0." in text
    assert f"git_revision={certificate['settings']['git_revision']}" in text


def test_it_goes_on_where_it_was_killed_and_decodes_nothing_again(tmp_path, monkeypatch):
    """In the middle of a line."""
    run.soak(DRAFTERS, tmp_path / "whole", 200)
    run.soak(DRAFTERS, tmp_path / "killed", 100)
    file = tmp_path / "killed/records-0.jsonl"
    kept = file.read_bytes()[:-40]
    file.write_bytes(kept)
    done = run.soak(DRAFTERS, tmp_path / "killed", 200)
    assert file.read_bytes().startswith(kept[: kept.rfind(b"\n")])

    def timeless(folder):
        return [{k: v for k, v in line.items() if k != "seconds"} for line in lines(folder)]

    assert timeless(tmp_path / "killed") == timeless(tmp_path / "whole")
    monkeypatch.setattr(Engine, "completions", None)
    again = run.soak(DRAFTERS, tmp_path / "killed", 200)
    assert (again["tokens"], again["seconds"]) == (done["tokens"], done["seconds"])
    with pytest.raises(ConfigError, match=r"seed=0 there, 1 now\. Pass another output="):
        run.soak(DRAFTERS, tmp_path / "killed", 200, seed=1)


class AltersATokenThatWasWritten(Kangaroo):
    def observe(self, batch, draft, verdict, taps):
        super().observe(batch, draft, verdict, taps)
        last_B1 = (batch.length_B - 1)[:, None]  # the pending token, which the next round reads
        changed_B1 = batch.tokens_BS.gather(1, last_B1) + (verdict.count_B > 0)[:, None].long()
        batch.tokens_BS.scatter_(1, last_B1, changed_B1 % settings.VOCABULARY)


def altering(setting, draw):
    return AltersATokenThatWasWritten(setting.lm, adapter_for(setting.lm), 4, 0.0)


class WritesIntoTheCommittedCache(PromptLookup):
    def propose(self, batch):
        for values in batch.cache.values:
            values[0] += 1.0
        return super().propose(batch)


def accepts_one_too_many(decide):
    """A verifier that takes the first draft token unseen."""

    def decided(draft, logits_BNV, positions_BN, sampling, seeds_B):
        if draft.tree.size > 1:
            choice_B = torch.where(draft.valid_BN[:, 1], draft.tokens_BN[:, 1], -1)
            best_BV = torch.zeros_like(logits_BNV[:, 0]).scatter(
                1, choice_B.clamp(min=0)[:, None], 1e9
            )
            logits_BNV[:, 0] += torch.where((choice_B >= 0)[:, None], best_BV, 0.0)
        return decide(draft, logits_BNV, positions_BN, sampling, seeds_B)

    return decided


@pytest.mark.parametrize("broken", ["token", "cache", "verifier"])
def test_what_is_broken_is_caught(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "FAMILIES", ["llama"])  # whose rounds are the tensors'
    builds = {
        "token": altering,
        "cache": lambda setting, draw: WritesIntoTheCommittedCache(1, 4),
        "verifier": lambda setting, draw: PromptLookup(1, 4),
    }
    if broken == "verifier":
        decide = kangaroo.engine.stepper.decide
        monkeypatch.setattr(kangaroo.engine.stepper, "decide", accepts_one_too_many(decide))
    with pytest.raises(NotLossless, match=r"of 8 texts are not vanilla's"):
        run.soak({broken: builds[broken]}, tmp_path, 1)
    certificate = json.loads((tmp_path / run.CERTIFICATE).read_text())
    assert certificate["different_texts"] == len(certificate["differences"]) > 0
    difference = certificate["differences"][0]
    assert difference["label"] == "bug" and difference["cell"].startswith(
        f"0/{broken} (llama, greedy, "
    )
    assert difference["vanilla"] != difference["found"]
    assert (
        f"| {difference['seed']} | {difference['position']} |"
        in (tmp_path / "certificate.md").read_text()
    )
    monkeypatch.undo()
    # the report has all that makes the difference again
    (text,) = Engine(settings.target("llama", "cpu"), PromptLookup(1, 4)).generate(
        [difference["prompt"]], difference["max_new_tokens"], seeds=[difference["seed"]]
    )
    assert text.tokens[difference["position"]] == difference["vanilla"][0]


def test_a_difference_stays_in_the_records_and_fails_the_next_start_too(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "FAMILIES", ["llama"])
    for _ in range(2):
        with pytest.raises(NotLossless):
            run.soak({"altering": altering}, tmp_path, 1)
    assert len(lines(tmp_path)) == 1


def test_pytest_runs_it_by_its_mark_alone(tmp_path):
    environment = {"SOAK_TOKENS": "1", "SOAK_OUTPUT": "out", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    for mark, said in ("soak", "texts that differ: 0."), ("not slow", "1 skipped"):
        done = subprocess.run(
            [*command, "-m", mark, ROOT / "tests/soak/test_soak.py"],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and said in done.stdout, done.stdout
