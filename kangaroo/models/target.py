"""The target: drives a transformers Llama-like model by ranges of its layers. Nothing is copied or
patched: layers, norm, head and rotary embedding are the model's own modules.

Shapes: B rows, N nodes or tokens of a block, E occupied slots, D hidden size, V vocabulary,
R rows of a block, T tokens of a row, S slots, C head size.
"""

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
from kangaroo.cpu.huge_pages import move_to_huge_pages
from kangaroo.cpu.native import Sizes
from kangaroo.cuda.graphs import Graphs
from kangaroo.engine.acceleration import Acceleration
from kangaroo.engine.cache import ForwardMeta, KVCache, Taps, occupied, power_of_two
from kangaroo.engine.tree import Tree
from kangaroo.models import layer_weights as weights_of
from kangaroo.models.attention import ATTENTION, attention, has_flash
from kangaroo.models.quantizing import check_head, check_linears
from kangaroo.models.supported import FULL, WINDOWED, check_supported, eos_ids, ropes, window_of
from kangaroo.utils.errors import ConfigError

Pair = tuple[Tensor, Tensor]
PROMPT_CHUNK = 1024  # tokens of a prompt that bound its memory, without native code

AttentionInterface.register(ATTENTION, attention)


class TargetModel(nn.Module):
    """A frozen causal language model, cut at any layer. Errors: `UnsupportedModel` for one whose
    layers, positions or head this engine cannot drive."""

    def __init__(self, hf: PreTrainedModel):
        super().__init__()
        check_supported(hf.config)
        check_head(hf)
        check_linears(hf)
        hf.set_attn_implementation(ATTENTION)
        self.hf = hf.eval().requires_grad_(False)
        self.config = hf.config
        self.layers = hf.model.layers
        self.head = hf.lm_head
        self.dtype = self.head.weight.dtype
        self.device = hf.model.embed_tokens.weight.device
        self.weight_bits: int | None = None  # of a quantized `meta_model`, whose weights tell less
        self.layer_devices = [next(layer.parameters()).device for layer in self.layers]
        self.acceleration = Acceleration()
        self.fast_layers: Any = None  # a `Stack` of native code or of kernels
        self.fast_head: Any = None  # a `Head` of the same
        self.window, self.windowed = window_of(self.config)
        self.has_two_ropes = len(ropes(self.config)) > 1
        self.rope_tables: dict[tuple[int, bool], Pair] = {}

    def compile_for_decoding(self, huge_pages: bool = True) -> Self:
        """Decode in native code on a CPU, where the model is of its kind and there is a compiler,
        with `huge_pages` from where weights are read fastest; in Triton's kernels and CUDA graphs
        on one GPU. Training stays as it is, and so do prompts that PyTorch reads faster."""
        library = graphs = kernels = None
        sizes, dtype = self.sizes(), self.dtype
        plain = weights_of.is_plain(self.hf) and self.config.hidden_act == "silu"
        device, *others = {*self.layer_devices, self.head.weight.device}
        if device.type == "cuda" and not others:
            graphs = Graphs(self.device) if weights_of.can_record(self.hf) else None
            kernels = cuda.usable_layers(dtype, sizes, plain, self.device)
        elif device.type == "cpu" and not others and plain and dtype in native.DTYPES:
            library = native.library() if sizes.head_size <= native.WIDEST_HEAD else None
            if library is not None and huge_pages:
                norms = self.hf.model.norm.parameters()
                move_to_huge_pages((*self.layers.parameters(), *norms, self.head.weight))
        return self.decode_by(Acceleration(library, sizes, graphs, kernels))

    def decode_by(self, acceleration: Acceleration) -> Self:
        """Leave a step of decoding to what is faster."""
        reads = acceleration.library or acceleration.kernels
        weights = [weights_of.layer_weights(layer) for layer in self.layers if reads]
        self.fast_layers = acceleration.part("Stack", weights)
        self.fast_head = acceleration.part("Head", self.head.weight)
        self.acceleration = acceleration
        return self

    def shard(self, device: torch.device) -> None:
        """Spread the layers' weights over all processes, for training; a layer is whole only while
        it runs, and this process computes on `device`. All then have to run the same layers in the
        same order. The rest stays whole: the loss reads the head more than once a batch. Errors:
        `ConfigError` for a quantized target, whose weights are no plain tensors."""
        # imported here: it takes most of a second, and only training at scale needs it
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if weights_of.packed_linears(self.layers):
            raise ConfigError(
                "trainer.shard_target=true spreads plain weights, and this target is quantized. "
                "Leave one of them out: what is quantized takes a half or a quarter of the memory."
            )
        _ = self.fingerprint  # while layers are whole
        self.decode_by(Acceleration())  # what decodes faster holds on to whole layers
        self.rope_tables.clear()
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        model = self.hf.model
        for module in (model.embed_tokens, model.rotary_emb, model.norm, self.head):
            module.to(device)
        self.device, self.layer_devices = device, [device] * self.n_layers

    def sizes(self) -> Sizes:
        """What native code has to know of this model's layers, and of an adapter's."""
        config, attn = self.config, self.layers[0].self_attn
        heads = config.num_attention_heads, config.num_key_value_heads, attn.head_dim
        other = config.intermediate_size, config.rms_norm_eps, attn.scaling
        return Sizes(config.hidden_size, *heads, *other)

    @property
    def name(self) -> str:
        """What messages and provenance call the model."""
        return self.config.name_or_path or self.config.model_type

    @cached_property
    def fingerprint(self) -> str | None:
        """Tells these weights from others of the same shape; see `layer_weights`."""
        return weights_of.fingerprint(self.hf)

    @property
    def n_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.layers)

    def prompt_chunk(self, length: int) -> int:
        """The most tokens of a prompt of this length that are run at a time."""
        chunk = self.fast_layers.prompt_chunk(length) if self.fast_layers else None
        return chunk or PROMPT_CHUNK

    @property
    def context(self) -> int:
        """The most positions that the model was made for."""
        return self.config.max_position_embeddings

    def eos_ids(self) -> list[int]:
        """Every token that ends a text."""
        return eos_ids(self.hf)

    def new_norm(self) -> nn.Module:
        """A norm of the target's own class."""
        return type(self.hf.model.norm)(self.config.hidden_size, self.config.rms_norm_eps)

    def new_cache(
        self, batch_size: int, n_slots: int, devices: list[torch.device] | None = None
    ) -> KVCache:
        """A cache for all layers, each on its layer's device; with `devices` for as many layers of
        this model's shape, which an adapter's are too."""
        sizes, devices = self.sizes(), self.layer_devices if devices is None else devices
        return KVCache(batch_size, n_slots, sizes.kv_heads, sizes.head_size, self.dtype, devices)

    def extent(self, n_slots: int, used: int) -> int:
        """How many slots attention reads so that `used` are covered."""
        return occupied(n_slots, used, recorded=self.acceleration.graphs is not None)

    def forward_meta(
        self,
        tree: Tree,
        start_B: Tensor,
        used: int,
        n_slots: int,
        below: int = 0,
        recorded: tuple[str, KVCache] | None = None,
    ) -> ForwardMeta:
        """Place the nodes of `tree` in consecutive slots from `start` on, after what lies below.

        Args:
            start_B: first slot, which is also the position of the root.
            used: no row has a committed token or a node at or above this slot.
            below: how far below 0 `start` may lie: nodes there go to free slots at the end, unseen.
            recorded: a use, and the cache of recorded steps; the next block of both overwrites it.
        """
        extent = self.extent(n_slots, used + below)

        def work(start_B: Tensor, tree: Tree) -> ForwardMeta:
            return self.forward_meta_of(*tree.place(start_B, extent, below), n_slots)

        if recorded is None:
            return work(start_B, tree)
        (use, cache), tokens = recorded, len(start_B) * tree.size
        key = ("block", use, tree.is_chain, tree.size, tree.max_depth, extent, n_slots, below)
        return self.acceleration.replay((cache,), key, work, start_B, tree, tokens=tokens)

    def forward_meta_of(
        self,
        slots_BN: Tensor,
        positions_BN: Tensor,
        hidden_BNE: Tensor,
        n_slots: int,
        positions_BE: Tensor | None = None,
    ) -> ForwardMeta:
        """A block of all rows; `hidden_BNE` is true for the slots that a token does not see, and
        `positions_BE` says what lies in them; None where all drafted tokens are the block's."""
        bias, rope = self._bias(hidden_BNE), self._rope(n_slots, positions_BN)
        here, extent, rows = (slots_BN, positions_BN), hidden_BNE.shape[-1], slice(0, len(slots_BN))
        meta = ForwardMeta(*here, bias, extent, rows, rope, recordable=True)
        return self._with_window(meta, n_slots, hidden_BNE, positions_BE)

    def chunk(self, start: int, stop: int, row: int, n_slots: int) -> ForwardMeta:
        """Positions `start` to `stop` of one row: a chunk of a prefill."""
        positions_1T = torch.arange(start, stop, device=self.device)[None]
        bias: Any = None
        extent = stop
        if start > 0 and (self.acceleration.kernels or has_flash(self.device, self.dtype)):
            bias = causal_lower_right(stop - start, stop)
        elif start > 0:
            extent = occupied(n_slots, stop)
            slots_E = torch.arange(extent, device=self.device)
            bias = self._bias(slots_E > positions_1T[..., None])
        rows, rope = slice(row, row + 1), self._rope(n_slots, positions_1T)
        meta = ForwardMeta(positions_1T, positions_1T, bias, extent, rows, rope)
        return self._with_window(meta, n_slots, None, None)

    def _with_window(
        self,
        meta: ForwardMeta,
        n_slots: int,
        hidden_RTE: Tensor | None,
        positions_RE: Tensor | None,
    ) -> ForwardMeta:
        """The block, with the mask and the rotation of layers that do not see past their window, if
        there are such; without `hidden` a token sees what lies before it."""
        if self.window is None:
            return meta
        if positions_RE is None:
            slots_RE = torch.arange(meta.extent, device=self.device).repeat(len(meta.slots_RT), 1)
            positions_RE = slots_RE.scatter(1, meta.slots_RT, meta.positions_RT)
        back_RTE = meta.positions_RT[..., None] - positions_RE[:, None]
        hidden_RTE = back_RTE < 0 if hidden_RTE is None else hidden_RTE
        rope = self._rope(n_slots, meta.positions_RT, windowed=True)
        return replace(meta, windowed=(self._bias(hidden_RTE | (back_RTE >= self.window)), *rope))

    def _bias(self, hidden_RTE: Tensor) -> Tensor:
        bias = torch.zeros(hidden_RTE.shape, dtype=self.dtype, device=hidden_RTE.device)
        return bias.masked_fill_(hidden_RTE, -torch.inf)[:, None]

    def _rope(self, n_slots: int, positions_RT: Tensor, windowed: bool = False) -> Pair:
        cos_SC, sin_SC = self.rope_table(n_slots, windowed)
        return cos_SC[positions_RT], sin_SC[positions_RT]

    def rope_table(self, n_slots: int, windowed: bool = False) -> Pair:
        """Cosine and sine by the model's own rotary embedding, each `[S, C]`, of all positions
        below `n_slots` at the least; it is kept, since graphs read where it lies."""
        key = power_of_two(n_slots), windowed and self.has_two_ropes
        if key not in self.rope_tables:
            kind = WINDOWED if windowed or all(self.windowed) else FULL
            by_kind = {"layer_type": kind} if self.has_two_ropes else {}
            positions_1S = torch.arange(key[0], device=self.device)[None]
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            cos_1SC, sin_1SC = self.hf.model.rotary_emb(like, position_ids=positions_1S, **by_kind)
            self.rope_tables[key] = cos_1SC[0], sin_1SC[0]
        return self.rope_tables[key]

    def embed(self, tokens_BN: Tensor) -> Tensor:
        """The tokens' embeddings, `[B, N, D]`."""
        kernels, table = self.acceleration.kernels, self.hf.model.embed_tokens
        if kernels is None or torch.is_grad_enabled():
            return table(tokens_BN) * getattr(self.config, "embedding_multiplier", 1)  # Granite's
        return kernels.embed(tokens_BN, table.weight)

    def run(
        self,
        x_BND: Tensor,
        cache: KVCache | None,
        meta: ForwardMeta,
        layers: range,
        taps: Collection[int] = (),
    ) -> tuple[Tensor, Taps]:
        """Run a range of layers over a block, writing its keys and values at the block's slots: the
        output of the last layer (before the final norm) and the tapped states, by the number of
        layers below them. Without a cache the block is causal, and nothing follows (training)."""
        tapped = {layers.start: x_BND} if layers.start in taps else {}
        ends = sorted({tap for tap in taps if tap in layers} | {layers.start, layers.stop})
        for start, stop in pairwise(ends):
            x_BND = self._run(x_BND, cache, meta, range(start, stop))
            if stop in taps:
                tapped[stop] = x_BND
        return x_BND, tapped

    def _run(
        self, x_BND: Tensor, cache: KVCache | None, meta: ForwardMeta, layers: range
    ) -> Tensor:
        def work(x_BND: Tensor, meta: ForwardMeta) -> Tensor:
            if self.fast_layers and self.fast_layers.takes(x_BND, meta):
                return self.fast_layers(x_BND, cache, meta, layers)
            return self._eager(x_BND, cache, meta, layers)

        if cache is not None:
            key = ("layers", self.n_layers, layers, meta.rows.start)
            return self.acceleration.replay((cache,), key, work, x_BND, meta, keep=True)
        if self.acceleration.kernels and self.fast_layers.takes_text(x_BND, meta):
            return self.fast_layers.run_text(x_BND, meta, layers)
        return self._eager(x_BND, None, meta, layers)

    def _eager(
        self, x_BND: Tensor, cache: KVCache | None, meta: ForwardMeta, layers: range
    ) -> Tensor:
        view = None
        for index in layers:
            device = self.layer_devices[index]
            if view is None or device != x_BND.device:
                x_BND, meta = x_BND.to(device), meta.to(device)
                view = cache.at(meta) if cache is not None else None
            here = meta.for_layer(self.windowed[index])
            x_BND = self.layers[index](
                x_BND,
                attention_mask=here.bias_R1TE,
                position_ids=here.positions_RT,
                position_embeddings=here.rope,
                past_key_values=view,
            )
        return x_BND

    def logits(self, x_BND: Tensor) -> Tensor:
        """`[B, N, V]` from the output of the last layer; in float32 from native code or kernels."""
        x_MD, head = x_BND.flatten(0, 1), self.fast_head
        if head and head.takes(x_MD):
            return head(x_MD, self.hf.model.norm.weight).unflatten(0, x_BND.shape[:2])
        return self.read_out(self.norm(x_BND))

    def choose(self, x_BND: Tensor) -> tuple[Tensor, Tensor] | None:
        """The likeliest token after each and its chance, both `[B, N]`, by kernels; else None."""
        if self.acceleration.kernels is None:
            return None
        return self.fast_head.choose(x_BND, self.hf.model.norm.weight)

    def norm(self, x_BND: Tensor) -> Tensor:
        """The final norm, on its own device, of the output of the last layer."""
        return self.hf.model.norm(x_BND.to(self.hf.model.norm.weight.device))

    def read_out(self, normed_BND: Tensor) -> Tensor:
        """`[B, N, V]` from a normed state."""
        # as a matrix: for a strided slice, torch's 3-d matmul would copy the head's whole weight
        logits = self.head(normed_BND.flatten(0, 1).to(self.head.weight.device)).to(self.device)
        return self.finish_logits(logits).unflatten(0, normed_BND.shape[:2])

    def finish_logits(self, products: Tensor) -> Tensor:
        """The logits, from the head's products: Granite scales these, Gemma 2 caps them."""
        scaling = getattr(self.config, "logits_scaling", 1)
        cap = getattr(self.config, "final_logit_softcapping", None)
        logits = products if scaling == 1 else products / scaling
        return logits if cap is None else torch.tanh(logits / cap) * cap
