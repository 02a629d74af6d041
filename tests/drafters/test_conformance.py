"""Every drafter writes what vanilla decoding writes, whatever the sampling, batch or model.

The fast tests have every pair of these for every method, but its pairs with some families; the slow
ones have all together.
"""

import itertools
from collections.abc import Iterator
from functools import cache

import cases
import helpers
import pytest
import torch
from cases import DRAFTERS, FAMILIES, HOW, LONGER, METHODS, NEW_TOKENS, PROMPTS, SAMPLINGS, Case
from helpers import BY_MODULES, adapter_for, graphed, texts_by, tiny, tiny_model, vanilla_texts

from kangaroo.cpu.stepper import CpuStepper
from kangaroo.cuda.graphs import Graphs
from kangaroo.drafters.cascade import Cascade
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.engine.costs import VerifyCosts
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.engine.stepper import TensorStepper
from kangaroo.evaluation.lossless import fork
from kangaroo.evaluation.methods import generate
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel

# Every method runs on these in the fast tests, and on a quarter of the other families; in the slow
# ones on all, and on all but transformers' modules with every sampling and batch. All methods run
# by graphs in a test below, and there alone in the fast ones.
ALWAYS = ["llama", "llama-compiled"]
COVERED = [family for family in FAMILIES if family != "llama-graphs"]
IN_TURN = [family for family in COVERED if family not in ALWAYS]
EVERYWHERE = ("kangaroo", "kangaroo-tree")
PLAIN = set(FAMILIES) - set(BY_MODULES)
VARIANTS = [name for name in DRAFTERS if name not in METHODS]
# As 6 and 5 have no common divisor, every sampling meets every batch; the cheapest is the most
# frequent.
TURNS = ["alone", "ragged", "admitted", "ragged", "ragged", "admitted"]
FEWER_TURNS = ["ragged", "admitted", "alone", "ragged"]
# An adapter becomes a draft model beside plain weights alone.
EXACT = [(name, "bfloat16") for name in DRAFTERS]
EXACT += [(name, "blocks of a GGUF file") for name in METHODS if name != "draft-model"]
ROUNDS = list(itertools.product(["llama", "qwen3"], SAMPLINGS))
HALF, HALF16, WHOLE = torch.bfloat16, torch.float16, torch.float32


def turns_of(number: int, drafter: str) -> Iterator[tuple[tuple[str, str, str, str], bool]]:
    """A drafter on its families, a variant on a sixth of them: which sampling and batch each of
    them has, and whether the fast tests have it too, of a variant with one family."""
    is_method = drafter in METHODS
    some = [family for i, family in enumerate(IN_TURN) if (number + i) % 4 == 0]
    families = [*ALWAYS, *some] if is_method else COVERED[number % 6 :: 6]
    fast = families
    if not is_method:
        plain_or_some = (f in PLAIN or IN_TURN.index(f) % 4 == number % 4 for f in families)
        fast = list(itertools.compress(families, plain_or_some))[:1]
    rest = [f for f in (COVERED if is_method else families) if f not in fast]
    batches = TURNS if is_method else FEWER_TURNS
    first = number if is_method else 0
    for turn, family in enumerate([*fast, *rest]):
        sampling, rows = HOW[(number + turn) % len(HOW)], batches[(first + turn) % len(batches)]
        yield (drafter, family, sampling, rows), family in fast or drafter in EVERYWHERE


NUMBERED = [*enumerate(METHODS), *enumerate(VARIANTS)]
COVERING = [case for number, drafter in NUMBERED for case in turns_of(number, drafter)]
# what vanilla writes is computed once in each process for a family
COVERING.sort(key=lambda case: (COVERED.index(case[0][1]), HOW.index(case[0][2])))


def test_the_covering_has_every_pair_and_the_fast_tests_most_of_them():
    everything = (METHODS, COVERED, HOW, cases.BATCHES)
    of_fast_tests = [case for case, is_fast in COVERING if is_fast]
    for a, b in itertools.combinations(range(len(everything)), 2):
        pairs = set(itertools.product(everything[a], everything[b]))
        assert pairs <= {(case[a], case[b]) for case, _ in COVERING}
        # as vanilla's texts are decoded alone in all families
        alone = {(family, "alone") for family in COVERED}
        if (a, b) != (0, 1):
            assert pairs - alone <= {(case[a], case[b]) for case in of_fast_tests}
    in_batches = {(case[0], case[3]) for case, _ in COVERING}
    assert in_batches == set(itertools.product(DRAFTERS, cases.BATCHES))
    assert {case[0] for case in of_fast_tests} == set(DRAFTERS)


