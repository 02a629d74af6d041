"""A step that is one graph, and is launched before the last one is read, writes, drafts and accepts
what steps on tensors do, whatever enters, ends and changes meanwhile."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from cases import DRAFTERS, Case, in_turn, rounds_of
from helpers import adapter_for, graphed, random_prompts, texts_by, tiny, vanilla_texts
from strict_graphs import StrictGraphs, Tape
from torch import Tensor

from kangaroo import LayerSkipConfig, Rule, Sampling
from kangaroo.cuda.backend import CudaBackend
from kangaroo.drafters.base import Drafter
from kangaroo.drafters.chain import Chain, DraftToken
from kangaroo.engine.costs import VerifyCosts
from kangaroo.engine.engine import Engine
from kangaroo.engine.late_stepper import LateStepper, Launched, needs_no_host
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.session import Prompt, Session
from kangaroo.engine.stepper import TensorStepper
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel

LAYERSKIP = LayerSkipConfig(exit_layer=2, steps=3, threshold=0)
CHAINS: dict[str, Callable[[Case], Drafter]] = {
    name: DRAFTERS[name]
    for name in (
        "kangaroo kangaroo-vocabulary kangaroo-text-vocabulary kangaroo-on-embeddings-fused eagle "
        "block"
    ).split()
}
CHAINS["layerskip"] = lambda case: LAYERSKIP.build(case.lm)
STOPPING = "kangaroo-stops eagle-stops block-stops".split()
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.3, seed=5),
    Sampling(temperature=0.9, top_p=0.8, seed=2, rule=Rule.rejection),
    Sampling(temperature=0.9, seed=2, rule=Rule.block),
]
PROMPTS = random_prompts(40, 3, 21, 3, 1)
NEW_TOKENS = 13
ENTERING = ["kangaroo", "kangaroo-on-embeddings-fused", "block"]


@cache
def model(**fields: int) -> Case:
    lm = graphed(tiny(**fields))
    return Case(lm, adapter_for(lm), [])


def by_both(case: Case, name: str, run: Callable[[Engine], object], **options) -> list:
    """What `run` returns with steps that are launched ahead, and with those on tensors. Of these
    nothing is recorded, unless graphs draft from more tokens."""
    results, on_tensors = [], case
    if "text-vocabulary" not in name:
        on_tensors = replace(case, lm=TargetModel(case.lm.hf))
    for of, stepper in ((case, LateStepper), (on_tensors, TensorStepper)):
        with pytest.MonkeyPatch.context() as patches:
            if stepper is TensorStepper:
                patches.setattr("kangaroo.engine.engine.needs_no_host", lambda *_: False)
            engine = Engine(of.lm, (DRAFTERS | CHAINS)[name](of), **options)
            results.append(run(engine))
            assert isinstance(engine.session.stepper, stepper)
    return results


def drafted(rounds: list) -> set[int]:
    return {accepted for text in rounds for _, accepted, drafted in text if drafted}


@pytest.mark.parametrize(
    "name, sampling, rows", in_turn(CHAINS, [(x, rows) for rows in (3, 1) for x in SAMPLINGS])
)
def test_rounds_are_those_of_tensors_in_batches_that_texts_enter_and_leave(name, sampling, rows):
    """And texts are those of vanilla decoding."""

    def run(engine: Engine) -> list[Generation]:
        return engine.generate(PROMPTS, NEW_TOKENS, sampling, batch_size=rows)

    case = model()
    late, on_tensors = by_both(case, name, run, prefill_chunk=8)
    assert rounds_of(late) == rounds_of(on_tensors)
    assert len(drafted(rounds_of(late))) > 1  # drafts are right here, wrong there
    if sampling.rule is Rule.match or sampling.greedy:
        texts = [p + x.tokens for p, x in zip(PROMPTS, late, strict=True)]
        assert texts == vanilla_texts(tiny(), PROMPTS, NEW_TOKENS, sampling)


@pytest.mark.parametrize("name, place", in_turn(CHAINS, [(place,) for place in range(1, 9)]))
def test_an_eos_may_lie_anywhere_in_a_draft_or_after_it(name, place, monkeypatch):
    case = model()
    (text,) = vanilla_texts(tiny(), PROMPTS[:1], NEW_TOKENS)
    monkeypatch.setattr(case.lm.hf.generation_config, "eos_token_id", [text[40 + place]])
    run = partial(Engine.generate, prompts=PROMPTS, max_new_tokens=NEW_TOKENS, batch_size=2)
    late, on_tensors = by_both(case, name, run)
    assert rounds_of(late) == rounds_of(on_tensors)
    assert [x.finish for x in late] == [x.finish for x in on_tensors]
    assert late[0].finish == "eos" and len(late[0].tokens) <= place + 1


@pytest.mark.parametrize("name, length", in_turn(CHAINS, [(45,), (62,), (63,)]))
def test_a_draft_may_reach_beyond_the_context(name, length):
    case = model(max_position_embeddings=64)
    (prompt,) = random_prompts(length)
    run = partial(Engine.generate, prompts=[prompt], max_new_tokens=64 - length)
    late, on_tensors = by_both(case, name, run)
    assert rounds_of(late) == rounds_of(on_tensors)
    vanilla = vanilla_texts(tiny(max_position_embeddings=64), [prompt], 64 - length)
    assert [prompt + late[0].tokens] == vanilla


class SkippingBackend(CudaBackend):
    """Gives no numbers, where it may skip what computes them, and leaves other memory as it is."""

    needed: Tensor | None = None

    def skip_unless(self, needed: Tensor | None) -> None:
        self.needed = None if needed is None else needed.any()

    def spoiled(self, x: Tensor) -> Tensor:
        return x if self.needed is None else x.where(self.needed, torch.nan)


@pytest.fixture
def skipping(monkeypatch) -> Case:
    lm = tiny()
    backend = SkippingBackend(graphs=StrictGraphs())
    lm.decode_by(backend)
    monkeypatch.setattr("kangaroo.engine.engine.needs_no_host", lambda *_: True)
    run, adapt, draw = TargetModel.run, Layer.forward, Chain.draw

    def run_or_skip(lm, x_BND, *of, **how):
        out_BND, taps = run(lm, x_BND.nan_to_num(), *of, **how)
        return backend.spoiled(out_BND), taps

    def adapt_or_skip(layer, f_BND, deep_BND, *of):
        deep_BND = deep_BND if deep_BND is None else deep_BND.nan_to_num()
        return backend.spoiled(adapt(layer, f_BND.nan_to_num(), deep_BND, *of))

    def draw_or_skip(chain, *of):
        token = draw(chain, *of)
        if backend.needed is None:
            return token
        id_B1 = token.id_B1.where(backend.needed, 0)
        return DraftToken(id_B1, *map(backend.spoiled, token[1:]))

    monkeypatch.setattr(TargetModel, "run", run_or_skip)
    monkeypatch.setattr(Layer, "forward", adapt_or_skip)
    monkeypatch.setattr(Chain, "draw", draw_or_skip)
    return Case(lm, adapter_for(lm), [])


def test_the_host_reads_where_a_chain_may_stop_unless_the_rest_can_be_skipped():
    """For a text alone: in a batch a step verifies no more than was drafted."""
    case = model()
    for name, stops in (("kangaroo", False), ("kangaroo-stops", True), ("kangaroo-auto", True)):
        drafter = DRAFTERS[name](case)
        lm = SimpleNamespace(backend=SimpleNamespace(skips=True))
        assert needs_no_host(lm, drafter, rows=1) != stops  # the layer runs in modules
        drafter.adapter.fast_layers = object()
        assert needs_no_host(lm, drafter, rows=1)
        assert needs_no_host(lm, drafter, rows=2) != stops
        lm.backend.skips = False
        assert needs_no_host(lm, drafter, rows=1) != stops
        drafter.adapter.fast_layers = None


@pytest.mark.parametrize("name, sampling", in_turn(STOPPING, [(x,) for x in SAMPLINGS]))
def test_a_chain_alone_stops_without_the_host(name, sampling, skipping):
    def run(engine: Engine) -> list[Generation]:
        if name == "eagle-stops":
            engine.drafter.threshold = 0.6  # it is surer than others
        return engine.generate(PROMPTS[3:], 28, sampling, batch_size=1)

    late, on_tensors = by_both(skipping, name, run)
    assert rounds_of(late) == rounds_of(on_tensors)
    lengths = {drafted for text in rounds_of(late) for *_, drafted in text if drafted}
    assert len(lengths) > 1  # some stopped early
    if sampling.rule is Rule.match or sampling.greedy:
        texts = [p + x.tokens for p, x in zip(PROMPTS[3:], late, strict=True)]
        assert texts == vanilla_texts(tiny(), PROMPTS[3:], 28, sampling)


@pytest.mark.parametrize("name, cost", in_turn(["kangaroo-auto", "block-auto"], [(0.05,), (0.6,)]))
def test_what_a_text_taught_stops_chains_a_step_later(name, cost, skipping):
    def run(engine: Engine) -> list[Generation]:
        engine.drafter.draft_cost = cost
        return engine.generate(PROMPTS[3:], 40, batch_size=1)

    late, on_tensors = by_both(skipping, name, run)
    assert [x.tokens for x in late] == [x.tokens for x in on_tensors]
    drafts = [[drafted for *_, drafted in text] for text in rounds_of(late)]
    assert len({*chain.from_iterable(drafts)}) > 1


def mixed(engine: Engine) -> list:
    """Steps with and without drafts, beside texts that want none or logits, each row's rounds."""
    engine.drafter.draft_cost = 0.02  # which pays here
    session = engine.open(2, 120, Sampling(temperature=0.8))
    first, second, third, _, last = (Request(x, 60, seed=1, ignore_eos=True) for x in PROMPTS)
    session.admit(0, first)
    rounds = []

    def step(count: int, **how) -> None:
        for _ in range(count):
            rounds.append([(x.tokens, x.accepted, x.drafted) for x in session.step(**how)])

    step(4)
    step(2, drafts=False)
    step(3)
    session.admit(1, replace(second, max_new_tokens=5))
    step(4)
    session.admit(1, replace(third, drafts=False))
    step(2)
    session.batch.stop(1)
    step(2)
    session.admit(1, replace(last, keep=2, max_new_tokens=4))
    step(6)
    return rounds


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if "vocabulary" in x else ()) for x in CHAINS]
)
def test_a_batchs_budget_and_requests_may_ask_for_other_drafts(name, measured_budget, monkeypatch):
    """Beside another text, drafts stop by their confidence, and then steps wait for the host."""
    costs = VerifyCosts([1, 2, 16], [1.0, 1.02, 1.3], 0.5)
    monkeypatch.setattr("kangaroo.engine.engine.verify_costs", lambda lm: costs)
    late, on_tensors = by_both(model(), name, mixed)
    assert late == on_tensors


