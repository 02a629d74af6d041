"""Adapters on disk: weights, what they were made for, and the tokens they may draft from."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kangaroo.heads.base import HeadConfig, Trainable
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.loading import options_of
from kangaroo.models.target import TargetModel
from kangaroo.utils.discovery import classes
from kangaroo.utils.errors import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile
from kangaroo.utils.folders import SHIPPED, command_line, resolve_path, write_json

WEIGHTS, CONFIG, VOCABULARY = "adapter.safetensors", "config.json", "vocabulary.safetensors"
Kind = TypeVar("Kind", bound=Trainable)

FIXED = """
    model_type hidden_size intermediate_size num_hidden_layers vocab_size num_attention_heads
    num_key_value_heads head_dim rope_parameters rms_norm_eps tie_word_embeddings
""".split()  # fields of a target's config that fix what it computes
OF_FAMILIES = """
    sliding_window query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping
    embedding_multiplier residual_multiplier attention_multiplier logits_scaling
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size
""".split()  # such as only some families have
TRAINED = Path("outputs/train")

log = logging.getLogger(__name__)


@dataclass
class AdapterConfig:
    """What an adapter was made for; saved beside its weights."""

    target: str
    target_revision: str | None  # on the hub
    target_hash: str
    exit_layer: int
    n_layers: int  # of the target
    parameters: int
    architecture: HeadConfig
    vocabulary: int | None = None  # so many of the most frequent tokens are drafted; None is all
    facts: dict[str, Any] = field(default_factory=dict)  # of `Trainable.facts`
    training: dict[str, Any] = field(default_factory=dict)  # data, schedule, results, command
    target_weights: str | None = None  # `TargetModel.fingerprint`, where it is known

    @property
    def attention_window(self) -> int:
        """How far back it learnt to look, in tokens; 0, where nobody says, is to the beginning."""
        return self.facts.get("attention_window", 0)

    @property
    def vocabulary_beside_texts(self) -> int | None:
        """How many frequent tokens do where a text's own are drafted too; None: as without."""
        return self.facts.get("vocabulary_beside_texts", self.vocabulary)


def target_hash(lm: TargetModel) -> str:
    """Hash of the config fields that fix what the target computes, whatever else its file holds."""
    config = lm.config.to_dict()
    fields = {name: config.get(name) for name in FIXED}
    fields |= {name: config[name] for name in OF_FAMILIES if config.get(name) is not None}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def describe(
    lm: TargetModel,
    adapter: Trainable,
    training: dict[str, Any],
    vocabulary: int | None = None,
    facts: dict[str, Any] | None = None,
) -> AdapterConfig:
    """What is saved beside an adapter trained for `lm`."""
    return AdapterConfig(
        target=lm.name,
        target_revision=getattr(lm.config, "_commit_hash", None),
        target_hash=target_hash(lm),
        exit_layer=adapter.exit_layer,
        n_layers=lm.n_layers,
        parameters=sum(p.numel() for p in adapter.parameters()),
        architecture=adapter.architecture,
        vocabulary=vocabulary,
        facts=facts or {},
        training=training,
        target_weights=lm.fingerprint,
    )


