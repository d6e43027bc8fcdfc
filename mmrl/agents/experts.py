"""Episodes of an environment's own expert: what a warm start by cloning learns from, and films to look at.

env = GymEnvironment(PictureGrid(min_distance=8))
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

from mmrl.agents.actions import Action, write_answer
from mmrl.agents.env_pool import EnvPool, TurnResult
from mmrl.agents.environment import Environment, Observation, as_outcome, as_start
from mmrl.agents.films import Film, write_films
from mmrl.agents.tasks import AgentTask
from mmrl.files import replaced
from mmrl.workers.failures import WorkerFailure

MOST_TURNS = 1000


class ExpertFailedError(RuntimeError):
    """An expert's episode has no end: its environment failed, or it went on for too long."""


class ExpertEnvironment(Environment, Protocol):
    """An environment that knows what to do."""

    def expert(self) -> Action:
        """What solves the task from here on; its text is not used."""
        ...


class RemoteExpert:
    """The environment and expert of a pool's first row, which may raise, hang or die without harm to this process."""

    def __init__(self, pool: EnvPool) -> None:
        self._pool = pool

    def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        """Begin an episode."""
        result = _sound(self._pool.reset({0: AgentTask("expert", task, seed)})[0])
        return result.observation, result.info

    def step(self, action: Action) -> Any:
        """Execute an action."""
        result = _sound(self._pool.step({0: action})[0])
        return result.observation, result.reward, result.terminated, result.truncated, result.info

    def expert(self) -> Action:
        """What the environment's expert would do."""
        move = self._pool.ask_expert(0)
        if isinstance(move, WorkerFailure):
            raise ExpertFailedError(f"{move.kind}: {move.reason}")
        return move

    def close(self) -> None:
        """Give up the episode."""
        self._pool.stop([0])


class CarelessExpert:
    """An environment whose expert errs: now and then it takes any of some actions."""

    def __init__(
        self, env: ExpertEnvironment, actions: Sequence[str], mistakes: float, generator: random.Random
    ) -> None:
        self._env, self._actions, self._mistakes, self._generator = env, list(actions), mistakes, generator

    def expert(self) -> Action:
        """The expert's move, or any."""
        if self._generator.random() < self._mistakes:
            return Action(self._generator.choice(self._actions))
        return self._env.expert()

    def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        """As in the environment."""
        return self._env.reset(task, seed)

    def step(self, action: Action) -> Any:
        """As in the environment."""
        return self._env.step(action)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


@dataclass(frozen=True)
class ExpertTurn:
    """What the expert saw and did."""

    observation: Observation
    """As an agent sees it."""
    action: Action
    """`text` is the answer in the format that was asked for."""
    info: Mapping[str, Any]
    """What came of it."""


@dataclass(frozen=True)
class ExpertEpisode:
    """An episode of an expert."""

    task: Mapping[str, Any]
    """As the environment completed it (`info["task"]`), or as it was given."""
    seed: int
    turns: tuple[ExpertTurn, ...]
    last: Observation
    reward: float
    success: bool

    @property
    def instruction(self) -> str:
        """Text of the first observation."""
        return self.turns[0].observation.text

    def film(self) -> Film:
        """The episode as a film, its marks drawn on the picture that they were made on."""
        film = Film(f"{self.task.get('name', 'task')}/{self.task.get('seed', self.seed)}")
        for turn in self.turns:
            arguments = ", ".join(f"{name}={value!r}" for name, value in turn.action.arguments.items())
            film.add(turn.observation, f"{turn.action.name}({arguments})", turn.info)
        film.end(self.last, self.reward, self.success)
        return film


def run_expert(env: ExpertEnvironment, task: Mapping[str, Any], seed: int, format: str = "json") -> ExpertEpisode:
    """Let the expert act until the episode is over.

    Args:
        env: the environment, in this process.
        task: as its `reset` takes it.
        seed: of the episode.
        format: in which the answers are written; key of `mmrl.agents.actions.FORMATS`.

    Returns:
        The episode; success is what `info["success"]` says at the end, or else whether there was a reward.

    Raises:
        MalformedError: what the environment returned is no observation or outcome.
        ExpertFailedError: the episode did not end within 1000 turns.
    """
    observation, info = as_start(env.reset(task, seed))
    complete = info.get("task", task)
    turns: list[ExpertTurn] = []
    total = 0.0
    for _ in range(MOST_TURNS):
        move = env.expert()
        action = replace(move, text=write_answer([move], format))
        outcome = as_outcome(env.step(action))
        turns.append(ExpertTurn(observation, action, outcome.info))
        observation, total = outcome.observation, total + outcome.reward
        if outcome.terminated or outcome.truncated:
            success = bool(outcome.info.get("success", total > 0))
            return ExpertEpisode(complete, seed, tuple(turns), observation, total, success)
    raise ExpertFailedError(
        f"the expert of {type(env).__name__} did not end the episode of {dict(task)} in {MOST_TURNS} turns"
    )


def _sound(result: TurnResult) -> TurnResult:
    if result.failure is not None:
        raise ExpertFailedError(f"{result.failure.kind}: {result.failure.reason}")
    return result


def write_episodes(episodes: Sequence[ExpertEpisode], folder: Path, films: int = 1) -> None:
    """Write episodes as a data set: episodes.jsonl, a picture for each turn that shows one, and films.

    A row has task, seed, instruction, reward, success and turns, each with images, text, answer, name and arguments.
    """
    from PIL import Image

    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, episode in enumerate(episodes):
        turns = []
        for place, turn in enumerate(episode.turns):
            names = [f"images/{number:06d}-{place:02d}-{each}.png" for each in range(len(turn.observation.images))]
            for name, image in zip(names, turn.observation.images, strict=True):
                Image.fromarray(image).save(folder / name)
            action = {"name": turn.action.name, "arguments": dict(turn.action.arguments)}
            turns.append({"images": names, "text": turn.observation.text, "answer": turn.action.text, **action})
        row = {"task": dict(episode.task), "seed": episode.seed, "instruction": episode.instruction}
        rows.append(row | {"reward": episode.reward, "success": episode.success, "turns": turns})
    with replaced(folder / "episodes.jsonl") as draft, draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_films(folder / "films", "expert", [episode.film() for episode in episodes], films)
