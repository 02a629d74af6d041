"""The public API: load a model with its drafter, generate, stream."""

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch
from omegaconf import OmegaConf

from kangaroo.drafters.base import DrafterConfig
from kangaroo.engine.constraint import Restrictions
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.engine.streaming import pieces, whole_text
from kangaroo.heads.adapter_files import adapters_of
from kangaroo.models.loading import ModelConfig, load_target, model_config
from kangaroo.models.prompts import Tokenizer, conversation, prompt_ids, valid_text
from kangaroo.models.target import TargetModel
from kangaroo.utils.discovery import classes
from kangaroo.utils.errors import AdapterNotFound, ConfigError, KangarooError, explained, naming
from kangaroo.utils.folders import project_folder
from kangaroo.utils.ranges import Count, Ranged

CONFIGS = project_folder("configs")  # settings of known models, drafters and hardware

# A user's text, or a conversation: one or more messages as in OpenAI's API, of which the last is a
# user's.
Prompt = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
Settings = TypeVar("Settings")


def load(
    model: str | os.PathLike[str] | ModelConfig = "smollm2-135m",
    adapter: str | None = None,
    drafter: str | DrafterConfig = "hybrid",
    chat_template: str | None = None,
    **settings: Any,
) -> "Model":
    """A model that is ready to answer.

    Args:
        model: a name in `configs/groups/model.yaml`, a hub id, a folder, a GGUF file, or a
            `ModelConfig`.
        adapter: folder or hub id of the drafter's adapter; None takes the model's own:
            `adapters/NAME` in the working folder or as shipped, or what training saved.
        drafter: a name in `configs/drafter`, with the settings of the command line; or a config,
            then without `adapter` and `settings`.
        chat_template: name of a template in `models/templates`; None takes the model's own.
        settings: fields of the drafter's config, such as `steps` and `threshold`.

    Errors: `ConfigError` for an unknown model, drafter or setting; `AdapterNotFound`,
    `AdapterMismatch`, and those of `kangaroo.models.loading.load`.
    """
    if not isinstance(model, str | os.PathLike | ModelConfig):
        raise ConfigError(f"model={model!r} must be a name, a folder, a hub id or a ModelConfig.")
    config = model if isinstance(model, ModelConfig) else model_config(os.fspath(model))
    if chat_template is not None:
        config = replace(config, chat_template=chat_template)
    settings = ({} if adapter is None else {"adapter": adapter}) | settings
    drafter = drafter_config(drafter, config, settings)
    lm, tokenizer = load_target_for(config, drafter)
    return Model(Engine(lm, drafter.build(lm), tokenizer), tokenizer)


def load_target_for(
    model: ModelConfig, *drafters: DrafterConfig, more: Mapping[str, DrafterConfig] | None = None
) -> tuple[TargetModel, Tokenizer]:
    """`check_adapters` and then `load_target`, which may download gigabytes."""
    check_adapters(model, *drafters, more=more)
    return load_target(model)


def check_adapters(
    model: ModelConfig, *drafters: DrafterConfig, more: Mapping[str, DrafterConfig] | None = None
) -> None:
    """Raise `AdapterNotFound` if one of these drafters, or of those of `more.NAME=`, lacks a file;
    it names that file, and all drafters that lack nothing."""
    try:
        for name, drafter in (more or {}).items():
            with naming(f"more.{name}"):
                drafter.settings()
        for drafter in drafters:
            drafter.settings()
    except AdapterNotFound as error:
        ready = []
        for name in drafter_names():
            with suppress(KangarooError):
                drafter_config(name, model, {}).settings()
                ready.append(name)
        raise AdapterNotFound(f"{error} Drafters that are ready: {', '.join(ready)}.") from error


def drafter_names() -> list[str]:
    """The drafters in `configs/drafter`."""
    return sorted(file.stem for file in (CONFIGS / "drafter").glob("*.yaml"))


def drafter_config(drafter: object, model: ModelConfig, settings: dict[str, Any]) -> DrafterConfig:
    """The config of a drafter in `configs/drafter`, with the adapters that serve the model; a
    config stays as it is. A cascade's settings may be names of drafters. Errors: `ConfigError`."""
    if isinstance(drafter, DrafterConfig):
        if settings:
            raise ConfigError(f"{', '.join(settings)}: set this in the config given by drafter=.")
        if getattr(drafter, "adapter", None) == "???":
            raise ConfigError(
                f"{type(drafter).__name__} needs adapter=, a folder or a hub id; "
                f"drafter='{drafter.name}' takes the model's own."
            )
        return drafter
    if drafter not in drafter_names():
        names = ", ".join(drafter_names())
        raise ConfigError(f"there is no drafter {drafter!r}. Pass one of: {names}.")
    text = (CONFIGS / "drafter" / f"{drafter}.yaml").read_text("utf-8")
    text = text.replace("${adapters_of:${model}}", adapters_of(model.path, model.name))
    sizes = OmegaConf.load(CONFIGS / "groups" / "hardware.yaml")
    hardware = OmegaConf.select(sizes, hardware_here())  # for `${...}` in the file
    config = OmegaConf.create({"drafter": OmegaConf.create(text), "hardware": hardware}).drafter
    values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True)) | settings
    schema, *groups = values.pop("defaults")  # Hydra's
    for group in groups:
        for key, default in group.items() if isinstance(group, dict) else ():  # of a cascade
            name = key.partition("@")[2]
            values[name] = drafter_config(values.get(name, default), model, {})
    kind = classes("kangaroo.drafters", DrafterConfig)[schema.removesuffix("_schema")]
    return build(kind, values)


