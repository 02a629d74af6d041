"""Decode for transformers: `model.generate(..., custom_generate=FOLDER_OR_REPOSITORY)`.

`convert push` puts this file into an adapter's repository as `custom_generate/generate.py`, which
transformers fetches and calls in place of its own generation. The model is the caller's: it is
borrowed, and given back as it was.

Shapes: B rows, T tokens of the longest prompt, N new tokens.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer

from kangaroo.drafters.base import DrafterConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.heads import adapter_files
from kangaroo.models.supported import check_supported
from kangaroo.models.target import TargetModel
from kangaroo.utils.discovery import classes
from kangaroo.utils.errors import ConfigError, PromptError

TAKEN = ("inputs", "input_ids", "attention_mask")  # of a model's own inputs
REFUSED = ("logits_processor", "stopping_criteria", "assistant_model", "synced_gpus")
WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
}


def generate(
    model: PreTrainedModel,
    adapter: str | None = None,
    revision: str | None = None,
    streamer: BaseStreamer | None = None,
    **options: Any,
) -> Any:
    """What `model.generate(**options)` returns, drafted by an adapter: the same tokens, greedily,
    and samples of the same distribution.

    Args:
        adapter: its folder or hub id; None is what `custom_generate=` said.
        revision: of a hub id.
        streamer: gets the prompt, and then each token as it is known; for one prompt.
        options: `generate`'s own. torch's random numbers give the seeds of samples.

    Errors: `ConfigError` for what is not done here, by name; `UnsupportedModel`; `PromptError` for
    a padding that is not on the left, or a text longer than the context; those of loading an
    adapter.
    """
    check_supported(model.config)
    fix = "Pass adapter= its folder or hub id."
    source = adapter_files.find(adapter or _asked_for(), fix=fix, revision=revision)
    inputs = inspect.signature(model.forward).parameters.keys() - vars(GenerationConfig()).keys()
    for name in (*REFUSED, *(inputs - set(TAKEN))):
        if _is_given(options.get(name)):
            raise _refused(f"{name}=")
    decode = partial(_decode, str(source), streamer)
    generating: Any = model
    return GenerationMixin.generate(
        generating, streamer=streamer, custom_generate=decode, **options
    )


def _is_given(value: Any) -> bool:
    return not (value is None or value is False or (isinstance(value, list) and not value))


def _asked_for() -> str:
    """The folder or repository that this was loaded from, which `generate` tells nobody.

    Errors: `ConfigError` where it cannot be told.
    """
    frame = inspect.currentframe()
    for _ in range(2):  # of `generate` here, and of transformers'
        frame = frame and frame.f_back
    source = frame.f_locals.get("custom_generate") if frame else None
    if not isinstance(source, str):
        raise ConfigError("which adapter is to draft? Pass adapter= its folder or hub id.")
    return source


@contextmanager
def borrowed(hf: PreTrainedModel) -> Iterator[TargetModel]:
    """Somebody else's model as a target, and afterwards as it was: its attention, which modules
    train, which parameters take gradients."""
    attention = hf.config._attn_implementation
    training = [(module, module.training) for module in hf.modules()]
    learning = [(parameter, parameter.requires_grad) for parameter in hf.parameters()]
    try:
        yield TargetModel(hf)
    finally:
        for module, was in training:
            module.training = was
        for parameter, did in learning:
            parameter.requires_grad_(did)
        hf.set_attn_implementation(attention)


def _decode(
    source: str,
    streamer: BaseStreamer | None,
    model: Any,
    input_ids: Tensor,
    *,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: GenerationConfig,
    **model_kwargs: Any,  # with names of its own, `generate` would not hand these on
) -> Tensor | GenerateDecoderOnlyOutput:
    """The loop in place of transformers', which has prepared and checked what it takes."""
    _check(model, generation_config, stopping_criteria)
    sampling = _sampling(generation_config, logits_processor)
    prompts = _prompts(input_ids, model_kwargs["attention_mask"])
    rows, width = input_ids.shape
    new_tokens = generation_config.max_length - width
    seeds = rows * [0] if sampling.greedy else torch.randint(2**62, (rows,)).tolist()
    with borrowed(model) as lm:
        if lm.device.type == "cpu":  # on a GPU every call would record its graphs anew
            lm.compile_for_decoding(huge_pages=False)
        drafter = adapter_files.read_config(source).architecture.drafter
        kind: Any = classes("kangaroo.drafters", DrafterConfig)[drafter]
        engine = Engine(lm, kind(adapter=source).build(lm))
        eos = generation_config.eos_token_id
        ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        engine.eos_ids = frozenset(ends)
        if streamer is None:
            done = engine.generate(prompts, new_tokens, sampling, seeds=seeds)
            texts = [generation.tokens for generation in done]
        else:
            sampling.seed = seeds[0]
            texts = [[]]
            for token in engine.stream(prompts[0], new_tokens, sampling):
                texts[0].append(token.id)
                streamer.put(torch.tensor([token.id]))
            streamer.end()
    pad = generation_config.pad_token_id
    pad = (ends or [0])[0] if pad is None else pad
    longest = max(map(len, texts))
    written = [tokens + [pad] * (longest - len(tokens)) for tokens in texts]
    sequences = torch.cat([input_ids, input_ids.new_tensor(written)], 1)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _check(model: Any, config: GenerationConfig, criteria: Sequence[Any]) -> None:
    """Raise `ConfigError` for a way of generating that is not done here."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _refused(mode.value)
    for name in ("scores", "logits", "attentions", "hidden_states"):
        if getattr(config, f"output_{name}"):
            raise _refused(f"output_{name}=True")
    for criterion in criteria:
        if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria):
            raise _refused(type(criterion).__name__)
    for module in (model, model.model):
        if module._forward_hooks or module._forward_pre_hooks:
            raise _refused(f"a forward hook on the whole {type(module).__name__}")


def _sampling(config: GenerationConfig, processors: Sequence[Any]) -> Sampling:
    """What these processors do, which are in the order of `kangaroo.engine.sampling.warp`."""
    settings: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
    for processor in processors:
        name = WARPERS.get(type(processor))
        if name is None:
            raise _refused(type(processor).__name__)
        settings[name] = getattr(processor, name)
    return Sampling(**settings)


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The rows without their padding.

    Errors: `PromptError` for one that is not padded on the left.
    """
    if attention_mask is None:
        return input_ids.tolist()
    seen_BT = attention_mask.bool()
    if (seen_BT[:, :-1] & ~seen_BT[:, 1:]).any() or not seen_BT[:, -1].all():
        raise PromptError(
            "a prompt has padding or a hole after its first token; pad on the left "
            "(tokenizer.padding_side = 'left')."
        )
    return [row[seen].tolist() for row, seen in zip(input_ids, seen_BT, strict=True)]


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"{what} is not supported when Kangaroo decodes for `generate`. Leave it out, or leave "
        "custom_generate= out."
    )
