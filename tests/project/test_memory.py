"""What a process holds and has held, and what weights take."""

import psutil
import torch

from kangaroo.utils import memory

SIZE = 64 * 2**20


def test_the_peak_stays_when_memory_is_given_back():
    held = psutil.Process().memory_info().rss
    torch.ones(SIZE, dtype=torch.uint8).sum()
    assert memory.peak(torch.device("cpu")) >= held + SIZE


def test_weights_are_counted_in_bytes():
    layer = torch.nn.Linear(3, 5)
    assert memory.weights(layer, layer.half()) == 2 * 2 * (3 * 5 + 5)  # `half` changes it in place
