"""The training loop: recipes, loss terms and rollout stages, the trainer, its settings, and held-out evaluation.

    from mmrl.training import LossTerm, Recipe, RolloutStage, SupervisedRecipe

A recipe supplies the stages of a step, a loss term adds to the objective's loss, a rollout stage changes tasks before
sampling and rows after it, and `train` runs a configuration.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "mmrl.training.evaluation": ("Evaluation", "Measure", "evaluate_tasks"),
    "mmrl.core.state": ("Tally",),
    "mmrl.training.recipe": ("LossTerm", "Recipe", "RolloutStage", "Step", "TermLoss"),
    "mmrl.training.supervised": ("SupervisedRecipe",),
    "mmrl.training.run": ("evaluate", "train"),
    "mmrl.training.settings": ("BaseRunConfig", "CheckpointConfig", "EvaluationConfig", "RunConfig", "TrainerConfig"),
    "mmrl.training.trainer": ("Trainer",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
