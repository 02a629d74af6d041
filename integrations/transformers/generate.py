"""Decode for transformers: `model.generate(..., custom_generate=FOLDER_OR_REPOSITORY)`.

`convert pack` puts this file into an adapter's repository as `custom_generate/generate.py`, which
transformers downloads and calls in place of its own generation. It leaves the model as it was.

Shapes: B rows, T tokens of the longest prompt.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, GenerationMixin, MaxLengthCriteria
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

SUPPORTED = ("inputs", "input_ids", "attention_mask")  # inputs of a model
WITH_TOKENIZER = ("stop_strings", "token_healing")  # which transformers drops on its way here
REFUSED = ("logits_processor", "stopping_criteria", "assistant_model", "synced_gpus")
WARPERS = {
    transformers.TemperatureLogitsWarper: "temperature",
    transformers.TopKLogitsWarper: "top_k",
    transformers.TopPLogitsWarper: "top_p",
}


def generate(
    model: transformers.PreTrainedModel,
    adapter: str | None = None,
    revision: str | None = None,
    streamer: BaseStreamer | None = None,
    **options: Any,
) -> Any:
    """The result of `model.generate(**options)`, drafted by an adapter: the same tokens if greedy,
    otherwise samples of the same distribution.

    Args:
        adapter: its folder or hub id; None takes the one of `custom_generate=`.
        revision: of the hub id.
        streamer: gets the prompt, and then each token; only for a single prompt.
        options: those of `generate`. The seeds of samples are drawn from torch's generator.

    Errors: `ConfigError` for unsupported options, by name; `UnsupportedModel`; `PromptError` for
    padding that is not on the left, or a text longer than the context; those of loading an adapter.
    """
    check_supported(model.config)
    fix = "Pass adapter= its folder or hub id."
    source = adapter_files.find(adapter or _custom_generate(), fix=fix, revision=revision)
    inputs = inspect.signature(model.forward).parameters.keys() - vars(GenerationConfig()).keys()
    given = {name: options.get(name) for name in (*REFUSED, *(inputs - set(SUPPORTED)))}
    config = options.get("generation_config") or model.generation_config
    given |= {name: options.get(name, getattr(config, name)) for name in WITH_TOKENIZER}
    for name, value in given.items():
        if not (value is None or value is False or (isinstance(value, list) and not value)):
            raise _refused(f"{name}=")
    decode = partial(_decode, str(source), streamer)
    return GenerationMixin.generate(model, streamer=streamer, custom_generate=decode, **options)


def _custom_generate() -> str:
    """The folder or repository of this file, a local variable of transformers' `generate`. Errors:
    `ConfigError` where it is not found."""
    source = sys._getframe(2).f_locals.get("custom_generate")  # of what called our `generate`
    if not isinstance(source, str):
        raise ConfigError("which adapter is to draft? Pass adapter= its folder or hub id.")
    return source


@contextmanager
def borrowed(hf: transformers.PreTrainedModel) -> Iterator[TargetModel]:
    """The caller's model as a target. Its attention, training modes and `requires_grad` are
    restored afterwards."""
    attention = hf.config._attn_implementation
    training = [(module, module.training) for module in hf.modules()]
    trainable = [(parameter, parameter.requires_grad) for parameter in hf.parameters()]
    try:
        yield TargetModel(hf)
    finally:
        for module, was_training in training:
            module.training = was_training
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)
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
    **model_kwargs: Any,  # `generate` passes these only to a function with **kwargs
) -> Tensor | GenerateDecoderOnlyOutput:
    """The decoding loop in place of transformers', with the arguments that it has prepared."""
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
            generations = engine.generate(prompts, new_tokens, sampling, seeds=seeds)
            texts = [generation.tokens for generation in generations]
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
    padded = [tokens + [pad] * (longest - len(tokens)) for tokens in texts]
    sequences = torch.cat([input_ids, input_ids.new_tensor(padded)], 1)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _check(model: Any, config: GenerationConfig, criteria: Sequence[Any]) -> None:
    """Errors: `ConfigError` for an unsupported mode, output, criterion or hook."""
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
    """The settings of these processors, which have the order of `kangaroo.engine.sampling.warp`."""
    settings: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
    for processor in processors:
        name = WARPERS.get(type(processor))
        if name is None:
            raise _refused(type(processor).__name__)
        settings[name] = getattr(processor, name)
    return Sampling(**settings)


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The rows without their padding on the left. Errors: `PromptError` for no rows, an empty one,
    or other padding."""
    if not input_ids.numel():
        raise PromptError(f"input_ids of shape {[*input_ids.shape]} hold no token; pass a prompt.")
    if attention_mask is None:
        return input_ids.tolist()
    mask_BT = attention_mask.bool()
    for row, mask_T in enumerate(mask_BT):
        if not mask_T.any():
            raise PromptError(f"prompt {row} of the batch has no token; leave it out.")
        if not mask_T[-1] or (mask_T[:-1] & ~mask_T[1:]).any():
            raise PromptError(
                f"prompt {row} of the batch has padding or a hole after its first token; pad on "
                "the left (tokenizer.padding_side = 'left')."
            )
    return [row[mask].tolist() for row, mask in zip(input_ids, mask_BT, strict=True)]


def _refused(option: str) -> ConfigError:
    return ConfigError(
        f"{option} is not supported when Kangaroo decodes for `generate`. Leave it out, or leave "
        "custom_generate= out."
    )
