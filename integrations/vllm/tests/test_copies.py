"""What the plugin reads of the device: as often for many rows as for one."""

import sys
from collections import Counter

import pytest
import torch
from conftest import prompts, written
from kangaroo_vllm import Kangaroo
from kangaroo_vllm.target import SplitTarget

READS = "tolist cpu item __int__ __bool__ __index__ __float__".split()


@pytest.mark.parametrize("rows", [1, 5])
def test_a_step_reads_the_device_twice_and_once_for_each_drafted_token(rows, serve, monkeypatch):
    """Its tokens and its pages; the other reads are of tensors on the host."""
    reads, counts = Counter(), {"verify": [], "draft": []}

    def counted(name):
        read = getattr(torch.Tensor, name)

        def reading(tensor, *args, **options):
            reads[sys._getframe(1).f_globals["__name__"].partition(".")[0]] += 1
            return read(tensor, *args, **options)

        return reading

    def measured(kind, method):
        def run(self, *args, **options):
            before = reads["kangaroo_vllm"]
            result = method(self, *args, **options)
            counts[kind].append(reads["kangaroo_vllm"] - before)
            return result

        return run

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    with serve("half", steps=3, threshold=0.0, text_vocabulary=0) as llm:
        split = measured("verify", SplitTarget._join)
        monkeypatch.setattr(SplitTarget, "_join", split)
        monkeypatch.setattr(Kangaroo, "propose", measured("draft", Kangaroo.propose))
        written(llm, prompts(rows), max_tokens=24)
    assert max(counts["verify"]) == 6 and max(counts["draft"]) == 1 + 3 * 3
