"""A million tokens by every drafter, compared with vanilla's: `make soak` (docs/evaluation.md).

SOAK_TOKENS, SOAK_SEED, SOAK_DEVICE and SOAK_DTYPE in the environment change how much is decoded,
and by which targets; SOAK_OUTPUT is the folder of the certificate.
"""

import os
from pathlib import Path

import pytest

from kangaroo.models.loading import Dtype
from soak.run import SOAKED, soak

OPTIONS = {"tokens": int, "seed": int, "device": str, "dtype": Dtype}


@pytest.mark.soak
@pytest.mark.usefixtures("measured_budget")
def test_every_drafter_writes_vanillas_texts():
    texts = {name: os.environ.get(f"SOAK_{name.upper()}") for name in OPTIONS}
    options = {name: OPTIONS[name](text) for name, text in texts.items() if text}
    folder = Path(os.environ.get("SOAK_OUTPUT", "outputs/soak"))
    certificate = soak(SOAKED, folder, **options)
    print(f"\n{certificate['verdict']} The certificate is in {folder}.")
