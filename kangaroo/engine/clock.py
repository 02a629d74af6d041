"""The time that decoding takes: devices are waited for, and recording graphs does not count."""

import time
from typing import Any

import torch

from kangaroo.cuda.graphs import Graphs

Mark = tuple[Any, float]  # seconds of a clock, or a GPU's event; seconds of recording until then


def running() -> float:
    """Seconds on a clock that stands still while graphs are recorded, as happens once a shape."""
    return time.perf_counter() - Graphs.seconds


def now(device: torch.device) -> float:
    """The same clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return running()


def mark(device: torch.device) -> Mark:
    """This moment, in a GPU's stream of work: that costs no wait."""
    if device.type != "cuda":
        return running(), 0.0
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event, Graphs.seconds


def between(start: Mark, stop: Mark) -> float:
    """Seconds between two marks, once the device was waited for."""
    (first, recorded_first), (last, recorded_last) = start, stop
    passed: float = last - first if isinstance(first, float) else first.elapsed_time(last) / 1000
    return passed - (recorded_last - recorded_first)
