from pathlib import Path

import pytest
import torch

from mmrl.training.processes import make_accelerator, seed_everything
from mmrl.training.settings import TrainerConfig
from mmrl.training.trainer import Trainer
from tests.training.toy import ToyConfig, ToyRecipe


@pytest.fixture
def make_trainer(tmp_path: Path):
    """Trainer of a toy recipe; keyword arguments are fields of TrainerConfig or ToyConfig."""
    count = iter(range(1000))

    def make(folder: str | None = None, recipe: type[ToyRecipe] = ToyRecipe, **options) -> Trainer:
        names = TrainerConfig.__dataclass_fields__
        trainer = TrainerConfig(
            **{"steps": 4, "tasks_per_step": 3, "samples_per_task": 4, "learning_rate": 0.1}
            | {name: value for name, value in options.items() if name in names}
        )
        config = ToyConfig(trainer=trainer, **{k: v for k, v in options.items() if k not in names})
        config.validate()
        seed_everything(config.seed)
        run_dir = tmp_path / (folder or f"run{next(count)}")
        return Trainer(recipe(config), config, run_dir, make_accelerator(), None)

    return make


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.recipe.policy.parameters()]
