"""The provenance that is saved with every result, so that it can be reproduced."""

import datetime
import platform
import re
import subprocess
import sys
from enum import Enum
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import PACKAGE

PACKAGES = "kangaroo-decoding torch transformers datasets deepspeed hydra-core wandb".split()


def provenance() -> dict[str, Any]:
    """Command line, git revision, versions, hardware and time, as plain JSON values."""
    versions = {x: next((d.version for d in distributions(name=x)), None) for x in PACKAGES}
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git_revision": git_revision(),
        "versions": versions | {"python": platform.python_version()},
        "hardware": {
            "cpu": processor(),
            "threads": torch.get_num_threads(),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def describe_machine(provenance: dict[str, Any]) -> str:
    """The hardware in a provenance, in words."""
    hardware = provenance["hardware"]
    names = ", ".join(name for name in (hardware["cuda"], hardware["cpu"]) if name)
    return f"{names}, CPU threads: {hardware['threads']}"


@cache
def processor() -> str:
    """The processor's model name."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def git_revision() -> str | None:
    """The checkout's commit, with "-dirty" for uncommitted changes; None outside a checkout."""
    if not (PACKAGE.parent / ".git").exists():  # an installed package may lie in another repository
        return None
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The differences of two runs' settings, for an error message; empty where they are equal."""
    return "; ".join(
        f"{name}={before.get(name)!r} there, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    )


def check_same(folder: Path, before: dict[str, Any], now: dict[str, Any], option: str) -> None:
    """Errors: `ConfigError` where a folder, which is passed as `option`, has other settings."""
    if changed := differences(before, now):
        raise ConfigError(
            f"'{folder}' was begun with other settings ({changed}). Go on with the same ones, "
            f"pass {option} another folder, or delete it."
        )


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, as on the command line."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value.value if isinstance(value, Enum) else value
    return leaves
