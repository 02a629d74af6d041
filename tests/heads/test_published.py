"""Published heads of Medusa-1, EAGLE-1 and EAGLE-3 compute here what their papers' formulas give.

Shapes: P pairs of a state and the next token, T tokens, D hidden size, X width of queries or keys,
H heads, K draft vocabulary, V vocabulary.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import helpers
import pytest
import torch
from cases import last_state
from commands import python as run
from helpers import VOCABULARY, hidden_states, random_prompts, saved_adapter, states_after, tiny
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from kangaroo.drafters.eagle import EagleConfig
from kangaroo.drafters.eagle3 import Eagle3Config
from kangaroo.drafters.medusa import MedusaConfig
from kangaroo.engine.engine import Engine
from kangaroo.heads import adapter_files, published
from kangaroo.heads.eagle3_head import Eagle3Head, fused_taps
from kangaroo.models.loading import Dtype, ModelConfig, meta_model
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile

SIZE, HEADS, EPS, BASE = 32, 4, 1e-6, 500.0  # the target's RoPE has another base
FEW = 40  # tokens to draft from
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # float32, summed in another order
State = dict[str, Tensor]
SAME = {"rope_theta": None}  # the config has none: then the base is 10,000, as the target's


def drawn(shapes: dict[str, tuple[int, ...]]) -> State:
    """Norms about one, and matrices that keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for name, shape in shapes.items():
        random = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and "norm" in name
        state[name] = 1 + 0.3 * random if is_norm else 1.5 * random / shape[-1] ** 0.5
    return state


def layer_shapes(prefix: str, width: int, feed_forward: int = 64) -> dict[str, tuple[int, ...]]:
    rows = {"q": SIZE, "k": SIZE // 2, "v": SIZE // 2}
    shapes = {f"{prefix}.self_attn.{x}_proj.weight": (n, width) for x, n in rows.items()}
    shapes[f"{prefix}.self_attn.o_proj.weight"] = (SIZE, SIZE)
    for x in ("gate", "up"):
        shapes[f"{prefix}.mlp.{x}_proj.weight"] = (feed_forward, SIZE)
    shapes[f"{prefix}.mlp.down_proj.weight"] = (SIZE, feed_forward)
    return shapes | {f"{prefix}.post_attention_layernorm.weight": (SIZE,)}


def eagle_state() -> State:
    shapes = {"fc.weight": (SIZE, 2 * SIZE), "fc.bias": (SIZE,)}
    shapes["embed_tokens.weight"] = (VOCABULARY, SIZE)
    return drawn(shapes | layer_shapes("layers.0", SIZE))


def eagle3_state(feed_forward: int = 64) -> State:
    shapes = {"fc.weight": (SIZE, 3 * SIZE), "norm.weight": (SIZE,), "lm_head.weight": (FEW, SIZE)}
    shapes |= {f"midlayer.{x}.weight": (SIZE,) for x in ("input_layernorm", "hidden_norm")}
    state = drawn(shapes | layer_shapes("midlayer", 2 * SIZE, feed_forward))
    order_V = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))
    tokens_K = order_V[:FEW].sort().values
    inside_V = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, tokens_K, True)
    return state | {"d2t": tokens_K - torch.arange(FEW), "t2d": inside_V}


def medusa_state(heads: int = 3, size: int = SIZE, vocabulary: int = VOCABULARY) -> State:
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        shapes |= {f"{k}.0.linear.weight": (size, size), f"{k}.0.linear.bias": (size,)}
        shapes[f"{k}.1.weight"] = (vocabulary, size)
    return drawn(shapes)


def checkpoint(folder: Path, state: object, file: str = published.WEIGHTS, **more: object) -> str:
    """As their authors publish it; the config is that of a Llama with one layer."""
    folder.mkdir(exist_ok=True)
    (save_file if file.endswith("safetensors") else torch.save)(state, folder / file)
    config = {"model_type": "llama", "hidden_size": SIZE, "num_attention_heads": HEADS}
    config |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "rms_norm_eps": EPS}
    config |= {"num_hidden_layers": 1, "intermediate_size": 64, "rope_theta": BASE}
    fields = {name: x for name, x in (config | more).items() if x is not None}
    (folder / published.CONFIG).write_text(json.dumps(fields))
    return str(folder)


