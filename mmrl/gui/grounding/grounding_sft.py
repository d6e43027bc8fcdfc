"""Supervised warm start of a grounding model on worked answers, such as a tiny model's first steps.

The column `answers` holds points in pixels of the original image; they are written in the model's space.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mmrl.gui.grounding.grounding_tasks import FIRST_CORRECT, GroundingParts, Screens
from mmrl.gui.grounding.rewards import point_rewards
from mmrl.vlm.methods.sft import SftConfig, SftRecipe
from mmrl.vlm.vlm_config import VlmEvaluationConfig, scoring_evaluation


@dataclass
class GroundingSftConfig(GroundingParts, SftConfig):
    """A supervised run on screens; `target_key` stays `completion`, the column that the answers are written to."""

    evaluation: VlmEvaluationConfig = field(default_factory=lambda: scoring_evaluation(accuracy_reward=FIRST_CORRECT))
    """Evaluation; `rewards` are terms in addition to `point`."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        self.check_screens()
        SftConfig.validate(self.scored())

    def scored(self) -> GroundingSftConfig:
        """The same configuration with `point` and its parts among the rewards of the evaluation."""
        evaluation: Any = self.evaluation
        rewards = [*(point_rewards(self.answer) if self.answer else ()), *evaluation.rewards]
        return replace(self, evaluation=replace(evaluation, rewards=rewards))


class GroundingSftRecipe(SftRecipe):
    """Maximum likelihood of worked answers."""

    config: GroundingSftConfig

    def __init__(self, config: GroundingSftConfig) -> None:
        super().__init__(config.scored(), Screens(config))
