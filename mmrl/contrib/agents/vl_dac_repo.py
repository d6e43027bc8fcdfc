"""VL-DAC with the hyperparameters of its public configuration for MiniWorld; see `mmrl.agents.methods.vl_dac`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmrl.agents.methods.vl_dac import VlDacConfig, paper_trainer
from mmrl.agents.rollout.episodes import EpisodeConfig
from mmrl.training.objectives import ObjectiveConfig


def repo_preset() -> VlDacConfig:
    """The hyperparameters of the public configuration for MiniWorld.

    An optimiser step takes one of 16 episodes, where the code adds up 16 of 256 turns.

    Source: corl-team/VL-DAC configs/miniworld_qwen2vl.yaml.
    """
    changes: dict[str, Any] = {
        "advantage": {"gamma": 0.9, "lam": 0.95},
        "kl": {"coef": 0.04},
        "value": {"coef": 0.5},
    }
    trainer = replace(paper_trainer(), learning_rate=1e-6, final_learning_rate=1e-8, minibatches_per_step=16)
    return VlDacConfig(
        objective=ObjectiveConfig(preset="vl_dac", **changes),
        episode=EpisodeConfig(max_turns=128),
        trainer=replace(trainer, steps=100),
    )