def rms(x_PD: Tensor, weight_D: Tensor) -> Tensor:
    return x_PD / (x_PD.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight_D


def turned(x_PX: Tensor, base: float) -> Tensor:
    """RoPE: pair j of a head, halves apart, is turned by `position * base ** (-2 j / size)`."""
    size = SIZE // HEADS
    x_PHC = x_PX.unflatten(-1, (-1, size))
    angles_P1X = torch.arange(len(x_PX))[:, None, None] * base ** (-torch.arange(0, size, 2) / size)
    a_PHX, b_PHX = x_PHC.chunk(2, -1)
    cos, sin = angles_P1X.cos(), angles_P1X.sin()
    return torch.cat([a_PHX * cos - b_PHX * sin, b_PHX * cos + a_PHX * sin], -1)


def plain_layer(state: State, prefix: str, read_PX: Tensor, residual_PD: Tensor, base: float):
    """A Llama's layer, whose attention reads `read`."""
    w = {name.removeprefix(f"{prefix}."): x for name, x in state.items()}
    q, k, v = (read_PX @ w[f"self_attn.{x}_proj.weight"].T for x in "qkv")
    q_PHC, k_PHC = turned(q, base), turned(k, base).repeat_interleave(2, 1)
    v_PHC = v.unflatten(-1, (-1, SIZE // HEADS)).repeat_interleave(2, 1)
    scores_HPP = torch.einsum("phc,qhc->hpq", q_PHC, k_PHC) / (SIZE // HEADS) ** 0.5
    unseen_PP = torch.ones(len(q), len(q)).triu(1).bool()
    chances_HPP = scores_HPP.masked_fill(unseen_PP, -torch.inf).softmax(-1)
    attended_PD = torch.einsum("hpq,qhc->phc", chances_HPP, v_PHC).flatten(1)
    x_PD = residual_PD + attended_PD @ w["self_attn.o_proj.weight"].T
    normed_PD = rms(x_PD, w["post_attention_layernorm.weight"])
    gate_PX = silu(normed_PD @ w["mlp.gate_proj.weight"].T)
    up_PX = normed_PD @ w["mlp.up_proj.weight"].T
    return x_PD + gate_PX * up_PX @ w["mlp.down_proj.weight"].T


def plain_eagle(state: State, e_PD: Tensor, h_PD: Tensor, base: float = BASE) -> Tensor:
    """EAGLE's section 3: `Layer(W [e_{t+1}; f_t] + b)`, without a first norm."""
    x_PD = torch.cat([e_PD, h_PD], -1) @ state["fc.weight"].T + state.get("fc.bias", 0)
    return plain_layer(state, "layers.0", x_PD, x_PD, base)


def plain_eagle3(state: State, e_PD: Tensor, g_PD: Tensor, base: float = BASE) -> Tensor:
    """EAGLE-3's section 3: attention reads `[Norm(e_{t+1}); Norm(g_t)]`."""
    e_PD = rms(e_PD, state["midlayer.input_layernorm.weight"])
    read_PX = torch.cat([e_PD, rms(g_PD, state["midlayer.hidden_norm.weight"])], -1)
    return plain_layer(state, "midlayer", read_PX, g_PD, base)


def final_states(lm: TargetModel, state: State, text: list[int]) -> Tensor:
    return hidden_states(lm, text)[-1][0]


def fused_states(lm: TargetModel, state: State, text: list[int]) -> Tensor:
    taps = [states_after(lm, text, tap)[0] for tap in fused_taps(lm.n_layers)]
    return torch.cat(taps, -1) @ state["fc.weight"].T


def eagle_logits(lm: TargetModel, state: State, x_D: Tensor) -> Tensor:
    return lm.head.weight @ x_D


def eagle3_logits(lm: TargetModel, state: State, x_D: Tensor) -> Tensor:
    """`-inf` outside of the head's own tokens, whose offsets `d2t` has."""
    tokens_K = torch.arange(FEW) + state["d2t"]
    logits_K = state["lm_head.weight"] @ rms(x_D, state["norm.weight"])
    return torch.full((VOCABULARY,), -torch.inf).index_copy(0, tokens_K, logits_K)


KINDS: dict[str, tuple[Callable, ...]] = {
    "eagle": (eagle_state, final_states, plain_eagle, eagle_logits, EagleConfig),
    "eagle3": (eagle3_state, fused_states, plain_eagle3, eagle3_logits, Eagle3Config),
}


@torch.no_grad()
def plain_draft(
    lm: TargetModel, state: State, kind: str, text: list[int], count: int, base: float = BASE
) -> tuple[list[int], Tensor]:
    """The tokens that a head drafts after a text, whose last token is pending, and the logits of
    the last: pair t joins the state of token t, or the layer's own, and token t + 1."""
    _, states, layer, logits, _ = KINDS[kind]
    h_PD, drafted, logits_V = states(lm, state, text[:-1]), list[int](), torch.empty(0)
    for _ in range(count):
        e_PD = lm.embed(torch.tensor([[*text[1:], *drafted]]))[0]
        x_PD = layer(state, e_PD, h_PD, base)
        logits_V = logits(lm, state, x_PD[-1])
        drafted.append(int(logits_V.argmax()))
        h_PD = torch.cat([h_PD, x_PD[-1:]])
    return drafted, logits_V


def imported(lm: TargetModel, source: str, folder: Path) -> str:
    """The folder of an adapter, as `convert import` leaves it."""
    got = published.read(source, lm)
    few = None if got.vocabulary_K is None else got.vocabulary_K.tolist()
    about = {"vocabulary": few and len(few), "facts": got.facts}
    return str(saved_adapter(lm, got.adapter, folder, few, {"imported": got.origin}, **about))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields, compiled", [({}, False), (SAME, True)], ids=str)
def test_an_imported_head_drafts_what_its_formulas_give(tmp_path, kind, fields, compiled):
    lm = tiny().compile_for_decoding() if compiled else tiny()
    make, *_, config = KINDS[kind]
    state, base = make(), 10_000.0 if fields else BASE
    file = published.SAFETENSORS if fields else published.WEIGHTS
    source = checkpoint(tmp_path / "theirs", state, file, **fields)
    path = imported(lm, source, tmp_path / "ours")
    origin = adapter_files.read_config(path).training["imported"]
    assert (origin["source"], origin["file"]) == (source, file) and len(origin["sha256"]) == 16
    drafter = config(adapter=path, steps=4, threshold=0, top_k=1).build(lm)
    assert drafter.adapter.architecture.rope_base == (None if fields else BASE)

    def expected(text: list[int], seed: int, count: int) -> list[int]:
        return plain_draft(lm, state, kind, text, count, base)[0]

    lengths = helpers.check_chains(drafter, expected)
    engine = Engine(lm, drafter, prefill_chunk=8, always_drafts=True)
    prompts = random_prompts(1, 2, 7, 19, 30)
    texts = helpers.texts_by(engine, prompts, 16, batch_size=2)
    assert texts == helpers.vanilla_texts(lm, prompts, 16)
    in_native_rounds = compiled and kind == "eagle3"  # which draft as tensors do: test_conformance
    assert lengths == (set() if in_native_rounds else {4})
    # not only its best token
    (text,) = random_prompts(12, seed=3)
    for count in (1, 2, 3):
        drafted, logits_V = plain_draft(lm, state, kind, text, count, base)
        ids = [*text, *drafted[:-1]]  # the last of `text` is pending
        state_1D = last_state(lm, drafter.adapter, ids, len(text) - 1)[None]
        got_V = drafter.head.spread(drafter.head(state_1D))[0]
        torch.testing.assert_close(got_V, logits_V, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_imported_head_keeps_its_own_epsilon(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sys.modules[__name__], "EPS", 0.3)  # of the checkpoint and its formulas
    lm, (make, *_, config) = tiny().compile_for_decoding(), KINDS[kind]
    state, (text,) = make(), random_prompts(12, seed=3)
    path = imported(lm, checkpoint(tmp_path / "theirs", state), tmp_path / "ours")
    drafter = config(adapter=path, steps=4, threshold=0, top_k=1).build(lm)
    drafted, logits_V = plain_draft(lm, state, kind, text, 3)
    state_1D = last_state(lm, drafter.adapter, [*text, *drafted[:-1]], len(text) - 1)[None]
    torch.testing.assert_close(
        drafter.head.spread(drafter.head(state_1D))[0], logits_V, **TOLERANCE
    )
    assert drafter.adapter.fast_layers is None  # native code has one epsilon


def test_imported_medusa_heads_say_what_their_formula_gives(tmp_path):
    lm, state = tiny(), medusa_state()
    for file in ("medusa_lm_head.pt", "medusa_lm_head.safetensors"):
        path = imported(lm, checkpoint(tmp_path / file, state, file), tmp_path / f"{file}-ours")
        drafter = MedusaConfig(adapter=path, nodes=20).build(lm)
        h_1TD = torch.randn(1, 5, SIZE, generator=torch.Generator().manual_seed(4))
        for k, head in enumerate(drafter.draft_heads):
            w, b = state[f"{k}.0.linear.weight"], state[f"{k}.0.linear.bias"]
            expected_TV = (h_1TD + silu(h_1TD @ w.T + b))[0] @ state[f"{k}.1.weight"].T
            torch.testing.assert_close(head(drafter.heads(h_1TD, k)[0]), expected_TV, **TOLERANCE)
        assert len(drafter.draft_heads) == 3 and drafter.tree.size == 21
        prompts = random_prompts(5, 9)
        texts = helpers.texts_by(Engine(lm, drafter, always_drafts=True), prompts, 12)
        assert texts == helpers.vanilla_texts(lm, prompts, 12)


def test_a_head_may_have_another_order_of_tokens_all_of_them_or_other_sizes(tmp_path):
    lm, state = tiny(), eagle3_state(feed_forward=48)
    order_K = torch.randperm(FEW, generator=torch.Generator().manual_seed(5))
    tokens_K = (torch.arange(FEW) + state["d2t"])[order_K]
    mixed = {"lm_head.weight": state["lm_head.weight"][order_K]}
    mixed["d2t"] = tokens_K - torch.arange(FEW)
    every = {"lm_head.weight": torch.randn(VOCABULARY, SIZE)}
    every |= {"d2t": torch.zeros(VOCABULARY), "t2d": torch.zeros(VOCABULARY)}  # as they begin
    few = {name: x for name, x in state.items() if name not in ("d2t", "t2d")}
    heads = []
    for i, held in enumerate((state, state | mixed, few | every)):
        source = checkpoint(tmp_path / str(i), held, intermediate_size=48)
        heads.append(published.read(source, lm))
    plain, reordered, whole = heads
    assert torch.equal(plain.vocabulary_K, reordered.vocabulary_K)
    assert torch.equal(plain.adapter.head.weight, reordered.adapter.head.weight)
    assert plain.adapter.architecture.feed_forward_size == 48
    assert whole.vocabulary_K is None and len(whole.adapter.head.weight) == VOCABULARY


def test_biases_that_a_head_lacks_are_zero_and_wrapped_names_are_known(tmp_path):
    lm, state = tiny(), eagle_state()
    del state["fc.bias"]
    state["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    wrapped = {f"module.{name}": x for name, x in state.items()}
    head = published.read(checkpoint(tmp_path, wrapped), lm).adapter
    assert not head.join.bias.any() and torch.equal(head.join.weight, state["fc.weight"])


def without(name: str, make: Callable[[], State]) -> State:
    return {key: x for key, x in make().items() if key != name}


GATE = "midlayer.mlp.gate_proj.weight"
WIDE = torch.ones(SIZE, 4 * SIZE)
TWICE = {"d2t": torch.zeros(FEW, dtype=torch.long).index_fill(0, torch.tensor([1]), -1)}
SHORT = {"t2d": torch.ones(50, dtype=torch.bool)}
SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
# What a checkpoint holds, its config, and what is said.
REFUSED = {
    "unknown": ({"encoder.weight": torch.ones(2)}, {}, r"layout of no head.*encoder\.weight"),
    "lacks": (without(GATE, eagle3_state), {}, rf"it lacks {GATE}\. Pass model= .* not tiny/llama"),
    "wide": (eagle_state() | {"fc.weight": WIDE}, {}, r"fc\.weight is \[32, 128\], not \[32, 64\]"),
    "two layers": (eagle_state() | {"layers.1.x": WIDE}, {}, r"layers\.1\.x has no place"),
    "library": (eagle_state(), {"speculators_model_type": "eagle3"}, "of the library speculators"),
    "vocabulary": (eagle3_state(), {"vocab_size": 99}, "vocab_size=99; tiny/llama has 64"),
    "rope": (eagle_state(), SCALED, "Scaled RoPE has to be the target's"),
    "taps": (eagle3_state(), LAYERS, r"outputs of layers \[0, 1, 2\]; here they are \[1, 1, 0\]"),
    "t2d": (eagle3_state() | SHORT, {}, "t2d is of 50 tokens, and the target has 64"),
    "twice": (without("t2d", eagle3_state) | TWICE, {}, "d2t names a token twice"),
    "beyond": (eagle3_state() | {"d2t": torch.full((FEW,), 30)}, {}, "different tokens.*token 69,"),
    "no tokens": (eagle3_state() | {"d2t": torch.ones(0)}, {}, r"d2t is \[0\], not a list of"),
    "a column": (eagle3_state() | {"d2t": torch.ones(FEW, 1)}, {}, r"d2t is \[40, 1\], not a"),
    "rows": (eagle3_state() | {"lm_head.weight": WIDE}, {}, "lm_head has 32 rows, and d2t 40"),
    "blocks": (medusa_state() | {"0.2.weight": WIDE}, {}, r"0\.2\.weight has no place"),
    "tokens": (medusa_state() | {"2.1.weight": WIDE}, {}, r"2\.1\.weight is \[32, 128\], not"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_named_in_one_line(lm, tmp_path, what):
    state, fields, message = REFUSED[what]
    with pytest.raises(AdapterMismatch, match=message) as caught:
        published.read(checkpoint(tmp_path, state, **fields), lm)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_many_faults_are_counted_and_what_is_no_number_is_refused(tmp_path):
    lm = tiny()
    lacking = {name: x for name, x in eagle3_state().items() if "mlp" not in name}
    lacking |= {f"further.{i}": torch.ones(1) for i in range(3)}
    with pytest.raises(AdapterMismatch, match=r"it lacks .*further\.0 has no place and 2 more\."):
        published.read(checkpoint(tmp_path, lacking), lm)
    infinite = eagle_state() | {"fc.bias": torch.full((SIZE,), torch.inf)}
    with pytest.raises(CorruptFile, match=r"join\.bias holds numbers that are not finite"):
        published.read(checkpoint(tmp_path, infinite), lm)
    eight_bits = eagle_state() | {"fc.bias": torch.ones(SIZE).to(torch.float8_e4m3fn)}
    with pytest.raises(CorruptFile, match=r"fc\.bias is of torch\.float8_e4m3fn, no format"):
        published.read(checkpoint(tmp_path, eight_bits), lm)
    with pytest.raises(CorruptFile, match=r"config\.json' cannot be read \(.*zero"):
        published.read(checkpoint(tmp_path, eagle_state(), num_attention_heads=0), lm)
    with pytest.raises(CorruptFile, match="something other than a state dict"):
        published.read(checkpoint(tmp_path, {}), lm)
    with pytest.raises(ConfigError, match="exit_layer=2 is for adapters of Kangaroo"):
        published.read(checkpoint(tmp_path, eagle_state()), lm, exit_layer=2)
    (tmp_path / published.CONFIG).unlink()
    with pytest.raises(AdapterNotFound, match=r"holds no config\.json"):
        published.read(str(tmp_path), lm)


def test_eagle3_has_the_released_size_for_llama_3_1():
    """Its head has 32,000 of 128,256 tokens; 849 MB in float16."""
    lm = meta_model(ModelConfig("8b", "meta-llama/Llama-3.1-8B-Instruct", dtype=Dtype.bfloat16))
    with torch.device("meta"):
        head = Eagle3Head(lm, None, torch.arange(32_000))
    assert head.taps == (0, *fused_taps(32)) == (0, 2, 16, 29) and fused_taps(1) == (1, 0, 0)
    assert head.attention.k_proj.weight.shape == (1024, 8192)
    assert sum(p.numel() for p in head.parameters()) == 424_689_664


@pytest.mark.slow
def test_the_command_writes_where_the_drafter_looks_and_over_nothing(tmp_path):
    lm = helpers.tiny_target()
    state = medusa_state(2, lm.config.hidden_size, lm.config.vocab_size)
    checkpoint(tmp_path / "theirs", state, "medusa_lm_head.pt")
    command = ("scripts/convert.py import", "model=tiny", "source=theirs")
    done, again = (run(*command, cwd=tmp_path) for _ in range(2))
    assert done.returncode == 0, done.stderr
    assert "evaluate.py model=tiny drafter=medusa" in done.stdout
    assert MedusaConfig(adapter=str(tmp_path / "adapters/tiny-medusa")).build(lm).max_nodes == 30
    assert again.returncode == 1 and "already holds an adapter" in again.stderr
    checkpoint(tmp_path / "wide", eagle_state())
    refused = run(*command[:2], "source=wide", cwd=tmp_path)
    assert refused.returncode == 1 and "says vocab_size=64" in refused.stderr
