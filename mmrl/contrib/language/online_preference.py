"""Online preference optimisation: any pairwise loss on sampled responses, ranked by their rewards.

The pair is the best and the worst of `trainer.samples_per_task` answers (online DPO), or an answer of the policy and
one of an opponent: the reference (XPO) or the geometric mixture of policy and reference (Nash-MD). To rank with a
judge, use the reward `winrate`.

`online.reference: previous` takes the policy at the start of each iteration as the reference (iterative DPO, Nash-MP);
INPO uses both. `online.extrapolation` moves the weights further at the end of an iteration (accelerated preference
optimisation).

Differences from TRL's trainers: pairs with equal rewards are not trained, unless the loss reads the rewards; TRL takes
the first answer. Nash-MP's two half steps are one step. The accelerated method extrapolates log-probabilities, this
one weights, which is the same only where log-probabilities are linear in them.

Sources: Guo et al., online AI feedback, arXiv 2402.04792; Xie et al., XPO, arXiv 2405.21046; Munos et al., Nash-MD,
arXiv 2312.00886; Zhang et al., INPO, arXiv 2407.00617; He et al., accelerated preference optimisation, arXiv
2410.06293; huggingface/trl trl/experimental/{online_dpo,xpo,nash_md}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional

from mmrl.core.blocks.preference import CHOSEN, OWN, PREVIOUS, SCORE, DecisionScore
from mmrl.core.loss import Denominators
from mmrl.core.objectives.objective import LossOutput
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import PreferenceConfig, check_pair_batches, check_preference, make_preference
from mmrl.training.processes import Streams
from mmrl.training.recipe import LossTerm, Passes, Reference, Sampler, Step, start_kind
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.prefix import CacheDecoder
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, Samples, sample, sample_by
from mmrl.vlm.methods.preference import MismatchedAnswers
from mmrl.vlm.model.model_config import check_critic
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

Within = Callable[[Callable[[Any], Any]], Any]
"""Calls a function with the other policy while its weights are active (`Reference.score`)."""


@dataclass
class OnlineSettings:
    """Where pairs come from, and what the policy is compared against."""

    opponent: str = choice("auto", ("auto", "policy", "reference", "mixture"))
    """Model that writes the other response: the policy itself, the reference, or the geometric mixture of the two;
    auto: the choice of the objective's paper."""
    mixture: float = rare(bounded(0.5, above=0, below=1))
    """Weight of the reference in the mixture's log-probabilities."""
    reference: str = choice("start", ("start", "previous"))
    """Policy that the loss's log-ratios and the opponent refer to: start (see `reference.kind`), or previous, the
    policy at the start of the iteration."""
    iteration: int = bounded(1, at_least=1)
    """Steps per iteration."""
    extrapolation: float = rare(bounded(0.0, at_least=0))
    """Extrapolation of the weights at the end of an iteration, as a fraction of their change during the iteration."""


@dataclass
class OnlinePreferenceConfig(VlmConfig):
    """A run on pairs of sampled responses."""

    online: OnlineSettings = field(default_factory=OnlineSettings)
    """Opponent, reference and iterations."""
    objective: PreferenceConfig = field(default_factory=PreferenceConfig)  # type: ignore[assignment]
    """Loss to minimise."""

    @property
    def opponent(self) -> str:
        """Model that writes the other response."""
        chosen = self.online.opponent
        return self.made_objective().loss.opponent if chosen == "auto" else chosen

    @property
    def keeps_previous(self) -> bool:
        """Whether to keep the policy at the start of the iteration."""
        previous = self.online.reference == "previous" or "logp_previous" in self.made_objective().needs
        return previous or self.online.extrapolation > 0

    def made_objective(self) -> PreferenceObjective:
        """The objective of the run."""
        return make_preference(self.objective)

    def check_objective(self) -> None:
        """Check that model and data serve the objective; raises ValueError."""
        objective = self.made_objective()
        alone = self.opponent == "policy"
        samples = self.trainer.samples_per_task
        check_pair_batches(self.trainer.micro_batch)
        check_critic(self.model, needed=False)
        check_preference(objective, ("logp_previous", "kl_baseline", *(() if alone else ("own_answers",))))
        if isinstance(objective.score, DecisionScore):
            raise ValueError(
                "objective.score is 'decision', which only applies to noisy versions of images; use sum or mean"
            )
        if self.adaptive_kl.target is not None:
            raise ValueError("adaptive_kl.target is set, but a preference objective has no KL term; remove it")
        if samples < 2 or (samples > 2 and not alone):
            wanted = (
                "at least 2, because the best and the worst sample"
                if alone
                else "2, because the policy's and the opponent's response"
            )
            raise ValueError(f"trainer.samples_per_task is {samples}; use {wanted} form a pair")
        if "kl_baseline" in objective.needs and (self.online.reference != "start" or self.trainer.tasks_per_step < 2):
            raise ValueError(
                f"the loss '{objective.loss.kind}' compares responses to other questions of the step with the "
                "reference; use online.reference: start and trainer.tasks_per_step of at least 2"
            )
        if not alone:
            self._check_opponent()
        if self.keeps_previous and self.trainer.sharding != "none":
            raise ValueError(
                "online.reference: previous keeps a complete copy of the policy, which trainer.sharding would split; "
                "use sharding: none"
            )

    def _check_opponent(self) -> None:
        name = f"the opponent '{self.opponent}'"
        if self.rollers.engine != "local" or self.sampler.engine != "own":
            raise ValueError(f"{name} needs rollers.engine: local and sampler.engine: own")
        if self.online.reference == "start" and self.reference.kind not in ("auto", "frozen", "adapter"):
            raise ValueError(
                f"{name} uses the policy at the start, but reference.kind is '{self.reference.kind}'; use auto"
            )


