"""Two steps of the whole loop where the processes have unequal work, shared by however many this is started with.

`seen` is used by the first task only: one process never needs it, and the other one in its first micro-batch only,
where there are several. A filter leaves the processes unequal numbers of groups; of several minibatches, some hold no
group of one of the processes.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from torch import nn

from mmrl.core.loss import token_mean
from mmrl.training.processes import Streams, leave, make_accelerator
from mmrl.training.recipe import LossTerm, TermLoss
from mmrl.training.settings import TrainerConfig
from mmrl.training.trainer import Trainer
from tests.training.toy import LENGTH, ToyConfig, ToyPolicy, ToyRecipe


class Looking(ToyPolicy):
    def __init__(self, tasks: int) -> None:
        super().__init__(tasks)
        self.seen = nn.Parameter(torch.zeros(()))
        self.register_buffer("scale", torch.ones(LENGTH))

    def forward(self, rollouts, **options):
        scores = super().forward(rollouts, **options)
        first = (torch.tensor(rollouts.payload.tasks)[rollouts.group] == 0)[:, None].float()
        if bool(first.any()):
            scores.logp.add_(self.seen * first * (rollouts.payload.ids - 1.5))
        return dataclasses.replace(scores, logp=scores.logp * self.scale)


class Again(LossTerm):
    """A second forward pass for one backward pass."""

    name = "again"

    def __call__(self, policy, minibatch, scores, counts, step):
        again = policy(minibatch, outputs=frozenset({"logp"}))
        return TermLoss({"loss/extra": 0.1 * token_mean(again.logp**2, minibatch.loss_mask, counts)})


class FixedRecipe(ToyRecipe):
    """Every response and reward follows from its task, so that the processes share what one would have drawn."""

    def rollout(self, policy, tasks, streams, step):
        parts = [super(FixedRecipe, self).rollout(policy, [task], Streams(task), step) for task in tasks]
        return type(parts[0]).concat(parts)

    def score(self, rollouts, step):
        rollouts = super().score(rollouts, step)
        tasks = torch.tensor(rollouts.payload.tasks)[rollouts.group]
        flat = (tasks == 1) | (tasks == 3)  # the second process keeps one group of three
        reward = torch.where(flat, torch.ones(()), rollouts.reward)
        if "fails" in sys.argv:  # all rewards of the second process
            reward = torch.where(tasks % 2 == 1, torch.nan, reward)
        return rollouts.replace(reward=reward)


def main(chooses: str, minibatches: int, micro_batch: int, output: Path, overflows: bool) -> None:
    accelerator = make_accelerator()
    config = ToyConfig(
        preset="grpo",
        filter={"kind": chooses},
        trainer=TrainerConfig(
            steps=2,
            tasks_per_step=6,
            samples_per_task=4,
            learning_rate=0.1,
            micro_batch=micro_batch,
            minibatches_per_step=minibatches,
            mixed_precision="fp16" if overflows else "none",
        ),
    )
    recipe = FixedRecipe(config)
    recipe.terms = [Again()]
    recipe.policy = Looking(6)
    recipe.train_tasks = list(range(6))
    trainer = Trainer(recipe, config, output.parent, accelerator, None)
    trainer.tasks.shuffle = False
    _, collected = trainer.collect()
    trainer.tasks.position = 0
    if overflows and accelerator.process_index == accelerator.num_processes - 1:  # in the first step, on one of them
        recipe.policy.shared.register_hook(lambda own: own * float("inf") if trainer.step == 0 else own)
    for _ in range(config.trainer.steps):
        trainer.train_step()
    if accelerator.is_main_process:
        steps = trainer.updater.optimiser_step
        found = {"weights": recipe.policy.state_dict(), "metrics": collected, "steps": steps}
        torch.save(found | {"scale": trainer.updater.scale.state_dict()}, output)
    accelerator.wait_for_everyone()  # a process that leaves early takes the others' connections with it
    leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), "overflow" in sys.argv)
