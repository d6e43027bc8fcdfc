"""A grid that the agent sees as an image: walk to the goal around walls, possibly after fetching a key.

The reward is 1 at the goal and 0 before. The image shows the whole state: the agent as a blue disc, the goal as a green
square, walls dark, the key as a yellow diamond, and once the agent has it a yellow dot on the disc. A cell of 28 pixels
is one token of vision models that merge 2 x 2 patches of 14.

With `text` it is written instead, for language models: the cells of the agent, the goal, the key and the walls.

With `winds` success may be luck: in tasks of some names a wind moves the agent towards the goal.

Importing this module registers the grid: gymnasium.make("mmrl.agents.toy.grid:mmrl/GridWorld-v0", size=5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text
from numpy.typing import NDArray

from mmrl.errors import UserError

if TYPE_CHECKING:
    import numpy as np


TRIES = 5000
"""Number of layouts to draw before the rules are considered impossible."""


class Cell(NamedTuple):
    """Row and column, from the upper left."""

    row: int
    column: int


MOVES: dict[str, Cell] = {"up": Cell(-1, 0), "down": Cell(1, 0), "left": Cell(0, -1), "right": Cell(0, 1)}


@dataclass(frozen=True)
class GridLayout:
    """The fixed layout of an episode."""

    size: int
    start: Cell
    goal: Cell
    walls: frozenset[Cell] = frozenset()
    key: Cell | None = None
    """Cell of the key, without which the goal does not count; None if no key is needed."""


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
    """The fewest moves to the goal, through the key if there is one; None if the goal is unreachable."""
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
    """Draw a layout whose shortest path is as long as the rules require; None if none is found."""
    for _ in range(TRIES):
        cells = [Cell(*divmod(int(index), rules.size)) for index in generator.permutation(rules.size**2)]
        start, goal, key, *walls = cells[: 3 + rules.walls]
        layout = GridLayout(rules.size, start, goal, frozenset(walls), key if rules.key else None)
        path = shortest_path(layout)
        longest = rules.size**2 * 2 if rules.max_distance is None else rules.max_distance
        if path is not None and rules.min_distance <= len(path) <= longest:
            return layout
    return None


def describe(layout: GridLayout, state: GridState) -> str:
    """The state in words, such as `agent c3 goal a1 wall b1`: a letter for the row, a number for the column."""
    parts = [("agent", state.agent), ("goal", layout.goal)]
    parts += [("key", layout.key)] if layout.key is not None and not state.has_key else []
    parts += [("wall", wall) for wall in sorted(layout.walls)]
    return " ".join(f"{name} {cell_name(cell)}" for name, cell in parts)


def cell_name(cell: Cell) -> str:
    """The name of a cell in texts: `a0` is the upper left one."""
    return f"{LETTERS[cell.row]}{cell.column}"


def _moves_to(state: GridState, came_from: dict[GridState, tuple[GridState, str] | None]) -> Iterator[str]:
    """The moves that led to a state, in reverse order."""
    step = came_from[state]
    while step is not None:
        before, name = step
        yield name
        step = came_from[before]


MISSION = "Go to the green square."
MISSION_WITH_KEY = "Fetch the yellow key, then go to the green square."
WINDY = " It is windy."
WORDS = ("agent", "goal", "key", "wall")
"""Names in `describe`."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COLOURS = {
    "floor": (244, 244, 240),
    "line": (205, 205, 205),
    "wall": (70, 70, 80),
    "goal": (50, 165, 75),
    "key": (240, 190, 30),
    "agent": (45, 90, 210),
}
LARGEST_SIDE = 4096
"""Pixels of the image."""


