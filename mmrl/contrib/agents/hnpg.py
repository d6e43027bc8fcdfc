"""HNPG (Zhou et al., arXiv 2311.08384; code YifeiZhou02/HNPG): natural gradients, critics with offline data.

Each step draws half of its turns from the step's own episodes and half from recorded ones, and samples a new answer
a ~ pi(s) for each.

1. The critics Q(s, u) and V(s) of `mmrl.contrib.agents.archer` are fitted to both halves. Q's target is the return in
   the policy's own episodes and r + gamma V'(s') in recorded ones; V's target is Q'(s, a).
2. The actor takes one natural-gradient step (`mmrl.training.optimizer`) on the new answers, with the advantage
   min Q(s, a) - min V(s). Recorded actions train only the critics.

Differences from the code: the Fisher matrix is that of the sampled answers, as in the paper, not the second derivative
of the KL; V is a head, not a mean of Q over ten actions; own turns use Q - V, as in the paper, not GAE.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mmrl.agents.agent_recipe import AgentConfig
from mmrl.agents.methods.arpo import ReplayBuffer, ReplayConfig
from mmrl.agents.methods.digirl import EPISODES
from mmrl.agents.methods.digirl_critics import CriticTraining
from mmrl.agents.rollout.storage import read_recorded, store_episode
from mmrl.contrib.agents.archer import (
    ArcherRecipe,
    Drawn,
    UtteranceSettings,
    check_critics,
    default_objective,
    draw_turns,
)
from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.files import expanded
from mmrl.hub.building import BuiltPath, build_if_missing
from mmrl.runs.fingerprint import content_digest
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.recipe import Step, opening
from mmrl.training.settings import RunConfig, TrainerConfig, TrustRegionConfig


@dataclass
class HnpgSettings(UtteranceSettings, BuiltPath):
    """Recorded episodes, critics and the actor's step, with the defaults of the public code."""

    path: str = ""
    """Folder of recorded episodes; see mmrl.agents.rollout.storage."""
    gamma: float = bounded(1.0, at_least=0, at_most=1)
    """Discount per turn."""
    warmup_steps: int = bounded(0, at_least=0)
    """Number of initial steps in which only the critics learn."""
    critic: CriticTraining = field(
        default_factory=lambda: CriticTraining(learning_rate=3e-4, updates=30, batch_steps=256, max_grad_norm=1.0)
    )
    """The critics."""
    region: TrustRegionConfig = field(default_factory=TrustRegionConfig)
    """The actor's natural-gradient step."""


@dataclass
class HnpgConfig(AgentConfig):
    """An HNPG run."""

    hnpg: HnpgSettings = field(default_factory=HnpgSettings)
    """Recorded episodes, critics and the actor's step."""
    objective: ObjectiveConfig = field(default_factory=default_objective)
    """Fixed: policy gradient with the critics' advantages."""
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(learning_rate=1.0, max_grad_norm=0.0))
    """Batch sizes and guards; `learning_rate` is the fraction of each natural-gradient step to take."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        RunConfig.validate(self)
        check_critics(self, "hnpg")
        self.hnpg.region.check(self.trainer)
        if not self.hnpg.path:
            raise UserError(
                "hnpg.path is empty; set a folder of recorded episodes, or use recipe: archer, which needs none"
            )
        if self.hnpg.turns < 2:
            raise UserError("hnpg.turns is 1; half of the turns come from recorded episodes, so use at least 2")


class HnpgRecipe(ArcherRecipe):
    """Critics of new and recorded turns, and natural gradients; see the module."""

    config: HnpgConfig

    def __init__(self, config: HnpgConfig) -> None:
        super().__init__(config)
        self.trust_region = config.hnpg.region
        with opening(self.opened):
            episodes = self._recorded.episodes(self.policy, self.writer(self.policy))
        self.recorded = [store_episode(episode) for episode in episodes]

    def check_data(self) -> None:
        """Read the recorded episodes; raises UserError."""
        build_if_missing(self.config.hnpg, "hnpg")
        self._recorded = read_recorded(expanded(self.config.hnpg.path))

    @staticmethod
    def settings_of(config: HnpgConfig) -> HnpgSettings:
        """The method's options."""
        return config.hnpg

    def data_digest(self) -> str:
        """Digest of the tasks and of the responses and rewards of the recorded episodes."""
        told = [[record[name] for name in ("instruction", "answers", "rewards")] for record in self.recorded]
        return content_digest([super().data_digest(), *told])

    def describe(self) -> str:
        """The losses of actor and critics, and the actor's step."""
        settings, region = self.config.hnpg, self.config.hnpg.region
        return (
            "hnpg: minimise - mean over answers of A * sum_t logp_t,  A = min Q(s, a) - min V(s),  a ~ pi(s)\n"
            f"  by natural gradients of a KL of {region.max_kl:g}, damping {region.damping:g}\n"
            f"  critics: Q(s, u) -> return, or of recorded turns r + {settings.gamma:g} V'(s'),  V(s) -> Q'(s, a),  "
            f"averages move by {settings.tau:g}"
        )

    def _make_store(self) -> ReplayBuffer:
        return ReplayBuffer(
            # `_choose` reads this step's episodes alone, so one step's are enough
            ReplayConfig(size=self.config.trainer.tasks_per_step * self.config.trainer.samples_per_task)
        )

    def _choose(self, step: Step, generator: torch.Generator) -> list[Drawn]:
        """Turns of this step's episodes and recorded turns, half each."""
        fresh, half = self.store.stored(EPISODES, since=step.number), self.settings.turns // 2
        # if no episode of the step came to a result, recorded turns fill the batch
        own = draw_turns(fresh, half, generator, on_policy=True) if fresh else []
        return own + draw_turns(self.recorded, self.settings.turns - len(own), generator)
