r"""SofT-GRPO: reasoning with mixtures of tokens, trained with the Gumbel reparametrisation (arXiv 2511.06411).

Until a row's thinking ends, each of its decisions is a soft token. Of the sampler's top_k likeliest tokens within
top_p, with the probabilities p_k among them and Gumbel noise e_k, clipped to [-1.5, 3],

    y_k = log(p_k + 1e-6) + e_k,    weights softmax_k(y_k / temperature),

and the model reads the weighted sum of their embeddings; the text has the token of the largest weight. The update
replays the mixtures. The log-probability of a soft token under a policy with the probabilities q_k among the same
tokens is

    log pi = mean over k with log q_k > -3 of  -g_k - exp(-g_k),    g_k = clip(y_k - log(q_k + 1e-6), -1.5, 3),

a density of the noise. The token that ends the thinking and those behind it are ordinary. The objective is GRPO with
the scripts' KL, and any other without probabilities can be set.

Differences from zz1358m/SofT-GRPO-master: evaluations sample ordinary tokens; embeddings of the mixtures are constants,
as in the code, those of prompts are trained; noise that was drawn at a bound has a gradient, where in the code rounding
decides. The Gaussian and Dirichlet noises of the code are not here. Soft tokens need shared prompts, without
gradient checkpointing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.core.loss import Metric, mean_metric
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.prefix import KeepPrefill
from mmrl.vlm.engine.reader import mixed_embeddings
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import GenerationState, SamplerConfig, Samples, fill
from mmrl.vlm.inference.inference_sampler import EngineSamplerConfig
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

NOISE = (-1.5, 3.0)
"""Bounds of the Gumbel noise."""
EPS = 1e-6
EDGE = 1e-3
"""Noise drawn at a bound is recomputed up to rounding, which must not decide whether it has a gradient."""
RARE = -3.0
"""Tokens among the K with a smaller log-probability are ignored in the log-probability of their mixture."""


def mixture_logp(logp: Tensor, scores: Tensor) -> Tensor:
    """Log-probability (...) of soft tokens with `scores` y (..., K), by the log-probabilities (..., K) of their tokens.

    Source: zz1358m/SofT-GRPO-master verl-0.4.x/verl/utils/torch_functional.py, logprobs_from_logits_topk_gumbel.
    """
    # as in `_mixtures`, which adds EPS before the logarithm too
    among = (logp.softmax(-1) + EPS).log()
    noise = scores - among
    within = (noise > NOISE[0] - EDGE) & (noise < NOISE[1] + EDGE)
    # noise beyond its bounds means the policy has moved: clamping stops the gradient there
    noise = torch.where(within, noise, noise.clamp(*NOISE))
    # the likeliest always counts: of more than 20 equally likely tokens, each is rare
    counts = ((among > RARE) | (among == among.amax(-1, keepdim=True))).to(logp.dtype)
    # a mean over tokens, so its size does not depend on how many count
    return ((-noise - (-noise).exp()) * counts).sum(-1) / counts.sum(-1)


@dataclass
class SoftSettings:
    """Soft tokens."""

    temperature: float = bounded(0.1, above=0)
    """Temperature of the mixture weights; as it approaches 0, a mixture becomes its first token."""
    thinking_end: str = rare("</think>")
    """Text of the token that ends the soft part of a response."""


@dataclass
class SoftConfig(VlmConfig):
    """A SofT-GRPO run."""

    soft: SoftSettings = field(default_factory=SoftSettings)
    """Soft tokens."""
    sampler: EngineSamplerConfig = field(default_factory=lambda: EngineSamplerConfig(top_p=0.95, top_k=5))
    """Sampling of responses; a mixture consists of top_k tokens within top_p, and ordinary tokens are drawn from them
    too."""
    objective: ObjectiveConfig = field(
        default_factory=lambda: ObjectiveConfig(preset="grpo", kl={"coef": 0.001}, aggregation={"kind": "token_mean"})
    )
    """Objective that is optimised."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.sampler.top_k < 2:
            raise ValueError(
                f"sampler.top_k is {self.sampler.top_k}; it is the number of tokens in a mixture, so it must be at "
                "least 2"
            )
        if self.model.gradient_checkpointing or not self.model.shared_prefix:
            raise ValueError("soft tokens need model.shared_prefix=true and model.gradient_checkpointing=false")
        needing = [key for key, block in make_objective(self.objective).blocks.items() if needs_probability(block)]
        if needing:
            raise ValueError(f"objective.{needing[0]} uses probabilities, but soft tokens have densities")


