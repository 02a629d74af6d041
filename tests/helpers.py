"""Tiny models on which shallow drafts are often right, and drafters right or wrong on purpose.

Shapes: B rows, N draft nodes, V vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from strict_graphs import StrictGraphs
from torch import Tensor

from kangaroo.cuda.backend import CudaBackend
from kangaroo.drafters.base import Drafter, FromText
from kangaroo.drafters.kangaroo import Kangaroo, KangarooConfig
from kangaroo.drafters.kangaroo_tree import KangarooTree, KangarooTreeConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.batch import Batch
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.session import Session
from kangaroo.engine.tree import Draft, Tree, Verdict
from kangaroo.evaluation.methods import lent_to_transformers
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.base import Trainable
from kangaroo.heads.block import BlockHead, BlockHeadConfig
from kangaroo.heads.eagle3_head import Eagle3Head
from kangaroo.heads.eagle_head import EagleHead
from kangaroo.models.loading import TINY, Dtype, ModelConfig, load, random_model
from kangaroo.models.packed import PackedEmbedding, PackedLinear
from kangaroo.models.target import TargetModel
from kangaroo.training.recipe import AdapterRecipe

Texts = list[list[int]]
EXIT = 2  # of four layers; all but the first change little
VOCABULARY = 64
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 32}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0}  # both are felt
GEMMA3 = {
    "sliding_window": 9,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2}
GRANITE |= {"residual_multiplier": 0.7, "logits_scaling": 0.5}
SMALL_EXPERTS = {"moe_intermediate_size": 32, "decoder_sparse_step": 2}  # every second is dense
# Families that transformers' modules run; see `ARCHITECTURES`.
BY_MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),  # every second layer does not rotate
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "phi3-window": ("phi3", {"sliding_window": 20}),
    "gemma2": ("gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 8} | CAPS),
    "gemma3": ("gemma3_text", GEMMA3),
    "granite": ("granite", GRANITE),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 6}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2} | SMALL_EXPERTS),
}
# Families of targets: transformers' model type, and fields that differ from `tiny_model`'s.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-ungrouped": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {}),
    "qwen2-biased": ("qwen2", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
} | BY_MODULES
PARTS = ("attention", "attention_layers", "feed_forward", "own_head", "fused")


def tiny_model(architecture: str = "llama", deep_scale: float = 0.15, **overrides: object):
    """A transformers model without EOS; `overrides` are fields of its config."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8}
    fields: dict[str, object] = {"vocab_size": VOCABULARY, "max_position_embeddings": 512} | sizes
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    hf = random_model(architecture, deep_scale=deep_scale, **(fields | overrides))
    generator = torch.Generator().manual_seed(1)
    for parameter in hf.parameters():
        if parameter.ndim == 1:  # norms start at one and biases at zero: both would hide mistakes
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    zero = float(architecture.startswith("gemma"))  # whose weights count from one
    norm = hf.model.norm.weight.data
    norm.copy_(2 * (norm + zero) - zero)  # as sure of its tokens, here and there, as a trained one
    return hf


def tiny(architecture: str = "llama", **overrides: object) -> TargetModel:
    return TargetModel(tiny_model(architecture, **overrides))


def packed_tiny() -> TargetModel:
    """A tiny model whose matrices are blocks of a GGUF file, in three formats by turns."""
    hf = tiny_model("llama", dtype=torch.bfloat16)
    kinds = itertools.cycle((Kind.Q4_1, Kind.Q8_0, Kind.Q5_0))

    def blocks_of(weight: torch.Tensor) -> tuple[torch.Tensor, Kind, torch.dtype]:
        kind = next(kinds)
        return torch.from_numpy(gguf.quantize(weight.float().numpy(), kind)), kind, weight.dtype

    for name, part in list(hf.named_modules()):
        if isinstance(part, torch.nn.Linear):
            hf.set_submodule(name, PackedLinear(*blocks_of(part.weight.detach())))
    hf.set_input_embeddings(PackedEmbedding(*blocks_of(hf.model.embed_tokens.weight.detach())))
    return TargetModel(hf).compile_for_decoding()


def tiny_target() -> TargetModel:
    """What `model=tiny model.dtype=float32` stands for in a command."""
    return TargetModel(load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))[0])


