"""Runs episodes of a policy in a simulator, with options for executed steps, action units and temporal ensembling.

Shapes: R rows, L of them running, K control steps of a chunk, D entries of an action.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from mmrl.core.payload import to_device
from mmrl.errors import RunError, UserError
from mmrl.fields import bounded, choice, rare
from robotics.episodes.handover import DelaySettings, Handover
from robotics.episodes.payload import EpisodePayload
from robotics.policies.base.action_policy import INPUT_SHAPES, PolicyInputs
from robotics.policies.base.action_statistics import ActionStatistics
from robotics.policies.base.action_tokens import RowGenerators
from robotics.sim.episodes import ChunkResult, EpisodeSpec, RobotObservation, RobotSim, begin_episodes

SCALES = ("none", "bounds_q99")


class TemporalEnsemble:
    """Averages the predictions of the last chunks for the current control step; a chunk is predicted at every step.

    The weight of the i-th oldest prediction is exp(-decay i), with i = 0 for the oldest. The oldest prediction counts
    most, and a small decay reacts slowly to new observations. The mean is not a decision of the policy and has no
    log-probability, so this is for evaluation only.

    Source: ACT, arXiv 2304.13705, section IV-B and algorithm 2; tonyzhaozh/act imitate_episodes.py (m = 0.01).
    """

    def __init__(self, rows: int, chunk: int, action_size: int, decay: float = 0.01) -> None:
        if min(rows, chunk, action_size) < 1:
            raise UserError(f"rows={rows}, chunk={chunk} and action_size={action_size} must be at least 1")
        self._decay = decay
        self._chunks = np.zeros((rows, chunk, chunk, action_size), np.float32)
        """[row, j] is the chunk from j control steps ago."""
        self._count = np.zeros(rows, np.int64)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Discard the chunks of rows whose episodes restart; None for all rows."""
        # counts alone: old chunks stay in memory but have no weight
        self._count[slice(None) if rows is None else np.asarray(rows, np.int64)] = 0

    def step(self, chunks: ArrayLike, rows: ArrayLike) -> NDArray[np.float32]:
        """Add the newest chunks (L, K, D) of rows (L,) and return the actions (L, D) of this control step."""
        index = np.asarray(rows, np.int64)
        size = self._chunks.shape[1]
        new = np.asarray(chunks, np.float32)
        if new.shape != (len(index), *self._chunks.shape[2:]):
            raise ValueError(f"chunks have the shape {new.shape}; expected {(len(index), *self._chunks.shape[2:])}")
        # the newest first; the K-th oldest chunk predicts nothing for the present and leaves
        self._chunks[index] = np.concatenate([new[:, None], self._chunks[index, :-1]], 1)
        self._count[index] = np.minimum(self._count[index] + 1, size)
        count = self._count[index][:, None]  # fewer than K chunks exist at the start of an episode
        age = np.arange(size)
        # the oldest prediction has age count - 1
        weight = np.where(age < count, np.exp(-self._decay * (count - 1 - age)), 0.0)
        predicted = self._chunks[index][:, age, age]  # a chunk of j steps ago predicts the current step as its entry j
        return ((weight[..., None] * predicted).sum(1) / weight.sum(1)[:, None]).astype(np.float32)


def swap_layouts(episodes: Sequence[EpisodeSpec]) -> dict[EpisodeSpec, EpisodeSpec]:
    """Assign each episode a different layout of its task, shifted by half the number of layouts."""
    by_task: dict[str, list[EpisodeSpec]] = {}
    for episode in dict.fromkeys(episodes):
        by_task.setdefault(episode.task, []).append(episode)
    swapped: dict[EpisodeSpec, EpisodeSpec] = {}
    for task, own in by_task.items():
        layouts = list(dict.fromkeys(episode.layout for episode in own))
        if len(layouts) < 2:
            raise UserError(f"evaluation.swapped needs two initial states of each task; {task} has {len(layouts)}")
        half = len(layouts) // 2
        # a shift and no shuffle: no layout is mapped to itself
        other = {layout: layouts[(index + half) % len(layouts)] for index, layout in enumerate(layouts)}
        swapped |= {episode: replace(episode, layout=other[episode.layout]) for episode in own}
    return swapped


