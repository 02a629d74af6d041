"""What the drafters' tests decode."""

import pytest
from cases import SAMPLINGS, Case, case_of

from kangaroo.engine.sampling import Sampling


@pytest.fixture(params=["greedy", "sampled"])
def sampling(request) -> Sampling:
    return SAMPLINGS[request.param]


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama", "sampled")
