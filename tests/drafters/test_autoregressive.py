"""What a draft model and a target without its last layers, or without some of them, draft, and two
drafters in one: each follows what the other drafted.

Shapes: B rows, N draft nodes.
"""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import helpers
import pytest
from cases import CHUNK, DRAFTERS, NEW_TOKENS, PROMPTS, SAMPLINGS, Case, case_of, draft_lm
from helpers import VOCABULARY, Sometimes, check_chains, texts_by, tiny, tiny_model, vanilla_texts
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kangaroo.cpu.drafting import DraftModelDrafting
from kangaroo.drafters.base import Drafter
from kangaroo.drafters.cascade import Cascade
from kangaroo.drafters.draft_model import DraftModel, DraftModelConfig
from kangaroo.drafters.draft_verify import DraftVerify, DraftVerifyConfig
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.layerskip import FinalNorm, LayerSkipConfig
from kangaroo.engine.budget import Budget
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.evaluation.methods import generate
from kangaroo.heads.export import draft_model
from kangaroo.models import loading as models
from kangaroo.models.layer_weights import packed_linears
from kangaroo.models.loading import Dtype, ModelConfig
from kangaroo.models.quantizing import Quantization
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile

SAMPLED = SAMPLINGS["sampled"]
FURTHER = [("kangaroo", "qwen2-biased"), ("kangaroo", "qwen3-tied")]
FURTHER += [("kangaroo-fused", "mistral-window")]
LLAMA = [("llama", sampling) for (sampling,) in cases.GREEDY_OR_NOT]
# By native code, and of the target's first layers or of another model.
KINDS = itertools.product([True, False], repeat=2)
SIZES = [((272, 259),), ((264, 272),)]  # the target's, the draft's


def another_model() -> TargetModel:
    """With positions of its own."""
    rope = {"rope_type": "default", "rope_theta": 300.0}
    return tiny("llama", rope_parameters=rope, num_hidden_layers=2)


def layerskip(lm: TargetModel, layers: int) -> Drafter:
    return LayerSkipConfig(exit_layer=layers, steps=3, threshold=0).build(lm)


CHAINS: dict[str, Callable[[Case], Any]] = {
    name: DRAFTERS[name]
    for name in """
        kangaroo kangaroo-stops kangaroo-two-layers kangaroo-fused kangaroo-fused-layer
        kangaroo-fused-two-layers kangaroo-on-embeddings kangaroo-on-embeddings-fused
        eagle draft-model draft_verify draft_verify-stops
    """.split()
} | {
    "another model": lambda case: DraftModel(case.lm, another_model(), 3),
    "first layer": lambda case: layerskip(case.lm, 1),
    "all but the last": lambda case: layerskip(case.lm, 3),
    "last layer alone": lambda case: DraftVerify(case.lm, [0, 1, 2], 3, 0),
}


def definition(case: Case, drafter: Any, how: Sampling) -> Callable:
    match drafter:
        case DraftModel(lm=lm):
            return cases.written_by_some(lm, [range(lm.n_layers)], how)
        case DraftVerify():
            return cases.written_by_some(case.lm, [layers for layers, _ in drafter.runs], how)
        case Kangaroo(adapter=FinalNorm()):
            return cases.written_by_some(case.lm, [range(drafter.exit_layer)], how)
    case = replace(case, adapter=drafter.adapter)
    return lambda text, seed, count: cases.drafted_without_cache(case, text, count, how, seed)


@pytest.mark.parametrize(
    "name, family, sampling",
    [*cases.in_turn(CHAINS, LLAMA), *((*chain, "sampled") for chain in FURTHER)],
    indirect=["sampling"],
)
def test_a_chain_is_what_its_definition_gives_after_the_whole_text(name, family, sampling):
    """Alone, or after rounds in which another drafter had its way."""
    case = case_of(family, "sampled")
    drafter = CHAINS[name](case)
    lengths = check_chains(drafter, definition(case, drafter, sampling))
    whole = drafter if sampling.greedy else Cascade(Sometimes(case.texts), drafter)
    counts = cases.accepted(whole, case.lm, sampling)
    assert max(lengths) == drafter.steps and (len(lengths) > 1) == (drafter.threshold > 0)
    assert len(counts) > 1 + (not sampling.greedy) or name in ("another model", "last layer alone")


