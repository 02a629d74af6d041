"""How a model is served."""

from dataclasses import dataclass, field
from typing import Annotated

from kangaroo.utils.ranges import Count, NotNegative, Positive, Range, Ranged


@dataclass
class ServeConfig(Ranged):
    """How a model is served.

    Args:
        host, port: where; by default this machine alone can reach it.
        allowed_hosts: names by which clients may call it, besides `host`, `localhost` and any
            address; `*` stands for any characters. Were all allowed, a page in a user's browser
            could let its own name lead here (DNS rebinding), and read the answers.
        max_batch_size: texts that are written at the same time.
        max_model_len: tokens of a text, prompt included; None is the model's context.
        prefill_chunk: tokens of a prompt that enter between two steps of other texts; None is as
            many as are quick.
        prefix_cache: a prompt that goes on from a text that a free row still has, as the next turn
            of a conversation does, is read from there on. How soon an answer begins then tells
            whether somebody has asked the same before.
        max_queue: requests that wait for a row; a further one is answered with 429.
        timeout: seconds from a request's arrival until it is given up; None is never.
        grace: seconds that running texts get when the server is stopped.
        api_key: what clients must send as their bearer token; None lets everybody in.
        most_bytes: of a request's body.
        most_connections: open at the same time; a further one is answered with 503.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, (1 << 16) - 1)] = 8000
    allowed_hosts: list[str] = field(default_factory=list)
    max_batch_size: Count = 16
    max_model_len: Count | None = None
    prefill_chunk: Count | None = None
    prefix_cache: bool = True
    max_queue: Count = 256
    timeout: Positive | None = 600.0
    grace: NotNegative = 30.0
    api_key: str | None = None
    most_bytes: Count = 1 << 20
    most_connections: Count = 1024
