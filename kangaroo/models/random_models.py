"""Models with random weights and a tokenizer over bytes, for fast commands and tests."""

from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kangaroo.models.gguf_tokenizer import byte_level_tokenizer
from kangaroo.models.prompts import chat_template
from kangaroo.utils.errors import ConfigError

TINY = "random:tiny"
RANDOM = "random:"
SMALL = "small:"
SIZES = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads max_position_embeddings
""".split()
# By `model.path`, fields of transformers' config.
SHAPES = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text("utf-8"))
for _fields in SHAPES.values():
    _fields.update(zip(SIZES, _fields.pop("sizes"), strict=True))


def known_shape(path: str) -> dict[str, Any] | None:
    """Fields of transformers' config for a path in `SHAPES`; None for any other. The prefix
    `small:` makes the sizes small, and keeps family, groups of heads and context."""
    shape = SHAPES.get(path.removeprefix(SMALL))
    if shape is None or not path.startswith(SMALL):
        return shape
    group = shape["num_attention_heads"] // shape["num_key_value_heads"]
    kv_heads = 2 if group > 1 else 4
    heads = kv_heads * group
    sizes = 259, 16 * heads, 32 * heads, 6, heads, kv_heads  # the vocabulary of `byte_tokenizer`
    return shape | dict(zip(SIZES, sizes, strict=False))


def random_model(
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    deep_scale: float = 1.0,
    **overrides: Any,
) -> PreTrainedModel:
    """A small model with random weights, in eval mode, for the tokens of `byte_tokenizer`. Its
    weights are larger than usual, so that the output depends on the input.

    Args:
        architecture: transformers' `model_type`.
        deep_scale: multiplies what the last two thirds of the layers add to the residual stream: if
            it is small, a shallow drafter is often right, as in a trained model.
        overrides: fields of transformers' config.
    """
    fields = dict[str, Any](zip(SIZES, (259, 64, 128, 6, 4, 2, 8192), strict=True))
    fields |= {"head_dim": 16, "initializer_range": 0.25, "sliding_window": None}
    fields |= {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    config = AutoConfig.for_model(architecture, **fields | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers[config.num_hidden_layers // 3 :]:
        for name, weight in layer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight.data *= deep_scale
            elif hasattr(layer, "post_feedforward_layernorm") and name.startswith("post_"):
                weight.data += deep_scale - 1  # it was 1, or in Gemma 0, which stands for 1
    # RoPE's frequencies stay float32, as in a loaded checkpoint
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


def random_target(path: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The random model of a path that begins with `RANDOM`. Errors: `ConfigError`."""
    if path == TINY:
        return random_model(deep_scale=0.15, dtype=dtype).to(device)  # type: ignore[arg-type]
    shape = known_shape(path.removeprefix(RANDOM))
    if shape is None:
        names = ", ".join(SHAPES)
        raise ConfigError(f"model.path={path} names no known shape; these are {names}.")
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A ChatML tokenizer with one token per byte, then bos, eos and pad."""
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    return byte_level_tokenizer(
        BPE({char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}, []),
        [ByteLevel(add_prefix_space=False, use_regex=False)],
        list(special.values()),
        chat_template=chat_template("chatml"),
        **special,
    )