@pytest.mark.parametrize(
    "drafter, family, sampling, batch",
    [pytest.param(*case, marks=() if fast else pytest.mark.slow) for case, fast in COVERING],
)
def test_drafter_writes_what_vanilla_decoding_writes(drafter, family, sampling, batch):
    cases.check_texts(cases.case_of(family, sampling), drafter, sampling, cases.BATCHES[batch])


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter, family",
    [pair for pair in itertools.product(DRAFTERS, FAMILIES) if {*pair} & {*PLAIN, *EVERYWHERE}],
)
def test_so_it_does_in_every_sampling_and_batch(drafter, family):
    for sampling, rows in itertools.product(HOW, cases.BATCHES.values()):
        cases.check_texts(cases.case_of(family, sampling), drafter, sampling, rows)


@pytest.mark.parametrize(
    "drafter, family", list(zip(cases.KINDS, itertools.cycle(["llama", "llama-compiled"])))
)
def test_steps_without_drafts_in_between_change_no_text(drafter, family):
    """A server asks for them while prompts enter."""
    case = cases.case_of(family, "sampled")
    engine = Engine(case.lm, DRAFTERS[drafter](case))
    session = engine.open(len(PROMPTS), max(map(len, case.texts)), SAMPLINGS["sampled"])
    batch = session.batch
    for row, (prompt, how) in enumerate(zip(PROMPTS, cases.samplings("sampled"), strict=True)):
        session.admit(row, Request(prompt, NEW_TOKENS, how.seed))
    for number in itertools.count():
        records = session.step(drafts=number % 4 > 1)
        assert number % 4 > 1 or not any(record.drafted for record in records)
        if all(batch.done):
            break
    assert batch.texts == case.texts


@cache
def native_case(weights: str, sampling: str) -> Case:
    """A target whose products do not depend on what is computed together."""
    lm = helpers.packed_tiny()
    if weights == "bfloat16":
        lm = tiny("llama", dtype=torch.bfloat16).compile_for_decoding()
    assert lm.backend.name == "native"
    return Case(lm, adapter_for(lm), vanilla_texts(lm, LONGER, NEW_TOKENS, SAMPLINGS[sampling]))


@pytest.mark.parametrize("exact, sampling", cases.in_turn(EXACT, cases.GREEDY_OR_NOT), ids=str)
def test_compiled_drafters_are_exact_in_bfloat16_and_on_packed_weights_too(exact, sampling):
    """No rounding depends on what is computed together, nor on where a tree's nodes lie. The texts
    are longer than a chunk of attention, whose border their trees cross."""
    name, weights = exact
    case, how = native_case(weights, sampling), SAMPLINGS[sampling]
    engine = Engine(case.lm, DRAFTERS[name](case), prefill_chunk=cases.CHUNK)
    assert texts_by(engine, LONGER, NEW_TOKENS, how, batch_size=2) == case.texts


# These, and what is made of them, are drafted by tensors alone.
TENSORS = "cascade clasp draft_verify eagle- kangaroo-fused-two kangaroo-two lookahead medusa swift"
BEGINNINGS = (*TENSORS.split(), *cases.SCRIPTED)
NATIVE = {
    name: build
    for name, build in DRAFTERS.items()
    if name != "eagle" and not name.startswith(BEGINNINGS)
} | {
    "cascade of texts": DRAFTERS["cascade-token-recycling-tree"],
    "cascade to a tree": lambda case: Cascade(
        PromptLookup(2, 4), helpers.tree_of(case.lm, case.adapter, 3, 0.1, None, 3, 5, 0.01)
    ),
    "cascade to a chain": lambda case: Cascade(PromptLookup(2, 4), cases.kangaroo(case.lm)),
}


