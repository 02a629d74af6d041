"""The package in three lines: load a model with its drafter, generate, stream."""

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import EnumMeta
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch
import yaml

from kangaroo.drafters.base import DrafterConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.streaming import pieces
from kangaroo.models.loading import ModelConfig, load_target, model_config
from kangaroo.models.prompts import Message, Tokenizer, content_text, plain_text, prompt_ids, whole
from kangaroo.utils.discovery import classes
from kangaroo.utils.errors import AdapterNotFound, ConfigError, PromptError
from kangaroo.utils.folders import project_folder
from kangaroo.utils.ranges import Count, Ranged

CONFIGS = project_folder("configs")  # models, drafters and hardware known by name
WITHOUT_ADAPTER = "drafter='prompt_lookup', 'lookahead' and 'vanilla' need none"

# What the user says, or a conversation that ends with the user: a message or a list of messages,
# whose content is text or a list of text parts, as OpenAI's API has it.
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
        model: a name of `configs/groups/model.yaml`, a hub id, a local folder, or a `ModelConfig`
            where number format or device matter.
        adapter: folder or hub id of what the drafter needs; None takes the model's own,
            `adapters/NAME` of the working folder or as shipped, or what training saved.
        drafter: its name in `configs/drafter`, with the settings that it has on the command line;
            or its config, beside which there is neither `adapter` nor `settings`.
        chat_template: name of a template in `models/templates`; None takes the model's own.
        settings: fields of the drafter's config, such as `steps` and `threshold`.

    Errors: `ConfigError` for a model, drafter or setting that is not known; `AdapterNotFound`,
    `AdapterMismatch`, and those of `kangaroo.models.loading.load`.
    """
    if not isinstance(model, str | os.PathLike | ModelConfig):
        raise ConfigError(f"model={model!r} must be a name, a folder, a hub id or a ModelConfig.")
    config = model if isinstance(model, ModelConfig) else model_config(os.fspath(model))
    if chat_template is not None:
        config = replace(config, chat_template=chat_template)
    given = ({} if adapter is None else {"adapter": adapter}) | settings
    drafter = drafter_config(drafter, config.name, given)
    try:
        drafter.settings()  # what is not there is told before gigabytes are fetched
    except AdapterNotFound as error:
        raise AdapterNotFound(f"{error} In kangaroo.load {WITHOUT_ADAPTER}.") from error
    lm, tokenizer = load_target(config)
    return Model(Engine(lm, drafter.build(lm), tokenizer), tokenizer)


def drafter_config(drafter: object, model: str, settings: dict[str, Any]) -> DrafterConfig:
    """What a name of `configs/drafter` stands for, as on the command line; a config stands for
    itself. `model` is the target's name, and drafters of a cascade are settings by name, too.
    Errors: `ConfigError` for a name or a setting that is not known."""
    if isinstance(drafter, DrafterConfig):
        if settings:
            raise ConfigError(f"{', '.join(settings)} given beside drafter=; set it there.")
        if getattr(drafter, "adapter", None) == "???":
            raise ConfigError(
                f"{type(drafter).__name__} needs adapter=, a folder or a hub id; "
                f"drafter='{drafter.name}' takes the model's own."
            )
        return drafter
    names = sorted(file.stem for file in (CONFIGS / "drafter").glob("*.yaml"))
    if drafter not in names:
        raise ConfigError(f"there is no drafter {drafter!r}. Pass one of: {', '.join(names)}.")
    values = _written(f"drafter/{drafter}.yaml")
    schema, *others = values.pop("defaults")  # Hydra's
    sizes = _written("groups/hardware.yaml")[hardware_here()]
    for name, value in values.items():
        if isinstance(value, str) and value.startswith("${hardware."):
            _, section, option = value.strip("${}").split(".")
            values[name] = sizes[section][option]
        elif isinstance(value, str):
            values[name] = value.replace("${model.name}", model)
    values |= settings
    for other in others:
        for group, part in other.items() if isinstance(other, dict) else ():  # of a cascade
            name = group.partition("@")[2]
            values[name] = drafter_config(values.get(name, part), model, {})
    kind = classes("kangaroo.drafters", DrafterConfig)[schema.removesuffix("_schema")]
    return build(kind, values)


def build(kind: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """The dataclass with these fields, numbers of numpy as those of Python. Errors: `ConfigError`
    for a field that it has not, or a value of another type."""
    hints, values = get_type_hints(kind), {}
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name, value in settings.items():
        if name not in names:
            fix = f"{kind.__name__} has {', '.join(names)}"
            raise ConfigError(f"there is no setting '{name}'; {fix}.")
        hint = hints[name]
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = [get_origin(part) or part for part in parts]
        if isinstance(hint, EnumMeta):  # by its name too, as on the command line
            value = hint.__members__.get(value, value) if isinstance(value, str) else value
            hint = f"one of: {', '.join(hint.__members__)}"
        # a `Ranged` dataclass looks at its numbers itself
        if not any(part in (int, float, Any) or isinstance(value, part) for part in kinds):
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; it takes {hint}.")
        values[name] = value.item() if isinstance(value, np.generic) else value
    return kind(**values)


def hardware_here() -> str:
    """The section of `configs/groups/hardware.yaml` that drafters take if none is asked for."""
    return "gpu" if torch.cuda.is_available() else "cpu"


def _written(file: str) -> dict[str, Any]:
    return cast(dict[str, Any], yaml.safe_load((CONFIGS / file).read_text("utf-8")))


@dataclass
class Limits(Ranged):
    """How long an answer may become, and how many are decoded at a time."""

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
        **sampling: Any,
    ) -> str | list[str]:
        """The answer, or of a list of prompts the list of answers.

        Args:
            prompts: what the user says, or a conversation; or a list of such prompts.
            max_new_tokens: of an answer, at most; None is as many as the context has room for,
                and so much memory is taken then.
            batch_size: prompts decoded at a time; by default all at once.
            stop: a string, or several, that ends an answer, which keeps it.
            sampling: fields of `Sampling`. Prompts of a list get `seed`, `seed + 1`, ...; None is a
                random one.

        Errors: `PromptError` for a prompt that is empty, no text or conversation, or too long;
        `ConfigError` for a setting that is not known or cannot be.
        """
        batch, single = _listed(prompts)
        settings, stops = _sampling(sampling), _stops(stop)
        limits = build(Limits, {"max_new_tokens": max_new_tokens, "batch_size": batch_size})
        seeded = enumerate(batch, start=settings.seed)
        requests = [self._request(prompt, limits, stops, seed) for seed, prompt in seeded]
        rows = limits.batch_size or max(len(requests), 1)
        done = dict(self.engine.completions(requests, settings, rows))
        texts = [plain_text(self.tokenizer, done[i].tokens) for i in range(len(requests))]
        return texts[0] if single else texts

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = 512,
        stop: str | Iterable[str] | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """The answer of `generate`, in pieces of whole characters as they are written."""
        settings, limits = _sampling(sampling), build(Limits, {"max_new_tokens": max_new_tokens})
        request = self._request(prompt, limits, _stops(stop), settings.seed)
        tokens = self.engine.stream(request.prompt, request.max_new_tokens, settings, request.stop)
        return (text for text, _ in pieces(iter(tokens), self.tokenizer))

    def _request(self, prompt: Prompt, limits: Limits, stop: list[str], seed: int) -> Request:
        ids = prompt_ids(self.tokenizer, _conversation(prompt))
        room = max(1, self.engine.lm.context - len(ids))
        return Request(ids, limits.max_new_tokens or room, seed, stop)


def _listed(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts, and whether it was a single one."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [prompts], True
    parts = list(prompts)
    is_conversation = any(isinstance(part, Mapping) for part in parts)
    return ([parts], True) if is_conversation else (parts, False)


def _conversation(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [Message(role="user", content=prompt)]
    if not isinstance(prompt, list | tuple | Mapping):
        raise PromptError(f"{prompt!r} is no prompt; pass a string or a list of messages.")
    messages = []
    for message in [prompt] if isinstance(prompt, Mapping) else prompt:
        match message:
            case {"role": str(role), "content": content}:
                try:
                    text = content_text(content)
                except ValueError as error:
                    problem = f"a message of '{role}' is no text: its content {error}."
                    raise PromptError(problem) from error
                messages.append(cast(Message, {**message, "content": text}))
            case _:
                form = "{'role': 'user', 'content': '...'}"
                raise PromptError(f"{message!r} is no message of a conversation; write {form}.")
    return messages


def _stops(stop: Any) -> list[str]:
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) or not isinstance(stop, Iterable) else list(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop={stop!r}: {string!r} is no text that can end an answer.")
        try:
            whole(string)
        except ValueError as error:
            raise ConfigError(f"stop={stop!r}: {error}.") from error
    return strings


def _sampling(settings: dict[str, Any]) -> Sampling:
    if settings.get("seed", 0) is None:
        settings = settings | {"seed": secrets.randbits(31)}
    return build(Sampling, settings)
