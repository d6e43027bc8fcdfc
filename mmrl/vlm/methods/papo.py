"""PAPO, Perception-Aware Policy Optimization (Wang et al., arXiv 2507.06448; public code MikeWangWZHL/PAPO).

A GRPO (PAPO_G) or DAPO (PAPO_D) update plus a term that rewards token probabilities for depending on the image:

    L = L_policy + beta KL_ref - gamma_t mean(w k3(logp, logp_masked)) + rho_t (eta_policy H + eta_masked H_masked)

where logp_masked are the log-probs of the same responses when random patches of the images are black, H = -mean(logp)
and rho_t = gamma_t / gamma. All frames of a video lose the same patches, so that no frame shows what another has lost;
the paper only has images. The mask is drawn once per question and shared by its G samples; responses are always sampled
with the original images.

Differences from the paper, following the released code: the k3 estimator is exp(logp_masked - logp) - ... (the paper's
ratio is the inverse; `orientation: paper`); the entropy terms lower the entropy (the paper's sign would raise it); the
masked log-probs are constants of the update (`recompute_masked: true` sends gradient through them). Differences from
the code: means are taken over the whole optimiser step, not per micro-batch; a PAPO_D step that is not full after
`filter.max_tries` sampling rounds continues with the groups it has instead of failing. Questions without image or video
count in the denominator with w = 0. Defaults are those of the PAPO_G 3B script: gamma 0.02, beta 0.01, clip 0.2/0.3 and
dual clip 3.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.core.blocks.divergence import k3
from mmrl.core.loss import Aggregation, Denominators, masked_sum, mean_metric, token_mean
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, only_with, rare
from mmrl.hub.video_sampling import Frames
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import LossTerm, Passes, Step, TermLoss
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.data.task import VlmTask, load_videos
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import MediaQuestions, VlmRecipe


def blacken_patches(image: Image.Image, patch_size: int, ratio: float, rng: np.random.Generator) -> Image.Image:
    """Set each patch of a grid to black with a probability.

    Args:
        image: RGB image; the grid starts at the top left, so patches at the right and bottom edges may be smaller.
        patch_size: side of a patch in pixels of the given image, before any resize.
        ratio: probability that a patch is black; the masked fraction varies around it.
        rng: source of randomness.

    Source: PAPO, section 3; MikeWangWZHL/PAPO verl/trainer/papo_utils.py.
    """
    # in the pixels of the image as given: the grid of the processor is another one
    pixels = np.array(image.convert("RGB"))
    pixels[_draw_mask(pixels.shape[:2], patch_size, ratio, rng)] = 0
    return Image.fromarray(pixels)


def blacken_frames(frames: Frames, patch_size: int, ratio: float, rng: np.random.Generator) -> Frames:
    """Set patches of a video to black, the same ones in all frames.

    Args:
        frames: frames and metadata from `mmrl.hub.video_sampling`.
        patch_size: side of a patch in pixels of the frames as the model sees them.
        ratio: probability that a patch is black.
        rng: source of randomness.
    """
    # one mask for all frames, so that no frame shows what another one has lost
    pixels, metadata = frames
    mask = torch.from_numpy(_draw_mask(tuple(pixels.shape[2:]), patch_size, ratio, rng))
    return pixels.masked_fill(mask, 0.0), metadata


def _draw_mask(size: tuple[int, ...], patch_size: int, ratio: float, rng: np.random.Generator) -> np.ndarray:
    """(height, width) bool, True on black patches."""
    # rounded up, so that the edges are masked too; the grid is cut to the image below
    rows, columns = (-(-side // patch_size) for side in size)
    black = rng.random((rows, columns)) < ratio
    return np.kron(black, np.ones((patch_size, patch_size), dtype=bool))[: size[0], : size[1]]


MASKED = "masked"
CORRECT_TOKENS = "correct_tokens"


@dataclass
class PapoSettings:
    """Options of the perception term."""

    gamma: float = 0.02
    """Weight of the perception KL."""
    schedule: str = rare(choice("fixed", ("fixed", "annealing")))
    """fixed, or annealing: linear from `gamma` to `gamma_end` over `annealing_ratio` of the steps."""
    gamma_end: float = rare(only_with(0.0, schedule="annealing"))
    """Weight at the end of annealing."""
    annealing_ratio: float = rare(only_with(bounded(0.5, above=0, at_most=1), schedule="annealing"))
    """Fraction of the run over which to anneal."""
    mask_ratio: float = bounded(0.6, at_least=0, at_most=1)
    """Probability that a patch is masked (blacked out)."""
    patch_size: int = rare(bounded(14, at_least=1))
    """Patch size in pixels of the original image, or of a video's frames as the model sees them."""
    orientation: str = rare(choice("code", ("code", "paper")))
    """code: unbiased k3 of KL(pi || pi_masked), bounded gradient; paper: the inverse ratio, unbounded."""
    entropy_policy: float = 0.0
    """Weight eta of the policy's entropy (double entropy); the term lowers it."""
    entropy_masked: float = 0.0
    """Weight eta of the entropy under the masked image; it only has a gradient if `recompute_masked` is on."""
    entropy: str = rare(choice("sampled", ("sampled", "full")))
    """sampled: negative log-prob of the sampled token; full: exact entropy over the vocabulary."""
    recompute_masked: bool = rare(False)
    """Run the masked pass with gradient at every update instead of once before it."""
    apply: str = rare(choice("all", ("all", "correct_only")))
    """Which samples the term applies to: all, or correct_only."""
    term_clip: float | None = rare(None)
    """Upper bound of the per-token term, after `token_share`; the public code's experiment uses 0.2."""
    token_share: float = rare(bounded(1.0, above=0, at_most=1))
    """In each sample, keep only this fraction of tokens, those with the largest values; the public code's experiment
    uses 0.2."""
    sft_coef: float = rare(0.0)
    """Weight of the mean negative log-likelihood of the tokens of correct samples; the public code's experiment uses
    1e-3."""


