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
metrics count fresh trajectories only; reward/mean is that of the groups as they are trained on. An answer without a
readable action ends the episode and is not evaluated; there it is, so that a solved screen is paid after it.

Every process holds the whole buffer: it is filled with what all processes found, in the order of the tasks. So a run in
several processes replays what a run in one would, wherever the next group of a task is sampled, and the first
process's checkpoint is complete. The buffer takes `replay.memory_mb` a process at most.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe, AgentRewardConfig
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.rollout.episodes import Episode, equal_prompts, pack_groups
from mmrl.agents.rollout.storage import Record, restore_episode, size_of, store_episode
from mmrl.core.blocks.divergence import k3
from mmrl.core.loss import Denominators, Metric, mean_metric
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import KEEPS_OLD, Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, from_all, merge_in_order
from mmrl.training.recipe import LossTerm, Passes, Step, TermLoss
from mmrl.vlm.engine.vlm_policy import VlmPolicy

CORRECTIONS = ("recompute", "behaviour")
Fresh = tuple[tuple[int, int], tuple[str, list[Record]]]
"""Draw and index of its task in the step, the key that it is stored under, and an episode."""
MEGABYTE = 10**6


@dataclass
class ReplayConfig:
    """Replay of successful trajectories."""

    enabled: bool = True
    """Whether to store and replay successes; false is plain GRPO over trajectories."""
    size: int = rare(bounded(8, at_least=1))
    """Maximum number of trajectories per task; the oldest is removed first."""
    threshold: float = rare(0.1)
    """A trajectory is stored if the sum of its environment rewards exceeds this."""
    max_std: float = rare(bounded(0.05, at_least=0))
    """Replay into a group only if the population standard deviation of its trajectories' rewards is below this."""
    max_mean: float = rare(0.2)
    """Replay into a group only if the mean of its trajectories' rewards is below this."""
    correction: str = rare(choice("recompute", CORRECTIONS))
    """Old log-probs of replayed trajectories. recompute: those of the policy before the update, so the ratio starts at
    1 and hides how stale they are; behaviour: those at sampling time, clipped as usual."""
    max_age: int | None = rare(bounded(None, at_least=1))
    """Number of steps after which a stored trajectory expires; null = never."""
    memory_mb: int = rare(bounded(4096, at_least=1))
    """Maximum size of the buffer in 10^6 bytes; every process has a copy. Beyond it, the oldest trajectories of all
    tasks are evicted."""


def needs_replay(outcomes: Sequence[float], max_std: float = 0.05, max_mean: float = 0.2) -> bool:
    """Whether a group should receive a stored trajectory: its rewards are low and barely differ.

    Args:
        outcomes: what each trajectory of the group earned from the environment, before a format reward; NaN for those
            without a result, which do not count.
        max_std: bound of the standard deviation of the population.
        max_mean: bound of the mean.

    Source: dvlab-research/ARPO verl/trainer/ray_trainer.py, apply_replay.
    """
    known = [outcome for outcome in outcomes if not math.isnan(outcome)]
    # both bounds: a group of equal failures has no gradient, a group of equal successes needs none
    return bool(known) and statistics.pstdev(known) < max_std and statistics.fmean(known) < max_mean