@pytest.mark.parametrize(
    "name", ["kangaroo-text-vocabulary", "kangaroo-on-embeddings-fused", "block"]
)
def test_a_text_goes_on_from_what_its_row_has_read(name):
    def talk(engine: Engine) -> list:
        session = engine.open(2, 200, Sampling())
        texts = PROMPTS[1:3]
        done = []
        for turn in range(3):
            generations = []
            for row, text in enumerate(texts):
                request = Request([*text, turn], 9 + 4 * row, ignore_eos=True)
                generations.append((request, session.admit(row, request)))
            while not all(generation.finish for _, generation in generations):
                for row, record in enumerate(session.step()):
                    request, generation = generations[row]
                    if not generation.finish:
                        session.record(row, record, request, generation)
            texts = [list(text) for text in session.batch.texts]
            done += [generation for _, generation in generations]
        return [rounds_of(done), [x.reused for x in done], texts]

    late, on_tensors = by_both(model(), name, talk, prefix_cache=True)
    assert late == on_tensors
    assert min(late[1][2:]) > 0


def written_out(session: Session, prompt: list[int], new_tokens: int) -> None:
    session.admit(0, Request(prompt, new_tokens, ignore_eos=True))
    while not all(session.batch.done):
        session.step()


def test_what_a_step_writes_is_read_while_the_next_one_runs(monkeypatch):
    """But for a text's first step, and where a step may write its last token."""
    events = []
    replay, read = Tape.replay, Launched.read
    monkeypatch.setattr(Tape, "replay", lambda tape: events.append("launch") or replay(tape))
    monkeypatch.setattr(Launched, "read", lambda step: events.append("read") or read(step))
    case = model()
    session = Engine(case.lm, DRAFTERS["vanilla"](case)).open(1, 60, Sampling())
    written_out(session, PROMPTS[3], 6)
    launch_and_read = ["launch", "read"]
    assert events == [*launch_and_read, "launch", *launch_and_read * 3, "read"]
    written_out(session, PROMPTS[1], 2)
    assert events[-2:] == launch_and_read
    session = Engine(case.lm, DRAFTERS["kangaroo"](case)).open(1, 120, Sampling())
    events.clear()
    written_out(session, PROMPTS[3], 80)
    assert events[:5] == [*launch_and_read, "launch", *launch_and_read]
    count = events.count("read")
    assert events.count("launch") == count > 16  # none was in vain
    in_flight = [events[:i].count("launch") - events[:i].count("read") for i in range(len(events))]
    assert in_flight.count(2) > count - 8


