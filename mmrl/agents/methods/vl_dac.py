"""VL-DAC: PPO over tokens, with a critic over the steps of the environment.

All tokens of an answer share the advantage of their turn (generalised advantage estimation over turns). A turn's value
comes from a separate network on the model's last hidden state before the answer; its gradient stops there. The first
updates train only that network (`warmup_updates`). The objective is the catalogue's `vl_dac`; this recipe adds the
warm-up and the defaults.

Defaults: the paper's table (appendix B); `recipe: vl_dac_repo` has those of the public configuration for MiniWorld.
Where the table gives two values, the first is used (gamma 0.99 and 1, lambda 0.95 and 0.99); the clip range, which it
omits, is from the public code.

What differs from the public code, and why:

* The first token of an answer and tokens with the number 0 are trained like all others; the code drops them.
* Answers are drawn from the distribution that is trained. The code samples with top_k 1, which explores nothing, and
  scores at temperature 1; `sampler.top_k: 1` is refused here, and temperature is 1 where the table says 0.2, because
  that number had no effect there.
* Log-probabilities and the critic are float32; the code has bfloat16 and float16.
* Episodes are whole: a step has `tasks_per_step` x `samples_per_task` of them, instead of 256 environment steps that
  may end inside an episode, and an optimiser step takes whole episodes. Turns still count equally.
* `objective.advantage.truncation` is "mask", as in the code: a turn that ends at a time limit gets no advantage.
  "bootstrap" uses the critic's value of the observation after it.
* The learning rate follows a cosine over the run's optimiser steps; the code restarts the schedule after 100 updates.
* Answers without a readable action follow `actions.on_parse_error`; the code executes a substitute action.
* The last layer of the critic starts at zero.
* `entropy_coef` of the code is read and never used; `objective.entropy` has a bonus for those who want one.

Source: Bredis et al., Enhancing Vision-Language Model Training with Reinforcement Learning in Synthetic Worlds for
    Real-World Success, arXiv 2508.04280; corl-team/VL-DAC a2c_ppo_acktr/algo/ppo.py, storage.py, model.py and
    configs/miniworld_qwen2vl.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.core.loss import Denominators
from mmrl.core.objectives.objective import LossOutput
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.recipe import LossTerm, Step
from mmrl.training.settings import TrainerConfig
from mmrl.vlm.inference.inference_sampler import EngineSamplerConfig
from mmrl.vlm.model.model_config import CriticSettings, LoraSettings, ModelConfig

CRITIC_ALONE = frozenset({"values"})


def paper_model() -> ModelConfig:
    """Adapters, and a critic of two hidden layers on the detached state."""
    critic = CriticSettings(hidden=[3072, 2048], stop_gradient=True)
    return ModelConfig(lora=LoraSettings(enabled=True, rank=16, alpha=32, dropout=0.1), critic=critic)


def paper_trainer() -> TrainerConfig:
    """A cosine schedule from 5e-5 to 1e-7, two passes over the episodes of a step, and a low gradient clip."""
    return TrainerConfig(
        tasks_per_step=16,
        samples_per_task=1,
        minibatches_per_step=2,
        epochs=2,
        micro_batch=1,
        learning_rate=5e-5,
        final_learning_rate=1e-7,
        schedule="cosine",
        adam_eps=1e-7,
        max_grad_norm=0.01,
    )


@dataclass
class VlDacConfig(AgentConfig):
    """A run of VL-DAC."""

    model: ModelConfig = field(default_factory=paper_model)
    """Model, adapter, critic, precision."""
    conversation: ConversationConfig = field(default_factory=lambda: ConversationConfig(history_images=4))
    """Conversation that the agent reads."""
    sampler: EngineSamplerConfig = field(default_factory=lambda: EngineSamplerConfig(max_new_tokens=1024))
    """Sampling of a turn; the temperature is also used for scoring."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="vl_dac"))
    """Objective to optimise; any objective with a critic."""
    trainer: TrainerConfig = field(default_factory=paper_trainer)
    """Sampling and updates."""
    warmup_updates: int = rare(bounded(2, at_least=0))
    """Number of initial steps whose updates train only the critic."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        objective = make_objective(self.objective)
        if not objective.needs_values:
            raise ValueError(
                f"objective.advantage is '{objective.advantage.kind}', which has no critic, but the recipe "
                f"{self.recipe} needs one; use gae_turn or gae, or recipe: agent"
            )
        if self.sampler.top_k == 1:
            raise ValueError(
                "sampler.top_k is 1: every response would be the most likely one, so there would be no exploration; "
                "use 0"
            )


class CriticWarmup(LossTerm):
    """Skips the reference pass in the `steps` in which only the critic is trained; adds nothing to the loss."""

    name = "critic_warmup"
    gradient = "never"

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def provides(self, step: Step) -> frozenset[str]:
        """The critic's loss reads no log-probabilities of the reference."""
        return frozenset({"logp_ref"} if step.number < self.steps else ())


class VlDacRecipe(AgentRecipe):
    """Trains only the critic in the first steps, then policy and critic."""

    config: VlDacConfig

    def __init__(self, config: VlDacConfig) -> None:
        super().__init__(config)
        self.terms = [*self.terms, CriticWarmup(config.warmup_updates)]

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """The critic's part of the objective in the warm-up, then the whole objective."""
        if step.number >= self.config.warmup_updates:
            return super().loss(policy, minibatch, denominators, step)
        return self.objective.critic_loss(self.scores(policy, minibatch, CRITIC_ALONE), minibatch, denominators)
