"""Diffusion-DPO (Wallace et al., arXiv 2311.12908) on pairs of images, with FiFA's filter.

    L = -mean log sigmoid(-beta / 2 [(e_w - e_ref_w) - (e_l - e_ref_l)])

with e the mean squared error of the model on a noisy version of the preferred (w) or rejected (l) image; both sides of
a pair get the same time and the same noise. By default, e is the error of what the network predicts: |v - (noise -
x_0)|^2 for a flow model, and for Stable Diffusion mostly that of the noise, (1 - t)^2 times as much, as in the paper.
In terms of the core it is the objective `diffusion_dpo` with logp = -e / 2: other pair losses of the catalogue work
too, and `objective: {loss: {kind: none}, likelihood: {kind: nll, coef: 1}}` is supervised fine-tuning on the preferred
images, the paper's baseline. FiFA's filter (arXiv 2410.10166) is `diffusion.methods.fifa`.

Differences from the public code (SalesforceAIResearch/DiffusionDPO): times are from a shifted logit-normal as in
yifan123/flow_grpo scripts/train_sd3_dpo.py, whose beta 100 for flow models is the default (the paper's 2000 to 5000 is
for noise prediction). That script's loss is compared with the public code in tests/golden/test_preference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from diffusion.data.image_pairs import ImagePair, ImagePairConfig, load_pairs
from diffusion.data.prompts import DiffusionTask
from diffusion.diffusion_config import GivenImagesConfig, check_matching
from diffusion.diffusion_evaluation import shown_output
from diffusion.diffusion_recipe import DiffusionDomain
from diffusion.matching.times import TimestepConfig
from diffusion.matching.velocity import ERRORS, FlowMatching, encode_given, given_rollouts
from diffusion.methods.fifa import PairFilterConfig, embed_captions, select_pairs
from diffusion.models.diffusion_policy import DiffusionPolicy
from diffusion.models.ema import KeepsEvalAverage
from diffusion.sampling.trajectories import DiffusionPayload
from mmrl.core.blocks.preference import SCORE
from mmrl.core.loss import Denominators
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.runs.records import SampleRecord
from mmrl.training.objectives import PreferenceConfig, check_pair_batches, check_preference, make_preference, pair_marks
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Reference, Step
from mmrl.training.settings import BaseTrainerConfig, ReferenceConfig
from mmrl.training.supervised import SupervisedRecipe


@dataclass
class DiffusionDpoConfig(GivenImagesConfig):
    """A Diffusion-DPO run."""

    pairs: ImagePairConfig = field(default_factory=ImagePairConfig)
    """The pairs of images."""
    filter: PairFilterConfig = field(default_factory=PairFilterConfig)
    """Which pairs to train on."""
    drop_caption: float = rare(bounded(0.1, at_least=0, at_most=1))
    """Probability that both images of a pair are shown without their caption, so that guidance keeps working."""
    error: str = rare(choice("prediction", ERRORS))
    """Error to compare: of the network's own prediction, of the velocity, or of the noise that it implies, (1 - t)
    times that of the velocity."""
    timesteps: TimestepConfig = field(
        default_factory=lambda: TimestepConfig(
            count=1, times="logit_normal", shift=1.0, share_times="group", share_noise=True
        )
    )
    """Times of each pair in a step; the two images of a pair always share times and noises."""
    objective: PreferenceConfig = field(
        default_factory=lambda: PreferenceConfig(preset="diffusion_dpo", loss={"beta": 100.0})
    )
    """Loss to minimise."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The model to compare errors with."""
    trainer: BaseTrainerConfig = field(
        default_factory=lambda: BaseTrainerConfig(steps=500, tasks_per_step=32, learning_rate=1e-4, warmup_steps=10)
    )
    """Batch sizes, optimiser and guards, with small steps as in the public code; `tasks_per_step` counts pairs."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_preference(make_preference(self.objective))
        check_matching(self, self.evaluation.sampler)
        check_pair_batches(self.trainer.micro_batch)
        if self.timesteps.share_times == "image" or not self.timesteps.share_noise:
            raise ValueError(
                "timesteps.share_times must be group or batch and share_noise true: both images of a pair are compared "
                "at the same time with the same noise"
            )


class DiffusionDpoRecipe(KeepsEvalAverage, DiffusionDomain, SupervisedRecipe[DiffusionPolicy, ImagePair]):
    """Diffusion-DPO on given pairs; see the module."""

    config: DiffusionDpoConfig
    objective: PreferenceObjective
    start: Reference

    def __init__(self, config: DiffusionDpoConfig) -> None:
        super().__init__(config)
        self.objective = make_preference(config.objective)
        self.open(config, config.evaluation)
        self.process = FlowMatching(self.policy, config.evaluation.sampler, config.timesteps)
        # filtered after the model is loaded: captions are measured by its tokenizers and embeddings
        self.train_tasks = select_pairs(self.train_tasks, config.filter, embed_captions(self.policy)).pairs

    def load_train_tasks(self) -> Sequence[Any]:
        """All pairs; the filter is applied once the model is loaded."""
        loaded = load_pairs(self.config.pairs)
        self.skipped.update(loaded.skipped)
        if self.objective.needs_scores:
            lacking = [pair for pair in loaded.tasks if len(_scores(pair)) < 2]
            if lacking:
                raise UserError(f"{lacking[0].id} has no score_chosen and score_rejected, which the loss requires")
        return loaded.tasks

    def prompts_of(self, task: Any) -> list[str]:
        """The caption of a pair, or the prompt of an evaluation."""
        return [task.caption if isinstance(task, ImagePair) else task.prompt]

    def batch(self, policy: DiffusionPolicy, tasks: Sequence[ImagePair], streams: Streams, step: Step) -> Rollouts:
        """Encode both images of each pair, and draw the times and noises that they share."""
        kept, given = self._read(tasks)
        ids = [pair.id for pair in kept for _ in (0, 1)]
        # the mode of the autoencoder, no sample: both images of a pair carry no noise of their own
        images = encode_given(policy, ids, given, self.scoring.sampler.batch_rows)
        # streams belong to the tasks of the step; leaving out a pair must not shift those of the others
        count, streams = len(kept), streams.among(tasks, kept)
        # one draw per pair: both images lose their caption together, or their errors were not comparable
        shown = (streams.uniform(count, 1, purpose="caption") >= self.config.drop_caption).tolist()
        captions = [pair.caption if keep else "" for pair, keep in zip(kept, shown, strict=True)]
        # the same noise for both images, which cancels most of the variance of their difference
        seeds = streams.seeds(count, 1, purpose="noise").repeat_interleave(2)
        asked = [DiffusionTask(pair.id, caption) for pair, caption in zip(kept, captions, strict=True)]
        group, sigma = torch.arange(count).repeat_interleave(2), self.process.times(count, 2, streams)
        rollouts = given_rollouts(policy, asked, group, images, sigma, seeds)
        extras = pair_marks(count, rollouts.mask.device)
        if self.objective.needs_scores:
            scores = [score for pair in kept for score in _scores(pair)]
            extras[SCORE] = torch.tensor(scores, device=rollouts.mask.device)
        return streams.noted(rollouts.replace(extras=extras))

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Minus half the error on each noisy version (B, T)."""
        # -1/2 squared error is the Gaussian log-likelihood, as in Diffusion-DPO
        return PolicyOutputs(-0.5 * self.process.errors(policy, rollouts, self.config.error))

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Mean pair loss over pairs and their times."""
        return self.objective.step_loss(self.scores(policy, minibatch, self.loss_outputs), minibatch, denominators)

    def records(self, rollouts: Rollouts, limit: int) -> list[SampleRecord]:
        """Pairs as two images, the preferred one first, with the margin under the current policy."""
        shown = rollouts.select_groups(torch.arange(min(limit, rollouts.num_groups)))
        payload = DiffusionPayload.of(shown)
        scores = self.scores_in_chunks(self.policy, shown, self.loss_outputs)
        numbers = self.objective.pair_numbers(self.objective.pairs(scores.logp, shown))
        # a pair has one number for each time, or one alone
        means = {name: values.view(shown.num_groups, -1).mean(1).tolist() for name, values in numbers.items()}
        return [
            SampleRecord(
                id=task.id,
                prompt=task.prompt,
                response="",
                outputs=[shown_output(payload.images[2 * pair + side]) for side in (0, 1)],
                reward=means["rewards/margins"][pair] if "rewards/margins" in means else None,
                terms={name: values[pair] for name, values in means.items()},
                finish="image",
            )
            for pair, task in enumerate(payload.tasks)
        ]

    def describe(self) -> str:
        """Formula of the loss."""
        return f"{self.objective.describe()}\n  logp = -1/2 {self.process.error_formula(self.config.error)}"

    def _read(self, pairs: Sequence[ImagePair]) -> tuple[list[ImagePair], list[np.ndarray]]:
        """The pairs of a step whose images differ, and their images, of each pair the preferred one first."""
        kept: list[ImagePair] = []
        images: list[np.ndarray] = []
        for pair in pairs:
            sides = pair.read()
            if np.array_equal(*sides):
                self.skipped["equal_sides"] += 1
                continue
            kept.append(pair)
            images += sides
        if not kept:
            raise NoUsableTasksError(f"none of {len(pairs)} pairs can be used: the two images of each are identical")
        return kept, images


def _scores(pair: ImagePair) -> list[float]:
    return [pair.numbers[name] for name in ("score_chosen", "score_rejected") if name in pair.numbers]
