"""The optimiser of a run: its weights, their rates, and whether each process has them whole or a part.

AdamW, or natural-gradient steps within a trust region (`natural_step`). With the log-probability l_i of row i, its
advantage A_i and the gradient g of the loss, over the n rows of an optimiser step in all processes:

    F = 1/n sum_i grad l_i grad l_i^T + damping I,      d = -F^-1 g by conjugate gradients,
    step = d sqrt(2 max_kl / d^T F d), halved until 1/n sum_i A_i exp(l_i - l_i before) gains enough.

F is the Fisher matrix on the sampled rows. Its products take the derivative along a direction from a central
difference, so that no part of a model needs a second derivative.

Source: Kakade, A Natural Policy Gradient, 2001; step length and line search as in TRPO, arXiv 1502.05477.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.training.recipe import Recipe, Reference
from mmrl.training.settings import SMALLEST_LOW_PRECISION_STEP, BaseTrainerConfig, TrustRegionConfig
from mmrl.training.sharding import shard

FACTOR = "learning_rate_factor"
"""Key of an optimiser group whose learning rate differs from the run's."""
RESIDUAL = 1e-10
"""Fraction of the squared residual at which conjugate gradients stop."""
BACKTRACKS = 10
"""Maximum number of steps tried, each half as long as the previous one, as in YifeiZhou02/HNPG trpo.py, linesearch."""
ENOUGH = 0.1
"""Fraction of the gain predicted by the gradient below which a shorter step is tried."""

START, GROWTH_INTERVAL = 2.0**16, 2000
LARGEST, SMALLEST = 2.0**127, 2.0**-14
"""Bounds of the loss scale; beyond them there is infinity in float32, or a loss of 1 is below the normal numbers of
fp16."""


