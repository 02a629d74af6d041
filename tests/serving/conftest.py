"""A server of a tiny model, and OpenAI's client of it."""

from collections.abc import Iterator

import pytest
from openai import OpenAI
from serving_cases import serving


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as where:
        yield where


@pytest.fixture(scope="module")
def client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