def saved_adapter(
    lm: TargetModel,
    adapter: Trainable,
    folder: Path,
    frequent: Sequence[int] | None = (3,),
    training: dict[str, Any] | None = None,
    **described: Any,
) -> Path:
    """The folder of an adapter, as training leaves it, with the most `frequent` tokens of its data
    in order; `described` is more for `adapter_files.describe`."""
    about = adapter_files.describe(lm, adapter, training or {}, **described)
    frequent_K = None if frequent is None else torch.tensor(frequent)
    return adapter_files.save(adapter, about, frequent_K, folder)


def graphed(lm: TargetModel) -> TargetModel:
    """Decoding by graphs, by a stand-in for CUDA's that is as strict."""
    return lm.decode_by(CudaBackend(graphs=StrictGraphs()))


def adapter_for(
    lm: TargetModel, exit_layer: int = EXIT, architecture: AdapterHeadConfig | None = None
) -> Adapter:
    """An adapter that is often right untrained: the layers above the exit change little."""
    adapter = Adapter(lm, exit_layer, architecture).start_from(lm)
    adapter.norm.load_state_dict(lm.hf.model.norm.state_dict())  # undamped: as sure as the target
    if adapter.deep_tap is not None:  # untrained it would not look at the deep state
        generator = torch.Generator().manual_seed(2)
        adapter.fuse.weight.data.normal_(std=0.02, generator=generator)
    return adapter.to(lm.device, lm.dtype).requires_grad_(False)


def chain_of(
    lm: Any, layer: Any, steps: int = 6, threshold: Any = 0.6, head: Any = None, kind=Kangaroo
) -> Any:
    return kind(lm, layer, KangarooConfig(steps=steps, threshold=threshold), head)


def tree_of(lm: Any, layer: Any, *options: Any, kind: Any = KangarooTree) -> Any:
    names = "steps", "threshold", "head", "top_k", "nodes", "min_confidence"
    settings = dict(zip(names, options, strict=False))
    head = settings.pop("head", None)
    return kind(lm, layer, KangarooTreeConfig(**settings), head)


def eagle_for(lm: TargetModel) -> EagleHead:
    """Untrained: it goes on with the state it was given, changed a little by all its parts."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head, size = EagleHead(lm), lm.config.hidden_size
    head.copy_layers(lm, lm.n_layers - 1)
    head.join.weight.data = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    generator = torch.Generator().manual_seed(3)
    last = ("join.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj")
    for name, weight in head.named_parameters():
        if name.endswith(last):
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return head.to(lm.device, lm.dtype).requires_grad_(False)


def eagle3_for(lm: TargetModel, vocabulary_K: Tensor | None = None) -> Eagle3Head:
    """Untrained: it goes on with the highest state it was given, changed by all its parts."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        head = Eagle3Head(lm, None, vocabulary_K).start_from(lm, vocabulary_K)
    size = lm.config.hidden_size
    with torch.no_grad():
        head.fuse.weight *= 0.3
        head.fuse.weight[:, -size:] += torch.eye(size)
        for norm in (head.embedding_norm, head.state_norm, head.middle_norm):
            norm.weight += 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    return head.to(lm.device, lm.dtype).requires_grad_(False)


def block_for(lm: TargetModel, vocabulary_K: Tensor | None = None, **parts: int) -> BlockHead:
    """Untrained: further places repeat the first, by their positions, places and neighbours."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        head = BlockHead(lm, EXIT, BlockHeadConfig(places=5, rank=8, **parts), vocabulary_K)
        head.start_from(lm, vocabulary_K)
        fusing = [head.fuse.weight] if head.deep_tap else []
        for weight in (head.places, head.table.weight, *fusing):
            weight.data.normal_(std=0.1)
    assert head.norm is not None
    head.norm.load_state_dict(lm.hf.model.norm.state_dict())
    return head.to(lm.device, lm.dtype).requires_grad_(False)


def recipe_of(name: str = "attention", **options: object) -> AdapterRecipe:
    """An adapter's recipe; its parts stand beside the other options."""
    parts: dict[str, Any] = {part: options.pop(part) for part in PARTS if part in options}
    return AdapterRecipe(**({"name": name, "architecture": AdapterHeadConfig(**parts)} | options))


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def texts_by(engine: Engine, prompts: Texts, *how: Any, **options: Any) -> Texts:
    """Prompt and continuation of each; `how` to write is as for `Engine.generate`."""
    done = engine.generate(prompts, *how, **options)
    return [p + generation.tokens for p, generation in zip(prompts, done, strict=True)]