class AgainstOpponent:
    """Samples one response from the policy and one from its opponent for each question."""

    def __init__(self, recipe: OnlinePreferenceRecipe, own: Sampler[VlmPolicy, Prompt, Samples]) -> None:
        self.recipe = recipe
        self.own = own

    def load(self, weights: VlmPolicy, version: int) -> None:
        """Use these weights for sampling from now on."""
        self.own.load(weights, version)

    def sample(self, tasks: Sequence[Prompt], n: int, streams: Streams) -> Samples:
        """Both responses to each question, the policy's first."""
        config = self.recipe.config.sampler
        online = self.recipe.config.online
        policy = self.recipe.policy
        own = self.own.sample(tasks, 1, streams)
        draws = streams.uniform(len(tasks), 1, config.max_new_tokens, purpose="opponent")
        # scoring disables the adapter or calls the copy, whichever the reference is
        within: Any = self.recipe.anchor.to(policy.device).score
        with stopwatch("opponent"):
            if self.recipe.config.opponent == "mixture":
                other = sample_mixture(policy, within, online.mixture, tasks, config, draws)
            else:
                other = within(lambda module: sample(module, tasks, 1, config, draws))
        return in_turn(own, other)

    def close(self) -> None:
        """Free what the policy's sampler started."""
        self.own.close()


def in_turn(first: Samples, second: Samples) -> Samples:
    """Rows of two sets of N responses, one of each in turn."""
    # both sets were cut to their own longest answer
    width = max(first.mask.shape[1], second.mask.shape[1])

    def joined(name: str, value: float) -> Tensor:
        both = [getattr(samples, name) for samples in (first, second)]
        wide = [functional.pad(x, (0, width - x.shape[1]), value=value) for x in both]
        return torch.stack(wide, 1).flatten(0, 1)

    def lists(name: str) -> list[str]:
        return [x for pair in zip(getattr(first, name), getattr(second, name), strict=True) for x in pair]

    return Samples(
        response_ids=joined("response_ids", 0),
        mask=joined("mask", 0.0),
        logp=joined("logp", 0.0),
        finish=lists("finish"),
        texts=lists("texts"),
        # 1 is the mass of an untruncated distribution
        nucleus_mass=joined("nucleus_mass", 1.0),
    )


