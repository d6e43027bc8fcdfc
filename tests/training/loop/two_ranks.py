"""One update of the toy recipe on fixed rollouts, shared by however many processes this is started with."""

import sys
from pathlib import Path

import torch

from mmrl.core.rollouts import PLACE, TASK
from mmrl.training.processes import Streams, leave, make_accelerator, merge_lists, shard
from mmrl.training.recipe import Step
from mmrl.training.settings import TrainerConfig
from mmrl.training.trainer import Trainer
from mmrl.training.update import update_constants
from tests.training.loop.sharing import SharingRecipe
from tests.training.toy import ToyConfig


def main(preset: str, micro_batch: int, output: Path) -> None:
    accelerator = make_accelerator()
    config = ToyConfig(
        preset=preset,
        trainer=TrainerConfig(
            steps=1,
            tasks_per_step=6,
            samples_per_task=4,
            learning_rate=0.1,
            adam_eps=1.0,  # so that the rounding of a gradient near 0 is no whole step
            micro_batch=micro_batch,
            epochs=4 if preset == "bapo" else 1,  # its bounds matter once the policy has moved
            skip_zero_advantage_groups=accelerator.num_processes > 1,
        ),
    )
    recipe = SharingRecipe(config)
    with torch.no_grad():
        rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks, Streams(0), Step()), Step())
    rollouts.mask[::3, 2:] = 0.0  # ragged rows, so that ranks hold different numbers of tokens
    rollouts.reward[:] = torch.arange(24.0) % 4  # each group has a gradient
    rollouts.reward[5] = float("nan")
    if recipe.objective.kl is None:
        rollouts.reward[rollouts.group % 2 == 1] = 1.0  # the second process has nothing to learn from
    rollouts.extras |= {TASK: rollouts.group, PLACE: rollouts.group}
    trainer = Trainer(recipe, config, output, accelerator, None)
    mine = rollouts.select_groups(torch.tensor(shard(range(6), accelerator)))
    mine = update_constants(recipe, trainer.policy, trainer.reference, mine, Step())
    mine = recipe.advantages(mine, accelerator, Step())
    metrics = trainer.updater.update(mine, Step(0))
    states = merge_lists([recipe.objective_state.state_dict()], accelerator)
    if accelerator.is_main_process:
        torch.save({"weights": recipe.policy.state_dict(), "metrics": metrics, "states": states}, output)
    accelerator.wait_for_everyone()  # a process that leaves early takes the others' connections with it
    leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
