"""The soak compares what it says it does, goes on where it was stopped, and sees what is broken."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from commands import python
from evaluation_worker import tiny_lm
from test_evaluation_run import QUESTIONS

import kangaroo.engine.stepper
from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Rule
from kangaroo.evaluation.bench import Question
from kangaroo.models.loading import Dtype, byte_tokenizer
from kangaroo.soak import certificate, run, tiny, whole
from kangaroo.soak.cells import cell_of
from kangaroo.soak.drafters import DRAFTERS, adapter
from kangaroo.soak.run import SoakConfig, Task, soak
from kangaroo.soak.settings import SAMPLINGS, alone, sampling_of
from kangaroo.soak.tiny import FAMILIES, Tiny, cut
from kangaroo.soak.whole import Whole
from kangaroo.utils.discovery import classes
from kangaroo.utils.errors import ConfigError, NotLossless


def test_every_family_meets_every_sampling():
    count = len(FAMILIES) * len(SAMPLINGS)
    met = {(FAMILIES[n % len(FAMILIES)], sampling_of(n)) for n in range(count)}
    assert met == set(itertools.product(FAMILIES, SAMPLINGS))


def test_every_drafter_is_soaked():
    assert set(DRAFTERS) == set(classes("kangaroo.drafters", DrafterConfig))


def test_under_the_rejection_rule_only_greedy_texts_are_compared():
    """Those alone are promised to be vanilla's."""
    rejecting = [sampling for sampling in SAMPLINGS.values() if sampling.rule is Rule.rejection]
    assert rejecting and all(sampling.greedy for sampling in rejecting)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few and short texts."""
    monkeypatch.setattr(tiny, "REQUESTS", 8)
    monkeypatch.setattr(tiny, "LIMIT", (1, 24))


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records-0.jsonl").read_text().splitlines()]


def certify(folder, tokens=400, seed=0, drafters=None, **options):
    part = Tiny(seed, "cpu")
    if drafters is not None:
        part.drafters = drafters
    config = SoakConfig(tokens=tokens, seed=seed, **options)
    return soak([Task(part, tokens, lambda cell: cell.tokens)], config, {}, folder)


def test_a_setting_is_the_same_every_time_and_another_by_another_seed_or_number():
    first, again = Tiny(0, "cpu").setting(0), Tiny(0, "cpu").setting(0)
    assert (first.requests, first.texts, first.eos_ids) == (
        again.requests,
        again.texts,
        again.eos_ids,
    )
    for other in (Tiny(1, "cpu").setting(0), Tiny(0, "cpu").setting(len(FAMILIES))):
        assert other.family == first.family and other.requests != first.requests


def test_in_half_precision_only_targets_that_keep_the_promise_are_soaked(tmp_path):
    part = Tiny(0, "cpu", torch.bfloat16)
    assert part.families == [name for name in FAMILIES if name.endswith(", compiled")]
    setting = part.setting(0)
    assert setting.lm.dtype == torch.bfloat16 and setting.prefill_chunks == (1024,)
    config = SoakConfig(tokens=600, dtype=Dtype.bfloat16)
    found = soak([Task(part, 600, lambda cell: cell.tokens)], config, {}, tmp_path)
    assert found["different_texts"] == 0 and found["settings"]["dtype"] == "bfloat16"


def test_an_eos_ends_texts_in_the_middle():
    setting = next(
        found for found in map(Tiny(0, "cpu").setting, itertools.count()) if found.eos_ids
    )
    whole = alone(setting.lm, setting.requests, SAMPLINGS[setting.sampling], frozenset())
    assert any(len(text) < len(long) for text, long in zip(setting.texts, whole, strict=True))
    # the cut is what decoding with that EOS does
    assert setting.texts == alone(
        setting.lm, setting.requests, SAMPLINGS[setting.sampling], setting.eos_ids
    )


def test_a_text_is_cut_after_its_first_eos():
    assert cut([1, 2, 3, 2], frozenset({2})) == [1, 2]
    assert cut([1, 3], frozenset({2})) == [1, 3]


def test_the_certificate_adds_up(tmp_path):
    found = certify(tmp_path, tokens=300)
    cells = [cell_of(fields) for fields in lines(tmp_path)]
    assert found["tokens"] == sum(cell.tokens for cell in cells) >= 300
    assert found["differences"] == [] and found["different_texts"] == 0
    for groups in found["by"].values():
        assert sum(group["tokens"] for group in groups.values()) == found["tokens"]
    assert list(found["by"]["drafter"]) == list(DRAFTERS)[: len(found["by"]["drafter"])]
    text = (tmp_path / "certificate.md").read_text()
    assert f"{found['tokens']:,} tokens in" in text and "texts that differ: 0." in text
    assert f"git_revision={found['settings']['git_revision']}" in text


def test_it_goes_on_where_it_was_killed(tmp_path):
    """In the middle of a line."""
    certify(tmp_path / "whole", tokens=200)
    certify(tmp_path / "killed", tokens=100)
    file = tmp_path / "killed/records-0.jsonl"
    kept = file.read_bytes()[:-40]
    file.write_bytes(kept)
    certify(tmp_path / "killed", tokens=200)
    assert file.read_bytes().startswith(kept[: kept.rfind(b"\n")])

    def timeless(folder):
        return [{k: v for k, v in line.items() if k != "seconds"} for line in lines(folder)]

    assert timeless(tmp_path / "killed") == timeless(tmp_path / "whole")


def test_a_finished_soak_decodes_nothing_again(tmp_path, monkeypatch):
    found = certify(tmp_path)
    monkeypatch.setattr(Engine, "completions", None)
    again = certify(tmp_path)
    assert (again["tokens"], again["seconds"]) == (found["tokens"], found["seconds"])


def test_another_seed_needs_another_folder(tmp_path):
    certify(tmp_path, tokens=1)
    with pytest.raises(ConfigError, match=r"seed=0 there, 1 now\. Pass another output="):
        certify(tmp_path, tokens=1, seed=1)
    certify(tmp_path, tokens=1, seed=1, resume=False)
    assert len(lines(tmp_path)) == 1


def test_an_amount_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="one of them must be above 0"):
        SoakConfig(tokens=0)


class AltersATokenThatWasWritten(Kangaroo):
    def observe(self, batch, draft, verdict, taps):
        super().observe(batch, draft, verdict, taps)
        last_B1 = (batch.length_B - 1)[:, None]  # the pending token, which the next round reads
        changed_B1 = batch.tokens_BS.gather(1, last_B1) + (verdict.count_B > 0)[:, None].long()
        batch.tokens_BS.scatter_(1, last_B1, changed_B1 % tiny.VOCABULARY)


def altering(setting, draw):
    return AltersATokenThatWasWritten(setting.lm, adapter(setting.lm, "attention", 2), 4, 0.0)


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
    monkeypatch.setattr(tiny, "FAMILIES", ["llama"])  # whose rounds are the tensors'
    builds = {
        "token": altering,
        "cache": lambda setting, draw: WritesIntoTheCommittedCache(1, 4),
        "verifier": lambda setting, draw: PromptLookup(1, 4),
    }
    if broken == "verifier":
        decide = kangaroo.engine.stepper.decide
        monkeypatch.setattr(kangaroo.engine.stepper, "decide", accepts_one_too_many(decide))
    with pytest.raises(NotLossless, match=r"of 8 texts are not vanilla's"):
        certify(tmp_path, tokens=1, drafters={broken: builds[broken]})
    found = json.loads((tmp_path / certificate.NAME).read_text())
    assert found["different_texts"] == len(found["differences"]) > 0
    one = found["differences"][0]
    assert one["label"] == "bug" and one["cell"].startswith(f"tiny/0/{broken} (llama, greedy, ")
    assert one["vanilla"] != one["found"]
    assert f"| {one['seed']} | {one['position']} |" in (tmp_path / "certificate.md").read_text()
    monkeypatch.undo()
    # the report has all that makes the difference again
    (text,) = Engine(tiny.target("llama", "cpu"), PromptLookup(1, 4)).generate(
        [one["prompt"]], one["max_new_tokens"], seeds=[one["seed"]]
    )
    assert text.tokens[one["position"]] == one["vanilla"][0]


def test_a_difference_stays_in_the_records_and_fails_the_next_start_too(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "FAMILIES", ["llama"])
    for _ in range(2):
        with pytest.raises(NotLossless):
            certify(tmp_path, tokens=1, drafters={"altering": altering})
    assert len(lines(tmp_path)) == 1


def test_a_model_is_soaked_for_as_long_as_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(whole, "LIMIT", (2, 8))
    questions = [Question(q["question_id"], q["category"], q["turns"]) for q in QUESTIONS]
    part = Whole("tiny", tiny_lm(), byte_tokenizer(), {"lookup": PromptLookup()}, questions, 0)
    config = SoakConfig(tokens=0, minutes=1.0)
    found = soak([Task(part, 0.3, lambda cell: cell.seconds)], config, {}, tmp_path)
    cells = [cell_of(fields) for fields in lines(tmp_path)]
    assert sum(cell.seconds for cell in cells[:-1]) < 0.3 <= sum(cell.seconds for cell in cells)
    assert list(found["by"]["target"]) == ["tiny"] and found["different_texts"] == 0


def test_a_bench_without_a_short_question_is_refused():
    questions = [Question(1, "qa", ["word " * 1000])]
    with pytest.raises(ConfigError, match="no question of the bench has at most 400 tokens"):
        Whole("tiny", tiny_lm(), byte_tokenizer(), {}, questions, 0)


def test_the_command_writes_its_certificate_and_resumes(tmp_path):
    def typed(*options):
        done = python("scripts/soak.py", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return " ".join(done.stdout.split())

    shown = typed("soak.tokens=1")
    folder = tmp_path / "outputs/soak"
    found = json.loads((folder / certificate.NAME).read_text())
    assert certificate.verdict(found) in shown and "texts that differ: 0." in shown
    before = (folder / "records-0.jsonl").read_bytes()
    typed(f"soak.tokens={found['tokens'] + 1}")
    assert (folder / "records-0.jsonl").read_bytes().startswith(before)
    assert [line["drafter"] for line in lines(folder)] == ["vanilla", "kangaroo"]


def test_rows_are_refilled_wherever_several_are_decoded():
    assert all(max(run.FEWEST, 2 * rows) > rows for rows in run.BATCHES)
