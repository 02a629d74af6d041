"""The measurement of training's cost: every part runs, and its results belong together."""

from kangaroo.evaluation.speed import cost_report
from kangaroo.evaluation.speed.cost import measure
from kangaroo.evaluation.speed.cost_parts import FROZEN, CostConfig, micro_batches, parts, worker
from kangaroo.evaluation.speed.peak import memory_of_part
from kangaroo.models.loading import TINY, Dtype, ModelConfig, load
from kangaroo.models.target import LM
from kangaroo.training.config import TrainerConfig

MODEL = ModelConfig(name="tiny", path=TINY, dtype=Dtype.float32, device="cpu")
TRAINER = TrainerConfig(batch_tokens=64, loss_chunk=16)


def small(**changes):
    settings = {"micro_batches": 1, "rounds": 2, "exit_layers": [2, 3, 4], "length": 32}
    return CostConfig(**(settings | {"vocabulary": 100, "memory": False} | changes))


def test_every_part_is_measured_against_the_same_frozen_forward():
    result = measure(LM(load(MODEL)[0]), MODEL, small(), TRAINER)
    assert list(result["parts"]) == [part.name for part in parts(small())]
    assert result["parts"][FROZEN]["ratio"] == 1.0
    assert "attention, 3 exits" in result["parts"] and result["further_exit"] is not None
    assert result["text"] == "random tokens" and result["disk"]["hidden states"] == 0
    assert len(cost_report.rows(result)) == len(result["parts"])
    assert "random tokens" in cost_report.markdown(result)


def test_what_is_remembered_does_not_run_the_target():
    lm, config = LM(load(MODEL)[0]), small()
    batches, few_K = micro_batches(lm, config, TRAINER)
    (remembered,) = [part for part in parts(config) if part.remembered]
    work = worker(lm, remembered, batches, few_K, TRAINER)
    lm.run = None  # would fail
    work(0)


def test_peak_memory_holds_at_least_the_target():
    lm = LM(load(MODEL)[0])
    peak = memory_of_part(lm, MODEL, parts(small())[0], small(), TRAINER)
    assert peak is None or peak >= sum(p.nbytes for p in lm.parameters())
