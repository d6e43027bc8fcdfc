"""Options of runs with a vision-language model: shared options, evaluation, and reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmrl.fields import inheriting, rare
from mmrl.rewards import RewardConfig
from mmrl.rewards.reward_loading import load_function
from mmrl.training.evaluation import Measure
from mmrl.training.objectives import ObjectiveConfig, check_objective, make_objective
from mmrl.training.settings import EvaluationConfig, RunConfig
from mmrl.vlm.data.dataset import OWN_OPTIONS, DataConfig
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_sampler import AnswerSampling
from mmrl.vlm.entries import SCORES
from mmrl.vlm.inference.inference_sampler import EngineSamplerConfig
from mmrl.vlm.model.model_config import ModelConfig, check_critic, check_update_precision

ExtraMeasures = Callable[[Any], list[Measure[VlmTask]]]
"""Maps the `AnswerMeasure` of a held-out split to additional measures."""


@dataclass
class VlmEvaluationConfig(EvaluationConfig):
    """Evaluation of responses: greedy and sampled, overall and by data column."""

    by: list[str] | None = rare(None)
    """Data columns, such as kind or hint, by which to break down accuracy. Default: every column with 2 to 8 short
    values that several questions share; [] = none."""

    def check_extra_measures(self, splits: Collection[str], rewards: Sequence[object]) -> None:
        """Reject extra measures for unknown splits, or without rewards to score responses; raises ValueError."""

    def extra_measures(self) -> ExtraMeasures:
        """Additional measurements on a held-out split; loads the models that they need."""
        return lambda answers: []


@dataclass
class AnswerScoring:
    """Sampling and scoring of responses to held-out questions, for recipes that do neither in training."""

    sampler: AnswerSampling = field(default_factory=AnswerSampling)
    """Lengths of the responses."""
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms that score the responses."""
    accuracy_reward: str = ""
    """Reward term used to score correctness (1 = correct). Default: the last term."""


def scoring_evaluation(**options: Any) -> VlmEvaluationConfig:
    """`default_evaluation` with the options of `AnswerScoring`."""
    made: VlmEvaluationConfig = load_function("mmrl.vlm.critic.measures:ScoringEvaluationConfig")(**options)
    return made


def default_evaluation() -> VlmEvaluationConfig:
    """The options with all extra measures; their package builds on this one, so it is found by name."""
    made: VlmEvaluationConfig = load_function("mmrl.vlm.critic.measures:CriticEvaluationConfig")()
    return made


@dataclass
class VlmParts:
    """Model and questions of a run with a vision-language model; inherit from it before the configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Model, adapter, precision."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training questions; supervised and preference runs need their answers too."""
    eval_data: dict[str, DataConfig] = inheriting("data", own=OWN_OPTIONS)
    """Held-out splits by name; the first one is the headline. Options that a split does not set are taken from `data`,
    except path, split, build, build_options, max_tasks and budgets."""


def check_scoring(config: Any, rewards: Sequence[RewardConfig], accuracy_reward: str) -> None:
    """Check precision, extra measures and the name of the accuracy reward; raises ValueError."""
    check_update_precision(config.model, config.trainer.learning_rate)
    config.evaluation.check_extra_measures(config.eval_data, rewards)
    names = [reward.name for reward in rewards]
    if accuracy_reward and accuracy_reward not in names:
        raise ValueError(f"accuracy_reward is '{accuracy_reward}' but the rewards are: {', '.join(names)}")


@dataclass
class AdaptiveKlConfig:
    """Moves the KL coefficient so that the KL to the reference meets a target (Ziegler et al., arXiv 1909.08593)."""

    target: float | None = rare(None)
    """Target KL in nats per token. Default: keep the coefficient fixed."""
    horizon: float = 10_000.0
    """Number of samples over which the coefficient changes by the relative error."""


@dataclass
class VlmConfig(VlmParts, RunConfig):
    """A reinforcement-learning run of a vision-language model."""

    sampler: EngineSamplerConfig = field(default_factory=EngineSamplerConfig)
    """Sampling of responses in training and evaluation. The temperature is also used for scoring; evaluations have
    their own."""
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms and their weights."""
    evaluation: VlmEvaluationConfig = field(default_factory=default_evaluation)
    """Evaluation."""
    accuracy_reward: str = ""
    """Reward term used to score correctness in evaluations (1 = correct). Default: the last term."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Objective that is optimised."""
    mask_truncated_completions: bool = rare(False)
    """Exclude responses truncated at `sampler.max_new_tokens` from the loss; their rewards still count in their group
    (as in TRL; DAPO's overlong filtering)."""
    adaptive_kl: AdaptiveKlConfig = rare(field(default_factory=AdaptiveKlConfig))
    """Controller of objective.kl.coef."""

    scored_outputs: ClassVar[tuple[str, ...]] = SCORES
    """Policy outputs other than log-probabilities, and data about responses, that objectives can use."""

    @property
    def compared_samples(self) -> int | None:
        """Number of samples that the objective's advantages compare; None if the run does not train on them."""
        return self.trainer.samples_per_task

    def made_objective(self) -> Any:
        """The objective of the run."""
        return make_objective(self.objective, self.sampler.max_new_tokens)

    def check_objective(self) -> None:
        """Check that model and data serve the objective; raises ValueError."""
        if "truncation" in self.objective.advantage:
            raise ValueError(
                "objective.advantage.truncation is only for episodes with a time limit, which single responses do "
                "not have; remove it (recipe truncated sets it itself)"
            )
        objective = make_objective(self.objective)
        names = [reward.name for reward in self.rewards]
        check_objective(objective, self.scored_outputs, self.compared_samples, names, self.trainer.old_logp)
        check_critic(self.model, objective.needs_values)
        if self.adaptive_kl.target is not None and not objective.needs_reference:
            raise ValueError("adaptive_kl.target is set but the objective has no KL term; set objective.kl")

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        if not self.rewards:
            raise ValueError("rewards is empty; add at least one, see `mmrl list rewards`")
        super().validate()
        check_scoring(self, self.rewards, self.accuracy_reward)
        self.check_objective()