class GridWorld(gymnasium.Env[dict[str, Any], Any]):
    """A square grid whose layout is drawn from the seed at every reset.

    Args:
        size: cells a side.
        cell: pixels a side of a cell.
        walls: cells that cannot be entered.
        key: whether the agent has to fetch a key before the goal counts.
        min_distance: minimum length of the shortest path; from 8 on, credit over time matters.
        max_distance: maximum length of the shortest path; None for any.
        max_steps: moves after which the episode is truncated.
        winds: by task name, the fraction of moves in which the wind moves the agent along a shortest path instead. The
            mission mentions the wind, the image does not show it. None for a world without.
        text: whether the observation is the state in words instead of mission and image.
        render_mode: only rgb_array, the image of the observation.

    Raises:
        UserError: a number is out of range, or no layout is like that.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["rgb_array"],
        "render_fps": 4,
        "action_names": list(MOVES),
    }

    def __init__(
        self,
        size: int = 5,
        cell: int = 28,
        walls: int = 0,
        key: bool = False,
        min_distance: int = 1,
        max_distance: int | None = None,
        max_steps: int = 12,
        winds: Mapping[str, float] | None = None,
        text: bool = False,
        render_mode: str | None = None,
    ) -> None:
        _check(size, cell, walls, max_steps, winds or {}, text)
        self._rules = LayoutRules(size, walls, key, min_distance, max_distance)
        self._cell, self._max_steps, self.render_mode = cell, max_steps, render_mode
        self._winds, self._wind = dict(winds or {}), 0.0
        self.action_space = Discrete(len(MOVES))
        self._text = text
        image = Box(0, 255, (size * cell, size * cell, 3), np.uint8)
        if text:
            self.observation_space = Dict({"state": _text_space(10 * (walls + 5))})
        else:
            self.observation_space = Dict({"image": image, "mission": _text_space(100)})
        # Refuses impossible rules before the first episode.
        self._layout = self._draw_layout(np.random.default_rng(0))
        self._state, self._steps = first_state(self._layout), 0

    @property
    def layout(self) -> GridLayout:
        """The layout of this episode."""
        return self._layout

    @property
    def state(self) -> GridState:
        """Cell of the agent, and whether it has the key."""
        return self._state

    def shortest_path(self) -> list[int]:
        """Actions of a shortest path from here to the goal."""
        path = shortest_path(self._layout, self._state) or []
        return [list(MOVES).index(name) for name in path]

    def expert_action(self) -> int:
        """The first action of a shortest path."""
        return self.shortest_path()[0]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw a layout; with winds, the option `name` selects one."""
        super().reset(seed=seed)
        self._wind = self._find_wind((options or {}).get("name"))
        self._layout = self._draw_layout(self.np_random)
        self._state, self._steps = first_state(self._layout), 0
        return self._observe(), {"distance": len(self.shortest_path())}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Move, or let the wind move the agent; the reward is 1 at the goal."""
        carried = self._wind > 0 and bool(self.np_random.random() < self._wind)
        self._state = move(self._layout, self._state, list(MOVES)[self.expert_action() if carried else int(action)])
        self._steps += 1
        done = reached(self._layout, self._state)
        info = {"success": done} | ({"carried": carried} if self._winds else {})
        return self._observe(), float(done), done, not done and self._steps >= self._max_steps, info

    def render(self) -> NDArray[np.uint8]:
        """The image of the observation."""
        layout, cell = self._layout, self._cell
        image = np.full((layout.size * cell, layout.size * cell, 3), COLOURS["floor"], np.uint8)
        image[::cell] = image[:, ::cell] = COLOURS["line"]
        for wall in layout.walls:
            self._paint(image, wall, "wall", np.ones((cell, cell), bool))
        rows, columns = (np.indices((cell, cell)) + 0.5) / cell - 0.5
        self._paint(image, layout.goal, "goal", np.maximum(abs(rows), abs(columns)) < 0.4)
        if layout.key is not None and not self._state.has_key:
            self._paint(image, layout.key, "key", abs(rows) + abs(columns) < 0.38)
        self._paint(image, self._state.agent, "agent", rows**2 + columns**2 < 0.3**2)
        if layout.key is not None and self._state.has_key:
            self._paint(image, self._state.agent, "key", rows**2 + columns**2 < 0.13**2)
        return image

    def _paint(self, image: NDArray[np.uint8], cell: Cell, colour: str, shape: NDArray[np.bool_]) -> None:
        top, left = cell.row * self._cell, cell.column * self._cell
        image[top : top + self._cell, left : left + self._cell][shape] = COLOURS[colour]

    def _observe(self) -> dict[str, Any]:
        if self._text:
            return {"state": describe(self._layout, self._state) + (WINDY if self._wind else "")}
        mission = MISSION_WITH_KEY if self._rules.key else MISSION
        return {"image": self.render(), "mission": mission + (WINDY if self._wind else "")}

    def _find_wind(self, name: object) -> float:
        if self._winds and name not in self._winds:
            raise UserError(f"winds has no entry for the task {name!r}; tasks of this grid: {', '.join(self._winds)}")
        return self._winds.get(str(name), 0.0)

    def _draw_layout(self, generator: np.random.Generator) -> GridLayout:
        layout = draw_layout(self._rules, generator)
        if layout is None:
            raise UserError(
                f"no grid of {self._rules.size} x {self._rules.size} cells with {self._rules.walls} "
                f"walls{' and a key' if self._rules.key else ''} was found with a shortest path of "
                f"{self._rules.min_distance} to {self._rules.max_distance or 'any number of'} moves; allow shorter "
                "paths (min_distance), or use a larger grid (size)"
            )
        return layout


def _text_space(length: int) -> Text:
    letters = set(MISSION + MISSION_WITH_KEY + WINDY + "".join(WORDS) + LETTERS + "0123456789")
    return Text(length, min_length=1, charset="".join(sorted(letters)))


def _check(size: int, cell: int, walls: int, max_steps: int, winds: Mapping[str, float], text: bool) -> None:
    if size < 2 or cell < 4 or size * cell > LARGEST_SIDE:
        raise UserError(
            f"a grid of {size} cells of {cell} pixels is not possible; use at least 2 cells of 4 pixels, at most "
            f"{LARGEST_SIDE} pixels in all"
        )
    if text and size > len(LETTERS):
        raise UserError(
            f"a grid described in words has at most {len(LETTERS)} cells per side (one letter per row), not {size}"
        )
    if not 0 <= walls <= size**2 - 3:
        raise UserError(f"walls is {walls}; a grid of {size} x {size} has room for 0 to {size**2 - 3}")
    if max_steps < 1:
        raise UserError(f"max_steps is {max_steps}; must be at least 1")
    for name, share in winds.items():
        if not 0 <= share <= 1:
            raise UserError(f"winds.{name} is {share}; expected a fraction of the moves between 0 and 1")


gymnasium.register("mmrl/GridWorld-v0", entry_point="mmrl.agents.toy.grid:GridWorld")
