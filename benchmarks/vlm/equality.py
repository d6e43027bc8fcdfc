"""Whether shared prompts change anything: log-probs and gradients against separate rows, with a negative control.

The control puts the completions behind their prompt in one row under the plain causal mask, so that each sees those
before it. A test that passes there too would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import check
from benchmarks.vlm.arms import make_recipe, make_rollouts, rows_apart
from benchmarks.vlm.workload import shape_of
from mmrl.core.logprobs import linear_logprobs
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.training.recipe import Step, shared_prefix
from mmrl.training.update import count_denominators
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.engine.rows import pack_prompts, text_prompt
from mmrl.vlm.vlm_recipe import VlmRecipe

LOGP_TOLERANCE = 5e-6
"""Maximum difference of a log-prob in float32."""
GRADIENT_TOLERANCE = 1e-5
"""Maximum relative difference of the gradient, Euclidean norm over all parameters."""
CONTROL = 100.0
"""The control must differ by more than this many tolerances."""
TASKS = 2


@dataclass
class _Pass:
    """Log-probs (B, T) of one way to compute them, and the gradient by parameter."""

    logp: Tensor
    gradients: dict[str, Tensor]


def equality_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Compare one forward and backward pass of shared prompts with separate rows.

    Two groups, completions of all lengths from 1 to T, old log-probs of another policy so that clipping is active,
    and the same in micro-batches that split the groups.

    Args:
        options: model, data, shape, device.
    """
    shape = shape_of(options["shape"])
    rows = TASKS * shape.group
    lengths = [1 + (shape.completion - 1) * index // (rows - 1) for index in range(rows)]
    with make_recipe(options | {"shared_prefix": False}, old_logp="sampler") as recipe:
        rollouts = make_rollouts(recipe, shape, lengths, TASKS)
        flat = _measure(recipe, lambda: _differentiate(recipe, rows_apart(rollouts)))
        leaking = _measure(recipe, lambda: _differentiate_leaking(recipe, rollouts))
    with make_recipe(options, old_logp="sampler") as recipe:
        shared = _measure(recipe, lambda: _differentiate(recipe, rollouts))
        pieces = _measure(recipe, lambda: _differentiate(recipe, rollouts, micro_batch=max(shape.group // 3, 1)))
    mask = rollouts.mask.bool()
    return {
        "checks": {
            **_checks("shared", flat, shared, mask, 1.0),
            **_checks("shared in micro-batches", flat, pieces, mask, 1.0),
            **_checks("control, completions leak", flat, leaking, mask, CONTROL),
        },
        "counts": {"rows": rows, "tokens": int(mask.sum())},
    }


def _measure(recipe: VlmRecipe, run: Callable[[], Tensor]) -> _Pass:
    recipe.policy.zero_grad(set_to_none=True)
    logp = run()
    named = recipe.policy.network.named_parameters()
    return _Pass(logp, {name: p.grad.detach().clone() for name, p in named if p.grad is not None})


def _differentiate(recipe: VlmRecipe, rollouts: Rollouts, micro_batch: int = 0) -> Tensor:
    """Gradient of the loss as the update computes it; returns the log-probs."""
    denominators = count_denominators(recipe, rollouts)
    chunks = list(rollouts.micro_batches(micro_batch or rollouts.num_rows))
    with shared_prefix(recipe.policy, chunks) as shared:
        for chunk in chunks:
            recipe.loss(recipe.policy, chunk, denominators, Step()).loss.backward()
        shared.backward()
    return recipe.scores_in_chunks(recipe.policy, rollouts, recipe.loss_outputs).logp


def _differentiate_leaking(recipe: VlmRecipe, rollouts: Rollouts) -> Tensor:
    """The same loss on log-probs of completions that see those before them in their group."""
    parts = [_leaking_logp(recipe, rollouts.select_groups(torch.tensor([group]))) for group in range(TASKS)]
    logp = torch.cat(parts)
    loss = recipe.objective.loss(PolicyOutputs(logp, None, None), rollouts, count_denominators(recipe, rollouts)).loss
    loss.backward()
    return logp.detach()


def _leaking_logp(recipe: VlmRecipe, rollouts: Rollouts) -> Tensor:
    policy = recipe.policy
    payload = VlmPayload.of(rollouts)
    (prompt,) = payload.prompts
    input_lengths = rollouts.lengths - 1
    pairs = zip(payload.response_ids, input_lengths.tolist(), strict=True)
    answers = [text_prompt(ids[:length]) for ids, length in pairs]
    for answer in answers:
        answer.position_ids = answer.position_ids + prompt.next_position
    row = pack_prompts([prompt, *answers], policy.device)
    hidden = policy.reader.read_packed(policy, row, [prompt], None)
    places = torch.nonzero(rollouts.mask, as_tuple=True)
    starts = len(prompt) + input_lengths.cumsum(0) - input_lengths
    before = torch.where(places[1] == 0, len(prompt) - 1, starts[places[0]] + places[1] - 1)
    targets = payload.response_ids[places]
    found = linear_logprobs(hidden[before], policy.network.lm_head.weight, targets, banned=policy.banned_ids)
    return torch.zeros_like(rollouts.mask).index_put(places, found.logp)


def _checks(name: str, truth: _Pass, other: _Pass, mask: Tensor, factor: float) -> dict[str, dict[str, Any]]:
    above = factor > 1.0
    logp = float((truth.logp - other.logp)[mask].abs().max())
    limit = factor * GRADIENT_TOLERANCE
    return {
        f"{name}: log-probs": check(logp, factor * LOGP_TOLERANCE, above=above),
        f"{name}: gradient": check(_difference(truth, other, ""), limit, above=above),
        f"{name}: gradient of the vision tower": check(_difference(truth, other, "visual"), limit, above=above),
    }


def _difference(truth: _Pass, other: _Pass, part: str) -> float:
    """Relative Euclidean distance over the parameters whose name holds `part`; a missing gradient is 0."""
    names = [name for name in {**truth.gradients, **other.gradients} if part in name]
    pairs = [(truth.gradients.get(name), other.gradients.get(name)) for name in names]
    apart = sum(float((_or_zero(a, b) - _or_zero(b, a)).double().square().sum()) for a, b in pairs)
    size = sum(float(a.double().square().sum()) for a, _ in pairs if a is not None)
    return (apart / size) ** 0.5 if size else float("inf")


def _or_zero(value: Tensor | None, like: Tensor | None) -> Tensor:
    if value is not None:
        return value
    assert like is not None
    return torch.zeros_like(like)