def build(kind: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """The dataclass with these fields; numpy's numbers become Python's. Errors: `ConfigError`."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    values = {}
    for name, value in settings.items():
        if name not in names:
            fix = f"{kind.__name__} has {', '.join(names)}"
            raise ConfigError(f"there is no setting '{name}'; {fix}.")
        hint = get_type_hints(kind)[name]
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = [get_origin(part) or part for part in parts]
        # a `Ranged` dataclass itself checks its numbers, and `Sampling` its rule
        if not any(part in (int, float, Any, Rule) or isinstance(value, part) for part in kinds):
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; it takes {hint}.")
        values[name] = value.item() if isinstance(value, np.generic) else value
    return kind(**values)


def hardware_here() -> str:
    """The section of `configs/groups/hardware.yaml` for this machine."""
    return "gpu" if torch.cuda.is_available() else "cpu"


@dataclass
class Limits(Ranged):
    """The most tokens of an answer, and how many answers are decoded at a time."""

    max_new_tokens: Count | None
    batch_size: Count | None = None


@dataclass
class Model:
    """A target and its drafter: text in, text out, one batch or stream at a time."""

    engine: Engine
    tokenizer: Tokenizer

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        max_new_tokens: int | None = 512,
        batch_size: int | None = None,
        stop: str | Iterable[str] | None = None,
        json_schema: Mapping[str, Any] | None = None,
        logit_bias: Mapping[int, float] | None = None,
        **sampling: Any,
    ) -> str | list[str]:
        """The answer, or a list of answers for a list of prompts.

        Args:
            prompts: a user's text or a conversation, or a list of them.
            max_new_tokens: of an answer; None is the rest of the context, for all of which memory
                is taken.
            batch_size: prompts decoded at a time; None is all.
            stop: one string or more; an answer ends before the first, as in OpenAI's API.
            json_schema: answers are JSON that follows this schema.
            logit_bias: what is added to the logits of tokens, by id.
            sampling: fields of `Sampling`. The prompts of a list get `seed`, `seed + 1`, ...;
                `seed=None` is random.

        Errors: `PromptError` for a prompt that is empty, too long, or not a text or conversation;
        `ConfigError` for an unknown or invalid setting.
        """
        prompt_list, is_single = _as_list(prompts)
        settings = _sampling(sampling)
        stops = _stops(stop)
        limits = build(Limits, {"max_new_tokens": max_new_tokens, "batch_size": batch_size})
        constraint = self.restrictions.of(logit_bias, json_schema)
        requests = []
        for seed, prompt in enumerate(prompt_list, start=settings.seed):
            request = self._request(prompt, limits, stops, seed)
            requests.append(replace(request, constraint=constraint))
        rows = limits.batch_size or max(len(requests), 1)
        answers = sorted(self.engine.completions(requests, settings, rows))
        texts = [whole_text(answer.tokens, self.tokenizer, stops) for _, answer in answers]
        return texts[0] if is_single else texts

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = 512,
        stop: str | Iterable[str] | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """The answer of `generate`, piece by piece as it is written, in whole characters."""
        settings = _sampling(sampling)
        limits = build(Limits, {"max_new_tokens": max_new_tokens})
        request = self._request(prompt, limits, _stops(stop), settings.seed)
        tokens = self.engine.stream(request.prompt, request.max_new_tokens, settings, request.stop)
        return (text for text, _ in pieces(tokens, self.tokenizer, request.stop))

    @cached_property
    def restrictions(self) -> Restrictions:
        """Makes the restrictions of answers."""
        return Restrictions(self.tokenizer, self.engine.lm.config.vocab_size, self.engine.eos_ids)

    def _request(self, prompt: Prompt, limits: Limits, stop: list[str], seed: int) -> Request:
        ids = prompt_ids(self.tokenizer, conversation(prompt))
        room = max(1, self.engine.lm.context - len(ids))
        return Request(ids, limits.max_new_tokens or room, seed, stop)


def _as_list(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether there was a single one."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [prompts], True
    parts = list(prompts)
    is_conversation = any(isinstance(part, Mapping) for part in parts)
    return ([parts], True) if is_conversation else (parts, False)


def _stops(stop: Any) -> list[str]:
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) or not isinstance(stop, Iterable) else list(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop={stop!r}: {string!r} must be a text that is not empty.")
        with explained(ConfigError, f"stop={stop!r}", "Pass other text.", (ValueError,)):
            valid_text(string)
    return strings


def _sampling(settings: dict[str, Any]) -> Sampling:
    if settings.get("seed", 0) is None:
        settings = settings | {"seed": secrets.randbits(31)}
    return build(Sampling, settings)
