"""Options of a DigiRL run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmrl.agents.critics import CriticConfig
from mmrl.agents.filters import step_threshold
from mmrl.agents.recipe import AgentConfig
from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.training.loop.objectives import ObjectiveConfig
from mmrl.training.loop.settings import RunConfig
from mmrl.vlm.model_config import check_update_precision

METHODS, ADVANTAGES = ("digirl", "filtered_cloning"), ("paper", "code")


@dataclass
class DigirlSettings:
    """What is learnt from which episodes."""

    method: str = choice("digirl", METHODS)
    """digirl, or filtered_cloning: episodes filtered by reward, all of their steps, no critics."""
    path: str | None = None
    """Folder of recorded episodes to begin with; see mmrl.agents.recorded."""
    build: str | None = None
    """`module:function` that writes the folder where it is missing: it gets the path and `build_options`."""
    build_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `build`."""
    offline_steps: int = bounded(0, at_least=0)
    """First steps of the run, in which no episodes are run."""
    warmup_steps: int = bounded(0, at_least=0)
    """First steps of the run, in which only the critics learn."""
    gamma: float = rare(bounded(0.5, at_least=0, at_most=1))
    """Discount of the returns that the step critic predicts."""
    advantage: str = rare(choice("paper", ADVANTAGES))
    """Advantage of a step: doubly robust (paper), or V(s') - V(s) - 0.05 + r + return (code)."""
    lam: float = rare(bounded(0.5, at_least=0, at_most=1))
    """Weight of the episode's end in the paper's advantage; the further from it, the higher its power."""
    threshold: str = rare("auto")
    """What the advantage of a step has to exceed: 1/H with H the steps of its episode, a number, or auto (1/H for the
    paper's advantage, 0 for the code's)."""
    step_filter: bool = rare(True)
    """Whether steps are filtered."""
    instruction_filter: bool = rare(True)
    """Whether episodes are filtered."""
    quantile: float = bounded(0.9, at_least=0, at_most=1)
    """Episodes that score at least this quantile of all are kept."""
    min_score: float | None = bounded(None, finite=True)
    """Smallest score of a kept episode besides, a reward offline and an advantage after; null = none."""
    clamp: bool = rare(True)
    """Whether token probabilities are kept within 0.001 and 0.99, beyond which a token has no gradient."""
    batch_episodes: int = bounded(16, at_least=1)
    """Episodes of an optimiser step, drawn with replacement."""
    capacity: int = bounded(1000, at_least=1)
    """Episodes that are stored; the oldest one goes first. All are read once in every step."""
    memory_mb: int = rare(bounded(4096, at_least=1))
    """Largest size of the stored episodes in 10^6 bytes, in each process."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critics."""

    @property
    def has_critics(self) -> bool:
        """Whether there are critics."""
        return self.method == "digirl"

    def step_rule(self) -> str:
        """The threshold of steps without auto."""
        automatic = "1/H" if self.advantage == "paper" else "0"
        return automatic if self.threshold == "auto" else self.threshold

    def validate(self) -> None:
        """Check that the options fit together; raises ValueError."""
        step_threshold(self.step_rule(), 1)
        if self.offline_steps and self.path is None:
            raise UserError(f"digirl.offline_steps is {self.offline_steps}, but digirl.path names no recorded episodes")
        if self.warmup_steps and not self.has_critics:
            raise UserError("digirl.warmup_steps trains critics, which filtered_cloning does not have")


@dataclass
class DigirlConfig(AgentConfig):
    """A DigiRL run; each step has `trainer.epochs` x `trainer.minibatches_per_step` optimiser steps, 20 in the code."""

    digirl: DigirlSettings = field(default_factory=DigirlSettings)
    """What is learnt from which episodes."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="sft"))
    """Fixed: likelihood of what is kept."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        RunConfig.validate(self)
        check_update_precision(self.model, self.trainer.learning_rate)
        if self.objective != ObjectiveConfig(preset="sft"):
            raise UserError("digirl raises the likelihood of kept steps; leave objective out, or use recipe: agent")