@pytest.mark.parametrize("kind, idle", cases.in_turn(KINDS, [(3,), (0,), (9,)]), ids=str)
def test_so_it_does_after_rounds_without_drafts(case, kind, idle, monkeypatch):
    """Of each so many, after two in which it drafts."""
    native, first_layers = kind
    model = draft_lm(case) if first_layers else another_model()
    lm, model = TargetModel(case.lm.hf), TargetModel(model.hf)
    if native:
        lm, model = lm.compile_for_decoding(), model.compile_for_decoding()
    expected = cases.written_by_some(model, [range(model.n_layers)], SAMPLED)
    drafter = DraftModel(lm, model, steps=3)
    engine, rounds = Engine(lm, drafter, prefill_chunk=CHUNK), itertools.count()
    counts = set() if native else check_chains(drafter, expected)

    def least(self, rows, nodes, drafting):
        return [float(next(rounds) % (2 + idle) >= 2)] * nodes

    monkeypatch.setattr(Budget, "min_chain_chances", least)
    draft = DraftModelDrafting.draft

    def check(self, buffers, batch, rows):
        draft(self, buffers, batch, rows)
        for row in rows:
            drafted = buffers.token[row, 1 : buffers.count[row]].tolist()
            assert drafted == expected(batch.texts[row], batch.seeds[row], len(drafted))
            counts.add(len(drafted))

    monkeypatch.setattr(DraftModelDrafting, "draft", check)
    texts = texts_by(engine, PROMPTS, 2 * NEW_TOKENS, SAMPLED, batch_size=2)
    assert counts == ({0, 3} if idle else {3})
    assert texts == vanilla_texts(lm, PROMPTS, 2 * NEW_TOKENS, SAMPLED)


@pytest.mark.parametrize("native", [True, False])
def test_a_draft_model_reads_no_text_without_a_draft(case, native, monkeypatch):
    lm, model = TargetModel(case.lm.hf), TargetModel(draft_lm(case).hf)
    if native:
        lm, model = lm.compile_for_decoding(), model.compile_for_decoding()
    drafter = DraftModel(lm, model, steps=3, threshold="auto")
    drafter.draft_cost = 0.0
    needed = NEW_TOKENS / len(PROMPTS[1])
    monkeypatch.setattr("kangaroo.drafters.draft_model.tokens_to_repay", lambda *_: needed)
    session = Engine(lm, drafter).open(2, 90, Sampling())
    for row, limit in enumerate((NEW_TOKENS, 3 * NEW_TOKENS)):
        session.admit(row, Request(PROMPTS[1], limit))
    session.step(drafts=False)
    assert drafter.n_read == [0, 0]
    first, second = session.step()
    assert first.drafted == 0 < second.drafted and drafter.n_read[1] > 0
    assert native == (drafter.n_read[0] == 0)  # tensors draft for all rows or none


@pytest.mark.parametrize("early_exit", [False, True], ids=["draft model", "layerskip"])
@pytest.mark.parametrize("steps", [1, 3])
def test_rounds_are_those_of_transformers_assisted_generation(case, steps, early_exit):
    """Same drafts, same acceptance: an implementation that is not ours."""
    model = cases.first_layers(case.lm, 2) if early_exit else draft_model(case.lm, case.adapter)
    # of no text: transformers 5.23 drops a mask that hides nothing, and then its assistant takes
    # pad tokens of the text for padding
    options = {"assistant_model": model, "pad_token_id": VOCABULARY}
    config = model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = steps, "constant"
    config.assistant_confidence_threshold = 0.0
    for prompt in PROMPTS:
        drafter: Drafter = DraftModel(case.lm, draft_lm(case), steps)
        if early_exit:
            drafter = LayerSkipConfig(exit_layer=2, steps=steps, threshold=0).build(case.lm)
        (ours,) = Engine(case.lm, drafter).generate([prompt], NEW_TOKENS)
        # theirs drafts before its prefill, ours after: so it begins after the token of ours
        theirs = generate(case.lm, [*prompt, ours.tokens[0]], NEW_TOKENS - 1, **options)
        assert ours.tokens[1:] == theirs.tokens
        prefill, *rounds = [len(step.tokens) for step in ours.steps]
        assert prefill == 1 and max(rounds) == steps + 1
        assert rounds == [len(step.tokens) for step in theirs.steps]


def folder_of(path: Path, tokens: list[str] | None = None, **overrides: object) -> str:
    """A small checkpoint with a tokenizer; `tokens` by their ids, a byte each if not given."""
    tiny_model("llama", **({"vocab_size": 259} | overrides)).save_pretrained(path)
    tokenizer = models.byte_tokenizer()
    if tokens is not None:
        fields = json.loads(tokenizer.backend_tokenizer.to_str())
        fields["model"]["vocab"] = {t: tokens.index(t) for t in fields["model"]["vocab"]}
        for added in fields["added_tokens"]:
            added["id"] = tokens.index(added["content"])
        fields["added_tokens"].sort(key=lambda added: added["id"])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(fields)))
    tokenizer.save_pretrained(path)
    return str(path)


def loaded(path: str) -> TargetModel:
    config = ModelConfig("target", path, dtype=Dtype.float32, device="cpu")
    return TargetModel(models.load(config)[0])


@pytest.mark.parametrize("low, high", [(7, 9), (256, 258)])  # the second are special ones
def test_a_draft_model_of_other_tokens_is_refused_with_the_first_that_differs(tmp_path, low, high):
    lm, vocabulary = loaded(folder_of(tmp_path / "target")), models.byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    DraftModelConfig(model=folder_of(tmp_path / "same", tokens)).build(lm)
    tokens[low], tokens[high] = tokens[high], tokens[low]
    names = [re.escape(repr(tokens[at])) for at in (low, high)]
    difference = f"its token {low} is {names[0]}, the target's {names[1]}"
    other = folder_of(tmp_path / "other", tokens)
    with pytest.raises(ConfigError, match=rf"other'.*target': {difference}.*drafter\.model="):
        DraftModelConfig(model=other).build(lm)


