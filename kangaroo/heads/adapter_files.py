"""Adapters on disk: weights, config, and draft vocabulary."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kangaroo.heads.base import HeadConfig, Trainable
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.loading import ModelConfig, known_model, model_options, shape_of
from kangaroo.models.supported import target_hashes
from kangaroo.models.target import TargetModel
from kangaroo.utils import errors
from kangaroo.utils.discovery import classes
from kangaroo.utils.folders import SHIPPED, command_line, project_folder, resolve_path, write_json

WEIGHTS = "adapter.safetensors"
CONFIG = "config.json"
VOCABULARY = "vocabulary.safetensors"
Kind = TypeVar("Kind", bound=Trainable)

TRAINED = Path("outputs/train")
PUBLISHED = ("kangaroo", "medusa", "eagle", "eagle3")  # drafters whose checkpoints can be imported

log = logging.getLogger(__name__)
_say_once = cache(log.info)


@dataclass
class AdapterConfig:
    """An adapter's config.json."""

    target: str
    target_revision: str | None  # on the hub
    target_hash: str
    exit_layer: int
    n_layers: int  # of the target
    parameters: int
    architecture: HeadConfig
    vocabulary: int | None = None  # number of frequent tokens to draft from; None is all
    facts: dict[str, Any] = field(default_factory=dict)  # `Trainable.facts`
    training: dict[str, Any] = field(default_factory=dict)  # data, schedule, results, command
    target_weights: str | None = None  # `TargetModel.fingerprint`

    @property
    def attention_window(self) -> int:
        """Tokens that its attention looks back; 0 is unlimited."""
        return self.facts.get("attention_window", 0)

    @property
    def vocabulary_beside_texts(self) -> int | None:
        """The number of frequent tokens to draft from besides a text's rare ones; None is all."""
        return self.facts.get("vocabulary_beside_texts", self.vocabulary)


def adapters_of(path: str, name: str) -> str:
    """The model whose adapters fit the target of a `model.path`: that target, called `name`, if it
    is a known one or has adapters; otherwise one of the same shapes, such as another quantization,
    and of several the one with the most similar name."""
    places = [SHIPPED, project_folder("adapters"), TRAINED]
    own = [place / f"{name}{kind}" for place in places for kind in ("", "-fused")]
    if known_model(path) or any(folder.is_dir() for folder in own):
        return name
    configs = [file for place in places[:2] for file in place.glob(f"*/{CONFIG}")]
    configs += TRAINED.glob(f"*/*/{CONFIG}")
    if not configs:
        return name
    try:
        hashes = target_hashes(shape_of(ModelConfig(name, path)))
    except errors.KangarooError:  # reported when the model is loaded
        return name
    others = set[str]()
    for file in configs:
        with suppress(OSError, ValueError):
            if json.loads(file.read_text("utf-8")).get("target_hash") in hashes:
                is_trained = file.is_relative_to(TRAINED)
                others.add(file.parts[-3] if is_trained else _saved_by_training(file.parent)[0])
    likeness = {x: SequenceMatcher(None, x.lower(), name.lower()).ratio() for x in sorted(others)}
    alike = max(likeness, key=likeness.__getitem__, default=name)
    if alike != name:
        _say_once(f"the adapters of '{alike}' serve '{name}', which has the same shapes")
    return alike


def describe(
    lm: TargetModel, adapter: Trainable, training: dict[str, Any], **fields: Any
) -> AdapterConfig:
    """The config of an adapter trained for `lm`, with `vocabulary` and `facts` as `fields`."""
    return AdapterConfig(
        target=lm.name,
        target_revision=getattr(lm.config, "_commit_hash", None),
        target_hash=target_hashes(lm.config)[0],
        exit_layer=adapter.exit_layer,
        n_layers=lm.n_layers,
        parameters=sum(p.numel() for p in adapter.parameters()),
        architecture=adapter.architecture,
        training=training,
        target_weights=lm.fingerprint,
        **fields,
    )


def saved_dtype(adapter: Trainable, lm: TargetModel) -> torch.dtype:
    """The dtype to save an adapter in: the target's, or bfloat16 if a weight overflows float16."""
    largest = torch.finfo(lm.dtype).max
    fits = all(bool((p.detach().abs() <= largest).all()) for p in adapter.parameters())
    return lm.dtype if fits else torch.bfloat16


def save(
    adapter: Trainable,
    config: AdapterConfig,
    frequent_K: Tensor | None,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write weights, config, and the most frequent tokens in order; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: t.to(dtype or t.dtype).contiguous() for name, t in adapter.state_dict().items()}
    save_file(state, folder / WEIGHTS)
    if frequent_K is not None:
        save_file({"frequent": frequent_K.to(torch.int32)}, folder / VOCABULARY)
    write_json(folder / CONFIG, asdict(config) | {"architecture": config.architecture.as_json()})
    return folder


