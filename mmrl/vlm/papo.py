"""PAPO, Perception-Aware Policy Optimization (Wang et al., arXiv 2507.06448; public code MikeWangWZHL/PAPO).

A GRPO (PAPO_G) or DAPO (PAPO_D) update plus a term that rewards token probabilities for depending on the image:

    L = L_policy + beta KL_ref - gamma_t mean(w k3(logp, logp_masked)) + rho_t (eta_policy H + eta_masked H_masked)

where logp_masked are the log-probs of the same responses when random patches of the images are black, H = -mean(logp)
and rho_t = gamma_t / gamma. The frames of a video lose the same patches, so that none shows what another one lost; the
paper has images only. The masked image is drawn once a question and shared by its G samples; responses are
sampled with the original images only.

Differences from the paper, following the released code: the k3 estimator is exp(logp_masked - logp) - ... (the paper's
ratio is the inverse; `orientation: paper`); the entropy terms lower the entropy (the paper's sign would raise it); the
masked log-probs are constants of the update (`recompute_masked: true` sends gradient through them). Difference from
the code: means are taken over the whole optimiser step, not per micro-batch; a PAPO_D step that is not full after
`filter.max_tries` sampling rounds goes on with the groups it has instead of failing. Questions without image or
video count in the denominator with w = 0. Defaults are those of the PAPO_G 3B script: gamma 0.02, beta 0.01, clip
0.2/0.3 and dual clip 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from mmrl.core.aggregation import Denominators, masked_sum, token_mean
from mmrl.core.metrics import mean_metric
from mmrl.core.objective import PolicyOutputs
from mmrl.core.regularizers import k3
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.training.loop.loss_terms import LossTerms
from mmrl.training.loop.objectives import ObjectiveConfig
from mmrl.training.loop.reference import Reference
from mmrl.training.record.stopwatch import stopwatch
from mmrl.vlm.config import VlmConfig
from mmrl.vlm.masking import blacken_frames, blacken_patches
from mmrl.vlm.payload import Prompt, VlmPayload
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.recipe import VlmRecipe
from mmrl.vlm.task import VlmTask
from mmrl.vlm.video_input import load_videos

MASKED = "masked"
CORRECT_TOKENS = "correct_tokens"


@dataclass
class PapoSettings:
    """Options of the perception term."""

    gamma: float = 0.02
    """Weight of the perception KL."""
    schedule: str = rare(choice("fixed", ("fixed", "annealing")))
    """fixed, or annealing: linear from `gamma` to `gamma_end` over `annealing_ratio` of the steps."""
    gamma_end: float = rare(0.0)
    """Weight at the end of annealing."""
    annealing_ratio: float = rare(bounded(0.5, above=0, at_most=1))
    """Share of the run's steps that annealing takes."""
    mask_ratio: float = bounded(0.6, at_least=0, at_most=1)
    """Probability that a patch is black."""
    patch_size: int = rare(bounded(14, at_least=1))
    """Side of a patch in pixels of the original image, or of a video's frames as the model sees them."""
    orientation: str = rare(choice("code", ("code", "paper")))
    """code: unbiased k3 of KL(pi || pi_masked), bounded gradient; paper: the inverse ratio, unbounded."""
    entropy_policy: float = 0.0
    """Weight eta of the entropy of the policy (double entropy); lowers it."""
    entropy_masked: float = 0.0
    """Weight eta of the entropy under the masked image; has a gradient only with `recompute_masked`."""
    entropy: str = rare(choice("sampled", ("sampled", "full")))
    """sampled: minus the log-prob of the sampled token; full: over the vocabulary."""
    recompute_masked: bool = rare(False)
    """Run the masked pass with gradient at every update instead of once before it."""
    apply: str = rare(choice("all", ("all", "correct_only")))
    """Samples that get the term: all, or correct_only."""
    term_clip: float | None = rare(None)
    """Upper bound of the per-token term, after `token_share`; the public code's experiment uses 0.2."""
    token_share: float = rare(bounded(1.0, above=0, at_most=1))
    """Keep, in each sample, this share of tokens with the largest term; the public code's experiment uses 0.2."""
    sft_coef: float = rare(0.0)
    """Weight of the mean negative log-likelihood of the tokens of correct samples; the public code's experiment uses
    1e-3."""


def _papo_objective() -> ObjectiveConfig:
    return ObjectiveConfig(preset="papo")


@dataclass
class PapoConfig(VlmConfig):
    """A PAPO run; PAPO_D is `objective: {preset: dapo}`."""

    papo: PapoSettings = field(default_factory=PapoSettings)
    """The perception term."""
    objective: ObjectiveConfig = field(default_factory=_papo_objective)
    """Base objective; the default is that of the public scripts, clip 0.2/0.3, dual clip 3, k3 0.01, token mean."""