@torch.inference_mode()
def admit_text(session: Session, row: int, text: list[int], **options: Any) -> None:
    """Let a row begin as if its prefill had given the last token of this text."""
    session.admit(row, Request(text[:-1], max_new_tokens=10, **options))
    batch = session.batch
    batch.texts[row][-1] = batch.tokens_BS[row, len(text) - 1] = text[-1]
    batch.done[row] = batch.done_B[row] = False


def vanilla_texts(lm: TargetModel, prompts: Texts, *how: Any) -> Texts:
    """The same, each decoded alone."""
    return texts_by(Engine(lm, Vanilla()), prompts, *how, batch_size=1)


@torch.no_grad()
def forward_logits(lm: TargetModel, tokens: Sequence[int]) -> Tensor:
    """Logits `[T, V]` by transformers' own forward and attention."""
    with lent_to_transformers(lm):
        return lm.hf(torch.tensor([list(tokens)])).logits[0]


def states_after(lm: TargetModel, tokens: Sequence[int], layers: int) -> Tensor:
    """The target's states `[1, T, D]` after so many layers, in a whole pass without a cache."""
    x_1TD, length = lm.embed(torch.tensor([list(tokens)])), len(tokens)
    return lm.run(x_1TD, None, lm.chunk(0, length, 0, length), range(layers))[0]


