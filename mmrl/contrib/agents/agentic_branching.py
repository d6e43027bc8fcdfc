"""Agentic ARPO: episodes branch from others after observations that make the agent uncertain.

`branching.initial` of a task's G episodes begin at its start. The others branch from them at turns with a high entropy:
a branch replays the earlier actions in a fresh environment, which must depend only on task, seed and actions. With
`allocation: entropy` (AEPO) the first episode decides how many begin at the start.

Sources: Dong et al., ARPO, arXiv 2507.19849, and AEPO, arXiv 2510.14545; dongguanting/ARPO and mowenruan/ARPO
vllm_rollout_with_tools.py, whose constants are the defaults.

Differences from the code: entropies are exact rather than over the ten most likely tokens, and are compared within an
episode. A branch begins before the uncertain answer, as in the papers, not one observation later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe
from mmrl.agents.entries import SCORES
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.rollout.episodes import AgentPayload, Episode, pack_groups
from mmrl.agents.rollout.runner import Fork
from mmrl.core.blocks.turns import PARENT, SHARED
from mmrl.core.loss import Metric, row_metric
from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, only_with, rare
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.engine.vlm_policy import VlmPolicy

STREAK = 0.05
"""Decrease of the probability of a branch for each turn in a row in which episodes of the task branched (AEPO)."""


@dataclass
class BranchingSettings:
    """When episodes branch."""

    initial: int = only_with(bounded(8, at_least=1), allocation="fixed")
    """Episodes per task that start from the beginning, with allocation: fixed."""
    probability: float = rare(bounded(0.5, at_least=0, at_most=1))
    """Branching probability if the entropy equals that of the first turn."""
    weight: float = bounded(0.2, at_least=0)
    """Increase of the branching probability per unit of entropy above that of the first turn."""
    tokens: int = rare(bounded(20, at_least=1))
    """Number of first tokens of a turn whose entropies are summed; one unit is the logarithm of the vocabulary size."""
    allocation: str = choice("fixed", ("fixed", "entropy"))
    """fixed: `initial` episodes start from the beginning; entropy: their number follows from the entropies of the first
    episode, and consecutive branches become less likely (AEPO)."""


@dataclass
class BranchingConfig(AgentConfig):
    """A run whose episodes branch."""

    scored_outputs: ClassVar[tuple[str, ...]] = (*SCORES, "branches")

    branching: BranchingSettings = field(default_factory=BranchingSettings)
    """When episodes branch."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="agentic_branching"))
    """Objective that is optimised."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        size, initial = self.trainer.samples_per_task, self.branching.initial
        if self.branching.allocation == "fixed" and initial >= size:
            raise ValueError(
                f"branching.initial is {initial} and trainer.samples_per_task {size}: no episodes are left to branch; "
                "lower branching.initial, or use recipe: agent"
            )


def initial_episodes(entropies: Sequence[float], size: int) -> int:
    """How many of `size` episodes start from the beginning, from the entropies of the first episode's turns.

    Source: mowenruan/ARPO AEPO/verl_aepo_entropy/verl/workers/rollout/vllm_rollout/vllm_rollout_with_tools.py.
    """
    # the less uncertain turns after an observation are, the more episodes begin at the start
    change = entropies[0] - sum(entropies) / len(entropies)
    return min(int(size / (1 + math.exp(-0.5 * change))) + 1, size)


def choose_forks(
    entropies: Sequence[Sequence[float]], slots: int, settings: BranchingSettings, generator: torch.Generator
) -> list[tuple[int, int]]:
    """Episodes to branch from and the turn at which each branch begins, at most `slots`.

    Args:
        entropies: of the turns of each episode.
        slots: branches at most.
        settings: the probabilities.
        generator: of the draws.

    Returns:
        Indices of episodes and turns, 1 or later, in the order of turns.
    """
    found: list[tuple[int, int]] = []
    streak = 0
    for turn in range(1, max(map(len, entropies), default=0)):
        before = len(found)
        for index, own in enumerate(entropies):
            if turn >= len(own) or len(found) == slots:
                continue
            rise = settings.weight * (own[turn] - own[0])
            draw = float(torch.rand((), generator=generator, dtype=torch.float64))
            if settings.allocation == "fixed":
                branches = draw - rise <= settings.probability
            else:
                branches = (draw + rise) * max(0.0, 1.0 - STREAK * streak) >= settings.probability
            if branches:
                found.append((index, turn))
        streak = streak + 1 if len(found) > before else 0
    return found


class BranchingRecipe(AgentRecipe):
    """Episodes that branch; see the module."""

    config: BranchingConfig

    def draw_groups(self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams) -> list[list[Episode]]:
        """Run episodes from the start of each task, and branches until there are G."""
        settings, size = self.config.branching, self.config.trainer.samples_per_task
        seeds = streams.seeds(len(tasks), size).view(len(tasks), size).tolist()
        groups: list[list[Episode]] = [[] for _ in tasks]
        first = 1 if settings.allocation == "entropy" else settings.initial
        self._grow(policy, tasks, seeds, groups, [[None] * first for _ in tasks])
        entropies = self._entropies(policy, groups, [0] * len(tasks))
        if settings.allocation == "entropy":
            # without a valid first episode there is nothing to branch from
            starts = [initial_episodes(own[0], size) if own[0] else size for own in entropies]
            # the first episode is one of those at the start
            self._grow(policy, tasks, seeds, groups, [[None] * (count - 1) for count in starts])
            entropies = self._entropies(policy, groups, [0] * len(tasks))
        begun, number = [0] * len(tasks), 0
        while any(len(group) < size for group in groups):
            wanted: list[list[Fork | None]] = []
            for index, (group, own) in enumerate(zip(groups, entropies, strict=True)):
                slots, draws = size - len(group), streams.of(index, "branch", number)
                forks = choose_forks(own, slots, settings, draws) if slots else []
                # entropies are those of the episodes since `begun`, so the fork's place counts from there
                chosen = [Fork(group[begun[index] + place], turn) for place, turn in forks]
                # if no turn is chosen, the rest of the group begins at the start
                wanted.append([*chosen] if chosen else [None] * slots)
            begun, number = [len(group) for group in groups], number + 1
            self._grow(policy, tasks, seeds, groups, wanted)
            if any(len(group) < size for group in groups):
                entropies = self._entropies(policy, groups, begun)
        return groups

    def _grow(
        self,
        policy: VlmPolicy,
        tasks: Sequence[AgentTask],
        seeds: Sequence[Sequence[int]],
        groups: list[list[Episode]],
        wanted: Sequence[Sequence[Fork | None]],
    ) -> None:
        """Run further episodes of each task, which repeat a fork or nothing."""
        places = [(index, fork) for index, forks in enumerate(wanted) for fork in forks]
        if not places:
            return
        # a seed belongs to a place in the group, whether the episode there branches or not
        own = [seeds[index][len(groups[index]) + n] for index, forks in enumerate(wanted) for n in range(len(forks))]
        # all tasks in one call: their episodes run side by side
        drawn = self.draw(policy, [tasks[index] for index, _ in places], own, [fork for _, fork in places])
        for (index, fork), episode in zip(places, drawn, strict=True):
            if fork is not None:
                episode.parent = next(n for n, other in enumerate(groups[index]) if other is fork.source)
                episode.shared_turns = fork.turns
                if episode.prompt is not None:
                    episode.prompt = fork.source.prompt  # an equal one, so that the group reads it once
            groups[index].append(episode)

    def _entropies(
        self, policy: VlmPolicy, groups: Sequence[Sequence[Episode]], first: Sequence[int]
    ) -> list[list[list[float]]]:
        """Entropy at the beginning of each turn, of the episodes of each group from a place on; none without result."""
        new = [list(group[start:]) for group, start in zip(groups, first, strict=True)]
        # a group without any result cannot be packed
        valid = [own for own in ([episode for episode in group if episode.has_result] for group in new) if own]
        if not valid:
            return [[[] for _ in own] for own in new]
        rollouts = pack_groups(valid, policy)
        with stopwatch("score"):
            scored = self.scores_in_chunks(policy, rollouts, frozenset({"logp", "entropy"})).entropy
        assert scored is not None
        unit, known = math.log(len(policy.processor.tokenizer)), {}
        for row, episode in enumerate(AgentPayload.of(rollouts).episodes):
            # identity, as packing left out the episodes of other groups
            known[id(episode)] = _turn_entropies(scored[row].cpu(), episode, self.config.branching.tokens, unit)
        return [[known.get(id(episode), []) for episode in own] for own in new]

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Rewards as in every agent recipe, and what episodes share."""
        episodes = AgentPayload.of(rollouts).episodes
        group = rollouts.host.group.tolist()
        parent, shared = torch.zeros(2, len(episodes), dtype=torch.int64)
        for row, episode in enumerate(episodes):
            if episode.parent >= 0 and episode.has_result:
                # as a distance, which stays right where rows of several groups are joined
                parent[row] = row - group.index(group[row]) - episode.parent
                # the first decision of the first turn that the branch has for itself
                shared[row] = episode.trajectory.turn.index(episode.shared_turns)
        extras = {PARENT: to_device(parent, rollouts.mask.device), SHARED: to_device(shared, rollouts.mask.device)}
        return super().score(rollouts.replace(extras=rollouts.extras | extras), step)

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the fraction of episodes that branched."""
        branched = (rollouts.extras[SHARED] > 0).double()
        return super().step_metrics(rollouts) | {"episode/branched": row_metric(branched)}


def _turn_entropies(entropy: Tensor, episode: Episode, tokens: int, unit: float) -> list[float]:
    """Sum of the entropies (T,) of the first tokens of each turn, in units."""
    steps = episode.trajectory
    found: list[list[int]] = [[] for _ in range(steps.turns)]
    for index, (turn, sampled) in enumerate(zip(steps.turn, steps.sampled, strict=True)):
        if sampled and len(found[turn]) < tokens:
            found[turn].append(index)
    return [float(entropy[index].sum()) / unit for index in found]
