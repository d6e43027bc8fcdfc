"""Supervised warm start of a grounding model on worked answers, such as a tiny model's first steps.

The column `answers` holds points in pixels of the original image; they are written in the model's space.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.gui.grounding import GroundingOptions, Screens
from mmrl.vlm.sft import SftConfig, SftRecipe


@dataclass
class GroundingSftConfig(GroundingOptions, SftConfig):
    """A supervised run on screens; `target_key` stays `completion`, which the answers are written to."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        SftConfig.validate(self.scored())


class GroundingSftRecipe(SftRecipe):
    """Maximum likelihood of worked answers."""

    config: GroundingSftConfig

    def __init__(self, config: GroundingSftConfig) -> None:
        super().__init__(config.scored(), Screens(config))
