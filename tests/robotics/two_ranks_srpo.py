"""SRPO's rewards and one step of the loop, shared by however many processes this is started with.

The policy of the first process always reaches its goal, that of the others never does, until they are made equal.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mmrl.training.processes import leave, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.trainer import RunCounts, Trainer, collect_metrics
from robotics.methods.latents import LatentConfig
from robotics.methods.progress import ProgressSettings
from robotics.methods.srpo import SrpoRecipe
from robotics.policies.policy_loading import ActionPolicyConfig
from tests.robotics.test_robot_recipes import collected, srpo, trainer


def flat(policy) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()]).clone()


def main(output: Path) -> None:
    accelerator = make_accelerator()
    rank = accelerator.process_index
    model = ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1, options={"bias": 0.1})
    config = srpo(
        output.parent, model=model, progress=ProgressSettings(min_samples=10_000, memory=64), trainer=trainer(steps=1)
    )
    recipe = SrpoRecipe(config)
    last = recipe.policy.module.net[-1].bias
    last.data.fill_(3.0 if rank == 0 else -0.3)
    counts = RunCounts(recipe)
    rollouts = collected(recipe, tasks=2 + rank, seed=rank)
    counts.share()
    payload = rollouts.payload
    rows = range(rollouts.num_rows)
    found = {
        "success": payload.success.numpy(),
        "reward": rollouts.reward.numpy(),
        "latents": recipe.latent.embed([None for _ in rows], [payload.path(row) for row in rows]).latents,
        "metrics": collect_metrics(recipe, rollouts, Step()),
        "memory": {task: np.asarray(kept) for task, kept in recipe.memory.references().items()},
    }
    own_scale = SrpoRecipe(replace(config, latent=LatentConfig(kind="state")), recipe.policy)
    seen = collected(own_scale, tasks=2 + rank, seed=rank).payload
    found["fitted"] = own_scale.latent.state_dict()
    found["paths"] = np.concatenate([seen.path(row) for row in range(len(seen.success))])
    last.data.fill_(0.1)
    found["start"] = flat(recipe.policy)
    Trainer(recipe, config, output.parent, accelerator, None).train_step()
    found["evaluation"] = recipe.evaluate(recipe.policy, "held_out", accelerator, Step()).metrics
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:  # as if the processes had been killed while they wrote, the second one first
        file = next((output.parent / "run" / "episodes").glob("*.jsonl"))
        lines = file.read_text().splitlines(keepends=True)
        file.unlink()
        for part, kept in enumerate((lines[0:6:2], lines[1:4:2])):
            file.with_name(f"{file.stem}.part-{part:03d}.jsonl").write_text("".join(kept))
    accelerator.wait_for_everyone()
    begun, reset = [], recipe.sim.reset
    recipe.sim.reset = lambda episodes: begun.extend(episode.layout for episode in episodes) or reset(episodes)
    found["again"] = recipe.evaluate(recipe.policy, "held_out", accelerator, Step()).metrics
    found["begun"] = begun
    torch.save(found | {"weights": flat(recipe.policy)}, output.with_suffix(f".{rank}"))
    accelerator.wait_for_everyone()  # a process that leaves early takes the others' connections with it
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
