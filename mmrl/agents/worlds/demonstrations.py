"""Recorded episodes of the grid's expert, for `digirl.build`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.agents.experts import NoisyExpert, run_expert, write_episodes
from mmrl.agents.gym_env import GymEnvironment
from mmrl.agents.worlds.grid import GridWorld
from mmrl.agents.worlds.layouts import MOVES


def build_experts(
    path: str | Path,
    *,
    count: int = 200,
    first_seed: int = 2_000_000,
    mistakes: float = 0.0,
    names: Sequence[str] = (),
    format: str = "tag",
    **grid: Any,
) -> Path:
    """Record episodes of the grid's expert.

    digirl: {path: runs/grid-experts, build: "mmrl.agents.worlds.demonstrations:build_experts"}
    """
    env = NoisyExpert(GymEnvironment(GridWorld(**grid)), list(MOVES), mistakes, random.Random(first_seed))
    tasks = [{"name": name} for name in names] or [{}]
    episodes = [run_expert(env, tasks[number % len(tasks)], first_seed + number, format) for number in range(count)]
    write_episodes(episodes, Path(path), videos=0)
    return Path(path)
