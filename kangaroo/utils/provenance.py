"""What stands beside every result: enough to say how it came about and to make it again."""

import datetime
import platform
import re
import subprocess
import sys
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kangaroo.utils.folders import PACKAGE

PACKAGES = ("kangaroo", "torch", "transformers", "datasets", "deepspeed", "hydra-core", "wandb")


def provenance() -> dict[str, Any]:
    """Command line, git revision, versions, hardware and time, as plain JSON values."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git_revision": git_revision(),
        "versions": {x: _version(x) for x in PACKAGES} | {"python": platform.python_version()},
        "hardware": {
            "cpu": processor(),
            "threads": torch.get_num_threads(),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def machine(about: dict[str, Any]) -> str:
    """What computed, in words, of what `provenance` returned."""
    hardware = about["hardware"]
    names = ", ".join(name for name in (hardware["cuda"], hardware["cpu"]) if name)
    return f"{names}, CPU threads: {hardware['threads']}"


@cache
def processor() -> str:
    """The processor's model, as the system calls it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def git_revision() -> str | None:
    """The checkout's commit, with "-dirty" where files differ from it; None outside a checkout."""
    checkout = PACKAGE.parent
    if not (checkout / ".git").exists():  # an installed package may lie in somebody's repository
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """How settings differ, for a message that refuses to mix two runs; empty if they do not."""
    return "; ".join(
        f"{name}={before.get(name)!r} there, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    )


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, as they are written on the command line."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value.value if isinstance(value, Enum) else value
    return leaves


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
