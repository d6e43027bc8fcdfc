"""Recorded episodes of the grid's expert, for `digirl.build`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.agents.environments.experts import NoisyExpert, run_expert, write_episodes
from mmrl.agents.environments.gym import GymEnvironment
from mmrl.agents.toy.grid import MISSION, MISSION_WITH_KEY, MOVES, GridWorld


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

    digirl: {path: runs/grid-experts, build: "mmrl.agents.toy.build:build_experts"}
    """
    env = NoisyExpert(GymEnvironment(GridWorld(**grid)), list(MOVES), mistakes, random.Random(first_seed))
    tasks = [{"name": name} for name in names] or [{}]
    episodes = [run_expert(env, tasks[number % len(tasks)], first_seed + number, format) for number in range(count)]
    write_episodes(episodes, Path(path), videos=0)
    return Path(path)


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random model that writes a move of `GridWorld` in three tokens; options of `build_tiny`."""
    from mmrl.vlm.toy.tiny_generic import build_tiny

    answers = [f"<action>{name}</action>" for name in MOVES]
    corpus = [MISSION, MISSION_WITH_KEY, "Walk. Answer with an action.", *answers]
    return build_tiny(path, corpus=corpus, tokens=("<action>", "</action>", *MOVES), **options)
