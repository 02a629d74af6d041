"""Optimizer steps in torch or DeepSpeed, with gradients summed over micro-batches and processes.

The sum is exact, so on CPUs a run ends with the same weights for any number of processes, even if
that number changes between checkpoints. On a GPU gradients themselves differ in their last bits
from run to run, since attention's backward pass adds in any order.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kangaroo.heads.base import Trainable
from kangaroo.training.recipe import TrainerConfig
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import TORCHRUN, command_line, install
from kangaroo.utils.ranks import Ranks

# Gradients are rounded to multiples of 2^-44, five digits below AdamW's eps of 1e-8. In float64
# these add up without rounding as long as sums stay below 2^9, far above any gradient of a mean.
GRID = 2.0**44
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state keys
MOMENTUM = "momentum_buffer"  # Muon's


def check(config: TrainerConfig, ranks: Ranks) -> None:
    """Errors: `ConfigError` for options that exclude each other or need more processes."""
    if config.zero_stage and find_spec("deepspeed") is None:
        raise ConfigError(
            f"trainer=deepspeed needs the package deepspeed: {install('deepspeed')}; or "
            "trainer=default, which trains the same weights."
        )
    if config.shard_target and ranks.world == 1:
        command = command_line("train", launcher=TORCHRUN, trainer__shard_target=True)
        raise ConfigError(
            "trainer.shard_target=true spreads the target over processes, and there is one. Leave "
            f"it out, or start more: {command}"
        )
    if config.muon and config.zero_stage:
        raise ConfigError(
            "trainer.muon and trainer.zero_stage exclude each other: DeepSpeed has AdamW alone "
            "here. Leave one out."
        )


class TorchBackend:
    """AdamW, and Muon for linear layers if asked for, whole in every process. All processes call
    the same methods. Adapters start as rank 0's and have separate gradient clipping."""

    def __init__(self, adapters: Sequence[Trainable], options: TrainerConfig, ranks: Ranks):
        assert options.accumulate is not None
        self.adapters = adapters
        self.options = options
        self.ranks = ranks
        self.parameters = dict(nn.ModuleList(adapters).named_parameters())
        for parameter in self.parameters.values():
            ranks.overwrite(parameter.data)
        # a step's only micro-batch is rank 0's, and its gradient needs no sum
        summed = self.parameters.values() if options.accumulate > 1 else ()
        self.sums = [torch.zeros_like(p, dtype=torch.float64) for p in summed]
        self.steps = 0
        self._begin()

    def collect(self) -> None:
        """Add the gradients of the last micro-batch to the step's sum, and clear them."""
        for total, parameter in zip(self.sums, self.parameters.values(), strict=False):
            assert parameter.grad is not None
            total += (parameter.grad.double() * GRID).round_()
            parameter.grad = None

    def step(self, rates: Sequence[float]) -> None:
        """Take an optimizer step with the collected, clipped gradients at each adapter's rate."""
        for total, parameter in zip(self.sums, self.parameters.values(), strict=False):
            if self.ranks.world > 1:
                dist.all_reduce(total)
            parameter.grad = (total / GRID).to(parameter.dtype)
            total.zero_()
        for parameter in () if self.sums else self.parameters.values():
            assert parameter.grad is not None
            self.ranks.overwrite(parameter.grad)
        for adapter in self.adapters:
            nn.utils.clip_grad_norm_(adapter.parameters(), self.options.clip)
        self._update(rates)
        self.steps += 1
        nn.ModuleList(self.adapters).zero_grad()

    def state(self) -> dict[str, Any]:
        """Weights and moments in float32 on the CPU, by name; no moments before the first step."""
        weights = {name: p.detach().cpu().clone() for name, p in self.parameters.items()}
        return {"steps": self.steps, "weights": weights} | self._moments()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the `state()` of any backend with any number of processes."""
        self.steps = state["steps"]
        for name, parameter in self.parameters.items():
            parameter.data.copy_(state["weights"][name])
        self._load_moments(state)

    def _begin(self) -> None:
        muon_groups = [muon_weights(a) if self.options.muon else [] for a in self.adapters]
        muon_ids = {id(p) for group in muon_groups for p in group}
        adamw_groups = [[p for p in a.parameters() if id(p) not in muon_ids] for a in self.adapters]
        self.optimizers: list[torch.optim.Optimizer] = [self._adamw(adamw_groups)]
        if self.options.muon:
            muon = torch.optim.Muon(
                [{"params": group} for group in muon_groups],
                weight_decay=self.options.weight_decay,
                adjust_lr_fn="match_rms_adamw",  # AdamW's rates (arXiv 2502.16982, section 2.2)
            )
            self.optimizers.append(muon)

    def _adamw(self, groups: Sequence[Sequence[nn.Parameter]]) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            [{"params": group} for group in groups],
            betas=self.options.betas,
            weight_decay=self.options.weight_decay,
        )

    def _update(self, rates: Sequence[float]) -> None:
        for optimizer in self.optimizers:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            optimizer.step()

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        states = {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}
        moments: dict[str, dict[str, Tensor]] = {key: {} for key in (*MOMENTS, MOMENTUM)}
        for name, parameter in self.parameters.items():
            state = states.get(parameter, {})
            for key in moments.keys() & state.keys():
                moments[key][name] = state[key].cpu().clone()
        return moments

    def _load_moments(self, state: dict[str, Any]) -> None:
        names = {parameter: name for name, parameter in self.parameters.items()}
        for optimizer in self.optimizers:
            for p in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                for key in (*MOMENTS, MOMENTUM):
                    moment = state.get(key, {}).get(names[p])
                    if moment is not None:
                        optimizer.state[p][key] = moment.to(p.device)
                optimizer.state[p]["step"] = torch.tensor(float(self.steps))  # Muon reads none


def muon_weights(adapter: Trainable) -> list[Tensor]:
    """The weights that Muon trains: those of linear layers except the adapter's own LM heads."""
    heads = adapter.own_heads()
    return [m.weight for m in adapter.modules() if isinstance(m, nn.Linear) and m not in heads]


