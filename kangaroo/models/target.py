"""The target: runs ranges of layers of a Llama-like transformers model, neither copied nor patched.

Shapes: B rows, N nodes or tokens of a block, E occupied slots, D hidden size, V vocabulary,
R rows of a block, T tokens of a row, S slots, C head size.
"""

import logging
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, PreTrainedModel
from typing_extensions import Self

from kangaroo import cuda
from kangaroo.cpu import native
from kangaroo.cpu.backend import CpuBackend
from kangaroo.cpu.huge_pages import move_to_huge_pages
from kangaroo.cuda.backend import CudaBackend
from kangaroo.cuda.graphs import Graphs
from kangaroo.engine.backend import Backend, Chosen, Head, Layers, Sizes
from kangaroo.engine.cache import ForwardMeta, KVCache, Taps, occupied, power_of_two
from kangaroo.engine.tree import Tree
from kangaroo.models import layer_weights as weights
from kangaroo.models import supported
from kangaroo.models.attention import ATTENTION, attention, has_flash
from kangaroo.models.packed import device_of
from kangaroo.models.quantizing import check_quantized
from kangaroo.models.supported import FULL, WINDOWED, check_supported, ropes, windows
from kangaroo.utils.memory import weight_bytes

Pair = tuple[Tensor, Tensor]
PROMPT_CHUNK = 1024  # tokens of a prompt at a time without native code, to bound memory

log = logging.getLogger(__name__)

AttentionInterface.register(ATTENTION, attention)


