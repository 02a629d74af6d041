"""A round is a few launches, and few are ever recorded: on the strict stand-in for graphs."""

import itertools

import pytest
import torch
from cases import DRAFTERS, Case
from helpers import adapter_for, graphed, random_prompts, tiny, vanilla_texts
from strict_graphs import Tape
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla, VanillaConfig
from kangaroo.engine.batch import Batch
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.warm_up import warm_up
from kangaroo.models.loading import TINY, ModelConfig, byte_tokenizer
from kangaroo.serving import serve
from kangaroo.serving.config import ServeConfig
from kangaroo.serving.scheduler import Scheduler

PROMPTS = random_prompts(5, 30, 9)


def written_out(engine: Engine, batch: Batch, prompts: list[list[int]], **options) -> None:
    """Steps until the texts of these prompts, one a row, have ended."""
    for row, prompt in enumerate(prompts):
        engine.admit(batch, row, Request(prompt, ignore_eos=True, **options))
    while not all(batch.done):
        engine.step(batch)


def growing(engine: Engine, batch: Batch, seed: int) -> None:
    """Some steps at many lengths of a text, from 1 to 2000 slots."""
    (text,) = random_prompts(2000, seed=seed)
    for length in (1, 30, 150, 300, 480, 700, 1000, 1300, 1700, 1980):
        written_out(engine, batch, [text[:length]], max_new_tokens=12)


@pytest.mark.parametrize(
    "name, most", [("vanilla", 8), ("kangaroo", 36), ("kangaroo-tree", 100), ("hybrid-tree", 100)]
)
def test_a_growing_text_is_recorded_anew_at_powers_of_two_alone(name, most):
    lm = graphed(tiny(max_position_embeddings=4096))
    engine = Engine(lm, DRAFTERS[name](Case(lm, adapter_for(lm), [])))
    batch = engine.open(1, 2000, Sampling())
    made = lm.acceleration.graphs.made
    growing(engine, batch, seed=0)
    shapes = [part for key in made for part in key if isinstance(part, torch.Size)]
    masks = {shape[-1] for shape in shapes if len(shape) == 4 and shape[1] == 1}
    assert masks == {256, 512, 1024, batch.n_slots} and len(made) <= most
    before = set(made)
    growing(engine, batch, seed=1)
    further = len(set(made) - before)
    assert further <= (0 if name in ("vanilla", "kangaroo") else most // 4)  # of other widths


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_settings_and_seeds_are_read_from_the_device(top_p):
    """Texts by unlike settings replay the same graphs, and each is its own."""
    lm, made = graphed(tiny()), set()
    engine = Engine(lm, Kangaroo(lm, adapter_for(lm), 3, 0.0))
    batch = engine.open(1, 60, Sampling(temperature=0.8, top_p=top_p))
    for seed, prompt in enumerate(PROMPTS):
        how = Sampling(temperature=0.8 + seed / 5, top_p=top_p, seed=seed)
        written_out(engine, batch, [prompt], max_new_tokens=20, seed=seed, sampling=how)
        assert batch.texts[0] == vanilla_texts(tiny(), [prompt], 20, how)[0]
        made = made or set(lm.acceleration.graphs.made)
    assert all("block" in key for key in set(lm.acceleration.graphs.made) - made)  # of a width


LAUNCHES = {"vanilla": (2, 16), "kangaroo": (8, 30), "kangaroo-tree-stops": (14, 35)}
LAUNCHES |= {"hybrid-tree": (11, 48), "eagle-tree": (11, 35)}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_round_is_few_launches(name, monkeypatch):
    """Of graphs, and of other operators that give something new."""
    replays, others = [], []
    replayed = Tape.replay

    def replay(self):
        replays.append(self)
        with _disable_current_modes():
            replayed(self)

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
            if all(alias.is_write for alias in aliases):  # else it is a view
                others.append(func)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(Tape, "replay", replay)
    lm = graphed(tiny())
    engine = Engine(lm, DRAFTERS[name](Case(lm, adapter_for(lm), [])))
    batch = engine.open(1, 200, Sampling(temperature=0.7))
    engine.admit(batch, 0, Request(random_prompts(60)[0], 120))
    seen = []
    for _ in range(24):
        before = len(lm.acceleration.graphs.made)
        replays.clear(), others.clear()
        with Launches():
            engine.step(batch)
        if len(lm.acceleration.graphs.made) == before:
            seen.append((len(replays), len(others)))
    assert len(seen) > 6
    graphs, operators = LAUNCHES[name]
    assert all(own <= graphs and other <= operators for own, other in seen), seen


def test_what_was_warmed_up_is_not_recorded_again():
    lm, rows, longest = graphed(tiny()), 2, 300
    engine = Engine(lm, Kangaroo(lm, adapter_for(lm), 2, 0.0), prefix_cache=True)
    warm_up(engine, rows, longest)
    made = set(lm.acceleration.graphs.made)
    batch = engine.open(rows, longest, Sampling())
    for sampling, length in itertools.product((Sampling(), Sampling(1.4)), (5, 270)):
        prompts = random_prompts(*[length] * rows)
        written_out(engine, batch, prompts, max_new_tokens=9, sampling=sampling)
    assert made and set(lm.acceleration.graphs.made) == made
    native = Engine(tiny().compile_for_decoding(), Vanilla())
    warm_up(native, 2, 100)
    assert native.cache is None  # where nothing is recorded, nothing is done


def test_a_server_is_ready_once_it_has_recorded(monkeypatch):
    lm, recorded = graphed(tiny()), []

    def run(server, sockets):
        recorded.append(len(lm.acceleration.graphs.made))
        for listening in sockets:
            listening.close()
        schedulers[0].close(60)

    schedulers = []
    start = Scheduler.start
    monkeypatch.setattr(Scheduler, "start", lambda self: schedulers.append(start(self)) or self)
    monkeypatch.setattr(serve, "load_target", lambda model: (lm, byte_tokenizer()))
    monkeypatch.setattr("uvicorn.Server.run", run)
    config = ServeConfig(port=0, max_batch_size=1, max_model_len=40)
    serve.serve(ModelConfig("tiny", TINY, device="cpu"), VanillaConfig(), config)
    assert recorded[0] > 0