def find(
    path: str,
    files: Sequence[str] = (WEIGHTS, CONFIG, VOCABULARY),
    fix: str = "Pass drafter.adapter= a folder or hub id, or leave it out.",
    revision: str | None = None,
) -> Path:
    """The folder of an adapter: a local one, or a hub id whose `files` are downloaded. A missing
    `adapters/NAME` stands for the shipped one, or for what training saved for the model NAME (for
    `adapters/NAME-medusa` the Medusa heads); a missing `adapters/NAME-fused` for `adapters/NAME`.
    Errors: `AdapterNotFound`."""
    folder = resolve_path(path)
    if folder.parent == SHIPPED:
        if (reason := absence(path)) is not None:
            raise errors.AdapterNotFound(reason)
        folder = _default(folder) or folder
        with suppress(errors.CorruptFile):  # nobody asked for the damaged adapter
            if folder.parent == SHIPPED and (saved := _saved_by_training(folder)[2]):
                trained = ", ".join(map(str, saved))
                _say_once(
                    f"'{folder}' drafts; drafter.adapter= takes what was trained here: {trained}"
                )
    if folder.is_dir():
        return folder
    problem = f"no adapter at '{path}': it is not a folder, and the hub gave none"
    with errors.explained(errors.AdapterNotFound, problem, fix, (OSError, HFValidationError)):
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(files)))


def absence(path: str) -> str | None:
    """Why a default `adapters/NAME` stands for no adapter, and what to do; None if it stands for
    one. Errors: `AdapterNotFound` if it may stand for several."""
    folder = resolve_path(path)
    if folder.parent != SHIPPED or _default(folder):
        return None
    name, drafter, _ = _saved_by_training(folder)
    target = model_options(name)
    chosen = {} if drafter == "kangaroo" else {"adapter": drafter}
    hint = f"({command_line('train', **target, **chosen)})"
    if drafter in PUBLISHED:
        convert = command_line("convert import", "source=CHECKPOINT", **target)
        hint += f", import a published checkpoint ({convert}),"
    return (
        f"no adapter at 'adapters/{folder.name.removesuffix('-fused')}', and none in "
        f"'{TRAINED / name}', where training saves them. Train one {hint} or pass drafter.adapter= "
        "a folder or hub id."
    )


def _default(folder: Path) -> Path | None:
    """The folder that a default `adapters/NAME` stands for; None without an adapter. Errors:
    `AdapterNotFound` if training saved several."""
    plain = folder.with_name(folder.name.removesuffix("-fused"))
    for place in (folder, resolve_path(str(plain))):
        if place.is_dir():
            return place
    saved = _saved_by_training(plain)[2]
    if len(saved) > 1:
        raise errors.AdapterNotFound(
            f"no adapter at '{plain}', and training saved several: {', '.join(map(str, saved))}. "
            "Pass drafter.adapter= one of them."
        )
    return saved[0] if saved else None


def _saved_by_training(folder: Path) -> tuple[str, str, list[Path]]:
    """The model and the drafter of an `adapters/NAME`, and what training saved for both."""
    drafters = {config.drafter for config in classes("kangaroo.heads", HeadConfig).values()}
    drafter = next((x for x in drafters if folder.name.endswith(f"-{x}")), "kangaroo")
    name = folder.name.removesuffix(f"-{drafter}").removesuffix("-fused")
    saved = [file.parent for file in sorted((TRAINED / name).glob(f"*/{WEIGHTS}"))]
    return name, drafter, [x for x in saved if read_config(str(x)).architecture.drafter == drafter]


def weights_hash(path: str) -> str:
    """A hash of an adapter's weights. Errors: `AdapterNotFound`."""
    return hashlib.sha256((_complete(find(path)) / WEIGHTS).read_bytes()).hexdigest()[:16]