class OnlinePreferenceRecipe(VlmRecipe):
    """Any pair loss on responses that are sampled and ranked in each step; see the module."""

    config: OnlinePreferenceConfig
    objective: PreferenceObjective  # type: ignore[assignment]

    def __init__(self, config: OnlinePreferenceConfig) -> None:
        super().__init__(config)
        self.previous = PreviousPolicy(self) if config.keeps_previous else None
        if self.previous is not None:
            self.terms = [*self.terms, self.previous]
        if "kl_baseline" in self.objective.needs:
            # KTO's baseline: answers to other questions of the step under the reference
            self.terms = [*self.terms, MismatchedAnswers(self)]
        if config.opponent != "policy":
            if config.online.reference == "start":
                kind = config.reference.kind
                self.start = Reference(start_kind(self.policy) if kind == "auto" else kind, self.policy)
            self.sampler = AgainstOpponent(self, self.sampler)

    @property
    def anchor(self) -> Reference:
        """The reference that the opponent is based on."""
        found = self.previous.policy if self.config.online.reference == "previous" and self.previous else self.start
        assert found is not None
        return found

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample the responses to each question and mark those of the opponent."""
        if self.config.opponent == "policy":
            return super().rollout(policy, tasks, streams, step)
        # here and not in the sampler, which a process without usable questions does not reach
        with self.anchor.whole():
            rollouts = super().rollout(policy, tasks, streams, step)
        own = torch.tensor([1.0, 0.0], device=rollouts.mask.device).repeat(rollouts.num_groups)
        return rollouts.replace(extras=rollouts.extras | {OWN: own})

    def estimate(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Reduce each group to its pair."""
        rows, learnt = ranked_pairs(rollouts, keep_ties=self.objective.needs_scores)
        pairs = rollouts.select(torch.tensor(rows, device=rollouts.mask.device))
        # both rows of an unlearnt pair stay, since losses take rows two by two
        mask = pairs.mask * torch.tensor(learnt, device=pairs.mask.device).repeat_interleave(2)[:, None]
        side = torch.tensor([1.0, -1.0], device=mask.device).repeat(len(learnt))
        extras = pairs.extras | {CHOSEN: (side + 1) / 2, SCORE: pairs.reward}
        self._note(learnt, extras[OWN][0::2].tolist() if OWN in extras else None)
        return pairs.replace(mask=mask, advantage=side[:, None] * mask, extras=extras)

    def _note(self, learnt: list[float], own: list[float] | None) -> None:
        """Log how many pairs of all processes are learned, and how many of those the policy won."""
        won = sum(mine * used for mine, used in zip(own or [0.0] * len(learnt), learnt, strict=True))
        # every process must make this call, with or without learnt pairs
        used, number, wins = map(sum, zip(*gather_object([(sum(learnt), len(learnt), won)]), strict=True))
        self.noted["pairs/learnt"] = used / number
        if own is not None and used:
            self.noted["pairs/won"] = wins / used

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Mean pair loss."""
        scores = self.scores(policy, minibatch, self.loss_outputs)
        output = self.objective.step_loss(scores, minibatch, denominators)
        return self.plus_terms(output, policy, minibatch, scores, denominators, step)

    def describe(self) -> str:
        """The objective's formula, and where the responses come from."""
        online, opponent = self.config.online, self.config.opponent
        shares = f"policy^{1 - online.mixture:g} reference^{online.mixture:g}"
        written = {"policy": "the best and the worst sample", "reference": "a sample and one of the reference"}
        lines = [super().describe(), f"pairs: {written.get(opponent, f'a sample and one of {shares}')}, by reward"]
        if online.reference == "previous":
            lines.append(f"reference: the policy at the start of an iteration of {online.iteration} steps")
        if online.extrapolation:
            lines.append(f"weights at the end of an iteration: w + {online.extrapolation:g} (w - w of the end before)")
        return "\n".join(lines)


def ranked_pairs(rollouts: Rollouts, *, keep_ties: bool) -> tuple[list[int], list[float]]:
    """Best and worst row of each group, and 1 for each group with a strict order or a tie that is kept.

    Of equal rows the first is the best and the last the worst.
    """
    rows: list[list[int]] = [[] for _ in range(rollouts.num_groups)]
    for row, group in enumerate(rollouts.group.tolist()):
        rows[group].append(row)
    reward = rollouts.reward.tolist()
    found = list[int]()
    learnt = list[float]()
    for own in rows:
        scored = [row for row in own if not math.isnan(reward[row])]
        # a group with at most one score still yields two rows, so that batches have the same size; they are masked
        chosen = scored if len(scored) > 1 else own
        best = max(chosen, key=reward.__getitem__) if len(scored) > 1 else chosen[0]
        worst = min(reversed([row for row in chosen if row != best]), key=reward.__getitem__)
        found += [best, worst]
        learnt.append(float(len(scored) > 1 and (keep_ties or reward[best] > reward[worst])))
    return found, learnt


