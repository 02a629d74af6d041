"""Checks of what this package supports, and the messages that refuse the rest."""

from dataclasses import dataclass
from typing import Any

FORMAT = 1  # of an exported folder

# Fields in which the configs of the target and of the folder must agree.
SHAPE = """
    model_type hidden_size intermediate_size vocab_size num_attention_heads num_key_value_heads
    head_dim rope_parameters rms_norm_eps
""".split()

ROOM = 512  # in a draft vocabulary, for tokens of the current texts

EXPORT = "python scripts/convert.py export to=vllm source=... model=... output=..."


class Unsupported(ValueError):
    """This package does not support a model or an option; the message says what to change."""


@dataclass(frozen=True)
class AdapterFacts:
    """The adapter's facts in a folder's config."""

    exit_layer: int  # the number of the target's layers below the adapter
    target_layers: int
    feed_forward: bool  # whether a feed-forward part follows its attention
    own_head: bool
    draft_vocabulary: int | None  # the number of tokens it drafts from; None is all
    threshold: float  # drafting stops after a token whose probability is not above it


def read(config: Any) -> AdapterFacts:
    """The adapter that a folder's config describes. Errors: `Unsupported` for a folder of other
    software, or an adapter of another kind."""
    section = getattr(config, "kangaroo", None)
    if not isinstance(section, dict) or section.get("format") != FORMAT:
        raise Unsupported(
            f"config.json has no 'kangaroo' of format {FORMAT} but {section!r}. Write the folder "
            f"with this version of Kangaroo: {EXPORT}"
        )
    parts = section["architecture"]
    if parts["kind"] != "adapter":
        problem = parts["kind"]
    elif parts["fused"]:
        problem = "fused"
    elif parts.get("attention_layers", 1) > 1:  # missing in folders of earlier versions
        problem = f"of {parts['attention_layers']} attention layers"
    else:
        problem = "" if parts["attention"] else "without attention"
    if problem:
        raise Unsupported(
            f"this adapter is {problem}, and kangaroo-vllm runs adapters of one attention layer, "
            "with or without a feed-forward part. Export one of train.py "
            "adapter=attention, layer or own_head."
        )
    if config.model_type != "llama":
        raise Unsupported(
            f"this adapter is for a target of type '{config.model_type}', and kangaroo-vllm runs "
            "targets of type 'llama' alone. Export to=draft_model instead."
        )
    return AdapterFacts(
        section["exit_layer"],
        section["target_layers"],
        parts["feed_forward"],
        parts["own_head"],
        section["draft_vocabulary"],
        float(section["threshold"]),
    )


def check_target(adapter: AdapterFacts, config: Any, target: Any) -> None:
    """Compare the config of the adapter with that of the target. Errors: `Unsupported` for a target
    that the adapter was not trained for."""
    differences = [
        f"{name} {actual!r}, not {expected!r}"
        for name in SHAPE
        if (actual := getattr(target, name, None)) != (expected := getattr(config, name, None))
    ]
    if target.num_hidden_layers != adapter.target_layers:
        differences.append(f"{target.num_hidden_layers} layers, not {adapter.target_layers}")
    if differences:
        raise Unsupported(
            "the adapter was trained for another target: this one has "
            f"{'; '.join(differences)}. Export the adapter of this target, or serve the adapter's."
        )


@dataclass(frozen=True)
class Options:
    """The user's options in `--additional-config`."""

    folder: str  # of the adapter, or its hub id
    threshold: float | None  # None is the folder's
    max_batch: int  # nothing is drafted with more rows than this
    text_vocabulary: int | None  # tokens of the texts to draft from; None is `ROOM`, if supported

    def room(self, adapter: AdapterFacts) -> int:
        """The room for tokens of the texts in the draft vocabulary. Errors: `Unsupported`."""
        if adapter.draft_vocabulary is not None and not adapter.own_head:
            return ROOM if self.text_vocabulary is None else self.text_vocabulary
        if self.text_vocabulary:
            raise Unsupported(
                "kangaroo_text_vocabulary is for adapters that draft by some rows of the target's "
                "head; this one has a head of its own, or drafts from all tokens. Leave it out."
            )
        return 0


def options(vllm_config: Any) -> Options:
    """This package's options. Errors: `Unsupported` for invalid ones, and for some of vLLM's."""
    parallel = vllm_config.parallel_config
    refused = {
        "pipeline parallelism (--pipeline-parallel-size)": parallel.pipeline_parallel_size > 1,
        "data parallelism (--data-parallel-size)": parallel.data_parallel_size > 1,
        "LoRA (--enable-lora)": vllm_config.lora_config is not None,
        "KV transfer (--kv-transfer-config)": vllm_config.kv_transfer_config is not None,
        "prompt embeddings (--enable-prompt-embeds)": vllm_config.model_config.enable_prompt_embeds,
        "sampled drafts (draft_sample_method)": (
            vllm_config.speculative_config.draft_sample_method != "greedy"
        ),
        'whole CUDA graphs (pass --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\')': (
            vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        ),
    }
    for feature, is_on in refused.items():
        if is_on:
            raise Unsupported(
                f"kangaroo-vllm does not run with {feature}. Leave it out, or use an adapter "
                "exported with to=draft_model."
            )
    additional = dict(vllm_config.additional_config or {})
    folder = additional.get("kangaroo")
    threshold = additional.get("kangaroo_threshold")
    max_batch = additional.get("kangaroo_max_batch", 2**31)
    if not isinstance(folder, str):
        raise Unsupported(
            f"which adapter is to draft? Name its folder: --additional-config "
            f'\'{{"kangaroo": "FOLDER"}}\', not {folder!r}. It is written by {EXPORT}'
        )
    if threshold is not None and not _is_number(threshold, below=1):
        raise Unsupported(
            f"kangaroo_threshold must be a number from 0 (never stop early) to below 1, not "
            f"{threshold!r}."
        )
    text_vocabulary = additional.get("kangaroo_text_vocabulary")
    for name, count in (("max_batch", max_batch), ("text_vocabulary", text_vocabulary)):
        unset = name == "text_vocabulary" and count is None
        if not (unset or (isinstance(count, int) and _is_number(count, below=2**31 + 1))):
            raise Unsupported(f"kangaroo_{name} must be a whole number from 0, not {count!r}.")
    return Options(folder, threshold, max_batch, text_vocabulary)


def _is_number(value: Any, below: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value < below
