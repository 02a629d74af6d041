"""The structures of `cpp/`, field by field; a test compares their sizes with C++'s.

An address is 0 for none; whoever fills one in keeps its memory alive.
"""

from ctypes import Structure, c_double, c_int64, c_void_p

import numpy as np


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int64) for name in names]


def _addresses(*names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names]


class Sizes(Structure):
    """What all layers of a model share (attention.h)."""

    _fields_ = [
        *_integers("hidden", "heads", "kv_heads", "head_size", "feed_forward", "threads"),
        ("eps", c_double),
        ("scaling", c_double),
    ]


class Stack(Structure):
    """Layers with their keys and values (layers.h)."""

    _fields_ = [
        *_addresses("layers"),
        *_integers("count"),
        *_addresses("keys", "values"),
        *_integers("n_slots", "window", "in_bytes"),
    ]


class Head(Structure):
    """A matrix from states to logits, and the norm before it (sampling.h)."""

    _fields_ = [
        *_addresses("norm", "weight"),
        *_integers("outputs"),
        *_addresses("ids"),
        *_integers("passing"),
        *_addresses("scales"),
    ]


class Rough(Structure):
    """A head in bytes, with the limits of its errors (sampling.h)."""

    _fields_ = [*_addresses("weight", "scales", "errors"), *_integers("passing")]


class Fusing(Structure):
    """What joins shallow and deep states (rows.h)."""

    _fields_ = _addresses("shallow_norm", "deep_norm", "weight", "scales")


class Target(Structure):
    """A whole model on its cache (rows.h)."""

    _fields_ = [
        *_addresses("embedding", "cos", "sin"),
        *_integers("vocabulary"),
        ("sizes", Sizes),
        ("stack", Stack),
        ("head", Head),
        ("rough", Rough),
    ]


class Drafting(Structure):
    """A drafting layer on its cache, and the shallow layers as drafts read them (rows.h)."""

    _fields_ = [
        *_addresses("norm", "deep"),
        *_integers("deep_tap"),
        ("stack", Stack),
        ("head", Head),
        ("fusing", Fusing),
        ("shallow", Stack),
    ]


class Places(Structure):
    """What a block has beside an adapter (rows.h)."""

    _fields_ = [*_addresses("places", "neighbours", "table"), *_integers("rank")]


class Rows(Structure):
    """The nodes of all rows (rows.h); `DraftBuffers` says what each field holds."""

    _fields_ = [
        *_integers("batch", "capacity", "hidden", "most_unread", "exit"),
        *_addresses("base", "count", "asking", "end", "draw", "token", "parent", "place"),
        *_addresses("has_state", "choices", "chances", "states", "unread", "unread_states"),
        *_addresses("made", "accepted", "written", "path"),
        *_integers("keep"),
        *_addresses("kept", "kept_chances"),
    ]


class Outcomes(Structure):
    """Logits in training, and what is found of them (outcomes.h)."""

    _fields_ = [
        *_integers("rows", "logits", "tokens", "threads"),
        *_addresses("scores", "index", "inside", "log_q", "largest", "rest", "best"),
    ]


# An element of the array `Rows.draw`: `Draw` of sampling.h.
DRAW = np.dtype(
    [("temperature", np.float64), ("top_p", np.float64), ("top_k", np.int64), ("seed", np.int64)]
)
# In the order of `struct_sizes` in decode.cpp.
CHECKED = Sizes, Stack, Head, Rough, Fusing, Target, Drafting, Places, Rows, Outcomes
