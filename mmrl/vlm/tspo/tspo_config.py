"""Options of a TSPO run, with the defaults of the public code if it has them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from mmrl.fields import bounded, choice, inheriting, only_with, rare
from mmrl.hub.building import BuiltPath
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import ObjectiveConfig, check_objective, make_objective
from mmrl.training.settings import EvaluationConfig, RunConfig, TrainerConfig
from mmrl.vlm.data.dataset import OWN_OPTIONS, DataConfig
from mmrl.vlm.data.task import VideoOptions
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import CriticSettings, ModelConfig
from mmrl.vlm.tspo.picking import LOGPROBS, METHODS

SCORES = ("logp_ref", "turns", "probabilities")
"""Scores of the policy in addition to log-probabilities; the picks are turn 0, trained tokens turn 1."""
ANSWERERS = ("oracle", "vlm")


@dataclass
class FeatureConfig(BuiltPath):
    """The CLIP, and which frames it sees."""

    path: str = MISSING
    """CLIP folder or hub id, such as openai/clip-vit-large-patch14."""
    fps: float = bounded(1.0, at_least=0)
    """Candidate frames per second; 0, or more than a video has, means all its frames."""
    max_frames: int = bounded(0, at_least=0)
    """Maximum number of candidates per video, evenly spaced if there would be more; 0 = no limit."""
    cache: str | None = None
    """Folder for cached features, keyed by content, candidates and CLIP. Default: in memory only."""
    memory_mb: float = rare(bounded(512.0, at_least=0))
    """Maximum megabytes of features in memory."""
    batch: int = rare(bounded(64, at_least=1))
    """Number of frames to embed together. Affects memory only."""
    device: str = rare("cpu")
    """Torch device for the CLIP; cuda means the device of the process."""


@dataclass
class TemporalAgentConfig:
    """The temporal agent."""

    path: str | None = None
    """Folder of a trained agent, or its run folder, to start from. Default: a new agent with the sizes below."""
    heads: int = bounded(8, at_least=1)
    """Attention heads, a divisor of the CLIP's width."""
    window: int = bounded(12, at_least=1)
    """Number of frames that a frame attends to; half of them are before it."""


