"""What the engine's tests decode, by native code and by PyTorch's operators."""

import pytest
from cases import Case
from engine_cases import HOT, NEW_TOKENS, PROMPTS
from helpers import adapter_for, tiny, vanilla_texts


@pytest.fixture(scope="module")
def case() -> Case:
    """By native code, which takes a third of the time."""
    lm = tiny().compile_for_decoding()
    return Case(lm, adapter_for(lm), vanilla_texts(lm, PROMPTS, NEW_TOKENS, HOT))


@pytest.fixture(scope="module")
def eager_case() -> Case:
    """By PyTorch's operators alone, so that each of them can be seen."""
    lm = tiny()
    return Case(lm, adapter_for(lm), vanilla_texts(lm, PROMPTS, NEW_TOKENS, HOT))
