"""Layouts of grid worlds: cells, moves and shortest paths."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

TRIES = 5000
"""Layouts that are drawn before the rules count as impossible."""


class Cell(NamedTuple):
    """Row and column, from the upper left."""

    row: int
    column: int


MOVES: dict[str, Cell] = {"up": Cell(-1, 0), "down": Cell(1, 0), "left": Cell(0, -1), "right": Cell(0, 1)}


@dataclass(frozen=True)
class GridLayout:
    """The constants of an episode."""

    size: int
    start: Cell
    goal: Cell
    walls: frozenset[Cell] = frozenset()
    key: Cell | None = None
    """Cell of the key, without which the goal does not count; None where none is needed."""


@dataclass(frozen=True)
class GridState:
    """The state of an episode."""

    agent: Cell
    has_key: bool


@dataclass(frozen=True)
class LayoutRules:
    """Constraints on random layouts."""

    size: int
    walls: int
    key: bool
    min_distance: int
    max_distance: int | None


def move(layout: GridLayout, state: GridState, name: str) -> GridState:
    """The state after a move, key of `MOVES`: walls and edges block it, and the key is picked up."""
    step = MOVES[name]
    cell = Cell(state.agent.row + step.row, state.agent.column + step.column)
    inside = 0 <= cell.row < layout.size and 0 <= cell.column < layout.size
    if not inside or cell in layout.walls:
        return state
    return GridState(cell, state.has_key or cell == layout.key)


def reached(layout: GridLayout, state: GridState) -> bool:
    """Whether the agent is at the goal, with the key if there is one."""
    return state.agent == layout.goal and state.has_key


def first_state(layout: GridLayout) -> GridState:
    """The initial state; without a key in the layout the agent needs none."""
    return GridState(layout.start, layout.key is None)


def shortest_path(layout: GridLayout, state: GridState | None = None) -> list[str] | None:
    """The fewest moves to the goal, via the key where there is one; None where it cannot be reached."""
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
    """Draw a layout whose shortest path is as long as the rules require; None where none is found."""
    for _ in range(TRIES):
        cells = [Cell(*divmod(int(index), rules.size)) for index in generator.permutation(rules.size**2)]
        start, goal, key, *walls = cells[: 3 + rules.walls]
        layout = GridLayout(rules.size, start, goal, frozenset(walls), key if rules.key else None)
        path = shortest_path(layout)
        longest = rules.size**2 * 2 if rules.max_distance is None else rules.max_distance
        if path is not None and rules.min_distance <= len(path) <= longest:
            return layout
    return None


def _moves_to(state: GridState, came_from: dict[GridState, tuple[GridState, str] | None]) -> Iterator[str]:
    """The moves that led to a state, in reverse order."""
    step = came_from[state]
    while step is not None:
        before, name = step
        yield name
        step = came_from[before]
