"""A simulator without physics: a point on a line that has to reach its goal; some layouts fail on purpose."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from robotics.sim.episodes import ChunkResult, EpisodeSpec, RobotObservation

STEP = 0.1
REACH = 0.1


class LineSim:
    """The state is (position, goal); an action of one number moves it; images are 32 x 32 with two lit columns.

    Each view is the image darkened by another 50, so that views differ.
    """

    action_size, state_size, horizon = 1, 2, 12
    image_size = (32, 32)
    potential_rewards = True

    def __init__(
        self,
        capacity=None,
        breaks: Collection[int] = (),
        never_starts: Collection[int] = (),
        views: Collection[str] = (),
    ):
        self.views = tuple(views)
        self.capacity, self.breaks, self.never_starts = capacity, set(breaks), set(never_starts)
        self.live = np.zeros(0, np.int64)
        self.counts = {"raised": 0}
        self.resets, self.closed = 0, False

    def tasks(self) -> Mapping[str, str]:
        return {"right": "go right", "left": "go left"}

    def layouts(self) -> Mapping[str, int | None]:
        return {"train": None, "held_out": 500}

    def reset(self, episodes: Sequence[EpisodeSpec]) -> ChunkResult:
        assert self.capacity is None or len(episodes) <= self.capacity
        self.resets += 1
        self.episodes = list(episodes)
        rng = [np.random.default_rng([episode.layout, episode.split == "held_out"]) for episode in episodes]
        side = np.array([1.0 if episode.task == "right" else -1.0 for episode in episodes])
        self.place = np.zeros(len(episodes))
        self.goal = side * np.array([draw.uniform(0.3, 0.6) for draw in rng])
        self.elapsed = np.zeros(len(episodes), int)
        dead = np.array([episode.layout in self.never_starts for episode in episodes])
        self.live = np.flatnonzero(~dead)
        rows = np.arange(len(episodes))
        result = self._result(rows, np.zeros((len(rows), 0)), np.zeros(len(rows), int))
        return ChunkResult(**{**vars(result), "failed": dead, "reasons": dict.fromkeys(rows[dead], "would not start")})

    def step_chunk(self, actions, record: Collection[int] = ()) -> ChunkResult:
        moves = np.clip(np.asarray(actions, float)[..., 0], -1, 1)
        rows, length = self.live, moves.shape[1]
        assert len(moves) == len(rows)
        rewards, steps = np.zeros((len(rows), length)), np.zeros(len(rows), int)
        success, failed = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
        frames = {}
        for at, row in enumerate(rows):
            film = []
            for step in range(min(length, self.horizon - self.elapsed[row])):
                self.place[row] += STEP * moves[at, step]
                steps[at] += 1
                gap = abs(self.place[row] - self.goal[row])
                rewards[at, step] = 1 / (1 + gap)
                film.append(self._picture(row))
                if gap < REACH:
                    success[at] = True
                    break
            self.elapsed[row] += steps[at]
            if row in record:
                frames[int(row)] = np.stack(film)
            if self.episodes[row].layout in self.breaks and self.elapsed[row] > 4:
                failed[at], steps[at], success[at], rewards[at] = True, 0, False, np.nan
                self.counts["raised"] += 1
        result = self._result(rows, rewards, steps)
        truncated = (self.elapsed[rows] >= self.horizon) & ~success & ~failed
        self.live = rows[~(success | failed | truncated)]
        reasons = {int(row): "it broke" for row in rows[failed]}
        changes = {"success": success, "terminated": success, "truncated": truncated, "failed": failed}
        return ChunkResult(**{**vars(result), **changes, "reasons": reasons, "frames": frames})

    def describe(self):
        return {"simulator": "line", "horizon": self.horizon}

    def close(self) -> None:
        self.closed = True

    def _result(self, rows, rewards, steps) -> ChunkResult:
        none = np.zeros(len(rows), bool)
        state = np.stack([self.place[rows], self.goal[rows]], 1).astype(np.float32)
        images = np.stack([self._picture(row) for row in rows])
        shifts = 50 * np.arange(1, len(self.views) + 1, dtype=np.uint8)[:, None, None, None]
        views = images[:, None] - np.minimum(shifts, images[:, None]) if self.views else None
        return ChunkResult(rows, rewards, steps, none, none, none, none, RobotObservation(rows, state, images, views))

    def _picture(self, row) -> np.ndarray:
        picture = np.zeros((*self.image_size, 3), np.uint8)
        for channel, at in ((0, self.place[row]), (1, self.goal[row])):
            column = int(np.clip(16 + 20 * at, 0, 31))
            picture[:, column, channel] = 255
        return picture


def open_line(config) -> LineSim:
    """Factory for `sim.kind`."""
    return LineSim(**config.options, views=config.views)
