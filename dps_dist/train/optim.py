"""Optimizer, learning-rate schedule, clipping and averaged weights, all from the section `optim`.

The training loop builds them once, steps them together, and saves their state dicts together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from dps_dist.config import Optim
from dps_dist.errors import InputError


def optimizer(config: Optim, model: nn.Module) -> torch.optim.Optimizer:
    """Adam, AdamW or SGD over the parameters of `model`.

    Adam and SGD add weight_decay·w to the gradient; AdamW takes lr·weight_decay·w off the weight.
    Without `decay_norms_and_biases` the parameters of at most one dimension are a second group,
    which is not decayed.
    """
    if config.name == "sgd" and config.nesterov and config.momentum == 0:
        raise InputError(
            "optim.momentum is 0: give more, such as 0.9, or set optim.nesterov to false"
        )
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if not config.decay_norms_and_biases:
        groups = [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
    # On two CPU cores fused takes 1/8 (adam), 2/7 (adamw), 1/3 (sgd) of foreach's time for
    # ResNet-18, and with channels last 2/7, 1/2, 5/7. Its bits are the same on one thread and two.
    built: torch.optim.Optimizer
    if config.name == "sgd":
        built = torch.optim.SGD(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=True,
        )
        # Told to skip its first step, as float16's first steps are, fused SGD leaves its momentum
        # uninitialised: a GradScaler must not tell it, but skip the step itself.
        built._step_supports_amp_scaling = False
    else:
        adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
        built = adam(
            groups, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
    built.register_load_state_dict_post_hook(_in_the_layout_of_the_weights)
    return built


def _in_the_layout_of_the_weights(optimizer: torch.optim.Optimizer) -> None:
    """Lay loaded moments out like their weights, channels last or not.

    Fused kernels walk through memory: on a CPU they pair the wrong elements without a word where
    the layouts differ, as after a restart with another train.channels_last.
    """
    for weight, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:  # not `step`
                state[key] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def schedule(
    config: Optim, optimizer: torch.optim.Optimizer, steps_per_epoch: int, epochs: int
) -> LRScheduler:
    """The learning rate of each optimizer step; `step()` it once after each.

    For step s = 0 … T−1, T = steps_per_epoch·epochs, W = warmup_epochs·steps_per_epoch rounded and
    anneal(a, b, x) = b + (a−b)·(1 + cos πx)/2:

        onecycle   anneal(lr/25, lr, s/P) up to P = 0.3T−1, then
                   anneal(lr, lr/250000, (s−P)/(T−1−P)): torch's OneCycleLR with its defaults
        constant   lr·(s+1)/(W+1) for s < W, then lr
        cosine     the same warm-up, then anneal(lr, 0, (s−W)/(T−1−W)): lr at s=W, 0 at s=T−1

    OneCycleLR also moves SGD's momentum or Adam's β1, from 0.95 to 0.85 and back, whatever the
    configured ones are. `lr` is not scaled by anything.
    """
    total = steps_per_epoch * epochs
    if config.warmup_epochs >= epochs:
        raise InputError(
            f"optim.warmup_epochs is {config.warmup_epochs:g}: give less than train.epochs, "
            f"{epochs}"
        )
    if config.schedule == "onecycle":
        return OneCycleLR(optimizer, max_lr=config.lr, total_steps=total)

    warmup = round(config.warmup_epochs * steps_per_epoch)

    def share_of_lr(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.schedule == "constant":
            return 1.0
        last = max(total - 1, warmup + 1)  # where there is no step to fall in, lr stays
        return (1 + cos(pi * min(1.0, (step - warmup) / (last - warmup)))) / 2

    return LambdaLR(optimizer, share_of_lr)


def set_momentum(
    config: Optim, optimizer: torch.optim.Optimizer, momentum: Callable[[float, str], float]
) -> None:
    """SGD's momentum or Adam's β1 for the next step: momentum(what it would be, the optimizer).

    1cycle has set it for this step; else it would be the configured one.
    """
    for group in optimizer.param_groups:
        moved = config.schedule == "onecycle"
        if "betas" in group:
            usual, beta2 = group["betas"] if moved else config.betas
            group["betas"] = (momentum(usual, config.name), beta2)
        else:
            usual = group["momentum"] if moved else config.momentum
            group["momentum"] = momentum(usual, config.name)


def clip(parameters: Iterable[Tensor], norm: float | None) -> None:
    """g ← g·min(1, norm/‖g‖₂) over all gradients together; nothing for None. No host sync."""
    if norm is not None:
        nn.utils.clip_grad_norm_(parameters, norm)


class Ema:
    """Averaged weights: w ← d·w + (1−d)·θ for every parameter θ; buffers are copied.

    Starts at w = θ. The n-th update, n = 0, 1, …, uses d = min(decay, (1+n)/(10+n)), so that the
    initial weights are forgotten within tens of updates and not within 1/(1−decay).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """One step of the average towards `model`, which may meanwhile be wrapped by DDP."""
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.parameters.values()), list(model.parameters()), 1 - d)
        _copy(list(model.buffers()), to=list(self.buffers.values()))
        self.updates += 1

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Within it `model` holds the averaged weights and buffers; after it, its own again."""
        own = [*model.parameters(), *model.buffers()]
        kept = [tensor.detach().clone() for tensor in own]
        try:
            _copy([*self.parameters.values(), *self.buffers.values()], to=own)
            yield
        finally:
            _copy(kept, to=own)

    def state_dict(self) -> dict[str, Any]:
        """The number of updates, and the averages by the model's names."""
        return {
            "updates": self.updates,
            "parameters": dict(self.parameters),
            "buffers": dict(self.buffers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved, from the same model."""
        both = {**self.parameters, **self.buffers}
        saved = {**state["parameters"], **state["buffers"]}
        _copy([saved[name] for name in both], to=list(both.values()))
        self.updates = int(state["updates"])


@torch.no_grad()
def _copy(values: list[Tensor], to: list[Tensor]) -> None:
    if to:  # foreach operations refuse empty lists
        torch._foreach_copy_(to, values)