def learning_rate_factor(config: BaseTrainerConfig, optimiser_step: int, waited: int = 0) -> float:
    """Fraction of the peak learning rate at an optimiser step."""
    # from 1 / warmup_steps, not from 0, so that the first step already moves
    if optimiser_step < config.warmup_steps:
        return (optimiser_step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    total = config.steps * config.epochs * config.minibatches_per_step
    # steps that waited count for the decay, though not for the warm-up
    progress = min((optimiser_step + waited - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    floor = config.final_learning_rate / config.learning_rate
    decay = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * decay


def make_optimizer(
    policy: nn.Module, config: BaseTrainerConfig, region: TrustRegionConfig | None = None
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, with weight decay for matrices but not for vectors (norms, biases).

    A policy may have `learning_rate_factors`, name of a child to the factor of its parameters' rate. With a trust
    region the gradients become steps, and SGD takes them: the rate is the fraction of the step.
    """
    if region is not None:
        # SGD only adds the step, which is complete when it gets here
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        if any(parameter.dtype.itemsize < 4 for parameter in trained):
            raise UserError(
                "natural-gradient steps require float32 weights or adapters (LoRA), because other types round "
                "the steps away"
            )
        return torch.optim.SGD(trained, lr=config.learning_rate)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise UserError(
            "every parameter of the model is frozen, so there is nothing to train; unfreeze some, or add LoRA"
        )
    factors: dict[str, float] = getattr(policy, "learning_rate_factors", {})
    trainable = [(name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    # 1.0 first, so that the first group's rate is the run's, which the log shows
    for factor in dict.fromkeys((1.0, *factors.values())):
        own = [p for name, p in trainable if factors.get(name.partition(".")[0], 1.0) == factor]
        marked = {} if factor == 1 else {FACTOR: factor}
        groups += [
            # matrices decay, vectors do not
            {"params": [p for p in own if p.ndim >= 2], "weight_decay": config.weight_decay, **marked},
            {"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0, **marked},
        ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.adam_eps,
        fused=True,  # one pass over weights and moments instead of several
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], *, scheduled: bool = False) -> None:
    """Load the moments of an optimiser, which keeps the settings that it was made with.

    torch would take over those of the state too, so that a resumed run would ignore changed ones. With `scheduled`,
    the rate is set before each step, and the one of the state is the last that was used.
    """
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        kept = {"params": group["params"]} | ({"lr": group["lr"]} if scheduled else {})
        group.clear()
        group.update(own | kept)


def divide(recipe: Recipe[Any, Any], accelerator: Accelerator, reference: Reference) -> None:
    """Shard the trained weights and those of references if the configuration requires it."""
    if recipe.config.trainer.sharding == "none":
        return
    names = frozenset(name for name, weight in recipe.policy.named_parameters() if weight.requires_grad)
    gathered = torch.bfloat16 if recipe.config.trainer.gathered == "bf16" else None
    # the reference is divided with the policy, or a process would hold it whole
    copies = [each.copy for each in (reference, recipe.start) if each is not None and each.copy is not None]
    # dict.fromkeys: the start of a recipe may be the reference too
    for module in dict.fromkeys((recipe.policy, *copies)):
        shard(module, accelerator, names, gathered)


def check_precision(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for weights in float16, or in bfloat16 if steps would be rounded away."""
    for group in optimizer.param_groups:
        low = {parameter.dtype for parameter in group["params"]} & {torch.bfloat16, torch.float16}
        if torch.float16 in low:
            raise UserError(
                "the weights to be trained are float16, for which gradients cannot be unscaled; use float32 "
                "weights with trainer.mixed_precision=fp16, or adapters (LoRA)"
            )
        rate = group["lr"] * group.get(FACTOR, 1.0)
        # low-precision numbers of the size of a weight are further apart than such a step, which then rounds away
        if low and rate < SMALLEST_LOW_PRECISION_STEP:
            kind = str(low.pop()).removeprefix("torch.")
            raise UserError(
                f"the weights to be trained are {kind} and trainer.learning_rate is {rate:g}: {kind} weights "
                "round such steps away; use float32 weights with trainer.mixed_precision=bf16, or adapters (LoRA)"
            )


def actor_weights(policy: nn.Module) -> list[nn.Parameter]:
    """Weights to be trained, without those of a critic, a child that the policy names in `critic_parts`."""
    critics = getattr(policy, "critic_parts", ())
    named = policy.named_parameters()
    # the first part of a name is the child of the policy
    found = [weight for name, weight in named if weight.requires_grad and name.partition(".")[0] not in critics]
    if not found:
        raise UserError("the policy has no weights to train: all of them are frozen; check the options of `model`")
    return found


def to_natural_steps(
    recipe: Recipe[Any, Any],
    policy: nn.Module,
    minibatch: Rollouts | None,
    weights: Sequence[nn.Parameter],
    accelerator: Accelerator,
) -> None:
    """Replace the gradients by minus the natural step, if the recipe has a trust region."""
    region = recipe.trust_region
    if region is None:
        return
    chunks: list[Rollouts] = []
    if minibatch is not None:
        # parts for memory only: sums over rows do not depend on them
        most = recipe.config.trainer.micro_batch or minibatch.num_rows
        chunks = list(recipe.micro_batches(minibatch, most, whole_groups=False))
    parts = [partial(_row_logp, recipe, policy, chunk) for chunk in chunks]
    # a weight that this minibatch does not use has no gradient
    gradient = torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in weights])
    # dropout would make the surrogate a different function at every call
    policy.eval()
    rows = Rows(weights, parts, partial(accelerator.reduce, reduction="sum"))
    # [:0] gives an empty tensor of the right dtype if this process has no rows
    step, share = natural_step(rows, gradient, torch.cat([rows.before[:0], *map(_row_advantage, chunks)]), region)
    policy.train()
    for weight, own in zip(weights, step.split([weight.numel() for weight in weights]), strict=True):
        # SGD subtracts rate * gradient, so the negative step is put there
        weight.grad = -own.view_as(weight)
    recipe.noted["optim/natural_share"] = share


def _row_logp(recipe: Recipe[Any, Any], policy: nn.Module, rows: Rollouts) -> Tensor:
    scores = recipe.scores(policy, rows, frozenset({"logp"}))
    # untrained decisions are no part of a row's log-probability
    return torch.where(rows.loss_mask > 0, scores.logp, 0.0).sum(1)


def _row_advantage(rows: Rollouts) -> Tensor:
    assert rows.advantage is not None
    # the row's mean, so that advantages within a row are weighed by decisions
    return (rows.advantage * rows.loss_mask).sum(1) / rows.loss_mask.sum(1).clamp(min=1)


class Rows:
    """Log-probabilities of an optimiser step's rows as a function of the trained weights.

    Args:
        weights: float32 or float64, P numbers in all.
        parts: each gives the log-probabilities (b,) of some rows of this process, as they are now.
        total: sum of a tensor over all processes.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], parts: Sequence[Callable[[], Tensor]], total: Callable[[Tensor], Tensor]
    ) -> None:
        self.weights = list(weights)
        self.total = total
        self._parts = parts
        self._first = weights[0].detach()
        self.before = self.logp()
        # over all processes: the Fisher matrix is a mean over the rows of the optimiser step
        self.count = float(total(self._first.new_tensor(float(len(self.before)))))

    @property
    def place(self) -> Tensor:
        """(P,) the weights."""
        return torch.cat([weight.detach().flatten() for weight in self.weights])

    def move(self, place: Tensor) -> None:
        """Set the weights to (P,) numbers."""
        sizes = [weight.numel() for weight in self.weights]
        with torch.no_grad():
            # in place, because the optimiser and the model hold these tensors
            for weight, own in zip(self.weights, place.split(sizes), strict=True):
                weight.copy_(own.view_as(weight))
        # autocast keeps casts of weights, which do not see an in-place change
        torch.clear_autocast_cache()

    def logp(self) -> Tensor:
        """(b,) log-probabilities of this process's rows."""
        with torch.no_grad():
            return torch.cat([part() for part in self._parts]) if self._parts else self._first.new_zeros(0)

    def surrogate(self, advantage: Tensor) -> float:
        """Mean over all rows of advantage * ratio, given the advantages (b,) of this process's rows."""
        return float(self.total((advantage * (self.logp() - self.before).exp()).sum())) / self.count

    def fisher(self, direction: Tensor) -> Tensor:
        """Product (P,) of the rows' Fisher matrix with a direction (P,)."""
        place = self.place
        # the cube root of the rounding error balances truncation and rounding of a central difference
        reach = torch.finfo(place.dtype).eps ** (1 / 3) / direction.norm()
        ends = []
        for sign in (1, -1):
            self.move(place + sign * reach * direction)
            ends.append(self.logp())
        # exactly back, not by subtracting: rounding must not move the weights
        self.move(place)
        return self._pull((ends[0] - ends[1]) / (2 * reach)) / self.count

    def _pull(self, weight: Tensor) -> Tensor:
        """Gradient (P,) of the weighted sum (b,) of all rows' log-probabilities."""
        found, start = self._first.new_zeros(sum(each.numel() for each in self.weights)), 0
        # chunk by chunk, each with its part of the row weights
        for part in self._parts:
            with torch.enable_grad():
                logp = part()
                mean = (weight[start : start + len(logp)] * logp).sum()
            # materialize: a weight that a chunk does not use gets zeros
            own = torch.autograd.grad(mean, self.weights, materialize_grads=True)
            found += torch.cat([each.flatten() for each in own])
            start += len(logp)
        return self.total(found)


def conjugate_gradients(product: Callable[[Tensor], Tensor], target: Tensor, iterations: int) -> Tensor:
    """Solve product(x) = target approximately, where product multiplies by a positive definite matrix."""
    found, residual, direction = torch.zeros_like(target), target.clone(), target.clone()
    size = first = float(residual @ residual)
    for _ in range(iterations):
        # relative to the start, since gradients of different runs differ by orders of magnitude
        if size <= RESIDUAL * first:
            break
        moved = product(direction)
        # exact line minimum along the direction, for a quadratic
        length = size / float(direction @ moved)
        found += length * direction
        residual -= length * moved
        size, before = float(residual @ residual), size
        # Fletcher-Reeves: conjugate to all earlier directions
        direction = residual + size / before * direction
    return found


def natural_step(rows: Rows, gradient: Tensor, advantage: Tensor, region: TrustRegionConfig) -> tuple[Tensor, float]:
    """Step (P,) for a gradient (P,) of the loss, and its fraction of the maximum step; both 0 if no step gains enough.

    The weights stay as they are. `advantage` (b,) belongs to this process's rows.

    Source: YifeiZhou02/HNPG trpo.py, trpo_step and linesearch, with the Fisher matrix of the sampled rows instead of
    the KL's second derivative.
    """

    def fisher(direction: Tensor) -> Tensor:
        return rows.fisher(direction) + region.damping * direction

    direction = conjugate_gradients(fisher, -gradient, region.iterations)
    # NaN fails this comparison too
    if not float(direction.norm()) > 0:
        return direction, 0.0
    # the longest step with d^T F d / 2 = max_kl, to second order
    longest = direction * (2 * region.max_kl / (direction @ fisher(direction))).sqrt()
    place, before, promised = rows.place, rows.surrogate(advantage), -float(gradient @ longest)
    share = 1.0
    for _ in range(BACKTRACKS):
        rows.move(place + share * longest)
        gained = rows.surrogate(advantage) - before
        # Armijo: a share of the gain that the gradient promises
        if math.isfinite(gained) and gained > ENOUGH * share * promised:
            break
        share /= 2
    else:
        # no step gained enough: stay, and let the next rollouts try
        share = 0.0
    # the caller applies the step through the optimiser, so the weights go back first
    rows.move(place)
    return share * longest, share


class LossScale:
    """Dynamic scale of the loss in fp16; always 1 if not enabled.

    The smallest positive number of fp16 is 6e-8: smaller gradients would become 0. The loss is multiplied by a power of
    two and its gradients divided by it in float32. A non-finite gradient halves the scale and skips the step; many
    finite steps in a row double it.

    Source: torch.amp.GradScaler, whose constants these are; Micikevicius et al., arXiv 1710.03740, section 3.2.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.value = START if enabled else 1.0
        self.overflows = 0
        """Optimiser steps skipped since the start of the run."""
        self._finite = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss multiplied by the scale."""
        # exact: the scale is a power of two
        return loss * self.value if self.enabled else loss

    def unscale(self, weights: Sequence[nn.Parameter]) -> None:
        """Divide the gradients of float32 weights by the scale, in place."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if self.enabled and gradients:
            torch._foreach_mul_(gradients, 1 / self.value)

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale may fix an overflow; if not, it has another cause."""
        # below the bound the loss itself would underflow in fp16
        return self.enabled and self.value > SMALLEST

    def shrink(self) -> None:
        """Halve the scale after a step with a non-finite gradient."""
        self.value = self.value / 2
        self._finite = 0
        self.overflows += 1

    def keep(self) -> None:
        """Count a finite step; after many in a row, double the scale."""
        # only steps in a row count: an overflow starts again
        self._finite += 1
        if self.enabled and self._finite == GROWTH_INTERVAL:
            self.value = min(2 * self.value, LARGEST)
            self._finite = 0

    def metrics(self) -> dict[str, float]:
        """The scale and the number of skipped steps; empty if losses are not scaled."""
        return {"optim/loss_scale": self.value, "optim/overflows": float(self.overflows)} if self.enabled else {}

    def state_dict(self) -> dict[str, Any]:
        """Scale and counts; empty if losses are not scaled."""
        return {"value": self.value, "overflows": self.overflows, "finite": self._finite} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; the scale starts from its default if the run did not scale losses before."""
        if self.enabled and state:
            self.value = float(state["value"])
            self.overflows = int(state["overflows"])
            self._finite = int(state["finite"])
