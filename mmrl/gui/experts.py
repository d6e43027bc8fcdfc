"""Episodes of the scripted experts: what a warm start by cloning learns from, and films to look at.

with closing(WebTaskEnv()) as env:
    episode = expert_episode(env, {"name": "login", "seed": 3}, seed=3)
    episode.turns[0].observation.images[0], episode.turns[0].action.text
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.agents.actions import Action
from mmrl.agents.environment import Observation
from mmrl.agents.films import Film, write_films
from mmrl.gui.web_env import WebAgentEnv, WebTaskEnv

__all__ = ["ExpertEpisode", "ExpertTurn", "expert_episode", "write_expert_episodes"]


@dataclass(frozen=True)
class ExpertTurn:
    """What the expert saw and did."""

    observation: Observation
    """As an agent sees it, at the size of the model."""
    action: Action
    """Points in the environment's coordinate space; `text` is the answer in the format json of mmrl.agents.actions."""
    info: Mapping[str, Any]
    """What came of it."""


@dataclass(frozen=True)
class ExpertEpisode:
    """An episode of an expert."""

    task: Mapping[str, Any]
    """Complete: a reset with it and the seed begins the same episode."""
    seed: int
    instruction: str
    turns: tuple[ExpertTurn, ...]
    last: Observation
    reward: float
    success: bool

    def film(self) -> Film:
        """The episode as a film, each click drawn on the picture that it was made on."""
        film = Film(f"{self.task['name']}/{self.task['seed']}")
        for turn in self.turns:
            film.add(turn.observation, _caption(turn.action), turn.info)
        film.end(self.last, self.reward, self.success)
        return film


def expert_episode(env: WebTaskEnv, task: Mapping[str, Any], seed: int) -> ExpertEpisode:
    """Let the expert solve a task; it sees the page's state, and its actions are those of an agent.

    Args:
        env: the environment.
        task: as `WebTaskEnv` takes it.
        seed: of the episode.

    Returns:
        The episode; with disturbances and few steps it may end without success.

    Raises:
        BrowserFailure: the browser failed.
    """
    agent = WebAgentEnv(env)
    observation, info = agent.reset(task, seed)
    instruction, complete = observation.text, info["task"]
    turns: list[ExpertTurn] = []
    over, reward = False, 0.0
    while not over:
        name, arguments = env.expert_move()
        answer = json.dumps({"thoughts": "", "action": {"name": name, "arguments": arguments}}, ensure_ascii=False)
        action = Action(name, arguments, answer)
        after, reward, terminated, truncated, info = agent.step(action)
        turns.append(ExpertTurn(observation, action, info))
        observation, over = after, terminated or truncated
    return ExpertEpisode(complete, seed, instruction, tuple(turns), observation, reward, bool(info["success"]))


def write_expert_episodes(
    env: WebTaskEnv, folder: Path, count: int, seed: int = 0, films: int = 1
) -> list[ExpertEpisode]:
    """Record expert episodes: episodes.jsonl, a picture for each turn, and films.

    Args:
        env: the environment; its settings say which tasks.
        folder: where to; made where it is missing.
        count: episodes.
        seed: of the first one; each next one has the next number.
        films: of the first episodes.

    Returns:
        The episodes. A row of the file has task, seed, instruction, reward, success and turns, each with image, text,
        answer, name and arguments.
    """
    from PIL import Image

    (folder / "images").mkdir(parents=True, exist_ok=True)
    episodes = []
    with (folder / "episodes.jsonl").open("w", encoding="utf-8") as file:
        for number in range(seed, seed + count):
            episode = expert_episode(env, {}, number)
            turns = []
            for place, turn in enumerate(episode.turns):
                path = f"images/{number:06d}-{place:02d}.png"
                Image.fromarray(turn.observation.images[0]).save(folder / path)
                action = {"name": turn.action.name, "arguments": dict(turn.action.arguments)}
                turns.append({"image": path, "text": turn.observation.text, "answer": turn.action.text, **action})
            row = {"task": dict(episode.task), "seed": number, "instruction": episode.instruction}
            row |= {"reward": episode.reward, "success": episode.success, "turns": turns}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            episodes.append(episode)
    write_films(folder / "films", "expert", [episode.film() for episode in episodes[:films]], films)
    return episodes


def _caption(action: Action) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in action.arguments.items())
    return f"{action.name}({arguments})"