@dataclass
class PickConfig:
    """Draws of frames in training."""

    count: int = bounded(16, at_least=1)
    """Number of frames to pick for a question with a needle; if the video has fewer, all of them."""
    general_count: int = rare(bounded(0, at_least=0))
    """Number of frames to pick for other questions; 0 = half as many."""
    logprob: str = choice("mean_marginal", LOGPROBS)
    """Log-probability of the picks: mean_marginal (public code), sum_marginal, noisy_product (the paper's eq. 5) or
    plackett_luce (exact); see `mmrl/vlm/tspo/picking.py`."""
    temperature: float = bounded(0.025, above=0)
    """Temperature that divides the scores in the first step."""
    final_temperature: float = rare(bounded(0.01, above=0))
    """Temperature at the end of the run; it decreases linearly."""

    def of(self, specific: bool) -> int:
        """Picks for a question with or without a needle."""
        return self.count if specific else self.general_count or max(self.count // 2, 1)


@dataclass
class AnswererConfig:
    """The answerer, whose answers determine the reward of the picked frames."""

    kind: str = choice("oracle", ANSWERERS)
    """oracle: correct if enough frames of the needle are picked (a rule for experiments); vlm: a vision-language model
    reads the frames."""
    min_frames: int = bounded(4, at_least=1)
    """oracle: number of needle frames needed for a correct answer."""
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=""))
    """vlm: the model."""
    train: bool = rare(only_with(False, kind="vlm"))
    """vlm: train the model together with the agent, so its sampled tokens are decisions too. Otherwise it is frozen,
    decodes greedily, and its ratio is 1."""
    learning_rate: float = rare(only_with(bounded(0.0, at_least=0), train=True))
    """vlm: learning rate of the trained model, with the agent's schedule; 0 = the agent's rate, which is too high for
    large models."""
    sampler: SamplerConfig = field(default_factory=lambda: SamplerConfig(max_new_tokens=256))
    """vlm: length of responses; for a trained model also temperature and truncation."""
    reward: RewardConfig = field(default_factory=lambda: RewardConfig(name="choice"))
    """vlm: reward function that returns 1 for a correct answer."""
    batch_rows: int = rare(bounded(64, at_least=1))
    """vlm: number of answers to process together. Affects memory only."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        if self.kind == "oracle" and self.model.path:
            raise ValueError(
                "answerer.kind is oracle, which has no model; set answerer.kind=vlm, or remove answerer.model"
            )
        if self.model.critic != CriticSettings():
            raise ValueError("answerer.model.critic is set, but the answerer has no critic; remove it")
        if self.kind == "vlm" and not self.model.path:
            raise ValueError("answerer.kind is vlm, but answerer.model.path is empty; set a model folder or hub id")


@dataclass
class TspoEvaluationConfig(EvaluationConfig):
    """Evaluation without noise, compared with evenly spaced frames and with those most similar to the question."""

    method: str = rare(choice("topk", lambda: METHODS))
    """topk: the best frames (LongVideoBench, MLVU, LVBench); bin-max: the best of each part (Video-MME)."""
    count: int = rare(bounded(0, at_least=0))
    """Number of frames to pick; 0 = as many as in training."""


@dataclass
class TspoConfig(RunConfig):
    """A TSPO run."""

    features: FeatureConfig = field(default_factory=FeatureConfig)
    """CLIP and candidate frames."""
    agent: TemporalAgentConfig = field(default_factory=TemporalAgentConfig)
    """The trained agent."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training questions, each with one video; columns needle, type and query."""
    eval_data: dict[str, DataConfig] = inheriting("data", own=OWN_OPTIONS)
    """Held-out splits by name; the first one is the headline. Options that a split does not set are taken from `data`,
    except path, split, build, build_options, max_tasks and budgets."""
    picks: PickConfig = field(default_factory=PickConfig)
    """Draws of frames."""
    answerer: AnswererConfig = field(default_factory=AnswererConfig)
    """Answers from the picked frames."""
    accuracy_weight: float = bounded(1.0, at_least=0)
    """Weight of R_A, which is 1 for a correct answer."""
    locating_weight: float = bounded(1.0, at_least=0)
    """Weight of R_T, the fraction of the picks in the needle; 1 for questions without a needle."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="tspo"))
    """The objective."""
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            tasks_per_step=16, samples_per_task=8, learning_rate=5e-4, schedule="linear"
        )
    )
    """Batch sizes, optimiser and guards."""
    evaluation: TspoEvaluationConfig = field(default_factory=lambda: TspoEvaluationConfig(samples=0))
    """Held-out evaluation."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if not self.accuracy_weight and not self.locating_weight:
            raise ValueError(
                "accuracy_weight and locating_weight are both 0, so every reward would be 0; set one of them"
            )
        if not self.evaluation.greedy or self.evaluation.samples or self.evaluation.temperature != 1:
            raise ValueError(
                "evaluation.greedy must be true, evaluation.samples 0 and evaluation.temperature 1: picks are "
                "evaluated without noise"
            )
        for data in (self.data, *self.eval_data.values()):
            if data.video != VideoOptions():
                raise ValueError(
                    "data.video is set, but features.fps and features.max_frames determine the candidate frames"
                )
            if data.budgets:
                raise ValueError("data.budgets is set, but frame picks have no token budget; remove it")
            if data.system_prompt and self.answerer.kind == "oracle":
                raise ValueError("data.system_prompt is set, but answerer.kind is oracle, which reads no prompt")
        if self.picks.final_temperature > self.picks.temperature:
            raise ValueError(
                f"picks.final_temperature is {self.picks.final_temperature:g}, above picks.temperature "
                f"{self.picks.temperature:g}; the temperature must decrease"
            )
        check_objective(objective_of(self), SCORES, self.trainer.samples_per_task, ("accuracy", "locating"))


def objective_of(config: TspoConfig) -> Any:
    """The objective, with the parts implied by the log-probability unless the configuration sets them.

    The mean of marginals is a mean over a row's picks. In the other forms a row is one product: its ratio is that of
    all picks. Where tokens are trained too, picks and tokens are averaged apart (a turn each), as the factors
    pi_l * pi_ts of the paper, so that a long answer does not outweigh the picks.
    """
    chosen = config.objective
    longest = config.picks.count
    if config.answerer.train:
        if not chosen.aggregation:
            chosen = replace(chosen, aggregation={"kind": "turn_mean"})
        return make_objective(chosen, longest + config.answerer.sampler.max_new_tokens)
    if config.picks.logprob != "mean_marginal" and not chosen.ratio:
        chosen = replace(chosen, ratio={"kind": "sequence_product"})
    return make_objective(chosen, longest)
