"""The package in three lines: load a model with its drafter, generate, stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from kangaroo import models
from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.embedded import EMBEDDED
from kangaroo.engine import Engine
from kangaroo.errors import ConfigError, PromptError
from kangaroo.folders import SHIPPED
from kangaroo.model import LM
from kangaroo.models import RANDOM, Dtype, ModelConfig, known_models
from kangaroo.prompts import Message, plain_text, prompt_ids
from kangaroo.sampling import Sampling
from kangaroo.streaming import pieces

Prompt = str | Sequence[Message]  # what the user says, or a conversation that ends with the user
Settings = TypeVar("Settings", KangarooConfig, Sampling)


def load(
    model: str | ModelConfig = "smollm2-135m",
    adapter: str | None = None,
    drafter: DrafterConfig | None = None,
    **settings: Any,
) -> Model:
    """A model that is ready to answer.

    Args:
        model: a name of `configs/model`, a hub id, a local folder, or a `ModelConfig` where number
            format or device matter.
        adapter: folder or hub id of a Kangaroo adapter; None takes the model's own, `adapters/NAME`
            of the working folder or as shipped, or else the one that training saved.
        drafter: another method's config; then there is neither `adapter` nor `settings`.
        settings: fields of `KangarooConfig`, such as `steps` and `threshold`.

    Errors: `ConfigError` for a model or setting that is not known; `AdapterNotFound`,
    `AdapterMismatch`, and those of `kangaroo.models.load`.
    """
    config = model if isinstance(model, ModelConfig) else model_config(model)
    if drafter is None:
        settings["adapter"] = adapter or str(SHIPPED / config.name)
        drafter = _made(KangarooConfig, settings)
    elif adapter is not None or settings:
        given = ", ".join((["adapter"] if adapter is not None else []) + list(settings))
        raise ConfigError(f"{given} given beside drafter=; set it in the drafter's config instead.")
    if not isinstance(drafter, DrafterConfig):
        raise ConfigError(
            f"drafter={drafter!r} is no drafter's config; pass one, such as HybridConfig() of "
            "kangaroo.drafters.hybrid."
        )
    drafter.settings()  # an adapter that is not there is told before gigabytes are fetched
    lm, tokenizer = load_target(config)
    return Model(Engine(lm, drafter.build(lm), tokenizer), tokenizer)


def load_target(config: ModelConfig) -> tuple[LM, PreTrainedTokenizerBase]:
    """The target as the engine drives it, and its tokenizer. Errors: those of `models.load`."""
    hf, tokenizer = models.load(config)
    lm = LM(hf)
    return lm.compile_for_decoding() if config.compiled else lm, tokenizer


def model_config(model: str) -> ModelConfig:
    """What a name of `configs/model`, a hub id or a local folder stands for.

    A hub id that one of those files names gets that file's number format and chat template.

    Errors: `ConfigError` for what is none of these.
    """
    known = known_models()
    for found in known:
        if model in (found["name"], found["path"]):
            del found["defaults"]  # Hydra's
            if "dtype" in found:
                found["dtype"] = Dtype(found["dtype"])
            return ModelConfig(**found)
    path = Path(model).expanduser()
    if path.is_dir() or "/" in model or model == EMBEDDED or model.startswith(RANDOM):
        return ModelConfig(name=path.resolve().name.rpartition(":")[2], path=model)
    names = ", ".join(found["name"] for found in known) or EMBEDDED
    raise ConfigError(
        f"there is no model '{model}'. Pass a hub id, a local folder, or one of: {names}."
    )


@dataclass
class Model:
    """A target and its drafter: text in, text out.

    Args:
        engine: decodes tokens; it does one batch or one stream at a time.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 512,
        batch_size: int | None = None,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> str | list[str]:
        """The answer, or of a list of prompts the list of answers.

        Args:
            prompts: what the user says, or a conversation; or a list of such prompts.
            max_new_tokens: tokens of an answer, at most.
            batch_size: prompts decoded at a time; by default all at once.
            stop: strings that end an answer, which keeps them.
            sampling: fields of `Sampling`: `temperature` (0, greedy, if not given), `top_p`,
                `top_k`, `seed`. Prompts of a list get `seed`, `seed + 1`, ...

        Errors: `PromptError` for a prompt that is empty, no conversation, or too long;
        `ConfigError` for a setting that is not known or cannot be.
        """
        one = isinstance(prompts, str) or any(isinstance(part, Mapping) for part in prompts)
        batch: list[Any] = [prompts] if one else list(prompts)
        asked = [self._ids(prompt) for prompt in batch]
        done = self.engine.generate(
            asked, max_new_tokens, _made(Sampling, sampling), batch_size, stop=stop
        )
        texts = [plain_text(self.tokenizer, generation.tokens) for generation in done]
        return texts[0] if one else texts

    def stream(
        self, prompt: Prompt, max_new_tokens: int = 512, stop: Sequence[str] = (), **sampling: Any
    ) -> Iterator[str]:
        """The answer of `generate`, in pieces of whole characters as they are written."""
        tokens = self.engine.stream(
            self._ids(prompt), max_new_tokens, _made(Sampling, sampling), stop
        )
        return (text for text, _ in pieces(iter(tokens), self.tokenizer))

    def _ids(self, prompt: Prompt) -> list[int]:
        messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        for message in messages:
            if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()):
                raise PromptError(
                    f"{message!r} is no message of a conversation; write "
                    "{'role': 'user', 'content': '...'}."
                )
        return prompt_ids(self.tokenizer, list(messages))


def _made(kind: type[Settings], settings: dict[str, Any]) -> Settings:
    """The dataclass with these fields; `ConfigError` for one that it has not."""
    names = [field.name for field in fields(kind)]
    for name in settings:
        if name not in names:
            raise ConfigError(
                f"there is no setting '{name}'; {kind.__name__} has {', '.join(names)}."
            )
    return kind(**settings)
