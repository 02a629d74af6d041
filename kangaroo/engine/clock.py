"""The time that decoding takes: devices are waited for, and recording graphs does not count."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kangaroo.cuda.graphs import Graphs


def running() -> float:
    """Seconds on a clock that stands still while graphs are recorded, as happens once a shape."""
    return time.perf_counter() - Graphs.seconds


def now(device: torch.device) -> float:
    """The same clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return running()


@dataclass
class Mark:
    """A moment on the host's clock, or in the device's stream of work.

    Args:
        recording: seconds that graphs had taken until then.
    """

    at: float | torch.cuda.Event
    recording: float


class Clock:
    """Time between marks, which cost no wait. It can be read once the device was waited for."""

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> Mark:
        """This moment."""
        if self.device.type != "cuda":
            return Mark(running(), recording=0.0)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return Mark(event, Graphs.seconds)

    @staticmethod
    def between(start: Mark, stop: Mark) -> float:
        """Seconds from `start` to `stop`."""
        if isinstance(start.at, float) and isinstance(stop.at, float):
            return stop.at - start.at
        assert isinstance(start.at, torch.cuda.Event) and isinstance(stop.at, torch.cuda.Event)
        return start.at.elapsed_time(stop.at) / 1000 - (stop.recording - start.recording)