@dataclass
class PapoConfig(VlmConfig):
    """A PAPO run; PAPO_D is `objective: {preset: dapo}`."""

    papo: PapoSettings = field(default_factory=PapoSettings)
    """The perception term."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="papo"))
    """Base objective. Default: the one in the public scripts (clip 0.2/0.3, dual clip 3, k3 0.01, token mean)."""


def gamma_at(settings: PapoSettings, step: int, total_steps: int) -> float:
    """Weight of the perception term at a training step.

    Source: MikeWangWZHL/PAPO, annealing of kl_prcp_coef.
    """
    if settings.schedule == "fixed":
        return settings.gamma
    # at least one step, or a short run would divide by 0
    horizon = max(1, int(total_steps * settings.annealing_ratio))
    return settings.gamma + (settings.gamma_end - settings.gamma) * min(step / horizon, 1.0)


def perception_terms(logp: Tensor, logp_masked: Tensor, mask: Tensor, weight: Tensor, settings: PapoSettings) -> Tensor:
    """Per-token divergence between the policy with the image and with its masked copy, to be maximised.

    Args:
        logp: (B, T) log-probs with the original image.
        logp_masked: (B, T) log-probs of the same tokens with the masked image.
        mask: (B, T) trained tokens.
        weight: (B,) weight of each sample; 0 without image.
        settings: orientation, clip and token share.

    Returns:
        (B, T) weighted terms; their mean times gamma is subtracted from the loss.

    Gradient: flows through `logp`, and through `logp_masked` if it requires grad.

    Source: PAPO, eq. 5; MikeWangWZHL/PAPO verl/workers/actor/dp_actor.py.
    """
    # the code's orientation has a bounded gradient, the paper's does not
    terms = k3(logp, logp_masked) if settings.orientation == "code" else k3(logp_masked, logp)
    # zero, not dropped: samples without an image still count in the mean's denominator
    terms = terms * weight[:, None]
    if settings.token_share < 1.0:
        # which tokens are kept is a choice, not a function to differentiate
        terms = terms * _largest_share(terms.detach(), mask, settings.token_share)
    return terms if settings.term_clip is None else terms.clamp(0.0, settings.term_clip)


def _largest_share(terms: Tensor, mask: Tensor, share: float) -> Tensor:
    # NaN takes padding out of the quantile; comparing with a NaN threshold keeps nothing in an empty row
    visible = torch.where(mask > 0, terms, torch.full_like(terms, float("nan")))
    threshold = torch.nanquantile(visible, 1.0 - share, dim=1, keepdim=True)
    return (terms >= threshold).to(terms.dtype)


class MaskedImages:
    """Adds a view of each prompt with black patches, drawn once per question and shared by its samples."""

    def __init__(self, settings: PapoSettings) -> None:
        self.settings = settings

    def __call__(self, payload: VlmPayload, policy: VlmPolicy, streams: Streams) -> VlmPayload:
        """Add the masked prompts of all questions; a question without image or video keeps its own."""
        # one seed a question, from a stream of its task: the G samples share a mask, however tasks are distributed
        seeds = streams.seeds(len(payload.tasks), 1, purpose="mask").tolist()
        views: list[Prompt | None] = [
            self.masked(policy, task, prompt, np.random.default_rng(seed))
            for task, prompt, seed in zip(payload.tasks, payload.prompts, seeds, strict=True)
        ]
        return dataclasses.replace(payload, views={**payload.views, MASKED: views})

    def masked(self, policy: VlmPolicy, task: VlmTask, prompt: Prompt, rng: np.random.Generator) -> Prompt:
        """The prompt of a question with masked images and videos."""
        # nothing to mask: its weight is 0, and its prompt serves as its own view
        if not (task.images or task.videos):
            return prompt
        options = (self.settings.patch_size, self.settings.mask_ratio, rng)
        images = [blacken_patches(image, *options) for image in task.load_images()]
        videos = [blacken_frames(frames, *options) for frames in load_videos(task, policy.layout.patch_size)]
        return policy.encode(task, images, videos)


class Perception(LossTerm):
    """The perception KL and the double entropy.

    Args:
        settings: options of the term.
        aggregation: how its tokens are averaged, as in the objective.
        temperature: temperature of scoring.
        accuracy_term: reward term whose value 1 marks a correct answer.
    """

    name = "perception"

    def __init__(
        self, settings: PapoSettings, aggregation: Aggregation, temperature: float, accuracy_term: str
    ) -> None:
        self.settings = settings
        self.aggregation = aggregation
        self.temperature = temperature
        self.accuracy_term = accuracy_term
        # the exact entropy costs a pass over the vocabulary, so it is only asked for if a term uses it
        weighed = settings.entropy_policy or settings.entropy_masked
        self.outputs = frozenset({"entropy"} if settings.entropy == "full" and weighed else ())

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Add the weight of each sample, and the masked log-probs unless every update recomputes them."""
        # weight 0 instead of leaving rows out: questions without media still count in the denominator
        shown = [float(bool(task.images or task.videos)) for task in VlmPayload.of(rollouts).tasks]
        weight = torch.tensor(shown, device=rollouts.mask.device)[rollouts.group]
        if self.settings.apply == "correct_only":
            weight = weight * (rollouts.reward_terms[self.accuracy_term] == 1.0)
        extras = {**rollouts.extras, "papo_weight": weight}
        if not self.settings.recompute_masked:
            # before the first update, as in the released code: constants for all updates of the step
            with stopwatch("masked_logp"):
                scores = passes.scores(rollouts, self._masked_outputs, self.masked_scores)
            extras["logp_masked"] = scores.logp
            if scores.entropy is not None:
                extras["entropy_masked"] = scores.entropy
        return rollouts.replace(extras=extras)

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """Minus gamma times the perception KL, plus the double entropy."""
        settings, mask = self.settings, minibatch.loss_mask
        masked = self._masked(policy, minibatch)
        divergence = perception_terms(scores.logp, masked.logp, mask, minibatch.extras["papo_weight"], settings)
        gamma = gamma_at(settings, step.number, step.total)
        # negative, since the divergence is maximised; `counts` cover the whole optimiser step, not the micro-batch
        terms = {"loss/perception": -gamma * self.aggregation(divergence, mask, counts, minibatch.turn)}
        # the entropy terms follow the schedule of gamma; with gamma 0 there is none to follow
        rho = gamma / settings.gamma if settings.gamma else 1.0
        for name, coef, source in (
            ("loss/entropy_policy", settings.entropy_policy, scores),
            ("loss/entropy_masked", settings.entropy_masked, masked),
        ):
            if coef:
                terms[name] = rho * coef * token_mean(self._entropy(source), mask, counts)
        # always in the code's orientation and over all rows, so that runs with other options can be compared
        distance = mean_metric(k3(scores.logp.detach(), masked.logp.detach()), mask)
        return TermLoss(terms, {"papo/kl_masked": distance})

    def masked_scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Scores of the same responses to the masked images."""
        return policy(rollouts, view=MASKED, temperature=self.temperature, outputs=outputs)

    def metrics(self, rollouts: Rollouts, step: Step) -> dict[str, float]:
        """Weight of the term at this step."""
        return {"papo/gamma": gamma_at(self.settings, step.number, step.total)}

    def formula(self) -> str:
        """The terms that PAPO adds."""
        settings = self.settings
        inside = "exp(a_it - l_it) - (a_it - l_it) - 1"
        if settings.orientation == "paper":
            inside = "exp(l_it - a_it) - (l_it - a_it) - 1"
        falling = f", weight falling to {settings.gamma_end:g}" if settings.schedule == "annealing" else ""
        lines = [
            f"PAPO adds, with l = logp and a = logp with {settings.mask_ratio:.0%} of the patches black:",
            f"          - {settings.gamma:g} * mean ({inside}){falling}",
        ]
        for name, coef in (("policy", settings.entropy_policy), ("masked", settings.entropy_masked)):
            lines += [f"          + {coef:g} * H({name})"] if coef else []
        return "\n".join(lines)

    @property
    def _masked_outputs(self) -> frozenset[str]:
        return self.outputs | {"logp"}

    def _masked(self, policy: nn.Module, minibatch: Rollouts) -> PolicyOutputs:
        """The masked scores: recomputed for this update with `recompute_masked`, else those from before it."""
        if self.settings.recompute_masked:
            return self.masked_scores(policy, minibatch, self._masked_outputs)
        return PolicyOutputs(minibatch.extras["logp_masked"], minibatch.extras.get("entropy_masked"), None)

    def _entropy(self, scores: PolicyOutputs) -> Tensor:
        return -scores.logp if scores.entropy is None or not self.outputs else scores.entropy


class CorrectLikelihood(LossTerm):
    """Mean negative log-likelihood of the tokens of samples whose reward `accuracy_term` is 1."""

    name = "correct_likelihood"

    def __init__(self, coef: float, accuracy_term: str) -> None:
        self.coef = coef
        self.accuracy_term = accuracy_term

    def counts(self, minibatch: Rollouts) -> dict[str, float]:
        """Tokens of correct samples."""
        return {CORRECT_TOKENS: float(self._mask(minibatch).sum())}

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """Fraction of the mean over the tokens of all correct samples of the optimiser step."""
        # `counts` are of the whole optimiser step, so the parts of all micro-batches add up to the mean
        total = masked_sum(-scores.logp, self._mask(minibatch)).sum()
        return TermLoss({"loss/sft": self.coef * (total / max(counts.others[CORRECT_TOKENS], 1.0))})

    def formula(self) -> str:
        """The term with its weight."""
        return f"          + {self.coef:g} * nll of correct samples"

    def _mask(self, rollouts: Rollouts) -> Tensor:
        correct = rollouts.reward_terms[self.accuracy_term] == 1.0
        return rollouts.loss_mask * correct.to(rollouts.loss_mask.dtype)[:, None]


class PapoRecipe(VlmRecipe):
    """GRPO or DAPO with the implicit perception term."""

    config: PapoConfig

    def __init__(self, config: PapoConfig) -> None:
        super().__init__(config, MediaQuestions("so PAPO has nothing to mask; use recipe: vlm"))
        settings, accuracy = config.papo, self.accuracy_term
        # the base recipe adds this view after sampling, which therefore never sees masked images
        self.view = MaskedImages(settings)
        perception = Perception(settings, self.objective.aggregation, config.sampler.temperature, accuracy)
        likelihood = [CorrectLikelihood(settings.sft_coef, accuracy)] if settings.sft_coef else []
        self.terms = [*self.terms, perception, *likelihood]