class FirstImages:
    """First images of some episodes, shown instead of those of the episodes in the same rows."""

    def __init__(self, sim: RobotSim, episodes: Sequence[EpisodeSpec]) -> None:
        started = sim.reset(episodes)
        images, views = started.observation.images, started.observation.views
        if images is None:
            raise UserError(
                "evaluation.swapped needs images, but the simulator does not render any; set sim.image_size"
            )
        if started.failed.any():
            row = int(started.failed.argmax())
            why = started.reasons.get(row, "no reason given")
            raise RunError(f"the environment whose images should be shown did not start: {episodes[row]}: {why}")
        # copied: simulators reuse their buffers
        self._images = images.copy()
        self._views = None if views is None else views.copy()

    def replace_in(self, observation: RobotObservation) -> RobotObservation:
        """Replace the images in the observation of some rows, including its past."""
        images, views = (None if part is None else part[observation.rows] for part in (self._images, self._views))
        found = replace(observation, images=images, views=views)
        if observation.past_state is None:
            return found
        steps = observation.past_state.shape[1]
        # the shown scene does not move, so its past looks like its present
        past = [None if part is None else np.repeat(part[:, None], steps, 1) for part in (images, views)]
        return replace(found, past_images=past[0], past_views=past[1])


@dataclass
class ActingSettings:
    """How a policy's predictions become actions of the robot."""

    n_action_steps: int = rare(bounded(0, at_least=0))
    """Number of control steps of a chunk to execute before the next observation; 0 = all."""
    temperature: float = bounded(1.0, above=0)
    """Divides the logits of tokens, or multiplies the noise of flow steps and the standard deviation of Gaussians, in
    sampling and in all log-probabilities of the update."""
    ensemble: float = rare(bounded(0.0, at_least=0))
    """Greedy evaluation only: weight decay m of the temporal ensemble over overlapping chunks, with an observation at
    every control step; 0 = no ensemble."""
    scale: str = choice("none", SCALES)
    """none: the policy predicts the simulator's own -1..1; bounds_q99: it predicts normalised actions, which its
    statistics convert to the units of the cloned data (the simulator's units). Use the same value as in cloning."""


@dataclass
class Episodes:
    """B finished episodes."""

    payload: EpisodePayload
    """Observations and decisions; `episodes` has one entry per row."""
    logp: Tensor
    """(B, C, D) float32, log-probability of each decision when sampled; 0 if no decision was made."""
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    """(steps, A) executed actions of each row, in the simulator's -1..1."""
    rewards: list[NDArray[np.float32]] = field(default_factory=list)
    """(steps,) the environment's reward of each control step of each row; a failed row ends in NaN."""


def action_scale(policy: Any, settings: ActingSettings) -> ActionStatistics | None:
    """Statistics that convert a policy's actions to the simulator's; raises UserError if `scale` does not apply."""
    statistics: ActionStatistics | None = getattr(policy, "statistics", None)
    if settings.scale == "none":
        if statistics is not None:
            raise UserError(
                "acting.scale is 'none', but the policy predicts normalised actions: it was cloned with action "
                "statistics (action_statistics.json in its folder); set acting.scale=bounds_q99"
            )
        return None
    if getattr(policy, "action_range", None) is not None:
        raise UserError(
            f"acting.scale is '{settings.scale}', but model.options.action_low and action_high already bring the "
            "policy's actions to the simulator's -1..1; set acting.scale=none, or leave them out"
        )
    if statistics is None:
        raise UserError(
            f"acting.scale is '{settings.scale}', but the policy has no action statistics; cloning demonstrations "
            "with this setting creates them and stores them in its folder. Use 'none' for a policy with actions in "
            "-1..1"
        )
    if statistics.size != policy.action_size:
        raise UserError(
            f"the policy's action statistics have {statistics.size} entries, but its actions have {policy.action_size}"
        )
    return statistics