def kept_dtype(adapter: Trainable, lm: TargetModel) -> torch.dtype:
    """What an adapter is saved in: the target's; bfloat16 where a weight is beyond float16."""
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
    """Write weights, config, and the tokens that a draft vocabulary is taken from, the most
    frequent first, into `folder`, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: t.to(dtype or t.dtype).contiguous() for name, t in adapter.state_dict().items()}
    save_file(state, folder / WEIGHTS)
    if frequent_K is not None:
        save_file({"frequent": frequent_K.to(torch.int32)}, folder / VOCABULARY)
    fields = asdict(config) | {"architecture": config.architecture.as_json()}
    write_json(folder / CONFIG, fields)
    return folder


def find(
    path: str,
    files: Sequence[str] = (WEIGHTS, CONFIG, VOCABULARY),
    fix: str = "Pass drafter.adapter= a folder or hub id, or leave it out.",
    revision: str | None = None,
) -> Path:
    """The folder of an adapter: a local one, or a hub id whose `files` are downloaded. For
    `adapters/NAME` the shipped one will do, or what training the model NAME saved; for
    `adapters/NAME-medusa` its Medusa heads; for `adapters/NAME-fused`, where that is missing,
    `adapters/NAME`. Errors: `AdapterNotFound`."""
    folder = resolve_path(path)
    if folder.is_dir():
        return folder
    if folder.parent == SHIPPED:
        plain = folder.with_name(folder.name.removesuffix("-fused"))
        return _trained(folder) if plain == folder else find(str(plain), files, fix, revision)
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise AdapterNotFound(
            f"no adapter at '{path}': it is not a folder, and the hub gave none ({error}). {fix}"
        ) from error


def _trained(missing: Path) -> Path:
    """The only adapter in `outputs/train/NAME` that can stand for `adapters/NAME`."""
    drafters = {kind.drafter for kind in kinds().values()}
    drafter = next((x for x in drafters if missing.name.endswith(f"-{x}")), "kangaroo")
    name = missing.name.removesuffix(f"-{drafter}")
    saved = [file.parent for file in sorted((TRAINED / name).glob(f"*/{WEIGHTS}"))]
    fitting = [x for x in saved if read_config(str(x)).architecture.drafter == drafter]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise AdapterNotFound(
            f"no adapter at '{missing}', and training left several: "
            f"{', '.join(map(str, fitting))}. Pass drafter.adapter= one of them."
        )
    target = options_of(name)
    way = f"({command_line('train', **target, adapter=drafter)})"
    if drafter == "kangaroo":
        imported = command_line("convert import", "source=CHECKPOINT", **target)
        way = f"({command_line('train', **target)}), import an official checkpoint ({imported}),"
    raise AdapterNotFound(
        f"no adapter at '{missing}', and none in '{TRAINED / name}', where training saves them. "
        f"Train one {way} or pass drafter.adapter= a folder or hub id."
    )


def kinds() -> dict[str, type[HeadConfig]]:
    """What can be trained, by the name in config.json."""
    return classes("kangaroo.heads", HeadConfig)


def weights_hash(path: str) -> str:
    """Hash of an adapter's weights, wherever `path` leads."""
    return hashlib.sha256((find(path) / WEIGHTS).read_bytes()).hexdigest()[:16]