@torch.no_grad()
def hidden_states(lm: TargetModel, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    with lent_to_transformers(lm):
        return lm.hf(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states


def check_drafts(drafter: Any, check: Callable[[Batch, Draft, int], None]) -> None:
    """From now on show each draft of a drafter to `check`, for each row that is being written:
    texts are right whatever is drafted, so a gap in a cache would cost acceptance unseen."""
    propose = drafter.propose

    def checked(batch: Batch) -> Draft:
        draft = propose(batch)
        for row in (row for row in range(batch.size) if not batch.done_B[row]):
            check(batch, draft, row)
        return draft

    drafter.propose = checked


def check_chains(drafter: Any, expected: Callable[[list[int], int, int], list[int]]) -> set[int]:
    """From now on compare each chain of a drafter with what is expected by (text, seed, length);
    the lengths that were drafted, once they are."""
    lengths: set[int] = set()

    def check(batch: Batch, draft: Draft, row: int) -> None:
        drafted = draft.tokens_BN[row, 1:][draft.valid_BN[row, 1:]].tolist()
        assert drafted == expected(batch.texts[row], batch.seeds[row], len(drafted))
        lengths.add(len(drafted))

    check_drafts(drafter, check)
    return lengths


def paths_of(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root to every valid node, in their order; first those of the root."""
    parents_BN = draft.tree.parents_BN.expand_as(draft.tokens_BN)
    nodes = torch.stack([parents_BN, draft.tokens_BN, draft.valid_BN.long()], -1)[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for parent, token, _ in nodes[1:]:
        paths.append((*paths[parent], token))
    return [path for path, (*_, is_valid) in zip(paths, nodes, strict=True) if is_valid]


class Knowing(Drafter):
    """Knows the texts that vanilla decoding writes, so that it can be right or wrong at will; a row
    is recognised by what it has written so far."""

    def __init__(self, texts: Sequence[list[int]]):
        self.texts = texts

    def coming(self, text: list[int], count: int) -> list[int]:
        """The next `count` tokens of a text, as far as they are known."""
        whole = next((t for t in self.texts if t[: len(text)] == text), text)
        return whole[len(text) : len(text) + count]


class Scripted(Knowing):
    """A chain of tokens, `right` or wrong by their absolute position; those beyond a known text are
    padding. It may first fill all scratch slots of the target's cache, as a drafter may."""

    def __init__(
        self, texts: Texts, right: Callable[[int], bool], steps: int = 4, scribbles: bool = False
    ):
        super().__init__(texts)
        self.right, self.max_nodes, self.scribbles = right, steps, scribbles

    def propose(self, batch: Batch) -> Draft:
        tokens_BN = batch.last(1).repeat(1, self.max_nodes + 1)
        valid_BN = torch.zeros_like(tokens_BN, dtype=torch.bool)
        valid_BN[:, 0] = True
        for row in range(batch.size):
            if self.scribbles:
                end = (row + 1) * batch.n_slots
                scratch = slice(row * batch.n_slots + batch.lengths[row] - 1, end)
                for cached in (*batch.cache.keys, *batch.cache.values):
                    cached[scratch] = 100.0
            for i, token in enumerate(self.coming(batch.texts[row], self.max_nodes)):
                wrong = (token + 1) % VOCABULARY
                tokens_BN[row, i + 1] = token if self.right(batch.lengths[row] + i) else wrong
                valid_BN[row, i + 1] = True
        return Draft(tokens_BN, Tree.chain(self.max_nodes + 1, tokens_BN.device), valid_BN)


class Sometimes(Knowing, FromText):
    """Finds what follows at some lengths of the text, right but for its last token."""

    max_nodes = 3

    def continuation(self, row: int, text: list[int]) -> list[int]:
        if (len(text) + row) % 5 < 2:
            return []
        *right, last = self.coming(text, 3) or [None]
        return [] if last is None else [*right, (last + 1) % VOCABULARY]


def oracle(texts: Texts, steps: int = 4) -> Scripted:
    return Scripted(texts, lambda position: True, steps)


def adversary(texts: Texts) -> Scripted:
    """Always wrong, and it leaves rubbish in the scratch slots."""
    return Scripted(texts, lambda position: False, scribbles=True)


class RandomTree(Knowing):
    """Another random tree every round, of one topology if `shared`: right and wrong tokens on any
    branch, some nodes padding, with the states of `entry` target layers."""

    max_nodes = 9

    def __init__(self, lm: TargetModel, texts: Texts, shared: bool = False, entry: int = 0):
        super().__init__(texts)
        self.lm, self.shared, self.entry = lm, shared, entry
        self.generator = torch.Generator().manual_seed(0)
        self.moved = 0  # accepted draft tokens that did not lie in their final slot

    def propose(self, batch: Batch) -> Draft:
        size = 1 + self._integer(self.max_nodes + 1)
        parents_BN = random_parents(1 if self.shared else batch.size, size, self.generator)
        tree = Tree(parents_BN, max_depth=int(brute_depth(parents_BN).max()))
        depth_BN = tree.depth_BN.expand(batch.size, -1)
        tokens_BN = torch.randint(VOCABULARY, (batch.size, size), generator=self.generator)
        for row in range(batch.size):
            coming = self.coming(batch.texts[row], size)
            for node in range(1, size):
                depth = int(depth_BN[row, node])
                if depth <= len(coming) and self._integer(3) > 0:
                    tokens_BN[row, node] = coming[depth - 1]
        tokens_BN[:, :1] = batch.last(1).cpu()
        valid_BN = torch.rand(batch.size, size, generator=self.generator) < 0.9
        valid_BN[:, 0] = True
        device = self.lm.device
        tokens_BN, tree = tokens_BN.to(device), Tree(parents_BN.to(device), tree.max_depth)
        draft = Draft(tokens_BN, tree, valid_BN.to(device), entry=self.entry)
        if self.entry:
            meta = self.lm.forward_meta(tree, batch.base_B, batch.used + size, batch.n_slots)
            layers, x_BND = range(self.entry), self.lm.embed(tokens_BN)
            draft.hidden_BND, _ = self.lm.run(x_BND, batch.cache, meta, layers)
        return draft

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: object) -> None:
        step_P = torch.arange(verdict.path_BP.shape[1], device=verdict.path_BP.device)
        accepted_BP = step_P <= verdict.count_B[:, None]
        self.moved += int((accepted_BP & (verdict.path_BP != step_P)).sum())

    def _integer(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))


def random_parents(rows: int, size: int, generator: torch.Generator) -> Tensor:
    columns = [torch.randint(max(i, 1), (rows,), generator=generator) for i in range(size)]
    return torch.stack(columns, 1)


def brute_depth(parents_BN: Tensor) -> Tensor:
    depth_BN = torch.zeros_like(parents_BN)
    for row, parents in enumerate(parents_BN.tolist()):
        for node in range(1, len(parents)):
            depth_BN[row, node] = depth_BN[row, parents[node]] + 1
    return depth_BN


def longest_earlier_match(text: list[int]) -> tuple[int, list[int]]:
    """The length of the longest end of the text that stood before, and the places after it."""
    for length in range(len(text) - 1, 0, -1):
        gram = text[-length:]
        places = [end for end in range(length, len(text)) if text[end - length : end] == gram]
        if places:
            return length, places
    return 0, [0]