LAYERS = "kangaroo", "block", "eagle3", "hybrid", "layerskip", "cascade to"
IN_INT8 = [name for name in NATIVE if name.startswith(LAYERS)]


@pytest.mark.parametrize("name, sampling", cases.in_turn(IN_INT8, [("sampled",), ("greedy",)]))
def test_drafts_in_int8_are_exact_too(name, sampling, monkeypatch):
    """Nearly the same drafts, from weights that are rounded, with the target's tokens."""
    case, how, rounds = native_case("bfloat16", sampling), SAMPLINGS[sampling], []
    for int8 in (False, True):
        monkeypatch.setattr(Layer, "int8", int8)
        engine = Engine(case.lm, NATIVE[name](case), prefill_chunk=cases.CHUNK)
        done = engine.generate(LONGER, NEW_TOKENS, how, batch_size=2)
        assert [p + x.tokens for p, x in zip(LONGER, done, strict=True)] == case.texts
        rounds.append(sum(map(len, cases.rounds_of(done))))
    drafting = engine.session.stepper.drafting
    uses_int8 = getattr(drafting, "second", drafting).int8 is not None
    assert uses_int8 == case.lm.backend.multiplies_bytes(torch.bfloat16)
    assert rounds[1] <= 1.1 * rounds[0] + 2


@pytest.mark.parametrize("name, family, sampling", cases.in_turn(NATIVE, ROUNDS))
def test_native_rounds_draft_and_accept_what_the_tensors_do(name, sampling, family):
    native, tensors = rounds_of_both(name, sampling, family)
    assert native == tensors


@cache
def steppers(family: str) -> list[tuple[TargetModel, type]]:
    """A model by native code and by tensors."""
    hf = tiny_model(family, **{"llama": {}, "qwen3": {"head_dim": 40}}[family])
    native = TargetModel(hf).compile_for_decoding()
    return [(native, CpuStepper), (TargetModel(hf), TensorStepper)]


def rounds_of_both(name: str, sampling: str, family: str, draft_cost: float | None = None) -> list:
    rounds = []
    for lm, stepper in steppers(family):
        drafter = NATIVE[name](Case(lm, adapter_for(lm), cases.case_of("llama", sampling).texts))
        if draft_cost is not None:
            drafter.draft_cost = draft_cost
        engine = Engine(lm, drafter)
        done = engine.generate(PROMPTS, NEW_TOKENS, SAMPLINGS[sampling], batch_size=2)
        assert isinstance(engine.session.stepper, stepper)
        rounds.append(cases.rounds_of(done))
    return rounds


@pytest.mark.parametrize(
    "name", "kangaroo kangaroo-tree-auto block draft-model prompt-lookup-short".split()
)
def test_both_keep_to_the_budget_of_a_batch_alike(name, measured_budget, monkeypatch):
    """From one in which drafting costs nothing to one in which each token costs like the first."""
    drafted = []
    for step in (0.0, 0.1 if name == "prompt-lookup-short" else 0.02, 1.0):
        costs = VerifyCosts([1, 2, 16], [1.0, 1.0 + step, 1.0 + 15 * step], 0.5)
        monkeypatch.setattr("kangaroo.engine.engine.verify_costs", lambda lm, costs=costs: costs)
        native, tensors = rounds_of_both(name, "greedy", "llama", draft_cost=0.0)
        assert native == tensors
        drafted.append(sum(count for text in native for _, _, count in text))
    assert drafted[0] > drafted[1] > drafted[2] == 0


def test_native_rounds_leave_rejection_to_the_tensors():
    lm = tiny().compile_for_decoding()
    engine = Engine(lm, cases.kangaroo(lm))
    engine.open(1, 20, Sampling(temperature=1.0, rule=Rule.rejection))
    assert isinstance(engine.session.stepper, TensorStepper)


@cache
def graph_case(device: str, dtype: torch.dtype, sampling: str) -> Case:
    """A model that decodes by graphs: CUDA's, or on the CPU their strict stand-in."""

    def on_device() -> TargetModel:
        place = device if device == "cpu" else f"cuda:{torch.cuda.device_count() - 1}"
        return TargetModel(tiny_model("llama", dtype=dtype).to(place))

    texts = vanilla_texts(on_device(), PROMPTS, NEW_TOKENS, SAMPLINGS[sampling])
    lm = on_device()
    lm = graphed(lm) if device == "cpu" else lm.compile_for_decoding()
    return Case(lm, adapter_for(lm), texts)


