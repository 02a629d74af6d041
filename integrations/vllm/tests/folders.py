"""Folders that the tests serve from: a target, exported adapters, an ordinary draft model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from kangaroo.model import LM
from kangaroo.trained import adapter_files


def exported(lm: LM, adapter: str, folder: Path, vocabulary: int | None, **changes: Any) -> Path:
    """What `scripts/export.py to=vllm` writes for `adapter`.

    Args:
        vocabulary: as of `adapter_files.load`.
        changes: to the section `kangaroo` of its config.
    """
    about = adapter_files.read_config(adapter)
    made, vocabulary_K = adapter_files.as_saved(adapter, lm, vocabulary)
    state = dict(made.state_dict())
    if vocabulary_K is not None:
        state["vocabulary"] = vocabulary_K
    architecture = {"kind": about.architecture.kind()} | asdict(about.architecture)
    config = lm.config.to_dict() | {"architectures": ["KangarooDraft"], "num_hidden_layers": 1}
    config["kangaroo"] = {
        "format": 1,
        "exit_layer": about.exit_layer,
        "target_layers": about.n_layers,
        "architecture": architecture,
        "draft_vocabulary": None if vocabulary_K is None else len(vocabulary_K),
        "threshold": 0.6,
    } | changes
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