class ReplayBuffer:
    """Trajectories by task, first in, first out.

    Source: dvlab-research/ARPO verl/trainer/replay_buffer.py.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self._config = config
        self._stored: dict[str, deque[Record]] = {}
        self._added = 0
        self.counts: Counter[str] = Counter()
        """added, expired (by age) and evicted (by memory) so far; trajectories displaced by newer ones of the same task
        are not counted."""

    def __len__(self) -> int:
        """Trajectories that are stored."""
        return sum(map(len, self._stored.values()))

    @property
    def megabytes(self) -> float:
        """Size in 10^6 bytes."""
        return sum(entry["bytes"] for own in self._stored.values() for entry in own) / MEGABYTE

    def push(self, task: str, record: Record, step: int) -> None:
        """Store a trajectory."""
        # `maxlen` drops the oldest trajectory of the task
        own = self._stored.setdefault(task, deque(maxlen=self._config.size))
        own.append({"episode": record, "step": step, "number": self._added, "bytes": size_of(record)})
        self._added += 1
        self.counts["added"] += 1
        while self.megabytes > self._config.memory_mb:
            self._evict_oldest()

    def push_all(self, fresh: list[Fresh], step: int) -> None:
        """Store the trajectories of the last draw from all processes, in the order of their tasks in the step."""
        # If the step drew its tasks more than once, the list also has the episodes of earlier draws; a process may have
        # none of the last one.
        last = max(from_all(max((draw for (draw, _), _ in fresh), default=0)))
        for task, records in merge_in_order([entry for entry in fresh if entry[0][0] == last]):
            for record in records:
                self.push(task, record, step)
        fresh.clear()

    def draw(self, task: str, step: int, generator: torch.Generator) -> tuple[Record, int] | None:
        """Draw one of a task's trajectories uniformly, with its age in steps."""
        own = [entry for entry in self._stored.get(task, ()) if not self._is_old(entry, step)]
        if not own:
            return None
        entry = own[int(torch.randint(len(own), (), generator=generator))]
        return entry["episode"], step - entry["step"]

    def expire(self, step: int) -> None:
        """Drop the trajectories that are older than `max_age` at this step."""
        for task, own in list(self._stored.items()):
            while own and self._is_old(own[0], step):
                own.popleft()
                self.counts["expired"] += 1
            if not own:
                del self._stored[task]

    def stored(self, task: str, since: int = 0) -> list[Record]:
        """A task's trajectories from a given step on, oldest first."""
        return [entry["episode"] for entry in self._stored.get(task, ()) if entry["step"] >= since]

    def state_dict(self, tasks: Collection[str] | None = None) -> dict[str, Any]:
        """The contents, of all or some tasks, as tensors and plain data."""
        stored = {task: list(own) for task, own in self._stored.items() if tasks is None or task in tasks}
        return {"stored": stored, "added": self._added, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; if the buffer is smaller now, the newest trajectories stay."""
        self._stored = {task: deque(own, maxlen=self._config.size) for task, own in state["stored"].items()}
        self._added = int(state["added"])
        self.counts = Counter(state["counts"])
        while self.megabytes > self._config.memory_mb:
            self._evict_oldest()

    def _is_old(self, entry: dict[str, Any], step: int) -> bool:
        return self._config.max_age is not None and step - entry["step"] > self._config.max_age

    def _evict_oldest(self) -> None:
        # Each deque is in order of arrival, so the oldest trajectory of all is at the front of one of them.
        task = min((own[0]["number"], task) for task, own in self._stored.items() if own)[1]
        self._stored[task].popleft()
        if not self._stored[task]:
            del self._stored[task]
        self.counts["evicted"] += 1


REPLAYED = "replayed"
"""(B,) 1 for replayed rows."""
SAMPLED = "logp_sampled"
"""(B, T) log-probs in nats when the row was sampled."""


@dataclass
class ArpoConfig(AgentConfig):
    """An ARPO run."""

    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Replay of past successes."""
    reward: AgentRewardConfig = field(default_factory=lambda: AgentRewardConfig(format=0.5))
    """Reward of an episode; the public code subtracts 0.5 for a last response without an action."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="arpo"))
    """Objective that is optimised."""


class Replay(LossTerm):
    """Sets the old log-probs of replayed trajectories and logs fresh and replayed ones separately; adds no loss.

    Args:
        config: options of the replay.
        recomputes: whether the old log-probs of fresh trajectories are recomputed, before or during the update.
    """

    name = "replay"
    gradient = "never"

    def __init__(self, config: ReplayConfig, *, recomputes: bool) -> None:
        self.config = config
        self.recomputes = recomputes
        self.buffer = ReplayBuffer(config)
        self.seen: Counter[str] = Counter()
        """Groups of the step without success, replayed trajectories, and the sum of their ages."""

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Give replayed trajectories the old log-probs that `replay.correction` asks for."""
        replayed = rollouts.extras[REPLAYED]
        if self.config.correction == "behaviour":
            # Without KEEPS_OLD, `old_in_update` would set these to the current log-probs and hide the rows' age.
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
        """Log the ratios and the KL of fresh and replayed trajectories separately."""
        return TermLoss(metrics=source_metrics(minibatch, scores.logp))

    def metrics(self, rollouts: Rollouts, step: Step) -> dict[str, float]:
        """State of the buffer and of the replays."""
        seen = Counter(self.seen)
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
    scores_apart = False  # the successes of all tasks are stored

    def __init__(self, config: ArpoConfig) -> None:
        super().__init__(config)
        # created even if replay is off, since `added` and `rollout_state` refer to it
        self.replay = Replay(config.replay, recomputes=not self.keeps_sampled_logp)
        if config.replay.enabled:
            self.terms = [*self.terms, self.replay]
        self._fresh: list[Fresh] = []
        self.added |= {"fresh": self._fresh, "replayed": self.replay.seen}

    def rollout_state(self, tasks: Sequence[AgentTask]) -> Any:
        """The stored episodes of the tasks."""
        return self.replay.buffer.state_dict({task.id for task in tasks})

    def load_rollout_state(self, state: Any) -> None:
        """Restore `rollout_state`."""
        self.replay.buffer.load_state_dict(state)

    def rollout(self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams, step: Step) -> Rollouts:
        """Run G episodes of each task and replay a success in groups that have none."""
        settings = self.config.replay
        if not settings.enabled:
            return super().rollout(policy, tasks, streams, step)
        groups = self.run_groups(policy, tasks, streams, step)
        streams = streams.among(tasks, [group[0].task for group in groups])
        for place, own in zip(streams.places, groups, strict=True):
            # the environment's reward alone: a format penalty says nothing about success
            found = [store_episode(episode) for episode in own if episode.total > settings.threshold]
            # groups without a success too, which tell the last draw from earlier ones
            self._fresh.append(((streams.draw, place), (own[0].task.id, found)))
        # before anything is injected, which would change the outcomes
        low = sum(needs_replay([e.total for e in own], settings.max_std, settings.max_mean) for own in groups)
        injected = inject_successes(groups, self.replay.buffer, settings, step.number, streams)
        self.replay.seen.update(low=low, injected=len(injected), age=sum(age for _, age in injected.values()))
        rollouts = streams.noted(pack_groups(groups, policy))
        marks = [
            float(number in injected and injected[number][0] == slot)
            for number, own in enumerate(groups)
            for slot in range(len(own))
        ]
        replayed = torch.tensor(marks, device=rollouts.mask.device)
        # as sampled: fresh rows lose these log-probs to the old policy's, replayed ones to `correction`
        return rollouts.replace(extras=rollouts.extras | {REPLAYED: replayed, SAMPLED: rollouts.logp_old})

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Rewards as in every agent's recipe; then the fresh successes of all processes are stored."""
        if self.config.replay.enabled:
            # Only now, after `rollout` has drawn: a group must not replay a success of its own step.
            self.replay.buffer.expire(step.number)
            self.replay.buffer.push_all(self._fresh, step.number)
        return super().score(rollouts, step)


def inject_successes(
    groups: list[list[Episode]], buffer: ReplayBuffer, config: ReplayConfig, step: int, streams: Streams
) -> dict[int, tuple[int, int]]:
    """Replace an episode by a stored one in each group that needs it and whose task has one."""
    injected = {}
    for number, group in enumerate(groups):
        task = group[0].task
        if not needs_replay([episode.total for episode in group], config.max_std, config.max_mean):
            continue
        drawn = buffer.draw(task.id, step, streams.of(number, "replay"))
        if drawn is None:
            continue
        # An episode without a result is not trained on, so replacing it loses nothing.
        slot = next((index for index, episode in enumerate(group) if not episode.has_result), 0)
        group[slot] = _with_shared_prompt(restore_episode(drawn[0], task), group)
        injected[number] = slot, drawn[1]
    return injected


def source_metrics(rollouts: Rollouts, logp: Tensor) -> dict[str, Metric]:
    """Ratios and divergences of fresh and replayed rows separately, from current log-probs (B, T) in nats."""
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
    """Give the episode its group's prompt object if the two are equal, so that the prompt is encoded once."""
    for other in group:
        if other.prompt is not None and episode.prompt is not None and equal_prompts(other.prompt, episode.prompt):
            episode.prompt = other.prompt
            break
    return episode
