"""The target of the heads' tests."""

import pytest
from helpers import tiny

from kangaroo.models.target import TargetModel


@pytest.fixture(scope="module")
def lm() -> TargetModel:
    lm = tiny()
    lm.config.name_or_path = "tiny/llama"
    return lm