def sim_actions(actions: NDArray[np.float32], statistics: ActionStatistics | None) -> NDArray[np.float32]:
    """Convert a policy's actions (..., D) to the simulator's in -1..1, by the statistics of `action_scale`.

    Raises:
        RunError: an action is not finite.
    """
    if not np.isfinite(actions).all():
        raise RunError("the policy chose actions that are not finite")
    # a prediction beyond the quantiles may leave the range of the simulator
    return actions if statistics is None else statistics.unnormalise(actions).clip(-1, 1)


def inputs_of(observation: RobotObservation, episodes: Sequence[EpisodeSpec], device: torch.device) -> PolicyInputs:
    """Convert an observation of R rows to policy inputs; `episodes`, indexed by row, give the instructions."""
    parts = {name: getattr(observation, name) for name in INPUT_SHAPES}
    return PolicyInputs(
        # row numbers, not positions: episodes that have ended are missing from the observation
        instructions=tuple(episodes[row].instruction for row in observation.rows.tolist()),
        **{name: None if part is None else to_device(torch.from_numpy(part), device) for name, part in parts.items()},
    )


def run_episodes(
    policy: Any,
    sim: RobotSim,
    episodes: Sequence[EpisodeSpec],
    settings: ActingSettings,
    generator: torch.Generator | Sequence[int],
    *,
    greedy: bool = False,
    record: bool = False,
    images_of: Sequence[EpisodeSpec] = (),
    timed: bool = False,
    delay: DelaySettings | None = None,
) -> Episodes:
    """Run episodes to completion, as many at once as the simulator supports.

    Args:
        policy: an action policy, see `robotics.policies.base.action_policy`.
        sim: the simulator.
        episodes: B initial states.
        settings: how actions are executed.
        generator: for the policy's sampling: one seed per episode, or a generator that draws the seeds. Episodes do not
            depend on the other episodes running at the same time.
        greedy: take the most likely actions.
        record: render every control step.
        images_of: B episodes whose first images the policy is shown throughout, while the real ones are recorded.
            Empty: the policy sees the real images.
        timed: measure the time of each chunk, which differs between runs.
        delay: simulated inference delay, and the way from one chunk to the next. The executed actions are then not
            those of the recorded decisions, so this is for evaluation only.

    Returns:
        The episodes in the order given. Rows whose environment failed are marked and have no result.

    Raises:
        UserError: `settings.scale` does not fit the policy, see `action_scale`, or `delay` does not.
    """
    action_scale(policy, settings)  # checked before any episode runs
    overlap = delay if delay is not None and delay.active else None
    if overlap is not None:
        overlap.check(policy, settings.n_action_steps)
    size = sim.capacity or len(episodes)
    seeds: Sequence[int] = (
        torch.randint(2**62, (len(episodes),), generator=generator).tolist()
        if isinstance(generator, torch.Generator)
        else generator
    )
    # seeded before the waves, so the number of episodes at once changes nothing
    own = [torch.Generator().manual_seed(seed) for seed in seeds]
    waves = []
    for start in range(0, len(episodes), size):
        wave = slice(start, start + size)
        keep = (greedy, record, timed)
        waves.append(_run_wave(policy, sim, episodes[wave], settings, own[wave], *keep, images_of[wave], overlap))
    # The shapes of decisions are known only from a chunk, and a wave may have none if all of its episodes failed to
    # start; so the first chunk of any wave serves all of them.
    example = next((chunks[0] for recorder in waves for chunks in recorder.chunks if chunks), None)
    parts = [recorder.close(example) for recorder in waves]
    width = max(part.logp.shape[1] for part in parts)  # waves are padded to their own longest episodes
    return Episodes(
        payload=EpisodePayload.concat([part.payload for part in parts]),
        logp=torch.cat([nn.functional.pad(part.logp, (0, 0, 0, width - part.logp.shape[1])) for part in parts]),
        actions=[actions for part in parts for actions in part.actions],
        rewards=[rewards for part in parts for rewards in part.rewards],
    )