class TargetModel(nn.Module):
    """A frozen causal language model, cut at any layer. Errors: `UnsupportedModel` if the engine
    cannot run its layers, positions or head."""

    def __init__(self, hf: PreTrainedModel):
        super().__init__()
        cuda.fix_precision()  # here, since all commands and `kangaroo.load` make a target
        check_supported(hf.config)
        check_quantized(hf)
        hf.set_attn_implementation(ATTENTION)
        self.hf = hf.eval().requires_grad_(False)
        self.config = hf.config
        self.layers = hf.model.layers
        self.head = hf.lm_head
        self.dtype = hf.model.norm.weight.dtype
        self.device = device_of(hf.model.embed_tokens)
        self.head_device = device_of(self.head)
        self.weight_bits: int | None = None  # of a quantized `meta_model`
        self.layer_devices = [next(layer.parameters()).device for layer in self.layers]
        self.decode_by(Backend())
        self.window, self.windowed = windows(self.config)
        self.has_two_ropes = len(ropes(self.config)) > 1
        self.rope_tables: dict[tuple[int, bool], Pair] = {}

    def compile_for_decoding(self, huge_pages: bool = True) -> Self:
        """Decode in native code on a CPU, if it knows the model and there is a compiler, or with
        Triton kernels and CUDA graphs on one GPU. With `huge_pages` weights are read faster.
        Training stays in PyTorch, and so do prompts that PyTorch reads faster."""
        sizes = self.sizes()
        devices = {*self.layer_devices, self.head_device}
        device, *other_devices = devices - {torch.device("meta")}  # of layers that are not loaded
        if device.type == "cuda" and not other_devices:
            graphs = Graphs(self.device) if weights.can_record(self.hf) else None
            is_plain = self._is_plain()
            has_kernels = cuda.runs_layers(self.dtype, sizes, is_plain, self.device, graphs)
            return self.decode_by(CudaBackend(graphs, sizes if has_kernels else None))
        fits = self.dtype in native.DTYPES and sizes.head_size <= native.WIDEST_HEAD
        knows_it = fits and self._is_plain(or_blocks=True)
        on_cpu = devices == {torch.device("cpu")}
        if other_devices:
            log.warning(
                f"'{self.name}' lies on {len(other_devices) + 1} devices: it decodes by "
                "transformers' modules, without kernels and graphs. For tensor parallelism serve "
                "it with vLLM and the plugin (integrations/vllm)."
            )
        library = native.library() if on_cpu and knows_it else None
        if library is None:
            return self.decode_by(Backend())
        if huge_pages:
            modules = (self.layers, self.hf.model.norm, self.head)
            move_to_huge_pages(x for module in modules for x in module.parameters())
        return self.decode_by(CpuBackend(library, sizes))

    def _is_plain(self, or_blocks: bool = False) -> bool:
        return weights.is_plain(self.hf, or_blocks) and self.config.hidden_act == "silu"

    def decode_by(self, backend: Backend) -> Self:
        """Decode by the layers and the head of this backend, if it has any."""
        self.backend = backend
        self.fast_layers: Layers | None = None
        if backend.runs_layers:
            self.fast_layers = backend.layers([weights.layer_weights(x) for x in self.layers])
        saves_much = 10 * weight_bytes(self.head) > weight_bytes(*self.layers)
        self.fast_head: Head | None = backend.head(weights.matrix_of(self.head), rounds=saves_much)
        return self

    def sizes(self) -> Sizes:
        """The sizes of this model's layers, and of an adapter's."""
        config = self.config
        attn = self.layers[0].self_attn
        return Sizes(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=attn.head_dim,
            feed_forward=config.intermediate_size,
            eps=config.rms_norm_eps,
            scaling=attn.scaling,
        )

    @property
    def name(self) -> str:
        """The model's name in messages and provenance."""
        return self.config.name_or_path or self.config.model_type

    @cached_property
    def fingerprint(self) -> str | None:
        """A hash of the weights; see `layer_weights.fingerprint`."""
        return weights.fingerprint(self.hf)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def prompt_chunk(self, length: int) -> int:
        chunk = self.fast_layers.prompt_chunk(length) if self.fast_layers else None
        return chunk or PROMPT_CHUNK

    @property
    def context(self) -> int:
        """The maximal number of positions."""
        return supported.context(self.config)

    def eos_ids(self) -> list[int]:
        """The tokens that end a text."""
        return supported.eos_ids(self.config, self.hf.generation_config.eos_token_id)

    def new_norm(self, eps: float | None = None) -> nn.Module:
        """A norm of the target's own class, by default with its epsilon."""
        return type(self.hf.model.norm)(self.config.hidden_size, eps or self.config.rms_norm_eps)

    def new_cache(
        self, batch_size: int, n_slots: int, devices: list[torch.device] | None = None
    ) -> KVCache:
        """A KV cache for all layers, or for one layer of their shape on each of `devices`."""
        sizes = self.sizes()
        return KVCache.empty(
            batch_size,
            n_slots,
            n_heads=sizes.kv_heads,
            head_size=sizes.head_size,
            dtype=self.dtype,
            devices=self.layer_devices if devices is None else devices,
        )

    def forward_meta(
        self,
        tree: Tree,
        start_B: Tensor,
        used: int,
        n_slots: int,
        below: int = 0,
        recorded: tuple[str, KVCache] | None = None,
    ) -> ForwardMeta:
        """The block of a tree whose nodes take consecutive slots.

        Args:
            start_B: the first slot, which is also the position of the root.
            used: all committed tokens and nodes lie below this slot.
            below: how far below 0 `start` may be. Nodes there go to hidden free slots at the end.
            recorded: purpose and cache of a recorded step, whose next block overwrites this one.
        """
        extent = self.extent(n_slots, used + below)
        by_position = self.backend.attends_by_position and self.window is None
        by_position = by_position and tree.is_chain and not below

        def place(start_B: Tensor, tree: Tree) -> ForwardMeta:
            if not by_position:
                return self.forward_meta_of(*tree.place(start_B, extent, below), n_slots)
            at_BN = start_B[:, None] + torch.arange(tree.size, device=start_B.device)
            rows = slice(0, len(at_BN))
            rope = self._rope(n_slots, at_BN)
            return ForwardMeta(at_BN, at_BN, None, extent, rows, rope, recordable=True)

        if recorded is None:
            return place(start_B, tree)
        purpose, cache = recorded
        tokens = len(start_B) * tree.size
        key = ("block", purpose, tree.is_chain, tree.size, tree.max_depth, extent, n_slots, below)
        return self.backend.replay((cache,), key, place, start_B, tree, tokens=tokens)

    def forward_meta_of(
        self,
        slots_BN: Tensor,
        positions_BN: Tensor,
        hidden_BNE: Tensor,
        n_slots: int,
        positions_BE: Tensor | None = None,
    ) -> ForwardMeta:
        """A block of all rows. `hidden_BNE` is true for slots that a token does not see. The slots'
        `positions_BE` are needed if drafted tokens lie outside the block."""
        meta = ForwardMeta(
            slots_BN,
            positions_BN,
            bias_R1TE=self._bias(hidden_BNE),
            extent=hidden_BNE.shape[-1],
            rows=slice(0, len(slots_BN)),
            rope=self._rope(n_slots, positions_BN),
            recordable=True,
        )
        return self._with_window(meta, n_slots, hidden_BNE, positions_BE)

    def chunk(self, start: int, stop: int, row: int, n_slots: int) -> ForwardMeta:
        """The block of a prefill chunk: positions `start` to `stop` of a row."""
        positions_1T = torch.arange(start, stop, device=self.device)[None]
        bias: Any = None
        extent = stop
        if start > 0 and (self.backend.attends_by_position or has_flash(self.device, self.dtype)):
            bias = causal_lower_right(stop - start, stop)
        elif start > 0:
            extent = occupied(n_slots, stop)
            bias = self._bias(torch.arange(extent, device=self.device) > positions_1T[..., None])
        meta = ForwardMeta(
            positions_1T,
            positions_1T,
            bias_R1TE=bias,
            extent=extent,
            rows=slice(row, row + 1),
            rope=self._rope(n_slots, positions_1T),
        )
        return self._with_window(meta, n_slots, None, None)

    def extent(self, n_slots: int, used: int) -> int:
        """The number of slots that attention reads to cover `used` ones."""
        return occupied(n_slots, used, recorded=self.backend.records)

    def _with_window(
        self,
        meta: ForwardMeta,
        n_slots: int,
        hidden_RTE: Tensor | None,
        positions_RE: Tensor | None,
    ) -> ForwardMeta:
        """Add mask and RoPE of layers with a window; without `hidden` the block is causal."""
        if self.window is None:
            return meta
        if positions_RE is None:
            slots_RE = torch.arange(meta.extent, device=self.device).repeat(len(meta.slots_RT), 1)
            positions_RE = slots_RE.scatter(1, meta.slots_RT, meta.positions_RT)
        distance_RTE = meta.positions_RT[..., None] - positions_RE[:, None]
        hidden_RTE = distance_RTE < 0 if hidden_RTE is None else hidden_RTE
        bias_R1TE = self._bias(hidden_RTE | (distance_RTE >= self.window))
        rope = self._rope(n_slots, meta.positions_RT, windowed=True)
        return replace(meta, windowed=(bias_R1TE, *rope))

    def _bias(self, hidden_RTE: Tensor) -> Tensor:
        bias = torch.zeros(hidden_RTE.shape, dtype=self.dtype, device=hidden_RTE.device)
        return bias.masked_fill_(hidden_RTE, -torch.inf)[:, None]

    def _rope(self, n_slots: int, positions_RT: Tensor, windowed: bool = False) -> Pair:
        cos_SC, sin_SC = self.rope_table(n_slots, windowed)
        return cos_SC[positions_RT], sin_SC[positions_RT]

    def rope_table(self, n_slots: int, windowed: bool = False) -> Pair:
        """RoPE's cosine and sine, each `[S, C]`, for at least `n_slots` positions. They are kept,
        since CUDA graphs read them in place."""
        key = power_of_two(n_slots), windowed and self.has_two_ropes
        if key not in self.rope_tables:
            layer_type = WINDOWED if windowed or all(self.windowed) else FULL
            options = {"layer_type": layer_type} if self.has_two_ropes else {}
            positions_1S = torch.arange(key[0], device=self.device)[None]
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            cos_1SC, sin_1SC = self.hf.model.rotary_emb(like, position_ids=positions_1S, **options)
            self.rope_tables[key] = cos_1SC[0], sin_1SC[0]
        return self.rope_tables[key]

    def embed(self, tokens_BN: Tensor) -> Tensor:
        """The tokens' embeddings, `[B, N, D]`."""
        embedded_BND = self.hf.model.embed_tokens(tokens_BN)
        multiplier = getattr(self.config, "embedding_multiplier", 1)  # Granite's
        return embedded_BND if multiplier == 1 else embedded_BND * multiplier

    def run(
        self,
        x_BND: Tensor,
        cache: KVCache | None,
        meta: ForwardMeta,
        layers: range,
        taps: Collection[int] = (),
    ) -> tuple[Tensor, Taps]:
        """Run a range of layers over a block, and write keys and values to the block's slots.
        Without a cache the block is a causal whole text (training). Returns the output of the last
        layer, before the final norm, and the tapped states by the number of layers below them."""
        tapped = {layers.start: x_BND} if layers.start in taps else {}
        bounds = sorted({tap for tap in taps if tap in layers} | {layers.start, layers.stop})
        for start, stop in pairwise(bounds):
            x_BND = self._run(x_BND, cache, meta, range(start, stop))
            if stop in taps:
                tapped[stop] = x_BND
        return x_BND, tapped

    def _run(
        self, x_BND: Tensor, cache: KVCache | None, meta: ForwardMeta, layers: range
    ) -> Tensor:
        def run(x_BND: Tensor, meta: ForwardMeta) -> Tensor:
            if self.fast_layers and self.fast_layers.takes(x_BND, cache, meta):
                return self.fast_layers(x_BND, cache, meta, layers)
            return self._eager(x_BND, cache, meta, layers)

        if cache is None:
            return run(x_BND, meta)
        key = ("layers", self.n_layers, layers, meta.rows.start)
        return self.backend.replay((cache,), key, run, x_BND, meta, keep=True)

    def _eager(
        self, x_BND: Tensor, cache: KVCache | None, meta: ForwardMeta, layers: range
    ) -> Tensor:
        view = None
        for index in layers:
            device = self.layer_devices[index]
            if view is None or device != x_BND.device:
                x_BND = x_BND.to(device)
                meta = meta.to(device)
                view = cache.at(meta) if cache is not None else None
            layer_meta = meta.for_layer(self.windowed[index])
            x_BND = self.layers[index](
                x_BND,
                attention_mask=layer_meta.bias_R1TE,
                position_ids=layer_meta.positions_RT,
                position_embeddings=layer_meta.rope,
                past_key_values=view,
            )
        return x_BND

    def logits(self, x_BND: Tensor) -> Tensor:
        """`[B, N, V]` from the output of the last layer; in float32 from native code or kernels."""
        x_MD = x_BND.flatten(0, 1)
        head = self.fast_head
        if head and head.takes(x_MD):
            return head(x_MD, self.hf.model.norm.weight).unflatten(0, x_BND.shape[:2])
        return self.read_out(self.norm(x_BND))

    def choose(self, x_BND: Tensor) -> Chosen | None:
        """As `Head.choose`: the likeliest next tokens and their probabilities, both `[B, N]`."""
        head = self.fast_head
        return None if head is None else head.choose(x_BND, self.hf.model.norm.weight)

    def likeliest(self, x_BND: Tensor) -> Tensor:
        """The likeliest next tokens, `[B, N]`, from the output of the last layer."""
        x_MD = x_BND.flatten(0, 1)
        head = self.fast_head
        if head and head.takes(x_MD):
            chosen_M = head.likeliest(x_MD, self.hf.model.norm.weight)
            if chosen_M is not None:
                return chosen_M.unflatten(0, x_BND.shape[:2])
        return self.logits(x_BND).argmax(-1)

    def norm(self, x_BND: Tensor) -> Tensor:
        """The final norm of the last layer's output, on the norm's device."""
        return self.hf.model.norm(x_BND.to(self.hf.model.norm.weight.device))

    def read_out(self, normed_BND: Tensor) -> Tensor:
        """Logits `[B, N, V]` of normed states."""
        # a matrix, since torch's 3-d matmul would copy the whole head for a strided slice
        logits = self.head(normed_BND.flatten(0, 1).to(self.head_device)).to(self.device)
        return self.finish_logits(logits).unflatten(0, normed_BND.shape[:2])

    def finish_logits(self, products: Tensor) -> Tensor:
        """Logits from the head's products, which Granite scales and Gemma 2 caps."""
        scaling = getattr(self.config, "logits_scaling", 1)
        cap = getattr(self.config, "final_logit_softcapping", None)
        logits = products if scaling == 1 else products / scaling
        return logits if cap is None else torch.tanh(logits / cap) * cap