def needs_probability(block: Any) -> bool:
    """Whether a block of an objective reads exp(logp) as a probability."""
    return "probabilities" in block.inputs


class SoftState(GenerationState):
    """Draws soft tokens until a row's thinking ends; `uniforms` are (B, max_new_tokens, K + 1)."""

    def __init__(
        self, policy: VlmPolicy, config: SamplerConfig, total: int, uniforms: Tensor, settings: SoftSettings
    ) -> None:
        # the last uniform of each step draws ordinary tokens, the others are the noise
        super().__init__(policy, config, total, uniforms[..., -1])
        self.settings = settings
        self.end = thinking_end(policy, settings)
        shape, device = (config.max_new_tokens, total, config.top_k), policy.device
        draws = to_device(uniforms[..., :-1].transpose(0, 1).double(), device).clamp(min=1e-12)
        self.noise = (-(-draws.log()).log()).clamp(*NOISE).float()
        self.thinking = torch.ones(total, dtype=torch.bool, device=device)
        self.mixed = {"soft": torch.zeros(shape[:2], device=device), "ids": torch.zeros(shape, dtype=torch.int64)}
        self.mixed |= {name: torch.zeros(shape) for name in ("weights", "scores")}
        self.mixed = {name: value.to(device) for name, value in self.mixed.items()}
        self.tables.append((self.mixed["soft"], 0.0))

    def choose(self, rows: Tensor, step: int, logp: Tensor, running: Tensor) -> Tensor:
        """Draw an ordinary token for each row, and replace it by a soft token in rows that are still thinking."""
        token = super().choose(rows, step, logp, running)
        ids, scores = self._mixtures(logp, self.noise[step, rows])
        soft = self.thinking[rows] & running
        # the end token itself is an ordinary one, so that the answer begins after readable text
        self.thinking[rows] &= ids[:, 0] != self.end
        token = torch.where(soft, ids[:, 0], token)
        mixes = soft & (ids[:, 0] != self.end)
        density = mixture_logp(logp.gather(1, ids), scores)
        # the logp of a soft token is a density of noise, that of an ordinary one a probability
        chosen = torch.where(mixes, density, logp.gather(1, token[:, None])[:, 0])
        self.ids[step].index_copy_(0, rows, token)
        self.logp[step].index_copy_(0, rows, chosen.where(running, 0.0))
        weights = (scores / self.settings.temperature).softmax(-1)
        for name, value in (("soft", mixes.float()), ("ids", ids), ("weights", weights), ("scores", scores)):
            self.mixed[name][step].index_copy_(0, rows, value)
        return token

    def inputs(self, rows: Tensor, step: int, token: Tensor) -> Tensor:
        """Embeddings (b, H) of the tokens of this step."""
        own = {name: value[step, rows] for name, value in self.mixed.items()}
        return mixed_embeddings(self.policy, token, own)

    def _mixtures(self, logp: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (b, K) and their scores, the highest first."""
        found, ids = logp.topk(self.config.top_k, -1)
        probability = found.softmax(-1)
        # a token is within top_p if those before it have not reached it; the first always is
        before = probability.cumsum(-1) - probability
        probability = probability.where(before < self.config.top_p, 0.0)
        scores = (probability / probability.sum(-1, keepdim=True) + EPS).log() + noise
        # tokens outside top_p whose noise was clipped tie; the likelier one comes first then
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        return ids.gather(1, order), scores


class SoftSampler:
    """Samples soft responses from the policy in this process."""

    def __init__(self, config: SamplerConfig, settings: SoftSettings, keep: KeepPrefill) -> None:
        self.config = config
        self.settings = settings
        self.keep = keep
        self.mixed: dict[str, Tensor] = {}

    def load(self, weights: VlmPolicy, version: int) -> None:
        """Sample from this policy."""
        self.policy = weights

    def sample(self, tasks: Sequence[Prompt], n: int, streams: Streams) -> Samples:
        """Draw n responses to each prompt; their mixtures stay in `mixed`."""
        draws = streams.uniform(len(tasks), n, self.config.max_new_tokens, self.config.top_k + 1)
        state = SoftState(self.policy, self.config, len(tasks) * n, draws, self.settings)
        found = fill(state, tasks, n, self.keep)
        width = found.mask.shape[1]
        self.mixed = {name: value[:width].transpose(0, 1).contiguous() for name, value in state.mixed.items()}
        return found

    def close(self) -> None:
        """Do nothing: the sampler does not own the policy."""


class SoftRecipe(VlmRecipe):
    """GRPO, or another objective, with soft tokens during reasoning."""

    config: SoftConfig
    sampler: SoftSampler

    def __init__(self, config: SoftConfig) -> None:
        super().__init__(config)
        if self.samples_elsewhere:
            # super() may have started an engine
            self.close()
            raise UserError("sampler.engine must be own, because soft tokens are only sampled by the policy itself")
        thinking_end(self.policy, config.soft)
        self.sampler = SoftSampler(config.sampler.config, config.soft, self._keep_prefill())

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample soft responses."""
        rollouts = super().rollout(policy, tasks, streams, step)
        payload = dataclasses.replace(VlmPayload.of(rollouts), mixed=self.sampler.mixed)
        return rollouts.replace(payload=payload)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Scores at the sampling temperature; the log-probabilities of soft tokens are densities of their noise."""
        found = super().scores(policy, rollouts, outputs | {"states"})
        mixed, width = VlmPayload.of(rollouts).mixed, rollouts.num_decisions
        soft = (mixed["soft"][:, :width] > 0) & (rollouts.mask > 0)
        assert found.states is not None
        if bool(soft.any()):
            states = found.states[soft[rollouts.mask > 0]]
            ids, scores = mixed["ids"][:, :width][soft], mixed["scores"][:, :width][soft]
            own: VlmPolicy = policy  # type: ignore[assignment]
            logp = own.head.several(states, ids, temperature=self.config.sampler.temperature, banned=own.banned_ids)
            # states come row by row under the mask, which is the order that masked_scatter fills in
            density = torch.zeros_like(found.logp).masked_scatter(soft, mixture_logp(logp, scores))
            found = dataclasses.replace(found, logp=torch.where(soft, density, found.logp))
        return found if "states" in outputs else dataclasses.replace(found, states=None)

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the fraction of soft tokens and the mean weight of their first token."""
        mixed = VlmPayload.of(rollouts).mixed
        # rollouts may have been padded or cut to another width
        soft = functional.pad(rollouts.mask, (0, mixed["soft"].shape[1] - rollouts.num_decisions)) * mixed["soft"]
        first = mean_metric(mixed["weights"][..., 0], soft)
        own = {"soft/share": Metric(soft.sum(), rollouts.mask.sum()), "soft/first_weight": first}
        return super().step_metrics(rollouts) | own

    def describe(self) -> str:
        """The objective's formula, and what the log-probabilities of soft tokens are."""
        return (
            f"{super().describe()}\nwhere p of a soft token is a density of its Gumbel noise, weights of temperature "
            f"{self.config.soft.temperature:g}, until {self.config.soft.thinking_end}"
        )


def thinking_end(policy: VlmPolicy, settings: SoftSettings) -> int:
    """Token that ends the soft part; raises UserError if its text is not one token."""
    ids = policy.processor.tokenizer.encode(settings.thinking_end, add_special_tokens=False)
    if len(ids) != 1:
        raise UserError(
            f"soft.thinking_end is {settings.thinking_end!r}, which is {len(ids)} tokens for this model; it must be one"
        )
    return int(ids[0])