def gamma_at(settings: PapoSettings, step: int, total_steps: int) -> float:
    """Weight of the perception term at a training step.

    Source: MikeWangWZHL/PAPO, annealing of kl_prcp_coef.
    """
    if settings.schedule == "fixed":
        return settings.gamma
    horizon = max(1, int(total_steps * settings.annealing_ratio))
    return settings.gamma + (settings.gamma_end - settings.gamma) * min(step / horizon, 1.0)


def perception_terms(logp: Tensor, logp_masked: Tensor, mask: Tensor, weight: Tensor, settings: PapoSettings) -> Tensor:
    """Per-token divergence between looking at the image and at its masked copy, to be maximised.

    Args:
        logp: (B, T) log-probs with the original image.
        logp_masked: (B, T) log-probs of the same tokens with the masked image.
        mask: (B, T) trained tokens.
        weight: (B,) weight of each sample; 0 without image.
        settings: orientation, clip and token share.

    Returns:
        (B, T) weighted terms; their mean times gamma is subtracted from the loss.

    Gradient: flows through `logp`, and through `logp_masked` where that carries one.

    Source: PAPO, eq. 5; MikeWangWZHL/PAPO verl/workers/actor/dp_actor.py.
    """
    terms = k3(logp, logp_masked) if settings.orientation == "code" else k3(logp_masked, logp)
    terms = terms * weight[:, None]
    if settings.token_share < 1.0:
        terms = terms * _largest_share(terms.detach(), mask, settings.token_share)
    return terms if settings.term_clip is None else terms.clamp(0.0, settings.term_clip)


def _largest_share(terms: Tensor, mask: Tensor, share: float) -> Tensor:
    visible = torch.where(mask > 0, terms, torch.full_like(terms, float("nan")))
    threshold = torch.nanquantile(visible, 1.0 - share, dim=1, keepdim=True)
    return (terms >= threshold).to(terms.dtype)


