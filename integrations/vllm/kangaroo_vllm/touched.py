"""Checks that an untested version of vLLM still has the code that this package builds on."""

import ast
import hashlib
import inspect
import io
import logging
import pkgutil
import re
import textwrap
import tokenize
from typing import Any

from kangaroo_vllm.checks import Unsupported

TESTED = ("0.32.0", "0.33.0")  # versions of vLLM

# The functions that this package calls, with its arguments.
CALLED = """
vllm.compilation.backends:set_model_tag tag
vllm.compilation.decorators:support_torch_compile dynamic_arg_dims
vllm.config:set_current_vllm_config vllm_config
vllm.distributed:tensor_model_parallel_all_reduce input_
vllm.forward_context:get_forward_context
vllm.forward_context:set_forward_context attn_metadata vllm_config num_tokens slot_mapping
    cudagraph_runtime_mode batch_descriptor
vllm.model_executor.layers.layernorm:RMSNorm hidden_size eps
vllm.model_executor.model_loader.utils:process_weights_after_loading model model_config
    target_device
vllm.model_executor.models.llama:LlamaAttention config hidden_size num_heads num_kv_heads
    max_position_embeddings bias bias_o_proj cache_config prefix
vllm.model_executor.models.llama:LlamaMLP hidden_size intermediate_size hidden_act bias prefix
vllm.model_executor.models.llama:LlamaForCausalLM.compute_logits self hidden_states
vllm.model_executor.models.utils:AutoWeightsLoader module
vllm.model_executor.models.utils:AutoWeightsLoader.load_weights self weights mapper
vllm.model_executor.models.utils:WeightsMapper orig_to_new_stacked
vllm.triton_utils.dispatcher:register_kernels overrides
vllm.utils.torch_utils:set_default_torch_dtype dtype
vllm.v1.attention.backend:AttentionMetadataBuilder.build self common_prefix_len
    common_attn_metadata fast_build
vllm.v1.attention.backend:CommonAttentionMetadata query_start_loc query_start_loc_cpu seq_lens
    seq_lens_cpu_upper_bound num_reqs num_actual_tokens max_query_len max_seq_len
    block_table_tensor slot_mapping is_prefilling
vllm.v1.attention.backend:subclass_attention_backend name_prefix attention_backend_cls builder_cls
vllm.v1.cudagraph_dispatcher:CudagraphDispatcher vllm_config
vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch self num_tokens
vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.initialize_cudagraph_keys self cudagraph_mode
vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p logits k p
"""

# Digests of functions that this package replaces, or that call it.
CODE = {
    "vllm.model_executor.models.llama:LlamaAttention.forward": "52a4c32d4797",
    "vllm.model_executor.models.llama:LlamaDecoderLayer.forward": "1a826318fe6b",
    "vllm.model_executor.models.llama:LlamaModel.forward": "c746e1aa9c11",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": "20c3008ad318",
    "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer": "f21ff0012460",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids": "2a0d973823dc",
}


def check() -> None:
    """Warn of a vLLM that is not among `TESTED`. Errors: `Unsupported` where it has changed
    something that this package builds on."""
    import vllm

    changed = changes()
    tested = " and ".join(TESTED)
    if changed:
        raise Unsupported(
            f"kangaroo-vllm was tested with vLLM {tested}, and this is vLLM {vllm.__version__}, "
            f"where this has changed: {'; '.join(changed)}. Install a vLLM of these, or a "
            "kangaroo-vllm made for this one; without it, an adapter exported with to=draft_model "
            "runs in any vLLM."
        )
    if vllm.__version__.partition("+")[0] not in TESTED:
        logging.getLogger("vllm").warning(
            "kangaroo-vllm was tested with vLLM %s, not with %s; what it builds on is as it was.",
            tested,
            vllm.__version__,
        )


def changes() -> list[str]:
    """The differences of this vLLM, by name."""
    changed = []
    entries = map(str.split, re.split(r"\n(?=v)", CALLED.strip()))
    called = {name: arguments for name, *arguments in entries}
    for name in (*called, *CODE):
        try:
            value = pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            changed.append(f"{name} is not there")
            continue
        if name in CODE:
            changed += [name] * (digest(value) != CODE[name])
            continue
        parameters, arguments = inspect.signature(value).parameters, set(called[name])
        needed = {
            parameter.name
            for parameter in parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        unknown, missing = arguments - parameters.keys(), needed - arguments
        for problem, names in (("takes no", unknown), ("needs", missing)):
            if names:
                changed.append(f"{name} {problem} {', '.join(sorted(names))}")
    return changed


def digest(value: Any) -> str:
    """A digest of a function's code, or of its branch for `custom_class`, without comments and
    layout. It is of the text, since syntax trees differ between versions of Python."""
    try:
        source = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return "no Python code"
    branches = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)]
    ours = [x.body for x in branches if "'custom_class'" in ast.unparse(x.test)]
    if ours:
        source = "\n".join(ast.get_source_segment(source, line) or "" for line in ours[0])
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text = "".join(token.string for token in tokens if token.type != tokenize.COMMENT)
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()[:12]