def made_by(path: str) -> dict[str, Any]:
    """What training took, as far as the config says, and the adapter that it went on from."""
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
    `AdapterNotFound` where it came without, `CorruptFile`, `ConfigError` where there are fewer."""
    file = find(path) / VOCABULARY
    if not file.is_file():
        raise AdapterNotFound(
            f"adapter '{path}' has no {VOCABULARY}, so drafter.vocabulary={size} cannot be chosen "
            "from it. Leave it unset, or train the adapter again."
        )
    try:
        frequent_K = load_file(file)["frequent"].long()
    except (SafetensorError, KeyError) as error:
        raise _unreadable(file, error) from error
    if not 0 < size <= len(frequent_K):
        raise ConfigError(
            f"drafter.vocabulary={size} must lie in 1 to {len(frequent_K)}, the distinct tokens "
            f"that adapter '{path}' was trained on."
        )
    return frequent_K[:size].sort().values


def load(
    path: str, lm: TargetModel, kind: type[Kind], vocabulary: int | None = None
) -> tuple[Kind, list[DraftHead]]:
    """What `as_saved` gives, in the dtype of `lm` and where it drafts, and the heads that it drafts
    with. Errors: also `AdapterMismatch` unless it is of that kind; `Trainable` takes any."""
    adapter, vocabulary_K = as_saved(path, lm, vocabulary)
    if not isinstance(adapter, kind):
        head = adapter.architecture
        raise AdapterMismatch(
            f"'{path}' is a trained {head.kind()}; pass drafter={head.drafter} for it, or "
            "drafter.adapter= one that this drafter can use."
        )
    adapter = adapter.to(adapter.home(lm), lm.dtype)
    return adapter, adapter.draft_heads(lm, vocabulary_K)


def as_saved(
    path: str, lm: TargetModel, vocabulary: int | None = None
) -> tuple[Trainable, Tensor | None]:
    """What was trained for `lm` as it lies on disk, and the tokens it drafts from: this many of the
    most frequent, 0 for all, None for what it was trained for. Of `lm`, which may be a
    `meta_model`, it takes the shapes alone. Errors: `AdapterNotFound`, `CorruptFile`,
    `AdapterMismatch`, and `ConfigError` for a vocabulary that cannot be."""
    folder = find(path)
    if folder != Path(path):
        log.info("the adapter '%s' is that in %s", path, folder)
    config, state, this = read_config(path), read_weights(folder), target_hash(lm)
    if config.n_layers != lm.n_layers or config.target_hash != this:
        raise AdapterMismatch(
            f"adapter '{path}' was trained for {config.target} (exit layer {config.exit_layer} of "
            f"{config.n_layers} layers, config {config.target_hash}); this target is {lm.name} "
            f"({lm.n_layers} layers, config {this}). Pass drafter.adapter= one trained for it, or "
            f"train one: {command_line('train', **options_of(lm.name))}"
        )
    if config.target_weights and lm.fingerprint not in (None, config.target_weights):
        log.warning(
            "adapter '%s' was trained for %s (weights %s); this target is %s (weights %s). Texts "
            "stay the same, but it may draft worse: drafter.adapter= one trained for it, or train "
            "one (python train.py model=...).",
            *(path, config.target, config.target_weights, lm.name, lm.fingerprint),
        )
    trained_for = config.vocabulary or 0
    size = trained_for if vocabulary is None else vocabulary
    vocabulary_K = draft_vocabulary(path, size) if size else None
    with torch.device("meta"):
        adapter = config.architecture.build(lm, config.exit_layer, vocabulary_K)
    if adapter.own_heads() and size != trained_for:
        raise ConfigError(
            f"adapter '{path}' has a head of its own over {config.vocabulary or 'all'} tokens, so "
            f"drafter.vocabulary={size} cannot be; leave it unset."
        )
    adapter.attention_window = config.attention_window
    return filled(adapter, state, f"adapter '{path}' does not fit this target"), vocabulary_K


def filled(adapter: Kind, state: Mapping[str, Tensor], fault: str) -> Kind:
    """The adapter with these weights themselves, ready to draft. Errors: `AdapterMismatch`, which
    begins with `fault` and names what is missing, left over or of another shape."""
    try:
        adapter.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise AdapterMismatch(f"{fault}: {error}") from error
    return adapter.eval().requires_grad_(False)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in an adapter's folder. Errors: `CorruptFile`, also where one is not finite."""
    try:
        state = load_file(folder / WEIGHTS)
    except (ValueError, SafetensorError) as error:
        raise _unreadable(folder, error) from error
    if (name := not_finite(state)) is not None:
        raise _unreadable(folder, f"{name} holds numbers that are not finite")
    return state


def not_finite(state: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a number that is not finite; None where there is none."""
    return next((name for name, x in state.items() if not x.isfinite().all()), None)


def read_config(path: str) -> AdapterConfig:
    """What an adapter was made for. Errors: `AdapterNotFound`, `CorruptFile`, `AdapterMismatch` for
    a head of low rank."""
    folder = find(path)
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise AdapterNotFound(f"'{folder}' holds no {name}; it is not an adapter's folder.")
    try:
        fields = json.loads((folder / CONFIG).read_text())
        parts = fields.pop("architecture")
        if rank := parts.pop("head_rank", None):  # 0 in all other adapters of those versions
            raise AdapterMismatch(
                f"adapter '{path}' has an LM head of low rank (head_rank={rank}), which is not run "
                "any more. Train one without it: trainer.vocabulary=8192 makes drafts as cheap."
            )
        if (kind := parts.pop("kind", None)) not in kinds():
            raise ValueError(f"its kind is {kind}, not one of {', '.join(kinds())}")
        config = AdapterConfig(**fields, architecture=kinds()[kind](**parts))
        for name in ("attention_window", "vocabulary_beside_texts"):
            if type(count := config.facts.get(name, 0)) is not int or count < 0:
                raise ValueError(f"its {name} is {count!r}, no count")
        return config
    except (ValueError, TypeError, AttributeError, KeyError, ConfigError) as error:  # no JSON, ...
        raise _unreadable(folder, error) from error


def _unreadable(path: Path, error: Exception | str) -> CorruptFile:
    return CorruptFile(f"adapter '{path}' cannot be read ({error}); fetch it again.")
