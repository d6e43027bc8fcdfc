"""Episodes of an environment's own expert: demonstrations for a warm start by cloning, and videos.

env = GymEnvironment(GridWorld(min_distance=8))
episode = run_expert(env, {}, seed=3, format="tag")
episode.turns[0].observation.images[0], episode.turns[0].action.text
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.env_pool import EnvPool, TurnResult
from mmrl.agents.environments.environment import Action, Environment, Observation, as_outcome, as_start, write_answer
from mmrl.agents.environments.videos import Video, write_videos
from mmrl.files import replaced
from mmrl.workers.engine import WorkerFailure

MOST_TURNS = 1000


class ExpertFailedError(RuntimeError):
    """An expert's episode did not finish: its environment failed, or it took too long."""


class ExpertEnvironment(Environment, Protocol):
    """An environment that has an expert."""

    def expert(self) -> Action:
        """The next action towards solving the task; its text is not used."""
        ...


class RemoteExpert:
    """The environment and expert of a pool's first row; if they raise, hang or crash, this process is unaffected."""

    def __init__(self, pool: EnvPool) -> None:
        self._pool = pool

    def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        """Start an episode."""
        result = _checked(self._pool.reset({0: AgentTask("expert", task, seed)})[0])
        return result.observation, result.info

    def step(self, action: Action) -> Any:
        """Execute an action."""
        result = _checked(self._pool.step({0: action})[0])
        return result.observation, result.reward, result.terminated, result.truncated, result.info

    def expert(self) -> Action:
        """The action of the environment's expert."""
        move = self._pool.ask_expert(0)
        if isinstance(move, WorkerFailure):
            raise ExpertFailedError(f"{move.kind}: {move.reason}")
        return move

    def close(self) -> None:
        """Stop the episode."""
        self._pool.stop([0])


class NoisyExpert:
    """An environment whose expert takes a random action with probability `mistakes`."""

    def __init__(
        self, env: ExpertEnvironment, actions: Sequence[str], mistakes: float, generator: random.Random
    ) -> None:
        self._env = env
        self._actions = list(actions)
        self._mistakes = mistakes
        self._generator = generator
        # only `expert` is wrapped: a mistake is executed like any action
        self.reset = env.reset
        self.step = env.step
        self.close = env.close

    def expert(self) -> Action:
        """The expert's action, or a random one."""
        if self._generator.random() < self._mistakes:
            return Action(self._generator.choice(self._actions))
        return self._env.expert()


@dataclass(frozen=True)
class ExpertTurn:
    """Observation and action of an expert's turn."""

    observation: Observation
    action: Action
    """`text` is the response in the requested format."""
    info: Mapping[str, Any]
    """Info of the step."""


@dataclass(frozen=True)
class ExpertEpisode:
    """An episode of an expert."""

    task: Mapping[str, Any]
    """The task as filled in by the environment (`info["task"]`), or as given."""
    seed: int
    turns: tuple[ExpertTurn, ...]
    last: Observation
    reward: float
    success: bool

    @property
    def instruction(self) -> str:
        """Text of the first observation."""
        return self.turns[0].observation.text

    def video(self) -> Video:
        """The episode as a video, marks drawn on the image that the action was taken on."""
        video = Video(f"{self.task.get('name', 'task')}/{self.task.get('seed', self.seed)}")
        for turn in self.turns:
            video.add(turn.observation, str(turn.action), turn.info)
        video.end(self.last, self.reward, self.success)
        return video


def run_expert(
    env: ExpertEnvironment, task: Mapping[str, Any], seed: int, format: str | None = "json"
) -> ExpertEpisode:
    """Run the expert until the episode ends.

    Args:
        env: the environment, in this process.
        task: as its `reset` takes it.
        seed: of the episode.
        format: in which the answers are written; key of `mmrl.agents.environments.environment.FORMATS`. None leaves
            them unwritten.

    Returns:
        The episode; success is the last `info["success"]`, or else whether there was a reward.

    Raises:
        MalformedError: the environment returned no observation or outcome.
        ExpertFailedError: the episode did not end within 1000 turns.
    """
    observation, info = as_start(env.reset(task, seed))
    complete = info.get("task", task)
    turns: list[ExpertTurn] = []
    total = 0.0
    success: bool | None = None
    # an expert that runs in circles must not hang the recording
    for _ in range(MOST_TURNS):
        move = env.expert()
        action = move if format is None else replace(move, text=write_answer([move], format))
        outcome = as_outcome(env.step(action))
        turns.append(ExpertTurn(observation, action, outcome.info))
        observation, total = outcome.observation, total + outcome.reward
        # an environment may report success in some turns only
        success = outcome.info.get("success", success)
        if outcome.terminated or outcome.truncated:
            # environments without the entry count any reward as success
            succeeded = total > 0 if success is None else bool(success)
            return ExpertEpisode(complete, seed, tuple(turns), observation, total, succeeded)
    raise ExpertFailedError(
        f"the expert of {type(env).__name__} did not finish the episode of {dict(task)} within {MOST_TURNS} turns"
    )


def write_episodes(episodes: Sequence[ExpertEpisode], folder: Path, videos: int = 1) -> None:
    """Write episodes as a dataset: episodes.jsonl, the images of the turns, and videos.

    Args:
        episodes: a row each, with task, seed, instruction, reward, success and turns; a turn has images, text, answer,
            name and arguments.
        folder: where the files go.
        videos: number of successes and of failures that get a video.
    """
    from PIL import Image

    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, episode in enumerate(episodes):
        turns = []
        for index, turn in enumerate(episode.turns):
            names = [f"images/{number:06d}-{index:02d}-{each}.png" for each in range(len(turn.observation.images))]
            for name, image in zip(names, turn.observation.images, strict=True):
                Image.fromarray(image).save(folder / name)
            action = {"name": turn.action.name, "arguments": dict(turn.action.arguments)}
            turns.append({"images": names, "text": turn.observation.text, "answer": turn.action.text, **action})
        row = {"task": dict(episode.task), "seed": episode.seed, "instruction": episode.instruction}
        rows.append(row | {"reward": episode.reward, "success": episode.success, "turns": turns})
    with replaced(folder / "episodes.jsonl") as draft, draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_videos(folder / "videos", "expert", [episode.video() for episode in episodes], videos)


def _checked(result: TurnResult) -> TurnResult:
    if result.failure is not None:
        raise ExpertFailedError(f"{result.failure.kind}: {result.failure.reason}")
    return result