def made_by(path: str) -> dict[str, Any]:
    """What training took, and the adapter that it started from, as far as the config knows."""
    training = read_config(path).training
    progress = training.get("progress", {})
    facts = {
        "trained_positions": progress.get("assistant_tokens"),
        "epochs": training.get("trainer", {}).get("epochs"),
        "seconds": round(progress.get("seconds", 0)) or None,
        "start": training.get("adapter", {}).get("start"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def draft_vocabulary(path: str, size: int) -> Tensor:
    """The `size` most frequent tokens of an adapter's training data, ascending. Errors:
    `AdapterNotFound` if it has no vocabulary, `CorruptFile`, `ConfigError` if that is smaller."""
    file = find(path) / VOCABULARY
    if not file.is_file():
        raise errors.AdapterNotFound(
            f"adapter '{path}' has no {VOCABULARY}, so drafter.vocabulary={size} cannot be chosen "
            "from it. Leave it unset, or train the adapter again."
        )
    with _readable(file):
        frequent_K = load_file(file)["frequent"].long()
    if not 0 < size <= len(frequent_K):
        raise errors.ConfigError(
            f"drafter.vocabulary={size} must lie in 1 to {len(frequent_K)}, the distinct tokens "
            f"that adapter '{path}' was trained on."
        )
    return frequent_K[:size].sort().values


def load(
    path: str, lm: TargetModel, kind: type[Kind], vocabulary: int | None = None
) -> tuple[Kind, list[DraftHead]]:
    """An adapter in the dtype and on the device for drafting, and its draft heads. Errors: those of
    `load_as_saved`; `AdapterMismatch` if it is not of this kind (`Trainable` takes any)."""
    adapter, vocabulary_K = load_as_saved(path, lm, vocabulary)
    if not isinstance(adapter, kind):
        head = adapter.architecture
        raise errors.AdapterMismatch(
            f"'{path}' is a trained {head.kind()}; pass drafter={head.drafter} for it, or "
            "drafter.adapter= one that this drafter can use."
        )
    adapter = adapter.to(adapter.home(lm), lm.dtype)
    return adapter, adapter.draft_heads(lm, vocabulary_K)


def load_as_saved(
    path: str, lm: TargetModel, vocabulary: int | None = None
) -> tuple[Trainable, Tensor | None]:
    """An adapter as it is on disk, for a target that may be a `meta_model`, and its draft
    vocabulary: this number of frequent tokens, 0 for all tokens, None as in training. Errors:
    `AdapterNotFound`, `CorruptFile`, `AdapterMismatch`, `ConfigError` for an invalid number."""
    folder = find(path)
    if folder != Path(path):
        log.info("the adapter '%s' is that in %s", path, folder)
    config = read_config(path)
    state = read_weights(folder)
    hashes = target_hashes(lm.config)
    if config.n_layers != lm.n_layers or config.target_hash not in hashes:
        raise errors.AdapterMismatch(
            f"adapter '{path}' was trained for {config.target} (exit layer {config.exit_layer} of "
            f"{config.n_layers} layers, config {config.target_hash}); this target is {lm.name} "
            f"({lm.n_layers} layers, config {hashes[0]}). Pass drafter.adapter= one trained for "
            f"it, or train one: {command_line('train', **model_options(lm.name))}"
        )
    if config.target_weights and lm.fingerprint not in (None, config.target_weights):
        log.warning(
            f"adapter '{path}' was trained for {config.target} (weights {config.target_weights}); "
            f"this target is {lm.name} (weights {lm.fingerprint}). Texts stay the same, but drafts "
            "may be worse. Pass drafter.adapter= one trained for this target, or train one: "
            f"{command_line('train', **model_options(lm.name))}"
        )
    trained_size = config.vocabulary or 0
    size = trained_size if vocabulary is None else vocabulary
    vocabulary_K = draft_vocabulary(path, size) if size else None
    with torch.device("meta"):
        adapter = config.architecture.build(lm, config.exit_layer, vocabulary_K)
    if adapter.own_heads() and size != trained_size:
        raise errors.ConfigError(
            f"adapter '{path}' has a head of its own over {config.vocabulary or 'all'} tokens: "
            f"leave drafter.vocabulary={size} out."
        )
    adapter.attention_window = config.attention_window
    adapter = assign_weights(adapter, state, f"adapter '{path}' does not fit this target")
    return adapter, vocabulary_K


def assign_weights(adapter: Kind, state: Mapping[str, Tensor], fault: str) -> Kind:
    """Put these tensors (no copies) into an adapter and make it ready to draft. Errors:
    `AdapterMismatch`, which begins with `fault` and names what does not match."""
    try:
        adapter.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise errors.AdapterMismatch(f"{fault}: {error}") from error
    return adapter.eval().requires_grad_(False)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in an adapter's folder. Errors: `CorruptFile`, also for infinity or NaN."""
    with _readable(folder):
        state = load_file(folder / WEIGHTS)
        if (name := not_finite(state)) is not None:
            raise ValueError(f"{name} holds numbers that are not finite")
    return state


def not_finite(state: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a number that is not finite, or None."""
    return next((name for name, x in state.items() if not x.isfinite().all()), None)


def read_config(path: str) -> AdapterConfig:
    """The config of an adapter. Errors: `AdapterNotFound`, `CorruptFile`."""
    folder = _complete(find(path))
    kinds = classes("kangaroo.heads", HeadConfig)
    with _readable(folder):
        fields = json.loads((folder / CONFIG).read_text())
        parts = fields.pop("architecture")
        kind = parts.pop("kind", None)
        if kind not in kinds:
            raise ValueError(f"its kind is {kind}, not one of {', '.join(kinds)}")
        config = AdapterConfig(**fields, architecture=kinds[kind](**parts))
        for name in ("attention_window", "vocabulary_beside_texts"):
            count = config.facts.get(name, 0)
            if type(count) is not int or count < 0:
                raise ValueError(f"its {name} is {count!r}, no count")
        return config


def _complete(folder: Path) -> Path:
    """The folder, if it holds an adapter's files. Errors: `AdapterNotFound`, which names the
    adapters in a training run's folder."""
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            trained = [str(file.parent) for file in sorted(folder.glob(f"*/{WEIGHTS}"))]
            fix = f"; it holds {', '.join(trained)}: pass drafter.adapter= one" if trained else ""
            raise errors.AdapterNotFound(
                f"'{folder}' holds no {name}, so it is no adapter's folder{fix}."
            )
    return folder


def _readable(path: Path) -> AbstractContextManager[None]:
    causes = (*errors.DAMAGED, SafetensorError, errors.ConfigError)
    fix = "Fetch or train it again."
    return errors.explained(errors.CorruptFile, f"adapter '{path}' cannot be read", fix, causes)
