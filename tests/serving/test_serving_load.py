"""A server under load: thousands of requests, clients that leave, and kill -9."""

import asyncio
import json
import random
from collections import Counter

import httpx
import psutil
import pytest
from serving_cases import LONGEST, alone, as_body, random_request, served

from kangaroo.engine.requests import Request
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import plain_text

SERVED = [
    "drafter=kangaroo",
    "drafter.adapter='untrained:2'",
    "model.dtype=float32",
    "max_batch_size=8",
    f"max_model_len={LONGEST}",
]
BROKEN = [b"", b"[", b'{"prompt": 3}', b'{"prompt": "a", "n": 99}', b'{"prompt": "' + b"x" * 5000]


def text_of(answer: httpx.Response, streamed: bool) -> str:
    """The text of the one choice."""
    if not streamed:
        return answer.json()["choices"][0]["text"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


class Clients:
    """Many at a time, each with one request after another."""

    def __init__(self, address: str, seed: int):
        self.url, self.rng = f"{address}/v1/completions", random.Random(seed)
        self.statuses: Counter[int] = Counter()
        self.texts: list[tuple[Request, str]] = []  # what was answered whole

    async def run(self, count: int, at_once: int = 16) -> None:
        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            left = iter(range(count))

            async def ask_again_and_again() -> None:
                for _ in left:
                    await self.ask(client)

            await asyncio.gather(*(ask_again_and_again() for _ in range(at_once)))

    async def ask(self, client: httpx.AsyncClient) -> None:
        """A good request, or a broken one; or a good one whose client leaves before its end."""
        rng = self.rng
        if rng.random() < 0.3:
            headers = {"content-type": "application/json"}
            answer = await client.post(self.url, content=rng.choice(BROKEN), headers=headers)
            assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
            return
        request, streamed = random_request(rng), rng.random() < 0.5
        body = as_body(request) | {"stream": streamed}
        try:
            patience = rng.random() * 0.2 if rng.random() < 0.2 else 120
            answer = await client.post(self.url, json=body, timeout=patience)
        except httpx.TimeoutException:
            return
        self.statuses[answer.status_code] += 1
        if answer.status_code == 200:
            self.texts.append((request, text_of(answer, streamed)))

    def check(self) -> None:
        """Every text is the one that is written alone."""
        assert set(self.statuses) <= {200, 429, 503} and len(self.texts) > 50
        for request, text in self.texts:
            assert text == plain_text(byte_tokenizer(), alone(request))


@pytest.mark.slow
def test_texts_are_right_and_memory_does_not_grow_until_a_kill_and_after_it(tmp_path):
    with served(*SERVED, f"hydra.run.dir={tmp_path}") as (address, process):
        clients, memory = Clients(address, seed=0), psutil.Process(process.pid).memory_info
        asyncio.run(clients.run(500))  # what it needs at the most
        before = memory().rss
        asyncio.run(clients.run(2000))
        assert memory().rss < 1.05 * before and process.poll() is None
        health = httpx.get(f"{address}/health").json()
        assert health == {"status": "ok", "running": 0, "entering": 0, "waiting": 0}

        async def until_killed() -> None:
            running, count = asyncio.create_task(clients.run(500)), len(clients.texts)
            while len(clients.texts) < count + 100:
                await asyncio.sleep(0.02)
            process.kill()
            with pytest.raises(httpx.TransportError):
                await running

        asyncio.run(until_killed())
        clients.check()
    with served(*SERVED, f"hydra.run.dir={tmp_path}") as (address, _):
        clients = Clients(address, seed=2)
        asyncio.run(clients.run(300))
        clients.check()