def replay_episode(
    sim: RobotSim, episode: EpisodeSpec, actions: NDArray[np.float32], chunk: int = 8
) -> tuple[NDArray[np.uint8], bool]:
    """Replay recorded actions (steps, A): frames (F, H, W, 3), empty without rendering, and success."""
    result = sim.reset([episode])
    frames: list[NDArray[np.uint8]] = [] if result.observation.images is None else [result.observation.images]
    success = False
    for start in range(0, len(actions), chunk):
        if not len(sim.live):
            break
        # frames of every step, although only the last observation is used elsewhere
        result = sim.step_chunk(actions[None, start : start + chunk], record=[0])
        frames += [result.frames[0]] if 0 in result.frames else []
        # a task that was solved once counts, also if it is undone later
        success |= bool(result.success[0])
    if result.failed[0]:
        raise RunError(f"the environment failed: {result.reasons.get(0, 'no reason given')}")
    return np.concatenate(frames) if frames else np.zeros((0, 0, 0, 3), np.uint8), success


def _run_wave(
    policy: Any,
    sim: RobotSim,
    episodes: Sequence[EpisodeSpec],
    settings: ActingSettings,
    generators: Sequence[torch.Generator],
    greedy: bool,
    record: bool,
    timed: bool,
    images_of: Sequence[EpisodeSpec],
    overlap: DelaySettings | None,
) -> _Recorder:
    """Run as many episodes as the simulator supports, chunk by chunk, until the last one ends.

    The policy only acts for live episodes: `observation.of(sim.live)` drops those that ended in the last round, and
    `recorder` adds the chunks of the live episodes to their rows.
    """
    weights = policy.parameters() if isinstance(policy, nn.Module) else iter(())
    # parameterless policies, such as scripted ones, act on the CPU
    device = next(weights, torch.zeros(0)).device
    shown = FirstImages(sim, images_of) if images_of else None
    started = begin_episodes(sim, episodes, getattr(policy, "past", 0))
    recorder = _Recorder(episodes, started, device)
    observation = started.observation
    ensemble = None
    if settings.ensemble and greedy:
        # one observation per control step: see the single action taken from it below
        ensemble = TemporalEnsemble(len(episodes), policy.chunk, policy.action_size, settings.ensemble)
    handover = None if overlap is None else Handover(overlap, settings.n_action_steps, len(episodes))
    statistics = action_scale(policy, settings)
    while len(sim.live):
        observation, began = observation.of(sim.live), time.perf_counter()
        # before the step, as the observation: a critic judges the state in which the decision was made
        full_state = sim.full_state() if hasattr(sim, "full_state") else None
        inputs = inputs_of(observation if shown is None else shown.replace_in(observation), episodes, device)
        # by row number, not by position: ended episodes must not shift the generators of the others
        draws = RowGenerators([generators[row] for row in sim.live])
        running = {} if handover is None else handover.previous(observation.rows)
        choice = policy.act(inputs, draws, temperature=settings.temperature, greedy=greedy, **running)
        # float32 on the host: simulators know neither the device nor the precision of the policy
        actions = choice.actions.float().cpu().numpy()
        if handover is not None:
            # in the units of the policy, as the chunk that it continues
            actions = handover.execute(actions, observation.rows)
        elif ensemble is None:
            # 0 becomes None: the whole chunk
            actions = actions[:, : settings.n_action_steps or None]
        else:
            # a chunk of one step (L, 1, D)
            actions = ensemble.step(actions, observation.rows)[:, None]
        actions = sim_actions(actions, statistics)
        result = sim.step_chunk(actions, record=sim.live.tolist() if record else ())
        seconds = time.perf_counter() - began if timed else None
        recorder.add(observation, choice, actions, result, full_state, seconds)
        observation = result.observation
    return recorder


