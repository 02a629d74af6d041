"""A server under load: thousands of good, bad and broken requests, clients that leave, kill -9."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections import Counter
from typing import Any

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
]
ANSWERS = {200, 400, 401, 404, 405, 413, 429, 503}
STRANGE: list[Any] = [
    *(None, True, -1, 0, 10**30, 1e308, -0.5, "", "x" * 5000, "\ud800", "\0", "🦘"),
    *([], [[]], [None], ["a", 1], {}, {"a": {}}, [1] * 3000, [-1], [10**12]),
]
FIELDS = """
    model prompt messages max_tokens max_completion_tokens temperature top_p top_k n seed stop
    stream stream_options ignore_eos logprobs logit_bias tools user response_format nonsense
""".split()


def good(rng: random.Random) -> tuple[dict[str, Any], Request]:
    """A body, and the request that it is."""
    request = random_request(rng)
    return as_body(request) | {"stream": rng.random() < 0.5}, request


def broken(rng: random.Random) -> bytes:
    """A body that is not what it should be: other values, other fields, cut, or noise."""
    body, _ = good(rng)
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
    for _ in range(rng.randrange(1, 4)):
        body[rng.choice(FIELDS)] = rng.choice(STRANGE)
    if kind == 1:
        body.pop(rng.choice(list(body)))
    if kind == 2:
        body["".join(rng.choices(string.printable, k=5))] = rng.choice(STRANGE)
    written = json.dumps(body).encode()
    return written[: rng.randrange(len(written))] if kind == 3 else written


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
        self.address, self.rng = address, random.Random(seed)
        self.statuses: Counter[int] = Counter()
        self.texts: list[tuple[Request, str]] = []  # what was answered whole

    async def run(self, count: int, at_once: int, bad: float, leaving: float) -> None:
        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            left = iter(range(count))

            async def ask_again_and_again() -> None:
                for _ in left:
                    await self.ask(client, bad, leaving)

            await asyncio.gather(*(ask_again_and_again() for _ in range(at_once)))

    async def ask(self, client: httpx.AsyncClient, bad: float, leaving: float) -> None:
        rng = self.rng
        path = rng.choice(["completions"] * 3 + ["chat/completions"])
        if rng.random() < bad:
            headers = {"content-type": rng.choice(["application/json", "text/plain", ""])}
            url = f"{self.address}/v1/{path}"
            self.count(await client.post(url, content=broken(rng), headers=headers))
            return
        body, request = good(rng)
        url = f"{self.address}/v1/completions"
        if rng.random() < leaving:
            try:
                await client.post(url, json=body, timeout=rng.random() * 0.2)
            except httpx.TimeoutException:
                return
        answer = await client.post(url, json=body)
        self.count(answer)
        if answer.status_code == 200:
            self.texts.append((request, text_of(answer, body["stream"])))

    def count(self, answer: httpx.Response) -> None:
        assert answer.status_code in ANSWERS, answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], answer.text
        self.statuses[answer.status_code] += 1

    def check(self) -> None:
        """Every text is the one that is written alone."""
        for request, text in self.texts:
            assert text == plain_text(byte_tokenizer(), alone(request))


@pytest.mark.slow
def test_ten_thousand_requests_good_and_bad_break_nothing(tmp_path):
    with served(*SERVED, f"max_model_len={LONGEST}", f"hydra.run.dir={tmp_path}") as (
        address,
        process,
    ):
        clients, memory = Clients(address, seed=0), psutil.Process(process.pid).memory_info
        # what it needs at the most
        asyncio.run(clients.run(1000, at_once=32, bad=0.7, leaving=0.1))
        before = memory().rss
        asyncio.run(clients.run(9000, at_once=32, bad=0.9, leaving=0.2))
        assert memory().rss < 1.05 * before
        health = httpx.get(f"{address}/health").json()
        assert health == {"status": "ok", "running": 0, "entering": 0, "waiting": 0}
        assert process.poll() is None
    assert clients.statuses[200] > 500 and clients.statuses[400] > 5000 and len(clients.texts) > 500
    clients.check()


@pytest.mark.slow
def test_texts_are_right_across_cancellations_and_a_kill(tmp_path):
    """500 requests at 16 a time; the server is killed in the middle, and another one goes on."""
    options = [*SERVED, f"max_model_len={LONGEST}", f"hydra.run.dir={tmp_path}"]
    finished = []
    with served(*options) as (address, process):
        clients = Clients(address, seed=1)

        async def until_killed() -> None:
            running = asyncio.create_task(clients.run(500, at_once=16, bad=0, leaving=0.3))
            while len(clients.texts) < 100:
                await asyncio.sleep(0.02)
            process.kill()
            with pytest.raises(httpx.TransportError):
                await running

        asyncio.run(until_killed())
        finished += clients.texts
        clients.check()
    with served(*options) as (address, _):
        clients = Clients(address, seed=2)
        asyncio.run(clients.run(500 - len(finished), at_once=16, bad=0, leaving=0.3))
        clients.check()
    assert len(finished) + len(clients.texts) > 300
