"""Reads the header of a GGUF file and maps its weights into memory. The layout is described at
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

Shapes: O rows of a matrix, B bytes of a row.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from huggingface_hub import hf_hub_download
from torch import Tensor

from kangaroo.utils.errors import CorruptFile, ModelNotFound, UnsupportedModel, explained

HUB = "hf://"
NUMBERS = dict(zip(GGUFValueType, "BbHhIif?  Qqd", strict=True))  # formats of `struct`


@dataclass
class StoredTensor:
    """Where a tensor lies in a file, in bytes; its format, and its shape with rows first."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    size: int


class GGUFFile:
    """A mapped GGUF file: `fields` of metadata and `tensors`, both by name. If another file takes
    its place, this one stays mapped. Errors: `ModelNotFound`, `CorruptFile`, `UnsupportedModel`."""

    def __init__(self, path: Path):
        self.path = path
        problem = f"the GGUF file '{path}' cannot be read"
        fix = "Pass model= another file."
        with explained(ModelNotFound, problem, fix), path.open("rb") as stream:
            # copy-on-write: torch takes no read-only memory
            self.data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        if self.data[:4] != b"GGUF":
            raise CorruptFile(
                f"'{path}' is no GGUF file: it begins with {self.data[:16]!r}. Fetch it again "
                "(`git lfs pull`, if that says git-lfs)."
            )
        self.end = 4
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise UnsupportedModel(
                f"'{path}' is written in the other byte order (big-endian). Convert it for this "
                "machine (gguf-convert-endian), or fetch another."
            )
        if version not in (2, 3):
            raise UnsupportedModel(f"'{path}' is GGUF version {version}; known are 2 and 3.")
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            self._read()
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise self.damage(f"its header ends too early or is damaged ({error})") from error

    def damage(self, reason: str) -> CorruptFile:
        """The error for an incomplete file."""
        return CorruptFile(f"the GGUF file '{self.path}' is not whole: {reason}. Fetch it again.")

    def field(self, name: str, default: Any = None) -> Any:
        """A field of the architecture, such as `block_count`. Errors: `CorruptFile` if it is
        missing and has no default."""
        value = self.fields.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise self.damage(f"its metadata lacks '{self.architecture}.{name}'")
        return value

    def blocks(self, name: str) -> Tensor:
        """The bytes of a tensor's rows, `[O, B]`, a view of the file. Errors: `CorruptFile`."""
        if name not in self.tensors:
            raise self.damage(f"it lacks the weight '{name}'")
        stored = self.tensors[name]
        flat = torch.frombuffer(
            self.data, dtype=torch.uint8, count=stored.size, offset=stored.start
        )
        return flat.view(stored.shape[0] if len(stored.shape) > 1 else 1, -1)

    def _read(self) -> None:
        n_tensors = self._number("Q")
        n_fields = self._number("Q")
        for _ in range(n_fields):
            name = self._text()
            self.fields[name] = self._value(GGUFValueType(self._number("I")))
        self.architecture = str(self.fields.get("general.architecture"))
        parts = self.fields.get("split.count", 0)
        if parts > 1:
            raise UnsupportedModel(
                f"'{self.path}' is one of {parts} parts of a model. Join them (llama-gguf-split "
                "--merge FIRST_PART WHOLE), and pass model= the whole."
            )
        places = []
        for _ in range(n_tensors):
            name = self._text()
            shape = [self._number("Q") for _ in range(self._number("I"))][::-1]
            places.append((name, self._number("I"), shape, self._number("Q")))
        alignment = self.fields.get("general.alignment", 32)
        first = -(-self.end // alignment) * alignment
        for name, number, shape, start in places:
            if number not in GGMLQuantizationType.__members__.values():
                raise UnsupportedModel(
                    f"'{self.path}' holds weights of a type that the package gguf does not know: "
                    f"{name} of type {number}. Pass model= a file of other types (Q4_K_M, Q8_0)."
                )
            kind = GGMLQuantizationType(number)
            numbers, size = GGML_QUANT_SIZES[kind]  # of a block
            if shape[-1] % numbers:
                raise ValueError(f"rows of {shape[-1]} in {name}, of type {kind.name}")
            n_bytes = torch.Size(shape).numel() // numbers * size
            end = first + start + n_bytes
            if end > len(self.data):
                raise self.damage(
                    f"it has {len(self.data)} bytes, and the weight '{name}' would end at byte "
                    f"{end}"
                )
            self.tensors[name] = StoredTensor(kind, tuple(shape), first + start, n_bytes)

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack_from(f"<{form}", self.data, self.end)
        self.end += struct.calcsize(form)
        return number

    def _text(self) -> str:
        start = self.end + 8
        self.end = start + self._number("Q")
        if self.end > len(self.data):
            raise ValueError("a text without an end")
        return self.data[start : self.end].decode()

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._text()
        if kind is not GGUFValueType.ARRAY:
            return self._number(NUMBERS[kind])
        part = GGUFValueType(self._number("I"))
        count = self._number("Q")
        if part in (GGUFValueType.STRING, GGUFValueType.ARRAY):
            return [self._value(part) for _ in range(count)]
        form = f"<{count}{NUMBERS[part]}"
        numbers = struct.unpack_from(form, self.data, self.end)
        self.end += struct.calcsize(form)
        return list(numbers)


def is_gguf(path: str) -> bool:
    """Whether a `model.path` names a GGUF file, here or on the hub."""
    return path.startswith(HUB) or path.endswith(".gguf")


def gguf_path(path: str, revision: str | None = None) -> Path:
    """The file of a `model.path`; of `hf://OWNER/NAME/FILE.gguf` the hub's, downloaded at first
    use. Errors: `ModelNotFound`."""
    if not path.startswith(HUB):
        return Path(path).expanduser()
    owner, _, rest = path.removeprefix(HUB).partition("/")
    name, _, file = rest.partition("/")
    if not (owner and name and file.endswith(".gguf")):
        raise ModelNotFound(f"'{path}' names no file; write hf://OWNER/NAME/FILE.gguf.")
    try:
        return Path(hf_hub_download(f"{owner}/{name}", file, revision=revision))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "").rstrip(" .:")
        raise ModelNotFound(
            f"'{path}' is not in the local hub cache, and the hub did not give it: {reason}. Go "
            "online once, or pass model.path= the file itself."
        ) from error
