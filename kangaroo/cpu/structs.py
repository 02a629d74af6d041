"""The structures of `cpp/`, field by field; a test compares their sizes with those in C++.

An address of 0 stands for nothing. Whoever sets an address keeps the memory alive.
"""

from ctypes import Structure, c_double, c_int64, c_void_p

import numpy as np

TYPES = {"p": c_void_p, "i": c_int64, "d": c_double}


def _fields(text: str) -> list[tuple[str, type]]:
    """Fields in their order, after the letter of their type: p address, i integer, d double."""
    groups = (group.split() for group in text.split(","))
    return [(name, TYPES[kind]) for kind, *names in groups for name in names]


class Sizes(Structure):
    """What all layers of a model share (attention.h)."""

    _fields_ = _fields("i hidden heads kv_heads head_size feed_forward threads, d eps scaling")


class Stack(Structure):
    """Layers with their keys and values (layers.h)."""

    _fields_ = _fields("p layers, i count, p keys values, i n_slots window plain")


class Head(Structure):
    """A matrix from states to logits, and the norm before it (sampling.h)."""

    _fields_ = _fields("p norm weight, i kind outputs, p ids, i passing, p scales")


class Rough(Structure):
    """A head in fewer bits, with the limits of its errors (sampling.h)."""

    _fields_ = _fields("p weight, i kind, p scales errors, i passing")


class Fusing(Structure):
    """Weights that join shallow and deep states (rows.h)."""

    _fields_ = _fields("p shallow_norm deep_norm weight, i kind, p scales")


class Target(Structure):
    """A whole model on its cache (rows.h)."""

    _fields_ = [
        *_fields("p embedding, i embedding_kind vocabulary, p cos sin"),
        ("sizes", Sizes),
        ("stack", Stack),
        ("head", Head),
        ("rough", Rough),
    ]


class Drafting(Structure):
    """A drafting layer on its cache, and the shallow layers as drafts read them (rows.h)."""

    _fields_ = [
        *_fields("p norm deep taps, i n_taps, p mix, i unseen"),
        ("stack", Stack),
        ("head", Head),
        ("fusing", Fusing),
        ("shallow", Stack),
    ]


class Places(Structure):
    """What a block has besides an adapter (rows.h)."""

    _fields_ = _fields("p places neighbours table, i rank")


class Rows(Structure):
    """The nodes of all rows (rows.h); `DraftBuffers` says what each field holds."""

    _fields_ = _fields(
        "i batch capacity hidden most_unread exit,"
        "p base count asking end draw token parent place has_state choices chances states unread,"
        "p unread_states made biases accepted written path, i keep, p kept kept_chances"
    )


class Outcomes(Structure):
    """Logits in training, and what is computed of them (outcomes.h)."""

    _fields_ = _fields(
        "i rows logits tokens threads, p scores index inside log_q largest rest best"
    )


# An element of the array `Rows.draw`: `Draw` of sampling.h.
DRAW = np.dtype(
    [("temperature", np.float64), ("top_p", np.float64), ("top_k", np.int64), ("seed", np.int64)]
)
# In the order of `struct_sizes` in decode.cpp.
CHECKED = Sizes, Stack, Head, Rough, Fusing, Target, Drafting, Places, Rows, Outcomes
