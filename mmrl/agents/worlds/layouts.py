"""Layouts of grid worlds: where everything stands, what a move does, and the shortest way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

TRIES = 5000
"""Layouts that are drawn before the rules are found to be impossible."""


class Cell(NamedTuple):
    """Row and column, from the upper left."""

    row: int
    column: int


MOVES: dict[str, Cell] = {"up": Cell(-1, 0), "down": Cell(1, 0), "left": Cell(0, -1), "right": Cell(0, 1)}


@dataclass(frozen=True)
class GridLayout:
    """What does not change in an episode."""

    size: int
    start: Cell
    goal: Cell
    walls: frozenset[Cell] = frozenset()
    key: Cell | None = None
    """Where the key lies, without which the goal is not reached; None where none is needed."""


@dataclass(frozen=True)
class GridState:
    """What changes."""

    agent: Cell
    has_key: bool


@dataclass(frozen=True)
class LayoutRules:
    """What layouts are drawn from."""

    size: int
    walls: int
    key: bool
    min_distance: int
    max_distance: int | None


def move(layout: GridLayout, state: GridState, name: str) -> GridState:
    """Take a step; one against a wall or the edge changes nothing, one onto the key picks it up.

    Args:
        layout: of the world.
        state: now.
        name: key of `MOVES`.

    Returns:
        The state afterwards.
    """
    step = MOVES[name]
    cell = Cell(state.agent.row + step.row, state.agent.column + step.column)
    inside = 0 <= cell.row < layout.size and 0 <= cell.column < layout.size
    if not inside or cell in layout.walls:
        return state
    return GridState(cell, state.has_key or cell == layout.key)


def reached(layout: GridLayout, state: GridState) -> bool:
    """Whether the agent stands on the goal with all that it needs."""
    return state.agent == layout.goal and state.has_key


def first_state(layout: GridLayout) -> GridState:
    """The state at the beginning; without a key in the layout the agent needs none."""
    return GridState(layout.start, layout.key is None)


def shortest_path(layout: GridLayout, state: GridState | None = None) -> list[str] | None:
    """The fewest moves to the goal, by way of the key where there is one."""
    begin = first_state(layout) if state is None else state
    came_from: dict[GridState, tuple[GridState, str] | None] = {begin: None}
    queue = deque([begin])
    while queue:
        here = queue.popleft()
        if reached(layout, here):
            return list(_moves_to(here, came_from))[::-1]
        for name in MOVES:
            there = move(layout, here, name)
            if there not in came_from:
                came_from[there] = (here, name)
                queue.append(there)
    return None


def draw_layout(rules: LayoutRules, generator: np.random.Generator) -> GridLayout | None:
    """Draw a layout whose shortest way is as long as the rules ask for."""
    for _ in range(TRIES):
        cells = [Cell(*divmod(int(place), rules.size)) for place in generator.permutation(rules.size**2)]
        start, goal, key, *walls = cells[: 3 + rules.walls]
        layout = GridLayout(rules.size, start, goal, frozenset(walls), key if rules.key else None)
        path = shortest_path(layout)
        longest = rules.size**2 * 2 if rules.max_distance is None else rules.max_distance
        if path is not None and rules.min_distance <= len(path) <= longest:
            return layout
    return None


def _moves_to(state: GridState, came_from: dict[GridState, tuple[GridState, str] | None]) -> Iterator[str]:
    """The moves that led to a state, the last one first."""
    step = came_from[state]
    while step is not None:
        before, name = step
        yield name
        step = came_from[before]
