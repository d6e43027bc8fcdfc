"""Cost of an objective relative to a small model: advantages, loss and its gradient, for every row of the catalogue.

    python -m benchmarks.rows [--rows 4096] [--decisions 1024] [--case bapo] [--out FILE]

The objective gets random log-probabilities and everything else that a block may need. The model is a vision-language
model of two layers of width 64, in training on answers of 96 tokens, and counts with the forward and backward pass of
its update alone, per decision: sampling, rewards and the optimiser, which a step has besides, would make the share
smaller. Times are CPU seconds of one process, the fastest of three.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import print_each
from mmrl.config import load_run
from mmrl.core import PolicyOutputs, Rollouts, all_objectives, get
from mmrl.training.processes import Streams, seed_everything
from mmrl.training.recipe import Step

ROOT = Path(__file__).parents[1]
GROUP, TURN, TIMES = 8, 64, 3


def fastest(run: Callable[[], Any]) -> float:
    """CPU seconds of the fastest of some calls."""
    taken = []
    for _ in range(TIMES):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return min(taken)


@functools.cache
def model_seconds() -> float:
    """Seconds per decision for a small model's forward and backward pass."""
    with tempfile.TemporaryDirectory() as folder:
        built = "hidden: 64, layers: 2, vision_hidden: 64, vision_depth: 1, min_pixels: 3136, max_pixels: 12544"
        settings = [
            f"output_dir={folder}/run",
            f"model.path={folder}/model",
            "model.build=mmrl.vlm.toy.digits:build_model",
            f"model.build_options={{{built}}}",
            f"data.path={folder}/train.jsonl",
            "data.build_options.count=16",
            "eval_data={}",
            "sampler.max_new_tokens=96",
            "objective.kl.kind=none",
        ]
        entry, config = load_run(ROOT / "configs/vlm/digits_grpo.yaml", settings)
        seed_everything(config.seed)
        recipe = entry.load_recipe_class()(config)
        with torch.no_grad():
            rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:8], Streams(0), Step())
        rollouts = recipe.objective.compute_advantages(rollouts.replace(reward=torch.rand(rollouts.num_rows)))
        counts = recipe.objective.denominators(rollouts)
        recipe.policy.train()
        seconds = fastest(lambda: recipe.loss(recipe.policy, rollouts, counts, Step()).loss.backward())
        recipe.close()
    return seconds / float(rollouts.mask.sum())


@functools.cache
def batch(rows: int, decisions: int) -> tuple[Rollouts, PolicyOutputs]:
    """Rows of half to full length with all that a block may need, and the outputs of a policy that has moved."""
    generator = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(size or (rows, decisions), generator=generator)

    def whole(high: int, *size: int) -> Tensor:
        return torch.randint(0, high, size or (rows, decisions), generator=generator)

    group, place = torch.arange(rows) // GROUP, torch.arange(decisions)
    mask = (place < whole(decisions // 2, rows)[:, None] + decisions // 2).float()
    turn = torch.where(mask > 0, place // TURN, -1)
    old = -noise().abs() - 0.05
    extras = {
        **{"tokens": whole(1000), "anchor": group[:, None] * 100 + turn.clamp(min=0), "duration": noise().abs()},
        **{"turn_reward": noise(), "information_gain": noise(), "answer": whole(3, rows), "task": group},
        **{"source": 0 * group, "budget": whole(decisions, rows), "greedy_reward": whole(2, rows).float()},
        **{"code_start": whole(decisions, rows), "parent": 0 * group, "shared": 0 * group},
        **{"collision": torch.rand(rows, decisions, generator=generator), "hinted": whole(2).float()},
    }
    optional = {"logp_ref": old + 0.1 * noise(), "values": noise(), "entropy": noise().abs(), "turn": turn}
    reward = whole(2, rows).float()
    rollouts = Rollouts(group, mask, old, reward, extras=extras).replace(logp_rollout=old + 0.01 * noise(), **optional)
    logp, distance = (old + 0.05 * noise()).requires_grad_(), noise().abs()
    return rollouts, PolicyOutputs(logp, distance, values=noise(), kl_ref=distance, kl_old=0.01 * distance)


def compare(row: str, rows: int, decisions: int) -> dict[str, float]:
    """Seconds of a row's parts, and their fraction of the model's time for the same number of decisions."""
    objective, (rollouts, outputs) = get(row), batch(rows, decisions)
    ready = objective.compute_advantages(rollouts)
    counts = objective.denominators(ready)

    def update() -> None:
        settled = objective.settled([objective.survey(outputs, ready)], ready) if objective.surveys else ready
        torch.autograd.grad(objective.loss(outputs, settled, counts).loss, outputs.logp)

    parts = {"advantages_s": fastest(lambda: objective.compute_advantages(rollouts)), "update_s": fastest(update)}
    model = model_seconds() * float(rollouts.mask.sum())
    return parts | {"model_s": model, "share": sum(parts.values()) / model}


if __name__ == "__main__":
    print_each(compare, tuple(all_objectives()), rows=4096, decisions=1024)