@pytest.mark.parametrize(
    "name, sampling",
    in_turn(["vanilla", *ENTERING], [(x,) for x in SAMPLINGS[:2]]),
)
def test_texts_that_end_and_prompts_that_enter_meet_steps_in_flight(name, sampling):
    """By EOS, by their limits, by hand; a prompt in chunks, with steps between these."""
    case, eager = model(), tiny().compile_for_decoding()
    lm, prompts = case.lm, PROMPTS[:4]
    engine = Engine(lm, DRAFTERS[name](case), prefill_chunk=8)
    texts = texts_by(engine, prompts * 2, NEW_TOKENS, sampling=sampling, batch_size=3)
    assert texts == vanilla_texts(eager, prompts * 2, NEW_TOKENS, sampling)
    session = engine.open(2, 200, sampling)
    requests = [Request(x, 100, seed=number, ignore_eos=True) for number, x in enumerate(prompts)]
    seeded = [replace(sampling, seed=number) for number in (0, 1)]
    wanted = [vanilla_texts(eager, [prompts[how.seed]], 100, how)[0] for how in seeded]
    for row in (0, 1):
        session.admit(row, requests[1 + row])
    for _ in range(3):
        session.step()
    session.batch.stop(1)
    for _ in range(2):
        session.step()
    assert session.stepper.state.rows_B4[1, 1] == len(session.batch.texts[1])
    prompt = Prompt(session, 1, requests[0])
    while prompt.advance() is None:
        session.step()
    for _ in range(8):
        session.step()
    for row, number in ((0, 1), (1, 0)):
        text = session.batch.texts[row]
        assert len(text) > len(prompts[number]) + 8
        assert text == wanted[number][: len(text)]