class DeepSpeedBackend(TorchBackend):
    """The same step with AdamW's state spread over the processes by DeepSpeed ZeRO."""

    def _begin(self) -> None:
        device = next(iter(self.parameters.values())).device
        # otherwise DeepSpeed chooses the first kind of device that the machine has
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        import deepspeed

        if device.type == "cpu":
            # it would compile for a minute at its first use, only to do what gloo does
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if not dist.is_initialized():  # started without torchrun
            os.environ.setdefault("LOCAL_RANK", "0")
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": self.options.zero_stage},
            "gradient_clipping": 0.0,
            "steps_per_print": None,
        }
        self.engines: list[Any] = []
        self.twins: list[nn.Parameter] = []
        # one engine for each adapter: DeepSpeed exposes moments of the first parameter group only
        for adapter in self.adapters:
            # its hooks act on every backward pass, so it gets twins without the adapter's gradients
            twins = nn.ParameterList(p.detach().clone() for p in adapter.parameters())
            optimizer = self._adamw([list(twins)])
            engine, *_ = deepspeed.initialize(
                model=twins, optimizer=optimizer, config=config, dist_init_required=False
            )
            self.engines.append(engine)
            self.twins += twins
        for parameter, twin in zip(self.parameters.values(), self.twins, strict=True):
            parameter.data = twin.data

    def _update(self, rates: Sequence[float]) -> None:
        from deepspeed.utils import safe_set_full_grad

        gradients = iter([parameter.grad for parameter in self.parameters.values()])
        for engine, rate in zip(self.engines, rates, strict=True):
            for group in engine.optimizer.param_groups:
                group["lr"] = rate
            # A backward pass allocates the gradients. The summed ones are put there afterwards,
            # since DeepSpeed's average over three processes would round them.
            engine.backward(torch.stack([twin.sum() for twin in engine.module]).sum())
            for twin in engine.module:
                safe_set_full_grad(twin, next(gradients))
            engine.step()

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        return {
            key: {
                name: safe_get_full_optimizer_state(twin, key).cpu().clone()
                for name, twin in zip(self.parameters, self.twins, strict=True)
            }
            for key in MOMENTS
        }

    def _load_moments(self, state: dict[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        for engine in self.engines:
            engine.optimizer.refresh_fp32_params()
        # AdamW allocates its moments in its first step; this one changes no weight
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._update([0.0] * len(self.adapters))
        for key in MOMENTS:
            for name, twin in zip(self.parameters, self.twins, strict=True):
                safe_set_full_optimizer_state(twin, state[key][name], key)
        for engine in self.engines:
            for moments in engine.optimizer.state.values():
                moments["step"].fill_(self.steps)