class PreviousPolicy(LossTerm):
    """The policy at the start of an iteration; at the end of one the weights may be extrapolated."""

    name = "previous_policy"
    gradient = "never"

    def __init__(self, recipe: OnlinePreferenceRecipe) -> None:
        self.recipe = recipe
        self.policy = Reference("frozen", recipe.policy)
        # on the CPU, as it is read only at the ends of iterations
        self.ended = {name: weight.detach().cpu().clone() for name, weight in self._trained()}
        """Weights at the end of the previous iteration, not extrapolated."""

    def provides(self, step: Step) -> frozenset[str]:
        """The reference's log-probabilities, if this is the reference."""
        return frozenset({"logp_ref"} if self.recipe.config.online.reference == "previous" else ())

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Score the responses under the previous policy."""
        needs = self.recipe.objective.needs & ({"logp_previous"} | self.provides(step))
        if not needs:
            return rollouts
        wanted = frozenset({"logp"})
        previous = self.policy.to(rollouts.mask.device)
        logp = previous.score(lambda module: passes.run(module, rollouts, wanted, None)).logp
        extras = {PREVIOUS: logp} if "logp_previous" in needs else {}
        reference = logp if "logp_ref" in needs and self.provides(step) else rollouts.logp_ref
        return rollouts.replace(logp_ref=reference, extras=rollouts.extras | extras)

    def on_step_end(self, step: Step) -> None:
        """Start the next iteration when one ends."""
        online = self.recipe.config.online
        if (step.number + 1) % online.iteration:
            return
        copies = self._copies
        with torch.no_grad():
            for name, weight in self._trained():
                # before extrapolation: the change between two ends must not contain earlier extrapolations
                ended = weight.detach().cpu().clone()
                if online.extrapolation:
                    weight.add_((ended - self.ended[name]).to(weight), alpha=online.extrapolation)
                self.ended[name] = ended
                # after extrapolation: the next iteration starts from where the weights are now
                copies[name].copy_(weight)

    def state_dict(self) -> Any:
        """Weights at the start of the iteration and at the end of the previous one."""
        copies = self._copies
        # trained weights alone: the others never change
        start = {name: copies[name].detach().cpu().clone() for name, _ in self._trained()}
        return {"start": start, "ended": dict(self.ended)}

    def load_state_dict(self, state: Any) -> None:
        """Restore `state_dict`."""
        copies = self._copies
        with torch.no_grad():
            for name, weight in state["start"].items():
                copies[name].copy_(weight)
        self.ended = dict(state["ended"])

    @property
    def _copies(self) -> dict[str, nn.Parameter]:
        assert self.policy.copy is not None
        return dict(self.policy.copy.named_parameters())

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self.recipe.policy.named_parameters() if weight.requires_grad]


class MixtureDecoder:
    """Decodes with two policies; `share` is that of the other one in the log-probabilities."""

    def __init__(self, own: CacheDecoder, other: CacheDecoder, within: Within, share: float) -> None:
        self._own = own
        self._other = other
        self._within = within
        self._share = share

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""
        self._own.keep(index)
        self._other.keep(index)

    def advance(self, token: Tensor) -> Any:
        """Read one token of each row and return the states of both policies."""
        return self._own.advance(token), self._within(lambda _: self._other.advance(token))

    def next_logp(self, states: Any, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token under the mixture."""
        own, other = states
        own_logp = self._own.next_logp(own, temperature)
        other_logp = self._within(lambda _: self._other.next_logp(other, temperature))
        # a geometric mean of two distributions does not sum to 1
        return ((1 - self._share) * own_logp + self._share * other_logp).log_softmax(-1)


def sample_mixture(
    policy: VlmPolicy, within: Within, share: float, prompts: Sequence[Prompt], config: SamplerConfig, uniforms: Tensor
) -> Samples:
    """Draw one response to each prompt from the mixture, proportional to policy^(1 - share) other^share at each token.

    Args:
        policy: one of the two.
        within: calls a function with the other.
        share: of the other, in (0, 1).
        prompts: N prompts.
        config: lengths, temperature and truncation.
        uniforms: (N, max_new_tokens) in [0, 1).
    """
    training = policy.training
    policy.eval()  # the other may be the policy itself without its adapter
    try:
        with torch.no_grad():
            other, prefix = within(lambda module: (module, module.encode_prefix(prompts).detach()))
    finally:
        policy.train(training)

    # called for each part of the prompts, of which both policies decode the same rows
    def decoder_of(own: Any, theirs: Any) -> tuple[Any, Any]:
        decoders = CacheDecoder(policy, policy.reader, own), CacheDecoder(other, other.reader, theirs)
        return MixtureDecoder(*decoders, within, share), (own.last_state, theirs.last_state)

    return sample_by(policy, prompts, config, uniforms, decoder_of, prefix.parts)
