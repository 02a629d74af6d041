"""A server under load: thousands of requests, broken ones among them, and clients that leave."""

import asyncio
import json
import random

import httpx
import psutil
import pytest
from serving_cases import LONGEST, alone, as_body, random_request, served

from kangaroo.engine.requests import Request
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import plain_text

SERVED = ["drafter=kangaroo", "drafter.adapter='untrained:2'", "model.dtype=float32"]
SERVED += ["max_batch_size=8", f"max_model_len={LONGEST}"]
BROKEN = [b"", b"[", b'{"prompt": 3}', b'{"prompt": "a", "n": 99}', b'{"prompt": "' + b"x" * 5000]


def text_of(answer: httpx.Response, streamed: bool) -> str:
    if not streamed:
        return answer.json()["choices"][0]["text"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@pytest.mark.slow
def test_texts_are_right_and_memory_does_not_grow(tmp_path):
    rng, texts = random.Random(0), list[tuple[Request, str]]()

    async def ask(client: httpx.AsyncClient) -> None:
        """A good request, or a broken one; or a good one whose client leaves before its end."""
        if rng.random() < 0.3:
            headers = {"content-type": "application/json"}
            answer = await client.post("completions", content=rng.choice(BROKEN), headers=headers)
            assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
            return
        request, streamed = random_request(rng), rng.random() < 0.5
        patience = rng.random() * 0.2 if rng.random() < 0.2 else 120
        body = as_body(request) | {"stream": streamed}
        try:
            answer = await client.post("completions", json=body, timeout=patience)
        except httpx.TimeoutException:
            return
        assert answer.status_code in (200, 429, 503), answer.text
        if answer.status_code == 200:
            texts.append((request, text_of(answer, streamed)))

    async def load(count: int) -> None:
        """By sixteen clients, each with one request after another."""
        left = iter(range(count))
        async with httpx.AsyncClient(base_url=f"{address}/v1", timeout=120) as client:

            async def ask_again_and_again() -> None:
                for _ in left:
                    await ask(client)

            await asyncio.gather(*(ask_again_and_again() for _ in range(16)))

    with served(*SERVED, f"hydra.run.dir={tmp_path}") as (address, process):
        memory = psutil.Process(process.pid).memory_info
        asyncio.run(load(500))  # what it needs at the most
        before = memory().rss
        asyncio.run(load(2000))
        assert memory().rss < 1.05 * before and process.poll() is None
        health = httpx.get(f"{address}/health").json()
        assert health == {"status": "ok", "running": 0, "entering": 0, "waiting": 0}
    assert len(texts) > 50
    for request, text in texts:
        assert text == plain_text(byte_tokenizer(), alone(request))
