"""ARPO for GUI agents, Agentic Replay Policy Optimization (public code dvlab-research/ARPO).

GRPO over whole trajectories, for tasks with one reward at the end. Where the trajectories of a group all earn little
(`needs_replay`), one of them is replaced by a success that the task had in an earlier step, so that the group has a
gradient again; afterwards every fresh trajectory that earned more than `replay.threshold` is stored. With e what the
environment gave and f = -1 where the last answer had no action that could be read:

    r = e + 0.5 f        A = (r - mean_g r) / (std_g r + 1e-6)        clip 0.2 / 0.3, dual clip 3, no KL

Differences from the public code: `replay.enabled` switches the replay off (there an option of that name is not read);
in a group with a broken environment its slot is the one that is filled, otherwise slot 0; an episode that does not fit
into the model is dropped and counted instead of cut; only tokens that the agent sampled are trained, the end of a turn
among them but not the header of its role. `replay.correction: behaviour` and `replay.max_age` are additions: with
`recompute`, as in the public code, the ratio of a replayed trajectory begins at 1 however old it is. The episode
metrics count fresh trajectories only; reward/mean is that of the groups as they are trained on.

Every process holds the whole buffer: it is filled with what all processes found, in the order of the tasks. So a run in
several processes replays what a run in one would, wherever the next group of a task is sampled, and the first
process's checkpoint is complete. The buffer takes `replay.memory_mb` a process at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn

from mmrl.agents.episode import Episode
from mmrl.agents.payload import pack_groups
from mmrl.agents.recipe import AgentConfig, AgentRecipe, AgentRewardConfig
from mmrl.agents.replay import ReplayBuffer, ReplayConfig, needs_replay
from mmrl.agents.stored import Record, restore_episode, store_episode
from mmrl.agents.tasks import AgentTask
from mmrl.core.aggregation import Denominators
from mmrl.core.metrics import Metric, mean_metric
from mmrl.core.objective import PolicyOutputs
from mmrl.core.regularizers import k3
from mmrl.core.rollouts import Rollouts
from mmrl.training.loop.distributed import sum_over_processes
from mmrl.training.loop.objectives import ObjectiveConfig
from mmrl.training.loop.passes import KEEPS_OLD
from mmrl.training.loop.seeds import make_generator
from mmrl.training.loop.terms import LossTerm, Passes, Step, TermLoss
from mmrl.vlm.payload import Prompt
from mmrl.vlm.policy import VlmPolicy

REPLAYED = "replayed"
"""(B,) 1 where a row was replayed."""
SAMPLED = "logp_sampled"
"""(B, T) log-probs in nats when the row was sampled."""


@dataclass
class ArpoConfig(AgentConfig):
    """An ARPO run."""

    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Replay of past successes."""
    reward: AgentRewardConfig = field(default_factory=lambda: AgentRewardConfig(format=0.5))
    """What an episode is worth; the public code takes off 0.5 for a last answer without action."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="arpo"))
    """What is optimised."""


class Replay(LossTerm):
    """Old log-probs of replayed trajectories, and metrics of fresh and replayed ones apart; adds nothing to the loss.

    Args:
        config: options of the replay.
        recomputes: whether the old log-probs of fresh trajectories are computed anew, before or in the update.
    """

    name = "replay"
    gradient = "never"

    def __init__(self, config: ReplayConfig, *, recomputes: bool) -> None:
        self.config, self.recomputes = config, recomputes
        self.buffer = ReplayBuffer(config)
        self.seen: Counter[str] = Counter()
        """Groups of the step without success, replayed trajectories, and the sum of their ages."""

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Give replayed trajectories the old log-probs that `replay.correction` asks for."""
        replayed = rollouts.extras[REPLAYED]
        if self.config.correction == "behaviour":
            logp_old = torch.where(replayed[:, None] > 0, rollouts.extras[SAMPLED], rollouts.logp_old)
            return rollouts.replace(logp_old=logp_old, extras=rollouts.extras | {KEEPS_OLD: replayed})
        rows = torch.nonzero(replayed > 0).flatten()
        if self.recomputes or not len(rows):
            return rollouts
        # trajectories that were sampled long ago were not sampled by the old policy
        logp = passes.scores(rollouts.select(rows), frozenset({"logp"})).logp
        return rollouts.replace(logp_old=rollouts.logp_old.index_copy(0, rows, logp.to(rollouts.logp_old.dtype)))

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """Ratios of fresh and of replayed trajectories apart."""
        return TermLoss(metrics=source_metrics(minibatch, scores.logp))

    def metrics(self, rollouts: Rollouts, step: Step) -> dict[str, float]:
        """The buffer and what was replayed."""
        seen = sum_over_processes(self.seen)
        self.seen.clear()
        injected = seen.get("injected", 0)
        found = {f"replay/{name}": float(self.buffer.counts[name]) for name in ("added", "expired", "evicted")}
        if injected:
            found["replay/age"] = seen["age"] / injected
        return found | {
            "replay/groups_without_success": float(seen.get("low", 0)),
            "replay/injected": float(injected),
            "replay/stored": float(len(self.buffer)),
            "replay/memory_mb": self.buffer.megabytes,
        }

    def formula(self) -> str:
        """The rule of the replay."""
        replay = self.config
        return (
            f"  replay: one of the last {replay.size} successes (> {replay.threshold:g}) of the task, in groups whose "
            f"returns have a deviation below {replay.max_std:g} and a mean below {replay.max_mean:g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The buffer."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.buffer.load_state_dict(state)


class ArpoRecipe(AgentRecipe):
    """Trajectory GRPO with replay; see the module."""

    config: ArpoConfig

    def __init__(self, config: ArpoConfig) -> None:
        super().__init__(config)
        self.replay = Replay(config.replay, recomputes=config.trainer.old_logp == "recompute")
        self.terms = [self.replay] if config.replay.enabled else []
        self._fresh: list[tuple[int, str, Record]] = []

    def rollout(
        self, policy: VlmPolicy, tasks: Sequence[AgentTask], generator: torch.Generator, step: Step
    ) -> Rollouts:
        """Run G episodes of each task and replay a success in groups that have none."""
        settings = self.config.replay
        if not settings.enabled:
            return super().rollout(policy, tasks, generator, step)
        groups = self.run_groups(policy, tasks, step)
        self._fresh = [
            (number, episode.task.id, store_episode(episode))
            for number, own in enumerate(groups)
            for episode in own
            if episode.total > settings.threshold
        ]
        low = sum(needs_replay([e.total for e in own], settings.max_std, settings.max_mean) for own in groups)
        injected = inject_successes(groups, self.replay.buffer, settings, step.number, self.config.seed)
        self.replay.seen.update(low=low, injected=len(injected), age=sum(age for _, age in injected.values()))
        rollouts = pack_groups(groups, policy)
        marks = [
            float(number in injected and injected[number][0] == slot)
            for number, own in enumerate(groups)
            for slot in range(len(own))
        ]
        replayed = torch.tensor(marks, device=rollouts.mask.device)
        return rollouts.replace(extras=rollouts.extras | {REPLAYED: replayed, SAMPLED: rollouts.logp_old})

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Rewards as in every agent's recipe; then the fresh successes of all processes are stored."""
        if self.config.replay.enabled:
            self._store_fresh(step)
        return super().score(rollouts, step)

    def _store_fresh(self, step: Step) -> None:
        """Store the successes of this step on all processes, in the order of the tasks."""
        rank = PartialState().process_index
        mine = [(number, rank, task, record) for number, task, record in self._fresh]
        found = mine if PartialState().num_processes == 1 else list(gather_object(mine))
        self._fresh = []
        self.replay.buffer.expire(step.number)
        for _, _, task, record in sorted(found, key=lambda entry: entry[:2]):
            self.replay.buffer.push(task, record, step.number)


def inject_successes(
    groups: list[list[Episode]], buffer: ReplayBuffer, config: ReplayConfig, step: int, seed: int
) -> dict[int, tuple[int, int]]:
    """Replace an episode by a stored one in each group that needs it and whose task has one."""
    injected, times = {}, Counter[str]()
    for number, group in enumerate(groups):
        task = group[0].task
        times[task.id] += 1
        if not needs_replay([episode.total for episode in group], config.max_std, config.max_mean):
            continue
        drawn = buffer.draw(task.id, step, make_generator(seed, "replay", step, task.id, times[task.id]))
        if drawn is None:
            continue
        slot = next((place for place, episode in enumerate(group) if not episode.has_result), 0)
        group[slot] = _with_shared_prompt(restore_episode(drawn[0], task), group)
        injected[number] = slot, drawn[1]
    return injected


def source_metrics(rollouts: Rollouts, logp: Tensor) -> dict[str, Metric]:
    """Ratios and distances of fresh and of replayed rows apart.

    Args:
        rollouts: rows with `logp_old` as the loss uses it, and the extras "replayed" and "logp_sampled".
        logp: (B, T) nats, now.
    """
    logp, replayed = logp.detach(), rollouts.extras[REPLAYED][:, None] > 0
    moved = logp - rollouts.extras[SAMPLED]
    values = {
        "ratio": (logp - rollouts.logp_old).exp(),
        "log_ratio": moved,
        "kl": k3(rollouts.extras[SAMPLED], logp),
    }
    found: dict[str, Metric] = {}
    for source, rows in (("fresh", ~replayed), ("replayed", replayed)):
        mask = rollouts.loss_mask * rows
        if bool(mask.any()):
            found |= {f"replay/{name}/{source}": mean_metric(value, mask) for name, value in values.items()}
    return found


def _with_shared_prompt(episode: Episode, group: Sequence[Episode]) -> Episode:
    """Give the episode its group's prompt object where both are equal, so that it is computed once."""
    for other in group:
        if other.prompt is not None and episode.prompt is not None and _equal(other.prompt, episode.prompt):
            episode.prompt = other.prompt
            break
    return episode


def _equal(one: Prompt, other: Prompt) -> bool:
    if not torch.equal(one.input_ids, other.input_ids):
        return False
    for name in ("pixel_values", "pixel_values_videos"):
        mine, its = getattr(one, name), getattr(other, name)
        if (mine is None) != (its is None) or (mine is not None and not torch.equal(mine.cpu(), its.cpu())):
            return False
    return True