class PapoRecipe(VlmRecipe):
    """GRPO or DAPO with the implicit perception term."""

    config: PapoConfig
    has_loss_terms: ClassVar[bool] = True

    def __init__(self, config: PapoConfig) -> None:
        super().__init__(config)
        self._step = 0

    @property
    def gamma(self) -> float:
        """Weight of the perception term at the current step."""
        return gamma_at(self.config.papo, self._step, self.config.trainer.steps)

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], generator: torch.Generator) -> Rollouts:
        """Sample with the original images, then make one masked copy of each question's images."""
        rollouts = super().rollout(policy, tasks, generator)
        payload = VlmPayload.of(rollouts)
        seed = int(torch.randint(2**62, (), generator=generator))
        with stopwatch("encode"):
            views: list[Prompt | None] = [
                self._masked_prompt(policy, task, prompt, np.random.default_rng([seed, index]))
                for index, (task, prompt) in enumerate(zip(payload.tasks, payload.prompts, strict=True))
            ]
        shown = [float(bool(task.images or task.videos)) for task in payload.tasks]
        has_image = torch.tensor(shown, device=rollouts.mask.device)
        return rollouts.replace(
            payload=dataclasses.replace(payload, views={**payload.views, MASKED: views}),
            extras={**rollouts.extras, "papo_weight": has_image[rollouts.group]},
        )

    def compute_logprobs(self, policy: VlmPolicy, reference: Reference, rollouts: Rollouts) -> Rollouts:
        """Add the masked pass of the policy before the update, unless it is recomputed with gradient."""
        rollouts = super().compute_logprobs(policy, reference, rollouts)
        extras = dict(rollouts.extras)
        if self.config.papo.apply == "correct_only":
            extras["papo_weight"] = extras["papo_weight"] * self.correct(rollouts)
        if not self.config.papo.recompute_masked:
            with stopwatch("masked_logp"):
                scores = self.scores_in_chunks(policy, rollouts, self._masked_outputs, self.masked_scores)
            extras["logp_masked"] = scores.logp
            if scores.entropy is not None:
                extras["entropy_masked"] = scores.entropy
        return rollouts.replace(extras=extras)

    @property
    def loss_outputs(self) -> frozenset[str]:
        """The objective's outputs, and the full entropy where the double entropy is over the vocabulary."""
        return super().loss_outputs | ({"entropy"} if self._full_entropy else set())

    def denominators(self, minibatch: Rollouts) -> Denominators:
        """Adds the tokens of correct samples, which their likelihood is divided by."""
        counts = super().denominators(minibatch)
        if not self.config.papo.sft_coef:
            return counts
        return dataclasses.replace(counts, others={CORRECT_TOKENS: float(self._correct_mask(minibatch).sum())})

    def loss_terms(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, denominators: Denominators
    ) -> LossTerms:
        """Minus gamma times the perception KL, plus the double entropy and the likelihood of correct samples."""
        settings = self.config.papo
        masked = self._masked(policy, minibatch)
        mask = minibatch.loss_mask
        divergence = perception_terms(scores.logp, masked.logp, mask, minibatch.extras["papo_weight"], settings)
        mean = self.objective.aggregation(divergence, mask, denominators, minibatch.turn)
        terms = {"loss/perception": -self.gamma * mean}
        rho = self.gamma / settings.gamma if settings.gamma else 1.0
        for name, coef, source in (
            ("loss/entropy_policy", settings.entropy_policy, scores),
            ("loss/entropy_masked", settings.entropy_masked, masked),
        ):
            if coef:
                terms[name] = rho * coef * token_mean(self._entropy(source), mask, denominators)
        if settings.sft_coef:
            terms["loss/sft"] = settings.sft_coef * self._correct_nll(scores.logp, minibatch, denominators)
        distance = mean_metric(k3(scores.logp.detach(), masked.logp.detach()), mask)
        return LossTerms(terms, {"papo/kl_masked": distance})

    def masked_scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Scores of the same responses to the masked images."""
        return self.score_view(policy, rollouts, outputs, MASKED)

    def describe(self) -> str:
        """The objective's formula and the terms that PAPO adds."""
        settings = self.config.papo
        inside = "exp(a_it - l_it) - (a_it - l_it) - 1"
        if settings.orientation == "paper":
            inside = "exp(l_it - a_it) - (l_it - a_it) - 1"
        lines = [
            f"PAPO adds, with l = logp and a = logp with {settings.mask_ratio:.0%} of the patches black:",
            f"          - {settings.gamma:g} * mean ({inside})"
            + (f", weight falling to {settings.gamma_end:g}" if settings.schedule == "annealing" else ""),
        ]
        names = {"entropy_policy": "H(policy)", "entropy_masked": "H(masked)", "sft_coef": "nll of correct samples"}
        lines += [
            f"          + {getattr(settings, key):g} * {text}" for key, text in names.items() if getattr(settings, key)
        ]
        return "\n".join([super().describe(), *lines])

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """The weight of the term beside the usual metrics."""
        used = gamma_at(self.config.papo, self._step - 1, self.config.trainer.steps)
        return super().step_metrics(rollouts) | {"papo/gamma": used}

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move along the annealing schedule."""
        super().on_step_end(step, metrics)
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        """Adds the position in the schedule."""
        return super().state_dict() | {"papo_step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self._step = int(state["papo_step"])

    @property
    def _full_entropy(self) -> bool:
        return self.config.papo.entropy == "full" and bool(
            self.config.papo.entropy_policy or self.config.papo.entropy_masked
        )

    @property
    def _masked_outputs(self) -> frozenset[str]:
        return frozenset({"logp", "entropy"} if self._full_entropy else {"logp"})

    def _masked_prompt(self, policy: VlmPolicy, task: VlmTask, prompt: Prompt, rng: np.random.Generator) -> Prompt:
        if not (task.images or task.videos):
            return prompt
        options = (self.config.papo.patch_size, self.config.papo.mask_ratio, rng)
        images = [blacken_patches(image, *options) for image in task.load_images()]
        videos = [blacken_frames(frames, *options) for frames in load_videos(task, policy.layout.patch_size)]
        return policy.encode(task, images, videos)

    def _masked(self, policy: nn.Module, minibatch: Rollouts) -> PolicyOutputs:
        """The masked pass: of this update with `recompute_masked`, else that before the update."""
        if self.config.papo.recompute_masked:
            return self.masked_scores(policy, minibatch, self._masked_outputs)
        return PolicyOutputs(minibatch.extras["logp_masked"], minibatch.extras.get("entropy_masked"), None)

    def _entropy(self, scores: PolicyOutputs) -> Tensor:
        return -scores.logp if scores.entropy is None or not self._full_entropy else scores.entropy

    def _correct_nll(self, logp: Tensor, minibatch: Rollouts, denominators: Denominators) -> Tensor:
        """Share of the mean over the tokens of all correct samples of the optimiser step."""
        total = masked_sum(-logp, self._correct_mask(minibatch)).sum()
        return total / max(denominators.others[CORRECT_TOKENS], 1.0)

    def _correct_mask(self, rollouts: Rollouts) -> Tensor:
        return rollouts.loss_mask * self.correct(rollouts).to(rollouts.loss_mask.dtype)[:, None]
