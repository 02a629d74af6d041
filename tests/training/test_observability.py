"""What a training run tells: teacher forcing beside decoding, and the names of its metrics."""

from itertools import takewhile

from cases import Case, drafted_without_cache
from helpers import EXIT, adapter_for, random_prompts, tiny, vanilla_texts
from training_cases import recipe, run, sample

from kangaroo.engine.sampling import Sampling
from kangaroo.heads.adapter_files import read_config
from kangaroo.training import results
from kangaroo.training.batches import collate, forward_target, grade
from kangaroo.training.recipe import trainees
from kangaroo.training.results import read_metrics

MEANS = ["loss", "agreement", "expected_acceptance"]
RATES = [f"ctar{w}" for w in range(1, 7)] + ["compression_rate"]


def trained(lm, **changes):
    """An adapter that agrees here and there, with values that saving does not round."""
    (trainee,) = trainees(lm, [recipe(**changes)], None)
    adapter = adapter_for(lm, EXIT, trainee.recipe.architecture).bfloat16().float()
    trainee.adapter.load_state_dict(adapter.state_dict())
    return trainee


def test_accepted_are_the_tokens_that_drafts_begun_at_every_position_would_get_right():
    """Along texts that decoding writes, so that its rounds are among these drafts."""
    lm = tiny()
    trainee = trained(lm)
    prompts = random_prompts(5, 14, seed=3)
    texts = vanilla_texts(lm, prompts, 25)
    data = [sample(text, len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
    tokens = collate(data, 1000, lm.device)
    (steps,) = grade(lm, forward_target(lm, tokens, [trainee]), [trainee], 7, results.STEPS)
    case, counts = Case(lm, trainee.adapter, texts), []
    for text, prompt in zip(texts, prompts, strict=True):
        for start in range(len(prompt), len(text)):
            drafted = drafted_without_cache(case, text[:start], results.STEPS, Sampling(), seed=0)
            pairs = zip(drafted, text[start:], strict=False)
            counts.append(len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))))
    reached = [sum(count >= w for count in counts) for w in range(1, results.STEPS + 1)]
    assert results.count_accepted(steps, tokens.learnt_BT).tolist() == reached
    assert len(counts) > reached[0] > reached[2] > 0


def test_every_metric_is_named_after_when_and_of_whom_it_was_taken(tmp_path):
    folder = run(tiny(), tmp_path, recipe(name="fused", fused=True, draft_steps=2))
    *_, last = read_metrics(tmp_path)
    name, steps = folder.name, [f"step{k}/{mean}" for k in range(2, 7) for mean in MEANS]
    assert set(last) == {
        *("step", "tokens", "tokens_per_second", "peak_memory_gib"),
        *(f"train/{name}/{figure}" for figure in [*MEANS, *steps[:3], "learning_rate"]),
        *(f"held_out/{name}/{figure}" for figure in MEANS + steps + RATES),
    }
    assert 0.05 < last["peak_memory_gib"] < 100
    progress = read_config(str(folder)).training["progress"]
    assert set(progress["held_out"]) == {*MEANS, *steps, *RATES}
    assert progress["tokens"] == last["tokens"]


def test_answers_too_short_for_a_draft_step_leave_its_metrics_out(tmp_path):
    data = [sample(ids, len(ids) - 1) for ids in random_prompts(*range(5, 13))]
    folder = run(tiny(), tmp_path, recipe(fused=True, draft_steps=2), data)
    *_, last = read_metrics(tmp_path)
    assert f"train/{folder.name}/loss" in last and f"train/{folder.name}/step2/loss" not in last
