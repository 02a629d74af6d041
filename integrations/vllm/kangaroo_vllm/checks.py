"""What this package can run, and the words in which it refuses the rest."""

from dataclasses import dataclass
from typing import Any

FORMAT = 1  # of the folder

# Fields of a target's config that have to be the same in the folder's.
SHAPE = """
    model_type hidden_size intermediate_size vocab_size num_attention_heads num_key_value_heads
    head_dim rope_parameters rms_norm_eps
""".split()

ROOM = 512  # in a draft vocabulary, for tokens of the texts

EXPORT = "python scripts/convert.py export to=vllm source=... model=... output=..."


class Unsupported(ValueError):
    """This package cannot run that, or not with these options; the message says what to change."""


@dataclass(frozen=True)
class AdapterFacts:
    """What a folder's config says of its adapter.

    Args:
        exit_layer: how many of the target's layers lie below it.
        target_layers: how many the target has.
        feed_forward: it has a feed-forward part after its attention.
        own_head: it has a head of its own.
        draft_vocabulary: how many tokens it drafts from; None is all.
        threshold: drafting stops after a token whose probability is not above it.
    """

    exit_layer: int
    target_layers: int
    feed_forward: bool
    own_head: bool
    draft_vocabulary: int | None
    threshold: float


def read(config: Any) -> AdapterFacts:
    """The adapter that a folder's config describes.

    Errors: `Unsupported` for a folder that the exporter did not write, or for another kind.
    """
    said = getattr(config, "kangaroo", None)
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise Unsupported(
            f"config.json has no 'kangaroo' of format {FORMAT} but {said!r}. Write the folder with "
            f"this version of Kangaroo: {EXPORT}"
        )
    parts = said["architecture"]
    if parts["kind"] != "adapter":
        other = parts["kind"]
    elif parts["fused"]:
        other = "fused"
    elif parts.get("attention_layers", 1) > 1:  # a folder of an earlier version does not say
        other = f"of {parts['attention_layers']} attention layers"
    else:
        other = "" if parts["attention"] else "without attention"
    if other:
        raise Unsupported(
            f"this adapter is {other}, and kangaroo-vllm runs adapters of one attention layer, "
            "with or without a feed-forward part. Export one of train.py "
            "adapter=attention, layer or own_head."
        )
    if config.model_type != "llama":
        raise Unsupported(
            f"this adapter is for a target of type '{config.model_type}', and kangaroo-vllm runs "
            "targets of type 'llama' alone. Export to=draft_model instead."
        )
    return AdapterFacts(
        said["exit_layer"],
        said["target_layers"],
        parts["feed_forward"],
        parts["own_head"],
        said["draft_vocabulary"],
        float(said["threshold"]),
    )


def check_target(adapter: AdapterFacts, config: Any, target: Any) -> None:
    """Refuse a target that the adapter was not trained for.

    Args:
        config: the adapter's; target: the target's.
    """
    unlike = [
        f"{name} {theirs!r}, not {ours!r}"
        for name in SHAPE
        if (theirs := getattr(target, name, None)) != (ours := getattr(config, name, None))
    ]
    if target.num_hidden_layers != adapter.target_layers:
        unlike.append(f"{target.num_hidden_layers} layers, not {adapter.target_layers}")
    if unlike:
        raise Unsupported(
            f"the adapter was trained for another target: this one has {'; '.join(unlike)}. Export "
            "the adapter of this target, or serve the adapter's."
        )


@dataclass(frozen=True)
class Options:
    """What the user asks for by `--additional-config`.

    Args:
        folder: of the adapter, or its hub id.
        threshold: None is the folder's.
        max_batch: more rows than this at the same time draft nothing.
        text_vocabulary: draft from so many of the texts' own tokens beside the frequent ones; None
            is `ROOM`, if the adapter can.
    """

    folder: str
    threshold: float | None
    max_batch: int
    text_vocabulary: int | None

    def room(self, adapter: AdapterFacts) -> int:
        """For tokens of the texts in this adapter's draft vocabulary. Errors: `Unsupported`."""
        if adapter.draft_vocabulary is not None and not adapter.own_head:
            return ROOM if self.text_vocabulary is None else self.text_vocabulary
        if self.text_vocabulary:
            raise Unsupported(
                "kangaroo_text_vocabulary is for adapters that draft by some rows of the target's "
                "head; this one has a head of its own, or drafts from all tokens. Leave it out."
            )
        return 0


def options(vllm_config: Any) -> Options:
    """The options, once it is clear that vLLM's other ones go with this package.

    Errors: `Unsupported`.
    """
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
        "CUDA graphs (pass --enforce-eager)": (
            vllm_config.compilation_config.cudagraph_mode.name != "NONE"
        ),
    }
    for what, is_on in refused.items():
        if is_on:
            raise Unsupported(
                f"kangaroo-vllm does not run with {what}. Leave it out, or use an adapter exported "
                "with to=draft_model."
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
    if threshold is not None and not _is_number(threshold, 0, 1):
        raise Unsupported(
            f"kangaroo_threshold must be a number from 0 (never stop early) to below 1, not "
            f"{threshold!r}."
        )
    text_vocabulary = additional.get("kangaroo_text_vocabulary")
    for name, count in (("max_batch", max_batch), ("text_vocabulary", text_vocabulary)):
        unset = name == "text_vocabulary" and count is None
        if not (unset or (isinstance(count, int) and _is_number(count, 0, 2**31 + 1))):
            raise Unsupported(f"kangaroo_{name} must be a whole number from 0, not {count!r}.")
    return Options(folder, threshold, max_batch, text_vocabulary)


def _is_number(value: Any, least: float, below: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value < below
