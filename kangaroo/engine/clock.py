"""The time of decoding: with the device's work, and without the recording of CUDA graphs."""

import time
from typing import Any

import torch

from kangaroo.cuda.graphs import Graphs

Mark = tuple[Any, float]  # a time or a GPU's event, and the seconds of recording before it


def running() -> float:
    """Seconds on a clock that stands still while CUDA graphs are recorded."""
    return time.perf_counter() - Graphs.seconds


def now(device: torch.device) -> float:
    """Seconds on the same clock, after waiting for the device to finish its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return running()


def mark(device: torch.device) -> Mark:
    """Mark this moment; on a GPU in its stream of work, so that nothing waits."""
    if device.type != "cuda":
        return running(), 0.0
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event, Graphs.seconds


def between(start: Mark, stop: Mark) -> float:
    """Seconds between two marks, once the device has reached both."""
    first, recording_before = start
    last, recording_after = stop
    passed: float = last - first if isinstance(first, float) else first.elapsed_time(last) / 1000
    return passed - (recording_after - recording_before)
