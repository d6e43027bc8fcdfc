"""Recorded episodes of the grid's expert, for `digirl.build`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.agents.environments.experts import NoisyExpert, run_expert, write_episodes
from mmrl.agents.environments.gym import GymEnvironment
from mmrl.agents.toy.grid import MISSION, MISSION_WITH_KEY, MOVES, WORDS, Cell, GridWorld, cell_name

LARGEST_TEXT = 6
"""Cells a side of grids whose cells are one token each for a language model."""


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


def build_model(path: str | Path, *, family: str = "qwen2_5_vl", **options: Any) -> Path:
    """Build a tiny random model that writes a move of `GridWorld` in three tokens.

    Args:
        path: folder to write.
        family: of a model that sees images, or qwen3 for a language model, which reads the grid with `text`.
        options: of `build_tiny` or `build_tiny_generic`.
    """
    from mmrl.vlm.toy.tiny_generic import build_tiny, build_tiny_generic

    corpus = [
        MISSION,
        MISSION_WITH_KEY,
        "Walk. Answer with an action.",
        *(f"<action>{name}</action>" for name in MOVES),
    ]
    tokens = ("<action>", "</action>", *MOVES)
    if family != "qwen3":
        return build_tiny(path, family=family, corpus=corpus, tokens=tokens, **options)
    cells = [cell_name(Cell(row, column)) for row in range(LARGEST_TEXT) for column in range(LARGEST_TEXT)]
    return build_tiny_generic(path, corpus=[*corpus, " ".join(WORDS)], tokens=(*tokens, *cells), **options)
