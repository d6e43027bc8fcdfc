"""AWM on sampled flow: fine-tunes a world model on the verdicts of verifiers.

K flows are sampled for each scene and judged by the verifiers, and the model moves towards the noise-to-flow paths of
those that were accepted more often than the scene's others: the loss of AWM (see `diffusion.matching.awm_loss`) with a
flow as the sample and a verdict as the reward. No true flow is used.

Source: Xue et al., AWM, arXiv 2509.25050, for the loss; 3DFlowAction, arXiv 2506.06199, for world model and verifier.
The combination and the other defaults are not from a paper: 8 scenes of 8 samples, 4 noisy versions per sample, all
weights trained.

A step in which all samples of each scene have the same reward moves no weight: the distances to reference and moving
average are tiny then, and AdamW would scale their gradients up to whole steps. `exploration` makes such steps rare.

`shuffle_verdicts` is the control: verdicts are permuted among the samples of a scene, which keeps their rates and
removes their information.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffusion.matching.awm_loss import AwmLoss, AwmSettings, with_ratio
from diffusion.matching.times import TimestepConfig, check_times
from diffusion.models.ema import EvalAverage, EvalEmaConfig
from mmrl.core.loss import Metric
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.rewards.reward_config import RewardResult, refuse_weights
from mmrl.runs.dry_run import model_follows
from mmrl.runs.run_log import stopwatch
from mmrl.training.evaluation import held_out_tasks
from mmrl.training.objectives import ObjectiveConfig, check_objective, make_objective
from mmrl.training.processes import Streams, make_generator
from mmrl.training.recipe import Recipe, Step
from mmrl.training.scoring import RewardErrors, with_rewards
from mmrl.training.settings import RunConfig, TrainerConfig
from robotics.flow3d.clip import FlowClip
from robotics.flow3d.methods.clip_sets import ClipSetConfig, clips_digest, instructions_of, load_clips
from robotics.flow3d.methods.flow3d_evaluation import FlowDomain, FlowEvaluationConfig, VerdictMeasure
from robotics.flow3d.methods.samples import ExplorationConfig, FlowSampling, SampledFlows
from robotics.flow3d.metrics import draw_flow
from robotics.flow3d.model.world_model import FlowWorldModel
from robotics.flow3d.plan.judge import FlowJudge, WeightedVerifierConfig

LOGGER = logging.getLogger("mmrl")
SCORES = ("kl_ref", "draws")
"""Scores of a world model in addition to likelihoods: a velocity distance."""


def _trainer() -> TrainerConfig:
    return TrainerConfig(
        steps=60, tasks_per_step=8, samples_per_task=8, learning_rate=3e-4, weight_decay=1e-4, old_logp="recompute"
    )


@dataclass
class SavedModelConfig:
    """The model to fine-tune."""

    path: str = ""
    """Folder of a saved world model, or of a run (its best checkpoint); a rectified flow."""

    def validate(self) -> None:
        """Reject an empty path; raises ValueError."""
        if not self.path:
            raise ValueError(
                "model.path is empty; set it to the folder of a world model, for example from a run's checkpoint"
            )


@dataclass
class Flow3dAwmConfig(RunConfig):
    """Fine-tuning of a world model on verdicts."""

    model: SavedModelConfig = field(default_factory=SavedModelConfig)
    """The model."""
    data: ClipSetConfig = field(default_factory=ClipSetConfig)
    """Training scenes: first images, query points and instructions; their flow is not used."""
    eval_data: dict[str, ClipSetConfig] = field(default_factory=dict)
    """Held-out clips by name; the first split is the headline."""
    verifiers: list[WeightedVerifierConfig] = field(default_factory=lambda: [WeightedVerifierConfig()])
    """Verifiers; the reward of a sample is the weighted sum of their values."""
    heldout_verifiers: list[WeightedVerifierConfig] = field(default_factory=list)
    """Additional verifiers that do not affect training; they reveal a model that only exploits the training
    verifiers."""
    shuffle_verdicts: bool = False
    """Control: permute the rewards among the samples of each scene."""
    exploration: ExplorationConfig = field(default_factory=ExplorationConfig)
    """Random motion of the training samples, for models whose samples hardly differ."""
    awm: AwmSettings = field(default_factory=AwmSettings)
    """The matching loss."""
    timesteps: TimestepConfig = field(default_factory=lambda: TimestepConfig(count=4))
    """The noisy versions; the grid is the model's own sampler's."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="awm"))
    """Advantage, clipping and the weight of the distance to the reference."""
    eval_ema: EvalEmaConfig = field(default_factory=EvalEmaConfig)
    """Moving average used for evaluation and export."""
    trainer: TrainerConfig = field(default_factory=_trainer)
    """Batch sizes, optimiser and guards."""
    evaluation: FlowEvaluationConfig = field(default_factory=FlowEvaluationConfig)
    """Evaluation on held-out clips."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.trainer.old_logp != "recompute":
            raise ValueError("trainer.old_logp must be 'recompute'; the sampler has no likelihood of noisy versions")
        if not any(each.weight for each in self.verifiers):
            raise ValueError("verifiers is empty or all weights are 0; add at least one")
        refuse_weights({each.label: each.weight for each in self.heldout_verifiers}, "heldout_verifiers")
        check_times(self)
        labels = [each.label for each in self.verifiers]
        check_objective(make_objective(self.objective), SCORES, self.trainer.samples_per_task, labels)


class Flow3dAwmRecipe(FlowDomain, Recipe[FlowWorldModel, FlowClip]):
    """AWM on sampled flow; see the module.

    Args:
        config: options of the run.

    Raises:
        UserError: model, clips or verifiers cannot be used.
    """

    config: Flow3dAwmConfig
    policy: FlowWorldModel

    def __init__(self, config: Flow3dAwmConfig) -> None:
        super().__init__(config)
        self.objective = make_objective(with_ratio(config.objective, config.awm))
        self.train_tasks: Sequence[FlowClip] = load_clips(config.data, "data")
        self.eval_tasks: Mapping[str, Sequence[FlowClip]] = held_out_tasks(config, load_clips)
        model_follows(self)
        self.policy = FlowWorldModel.from_pretrained(config.model.path)
        self.process = FlowSampling(self.policy, config.timesteps, config.exploration)
        self.judge = FlowJudge([*config.verifiers, *config.heldout_verifiers])
        self.opened.callback(self.judge.close)
        self._check_clips()
        self.awm = AwmLoss(self.policy, config.awm, self.process)
        # minibatches without an advantage would train only the distance to the reference
        self.awm.gradient = "with_signal"
        self.terms = [self.awm]
        self.eval_ema = self.parts["eval_ema"] = EvalAverage(self.policy, config.eval_ema)
        self.errors = self.parts["errors"] = RewardErrors()

        self.added["errors"] = self.errors.step

    def rollout_state(self, tasks: Sequence[FlowClip]) -> Any:
        """The average that flows are drawn with."""
        return None if self.awm.sampling_average is None else self.awm.sampling_average.state_dict()

    def load_rollout_state(self, state: Any) -> None:
        """Restore `rollout_state`."""
        if self.awm.sampling_average is not None:
            self.awm.sampling_average.load_state_dict(state)

    def data_digest(self) -> str:
        """Digest of the training scenes."""
        return clips_digest(self.train_tasks)

    def rollout(self, policy: FlowWorldModel, tasks: Sequence[FlowClip], streams: Streams, step: Step) -> Rollouts:
        """Sample K flows of each scene."""
        average = self.awm.sampling_average
        with nullcontext() if average is None else average.applied(policy):
            return self.process.draw(policy, tasks, self.config.trainer.samples_per_task, streams)

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Weighted verdicts; NaN, without a gradient, for a sample that a verifier could not judge."""
        with stopwatch("verify"):
            payload, result = self._judged(rollouts)
        self.errors.count(result)
        scored = with_rewards(rollouts.replace(payload=payload), result)
        # the terms keep the real verdicts; only the reward that is learned from is shuffled
        return scored.replace(reward=self._shuffled(scored, step)) if self.config.shuffle_verdicts else scored

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Pseudo log-likelihood of each noisy version; with "kl_ref" and "kl_ema" the distances to the anchors."""
        return self.awm.scores(policy, rollouts, outputs, self.reference if "kl_ref" in outputs else None)

    def measures(self, policy: FlowWorldModel, split: str, step: Step) -> list[VerdictMeasure]:
        """Verdicts on held-out scenes, and errors of the samples."""
        config = self.config
        return [VerdictMeasure(policy, config.evaluation, config.seed, split, judge=self.judge)]

    def evaluating(self, policy: FlowWorldModel) -> AbstractContextManager[None]:
        """Evaluate the average of the model."""
        return self.eval_ema.applied(policy)

    def describe_row(self, rollouts: Rollouts, row: int) -> dict[str, Any]:
        """Drawn flow with verdicts."""
        payload, advantage = SampledFlows.of(rollouts), rollouts.advantage
        clip = payload.clips[int(rollouts.group[row])]
        seen = clip.observation
        written = payload.flow[row].float().cpu().numpy()
        flow = self.policy.encoding.decode(written, clip.points, seen.size_px)
        reward = float(rollouts.reward[row])
        return {
            "id": f"{clip.source}/{clip.meta.get('seed', '')}",
            "prompt": seen.instruction,
            "response": payload.reasons[row] if payload.reasons else "",
            "outputs": [draw_flow(seen.rgb, clip.points, flow)],
            "reward": None if math.isnan(reward) else reward,
            "advantage": None if advantage is None else float(advantage[row].mean()),
        }

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Number of scenes, and counts of missing verdicts."""
        return {"data/clips": float(len(self.train_tasks)), **self.errors.take()}

    def _check_clips(self) -> None:
        """Refuse clips that do not fit the model, or that a verifier cannot judge; raises UserError."""
        for clips in (self.train_tasks, *self.eval_tasks.values()):
            self.policy.check_flow(clips[0].flow)
            self.policy.check_instructions(instructions_of(clips))
            self.judge.check(clips[0])

    def _judged(self, rollouts: Rollouts) -> tuple[SampledFlows, RewardResult]:
        """The payload with reasons, and the rewards."""
        payload = SampledFlows.of(rollouts)
        written = payload.flow.float().cpu().numpy()
        groups = rollouts.group.cpu().numpy()
        terms: dict[str, list[float]] = {}
        reasons: list[str] = []
        result = RewardResult([], terms)
        for number, clip in enumerate(payload.clips):
            # verifiers read pixels and metres, the model's samples are normalised
            flows = self.policy.encoding.decode(written[groups == number], clip.points, clip.observation.size_px)
            verdicts = self.judge.judge(clip, flows)
            for name, values in self.judge.values(verdicts).items():
                terms.setdefault(name, []).extend(values)
                # undecided, not refused: the value is NaN
                unknown = [found[name].reason for found in verdicts if found[name].ok is None]
                if unknown:
                    result.errors[f"{name}/unjudged"] = result.errors.get(f"{name}/unjudged", 0) + len(unknown)
                    result.examples.setdefault(f"{name}/unjudged", unknown[0])
            reasons += ["; ".join(f"{name}: {found.reason}" for name, found in each.items()) for each in verdicts]
        weights = [(each.weight, terms[each.label]) for each in self.config.verifiers]
        # NaN of a verifier that could not judge makes the sum NaN, so the sample is left out
        result.total = [sum(weight * values[row] for weight, values in weights) for row in range(len(reasons))]
        return dataclasses.replace(payload, reasons=reasons), result

    def _shuffled(self, rollouts: Rollouts, step: Step) -> Tensor:
        """Rewards (B,) permuted within each group, differently at each step."""
        reward, seeds = rollouts.reward.clone(), SampledFlows.of(rollouts).noise_seed.tolist()
        for group in range(rollouts.num_groups):
            rows = torch.nonzero(rollouts.group == group).flatten()
            # from the group's own seed, so that the shuffle does not depend on the process
            generator = make_generator(seeds[int(rows[0])], "shuffle", step.number)
            reward[rows] = rollouts.reward[rows[torch.randperm(len(rows), generator=generator).to(rows.device)]]
        return reward