class _Recorder:
    """Collects the chunks of episodes running at the same time, row by row."""

    def __init__(self, episodes: Sequence[EpisodeSpec], started: ChunkResult, device: torch.device) -> None:
        rows = range(len(episodes))
        self.episodes = list(episodes)
        self.started = started
        self.device = device
        self.chunks: list[list[dict[str, Any]]] = [[] for _ in rows]
        self.actions: list[list[NDArray[np.float32]]] = [[] for _ in rows]
        self.rewards: list[list[NDArray[np.float32]]] = [[] for _ in rows]
        self.frames: list[list[NDArray[np.uint8]]] = [[] for _ in rows]
        # the observation after the last chunk of each row; an episode that never starts keeps its first
        self.last = [_observed(started.observation, row) for row in rows]
        self.poses = [[] if started.object_poses is None else [started.object_poses[row]] for row in rows]
        self.success = np.zeros(len(episodes), bool)
        self.true_success = started.true_success
        self.terminated = np.zeros(len(episodes), bool)
        self.truncated = np.zeros(len(episodes), bool)
        self.failed = started.failed.copy()
        self.last_reward = np.zeros(len(episodes), np.float32)
        self.reasons = [started.reasons.get(row, "") for row in rows]

    def add(
        self,
        observation: RobotObservation,
        choice: Any,
        actions: NDArray[np.float32],
        result: ChunkResult,
        full_state: NDArray[np.float32] | None,
        seconds: float | None = None,
    ) -> None:
        """Add a chunk of the L live rows; `full_state` (L, F) is the state before the chunk, `seconds` its duration."""
        for index, row in enumerate(result.rows.tolist()):
            steps = int(result.steps[index])
            state, image, views = _observed(observation, index)
            # a chunk without an executed step has no reward: NaN, so that it cannot pass for a reward of 0
            rewards = result.rewards[index, :steps] if steps else np.array([np.nan])
            last, total = np.float32(rewards[-1]), np.float32(rewards.sum())
            chunk = {"state": state, "image": image, "steps": steps, "last_reward": last, "return": total}
            chunk |= {} if full_state is None else {"full": full_state[index]}
            # kept with every chunk, since nobody knows yet which one is the last
            chunk |= {} if result.full_state is None else {"last_full": result.full_state[index]}
            chunk |= {} if seconds is None else {"seconds": np.float32(seconds)}
            chunk |= {} if views is None else {"views": views}
            # decisions may live on the GPU until `close` stacks them
            self.chunks[row].append(chunk | {"decisions": choice.decisions[index], "logp": choice.logp[index]})
            self.actions[row].append(actions[index, :steps])
            self.rewards[row].append(result.rewards[index, :steps].astype(np.float32))
            if row in result.frames:
                self.frames[row].append(result.frames[row])
            if result.object_poses is not None:
                self.poses[row].append(result.object_poses[index])
            self.last[row] = _observed(result.observation, index)
            # once solved or ended, a row stays so
            self.success[row] |= bool(result.success[index])
            if self.true_success is not None and result.true_success is not None:
                self.true_success[row] |= bool(result.true_success[index])
            self.terminated[row] |= bool(result.terminated[index])
            self.truncated[row] |= bool(result.truncated[index])
            self.failed[row] |= bool(result.failed[index])
            self.last_reward[row] = last
            # a reason given earlier stays if this chunk has none
            self.reasons[row] = result.reasons.get(row, self.reasons[row])

    def close(self, example: dict[str, Any] | None) -> Episodes:
        """Stack the chunks of all rows, padded to the longest episode."""
        rows, first = range(len(self.episodes)), self.started.observation
        if example is None:  # no episode of any wave could start
            empty = torch.zeros(1)
            example = {"decisions": empty.long(), "logp": empty, "state": self.last[0][0]}
        states, images, views = zip(*self.last, strict=True)
        payload = EpisodePayload(
            episodes=self.episodes,
            states=self._stack("state", torch.from_numpy(example["state"])),
            decisions=self._stack("decisions", example["decisions"]),
            steps=self._stack("steps", torch.zeros((), dtype=torch.int64)),
            success=self._moved(self.success),
            true_success=None if self.true_success is None else self._moved(self.true_success),
            terminated=self._moved(self.terminated),
            truncated=self._moved(self.truncated),
            failed=self._moved(self.failed),
            last_reward=self._moved(self.last_reward),
            last_state=self._moved(np.stack(states)),
            images=None if first.images is None else self._stack("image", _black(first.images)),
            views=None if first.views is None else self._stack("views", _black(first.views)),
            last_image=None if first.images is None else self._moved(np.stack(images)),
            last_views=None if first.views is None else self._moved(np.stack(views)),
            frames=[self._frames_of(row) for row in rows] if any(self.frames) else [],
            full_states=self._stack("full", torch.from_numpy(example["full"])) if "full" in example else None,
            last_full_state=self._last_full_state(example) if "last_full" in example else None,
            seconds=self._stack("seconds", torch.zeros(())) if "seconds" in example else None,
            chunk_returns=self._stack("return", torch.zeros(())),
            chunk_last_rewards=self._stack("last_reward", torch.zeros(())),
            object_poses=[np.stack(poses) for poses in self.poses] if all(self.poses) else [],
            reasons=self.reasons,
            drawn=[self.started.drawn.get(row) for row in rows] if self.started.drawn else [],
        )
        actions = [np.concatenate(part) if part else np.zeros((0, 0), np.float32) for part in self.actions]
        rewards = [np.concatenate(part) if part else np.zeros(0, np.float32) for part in self.rewards]
        return Episodes(payload, self._stack("logp", example["logp"]).float(), actions, rewards)

    def _moved(self, values: NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(values), self.device)

    def _stack(self, name: str, example: Tensor) -> Tensor:
        """Values (B, C, ...) of all chunks, stacked on the device of the example."""
        width = max(1, *(len(chunks) for chunks in self.chunks))
        # padding rows are zeros; `steps` 0 marks them, and the mask follows from it
        out = torch.zeros((len(self.chunks), width, *example.shape), dtype=example.dtype, device=example.device)
        for row, chunks in enumerate(self.chunks):
            for number, chunk in enumerate(chunks):  # rows of ended episodes stay zero
                out[row, number] = torch.as_tensor(chunk[name])
        return to_device(out, self.device)

    def _last_full_state(self, example: dict[str, Any]) -> Tensor:
        """Full states (B, F) at the end of each row; zeros for rows that did not start."""
        blank = {"last_full": np.zeros_like(example["last_full"])}
        return self._moved(np.stack([(chunks or [blank])[-1]["last_full"] for chunks in self.chunks]))

    def _frames_of(self, row: int) -> NDArray[np.uint8] | None:
        if not self.frames[row] or self.started.observation.images is None:
            return None
        # the simulator records the frame after each step, so the first observation is put in front
        return np.concatenate([self.chunks[row][0]["image"][None], *self.frames[row]])


def _observed(
    observation: RobotObservation, index: int
) -> tuple[NDArray[np.float32], NDArray[np.uint8] | None, NDArray[np.uint8] | None]:
    """State, image and further views of a row."""
    images, views = (None if part is None else part[index] for part in (observation.images, observation.views))
    return observation.state[index], images, views


def _black(images: NDArray[np.uint8]) -> Tensor:
    return torch.zeros(images.shape[1:], dtype=torch.uint8)