# On the CPU each method has one of these in turn; drafters of the tests alone draft on the CPU.
ON_CPU = [(HALF, "greedy"), (HALF16, "sampled"), (WHOLE, "top-p")]
ON_CPU += [(HALF, "top-p"), (HALF16, "greedy")]
ON_CUDA = [(WHOLE, "greedy"), (WHOLE, "top-p"), (HALF, "sampled"), (HALF16, "sampled")]
GRAPHS = [
    pytest.param(drafter, "cpu", *how, marks=() if is_fast else pytest.mark.slow)
    for i, drafter in enumerate([*METHODS, *VARIANTS])
    for j, how in enumerate(ON_CPU)
    for is_fast in [i < len(METHODS) and i % len(ON_CPU) == j]
] + [
    pytest.param(drafter, "cuda", *how, marks=pytest.mark.gpu)
    for drafter in DRAFTERS
    for how in ON_CUDA
    if drafter not in cases.SCRIPTED
]


@pytest.mark.parametrize("drafter, device, dtype, sampling", GRAPHS, ids=str)
def test_graphs_leave_vanilla_only_at_near_ties_of_half_precision(drafter, device, dtype, sampling):
    """A pass over several tokens rounds otherwise than a pass over one, so near-ties may swap."""
    case = graph_case(device, dtype, sampling)
    engine = Engine(case.lm, DRAFTERS[drafter](case), prefill_chunk=cases.CHUNK)
    how, recorded = SAMPLINGS[sampling], Graphs.seconds
    done = engine.generate(PROMPTS, NEW_TOKENS, how, batch_size=cases.BATCHES["ragged"])
    assert Graphs.seconds > recorded
    for row, (prompt, text, generation) in enumerate(zip(PROMPTS, case.texts, done, strict=True)):
        left = fork(case.lm, prompt, generation.tokens, text[len(prompt) :], how, how.seed + row)
        assert left is None or (left.label == "near-tie" and dtype != WHOLE), left


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_vanilla_decoding_writes_what_transformers_writes(family):
    case = cases.case_of(family, "greedy")
    for prompt, text in list(zip(PROMPTS, case.texts, strict=True))[1:3]:
        assert prompt + generate(case.lm, prompt, NEW_TOKENS).tokens == text


def steps_of(drafter, case: Case) -> list:
    done = Engine(case.lm, drafter).generate(PROMPTS, NEW_TOKENS, SAMPLINGS["sampled"])
    return [step for generation in done for step in generation.steps[1:]]  # without the prefill


def accepted_share(steps: list) -> float:
    return sum(step.accepted for step in steps) / sum(step.drafted for step in steps)


def test_the_drafters_above_are_right_wrong_and_in_between():
    """Otherwise the equalities above would say little."""
    case = cases.case_of("llama-compiled", "sampled")
    in_between = """
        kangaroo kangaroo-vocabulary kangaroo-text-vocabulary kangaroo-stops kangaroo-auto
        kangaroo-layer kangaroo-own-head kangaroo-two-layers kangaroo-fused kangaroo-fused-layer
        kangaroo-fused-two-layers sometimes rest-tree
    """.split()
    names = ("oracle", "adversary", *in_between)
    steps = {name: steps_of(DRAFTERS[name](case), case) for name in names}
    assert accepted_share(steps["oracle"]) > 0.9  # a limit cuts the last draft
    assert accepted_share(steps["adversary"]) == 0
    for name in in_between:
        assert 0.2 < accepted_share(steps[name]) < 0.9, name
    assert {step.drafted for step in steps["kangaroo-stops"]} == {1, 2, 3, 4}
    assert {step.drafted for step in steps["kangaroo-auto"]} >= {2, 3}
    tree = DRAFTERS["tree"](case)
    assert 0.05 < accepted_share(steps_of(tree, case)) < 0.9
    assert tree.moved > 10  # accepted on branches that are not the first
