"""REFUEL: dialogues resampled from a random turn on, and a regression on the difference of their rewards.

In each step, which is an iteration of the paper's algorithm 1, the policy holds one dialogue for each task. A turn h is
drawn uniformly, and the dialogue is repeated up to h: the environment, a simulated user, hears the same answers again.
There the policy answers again and finishes the dialogue. The two answers of turn h are a pair,

    loss = mean of ([log pi(y) - log pi_t(y)] - [log pi(y') - log pi_t(y')] - eta (r - r'))^2,

with pi_t the policy that drew both and r the rewards of the whole dialogues. What came before h earns both sides the
same, so the difference is that of the future rewards. Later answers count through their rewards and are not trained.
A pair is left out if both answers of turn h are equal, or a dialogue has no result. The next step draws its dialogues
from the updated policy.

`refuel.length: sampled` is the public code's setting one: a dialogue counts up to a turn that is drawn uniformly, and h
is drawn up to that one. Differences from the code: dialogues of a step are trained once, where setting one writes all
of an iteration to a data set first; there is no KL in the reward (setting two has one of weight 0.05), and no penalty
of answers without an end token, for which reward.format serves.

Source: Gao et al., REFUEL, arXiv 2410.04612, algorithm 1; ZhaolinGao/REFUEL setting_one/{generate,tokenize_mask}.py and
setting_two/anthropic_hh/refuel.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.rollout.episodes import AgentPayload, Episode
from mmrl.agents.rollout.runner import Fork
from mmrl.core.blocks.preference import CHOSEN, SCORE, DecisionScore
from mmrl.core.loss import Denominators, Metric
from mmrl.core.objectives.objective import LossOutput
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.fields import choice
from mmrl.training.objectives import PreferenceConfig, check_pair_batches, check_preference, make_preference
from mmrl.training.processes import Streams
from mmrl.training.recipe import LossTerm, Passes, Step
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.model.model_config import check_critic

RESAMPLED = "resampled_turn"
"""Key of `Rollouts.extras` (B,): the turn that both dialogues of a pair answer, -1 if there is nothing to learn."""


@dataclass
class RefuelSettings:
    """How dialogues are resampled."""

    length: str = choice("whole", ("whole", "sampled"))
    """whole: rewards of the whole dialogue; sampled: rewards up to a uniformly drawn turn, with the resampled turn at
    or before it (setting one of the public code)."""


@dataclass
class RefuelConfig(AgentConfig):
    """A REFUEL run."""

    refuel: RefuelSettings = field(default_factory=RefuelSettings)
    """How dialogues are resampled."""
    objective: PreferenceConfig = field(  # type: ignore[assignment]
        default_factory=lambda: PreferenceConfig(preset="refuel")
    )
    """Loss to minimise."""

    def made_objective(self) -> PreferenceObjective:
        """The objective of the run."""
        return make_preference(self.objective)

    def check_objective(self) -> None:
        """Check that model and rewards serve the objective; raises ValueError."""
        objective, samples = self.made_objective(), self.trainer.samples_per_task
        check_pair_batches(self.trainer.micro_batch)
        check_critic(self.model, needed=False)
        check_preference(objective)
        if isinstance(objective.score, DecisionScore):
            raise ValueError(
                "objective.score is 'decision', which only applies to noisy versions of images; use sum or mean"
            )
        if samples != 2:
            raise ValueError(f"trainer.samples_per_task is {samples}; use 2: a dialogue and its resampled version")
        if self.refuel.length == "sampled" and self.rewards:
            raise ValueError(
                "refuel.length is 'sampled', but reward functions score whole dialogues; remove `rewards`, or use "
                "refuel.length: whole"
            )


def draw_turn(turns: int, length: str, generator: torch.Generator) -> tuple[int, int]:
    """Draw the turn h to resample, and the last turn whose reward counts.

    Args:
        turns: H, number of turns of the dialogue.
        length: `RefuelSettings.length`.
        generator: of the draws.

    Returns:
        h and the last turn, 0 <= h <= last < H.
    """
    last = turns - 1
    if length == "sampled":
        last = int(torch.randint(turns, (), generator=generator))
    return int(torch.randint(last + 1, (), generator=generator)), last


def answers_of(turn: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
    """Mask (B, T) of the decisions in the selected turn (B,) of each row, from their turns (B, T) and mask (B, T)."""
    return mask * (turn == wanted[:, None])


def resampled_turns(episodes: Sequence[Episode]) -> list[int]:
    """The turn that both dialogues of a pair answer, for each of 2 N dialogues; -1 if the two answers are equal."""
    turns = []
    for one, other in zip(episodes[0::2], episodes[1::2], strict=True):
        turn = one.shared_turns
        # a dialogue without a result may have ended before
        said = [each.answers[turn : turn + 1] for each in (one, other)]
        turns += [-1 if said[0] == said[1] else turn] * 2
    return turns


def cut_rewards(pair: Sequence[Episode], last: int) -> None:
    """Set the rewards of the turns after the last one that counts to 0."""
    for episode in pair:
        episode.rewards[last + 1 :] = [0.0] * len(episode.rewards[last + 1 :])


class DrawingPolicy(LossTerm):
    """Uses the policy that sampled the dialogues as the reference of the loss."""

    name = "drawing_policy"
    gradient = "never"

    def provides(self, step: Step) -> frozenset[str]:
        """The reference's log-probabilities, which are the old log-probabilities."""
        return frozenset({"logp_ref", "logp_old"})

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Score the answers before the update."""
        logp = passes.scores(rollouts, frozenset({"logp"})).logp
        return rollouts.replace(logp_ref=logp, logp_old=logp)


class RefuelRecipe(AgentRecipe):
    """Dialogues resampled from a random turn on; see the module."""

    config: RefuelConfig
    objective: PreferenceObjective  # type: ignore[assignment]

    def __init__(self, config: RefuelConfig) -> None:
        super().__init__(config)
        self.terms = [*self.terms, DrawingPolicy()]

    def draw_groups(self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams) -> list[list[Episode]]:
        """Run a dialogue for each task, and resample one of its turns."""
        seeds = streams.seeds(len(tasks), 2).view(len(tasks), 2)
        first = self.draw(policy, tasks, seeds[:, 0].tolist())
        drawn = [self._draw_turn(episode, streams.of(index, "turn")) for index, episode in enumerate(first)]
        forks = [Fork(episode, turn) if turn else None for episode, (turn, _) in zip(first, drawn, strict=True)]
        second = self.draw(policy, tasks, seeds[:, 1].tolist(), forks)
        pairs = [[one, other] for one, other in zip(first, second, strict=True)]
        for pair, (turn, last) in zip(pairs, drawn, strict=True):
            pair[0].shared_turns = pair[1].shared_turns = turn
            cut_rewards(pair, last)
            if turn and pair[1].prompt is not None:
                pair[1].prompt = pair[0].prompt  # an equal one, so that the group reads it once
        return pairs

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Rewards as in every agent recipe, and the turn that was resampled; -1 if both answers are equal."""
        turns = torch.tensor(resampled_turns(AgentPayload.of(rollouts).episodes))
        resampled = to_device(turns, rollouts.mask.device)
        return super().score(rollouts.replace(extras=rollouts.extras | {RESAMPLED: resampled}), step)

    def estimate(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Restrict the mask to the answers of the resampled turn, and mark the better one of each pair."""
        assert rollouts.turn is not None
        reward = rollouts.reward.view(-1, 2)
        known = torch.isfinite(reward).all(1) & (rollouts.extras[RESAMPLED][0::2] >= 0)
        mask = answers_of(rollouts.turn, rollouts.mask, rollouts.extras[RESAMPLED])
        mask = mask * known.repeat_interleave(2)[:, None]
        better = reward[:, 0] > reward[:, 1]
        marks = torch.stack([better, ~better], 1).flatten().to(mask.dtype)
        self.noted["refuel/learnt"] = Metric(known.double().sum(), float(len(known)))
        extras = rollouts.extras | {CHOSEN: marks, SCORE: rollouts.reward.nan_to_num()}
        return rollouts.replace(mask=mask, advantage=(2 * marks - 1)[:, None] * mask, extras=extras)

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Mean loss of the pairs."""
        scores = self.scores(policy, minibatch, self.loss_outputs)
        output = self.objective.step_loss(scores, minibatch, denominators)
        return self.plus_terms(output, policy, minibatch, scores, denominators, step)

    def describe(self) -> str:
        """The objective's formula, and how dialogues are resampled."""
        counted = "the whole dialogue" if self.config.refuel.length == "whole" else "the turns up to a random one"
        return (
            f"{super().describe()}\nlogp of the answers to a random turn h, ref the policy that drew them; score: "
            f"reward of {counted}, finished after h by the policy"
        )

    def _draw_turn(self, episode: Episode, generator: torch.Generator) -> tuple[int, int]:
        """See `draw_turn`; the first turn of a dialogue without a result, which cannot be repeated."""
        turns = episode.trajectory.turns
        if not episode.has_result or not turns:
            return 0, max(turns - 1, 0)
        return draw_turn(turns, self.config.refuel.length, generator)
