"""Which models the engine can drive, by their config alone."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from kangaroo.utils.errors import UnsupportedModel

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def check_supported(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModel` for a model whose layers or positions this engine cannot drive."""
    name = config.name_or_path or config.model_type
    if config.model_type not in SUPPORTED:
        raise UnsupportedModel(
            f"'{name}' is a {config.model_type} model; supported are {', '.join(SUPPORTED)}."
        )
    if quantization := getattr(config, "quantization_config", None):
        fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
        raise UnsupportedModel(
            f"'{name}' is quantised ({fields.get('quant_method', 'format not named')}), which is "
            "not supported yet. Pass the checkpoint that it was made from, in bfloat16 or float16."
        )
    layer_types = set(getattr(config, "layer_types", None) or ())
    windowed = "sliding_attention" in layer_types or (
        config.model_type == "mistral" and config.sliding_window is not None
    )
    if windowed:
        raise UnsupportedModel(
            f"'{name}' uses sliding-window attention (window {config.sliding_window}), which is "
            "not supported. A model trained with full attention is needed, or one whose config "
            "sets sliding_window to null."
        )
    rope_type = config.rope_parameters["rope_type"]
    if rope_type in ("dynamic", "longrope"):
        raise UnsupportedModel(
            f"'{name}' uses '{rope_type}' RoPE, whose frequencies change with the length of the "
            "text, so cached keys would not fit. Supported: default, linear, llama3, yarn."
        )
    part = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if rope_type != "default" and part != 1.0:  # the default one takes no notice of it
        raise UnsupportedModel(
            f"'{name}' has partial_rotary_factor={part} with '{rope_type}' RoPE, but a "
            f"{config.model_type} model rotates whole heads. Leave it out of config.json, if the "
            "model was trained without."
        )


def eos_ids(hf: PreTrainedModel) -> list[int]:
    """Every token that ends a text: Llama 3 has several, named by the generation config."""
    eos = hf.generation_config.eos_token_id
    eos = hf.config.eos_token_id if eos is None else eos
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