def test_a_draft_model_may_be_quantized(tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs the extra quantized")
    lm = loaded(folder_of(tmp_path / "target"))
    draft = folder_of(tmp_path / "draft")
    drafter = DraftModelConfig(model=draft, quantization=Quantization.nf4, threshold=0).build(lm)
    assert len(packed_linears(drafter.lm.hf)) > 0
    prompts = [[1, 5, 9], [7, 3]]
    done = Engine(lm, drafter).generate(prompts, 20, batch_size=2)
    texts = [prompt + generation.tokens for prompt, generation in zip(prompts, done, strict=True)]
    assert texts == vanilla_texts(lm, prompts, 20)
    with pytest.raises(ConfigError, match=r"drafter\.quantization=nf4 is for a drafter\.model"):
        DraftModelConfig(adapter="a", quantization=Quantization.nf4)


@pytest.mark.parametrize("rule, sizes", cases.in_turn([*Rule, "native"], SIZES), ids=str)
def test_vocabularies_of_the_same_tokens_may_be_padded_to_other_sizes(tmp_path, sizes, rule):
    """As those of one family are, such as Qwen2.5's; also where padding is written."""
    lm, rows = loaded(folder_of(tmp_path / "target", vocab_size=sizes[0])), 2
    if rule == "native":  # where one row alone drafts by its own rule
        lm, rule, rows = lm.compile_for_decoding(), Rule.match, 1
    draft = folder_of(tmp_path / "draft", vocab_size=sizes[1])
    drafter = DraftModelConfig(model=draft, steps=3, threshold=0).build(lm)
    sampling = Sampling(temperature=1.5, seed=2, rule=rule)
    prompts = [[1, 5, 9], [7, sizes[0] - 1, 3]]
    done = Engine(lm, drafter).generate(prompts, 40, sampling, batch_size=rows)
    texts = [prompt + generation.tokens for prompt, generation in zip(prompts, done, strict=True)]
    assert rule is not Rule.match or texts == vanilla_texts(lm, prompts, 40, sampling)
    assert max(map(max, texts)) < sizes[0]
    assert sum(step.accepted for generation in done for step in generation.steps)


def test_a_layerskip_checkpoint_is_known_and_exits_after_a_quarter_of_its_layers(case):
    lm = loaded("random:small:facebook/layerskip-llama2-7B")
    assert LayerSkipConfig().build(lm).exit_layer == lm.n_layers // 4
    with pytest.raises(ConfigError, match=r"exit_layer=4 .* the target's 4 layers; .* 1 to 3"):
        LayerSkipConfig(exit_layer=4).build(case.lm)


def test_one_of_model_and_adapter_is_needed(case):
    with pytest.raises(ConfigError, match=r"needs drafter\.model= or drafter\.adapter="):
        DraftModelConfig().build(case.lm)
    assert DraftModelConfig(model="a", adapter="b") == DraftModelConfig(model="a")


def test_subsets_that_cannot_be_are_refused_by_name(case, tmp_path):
    for skip in ([4], [-1], [0, 1, 2, 3]):
        with pytest.raises(ConfigError, match=r"skip=.*0 to 3"):
            DraftVerify(case.lm, skip)
    with pytest.raises(ConfigError, match=r"prepare\.py layers"):
        DraftVerifyConfig().build(case.lm)
    config = DraftVerifyConfig(subset=str(tmp_path / "subset.json"))
    with pytest.raises(AdapterNotFound, match=r"prepare\.py layers"):
        config.build(case.lm)
    another = '{"skip": [1], "target": "another", "target_hash": "0"}'
    for text, error, message in ("{", CorruptFile, "again"), (another, AdapterMismatch, "another"):
        (tmp_path / "subset.json").write_text(text)
        with pytest.raises(error, match=message):
            config.build(case.lm)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("steps", [1, 2])
def test_rows_are_drafted_by_the_first_or_else_the_second(case, rows, steps):
    """Whose caches then are as if it had drafted alone, whoever did before."""
    first, who = Sometimes(case.texts), set()
    by_length = first.continuation
    first.continuation = lambda row, text: by_length(0, text)
    cascade = Cascade(first, helpers.chain_of(case.lm, case.adapter, steps, 0))

    def expected(text: list[int], seed: int, count: int) -> list[int]:
        continuation = first.continuation(0, text)
        who.add("first" if continuation else "second")
        return continuation or cases.drafted_without_cache(case, text, steps, SAMPLED, seed)

    check_chains(cascade, expected)
    engine = Engine(case.lm, cascade, prefill_chunk=CHUNK)
    assert texts_by(engine, PROMPTS, NEW_TOKENS, SAMPLED, batch_size=rows) == case.texts
    assert who == {"first", "second"}
