"""Alarms of a run: warnings about metrics, judged by means over a few steps and given once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

STEPS = 5
"""Steps of a mean."""
WINDOW = 20
"""Latest steps that are kept."""


@dataclass
class Track:
    """A metric's finite values: those of the first `STEPS` and of the latest `WINDOW` steps."""

    first: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Take the value of a step."""
        # the first values stay: alarms compare the present with the beginning
        if len(self.first) < STEPS:
            self.first.append(value)
        self.latest = [*self.latest, value][-WINDOW:]

    @property
    def start(self) -> float:
        """Mean of the first steps; NaN before there are enough."""
        return _mean(self.first)

    @property
    def now(self) -> float:
        """Mean of the latest steps; NaN before there are enough."""
        return _mean(self.latest[-STEPS:])


def _mean(values: Sequence[float]) -> float:
    # NaN before there are enough, with which every comparison is false
    return sum(values) / STEPS if len(values) == STEPS else math.nan


@dataclass(frozen=True)
class Alarm:
    """A warning by metrics."""

    metrics: tuple[str, ...]
    """Metrics that it reads."""
    check: Callable[..., str]
    """Function of their tracks, in this order, that returns the warning; empty for none."""


class AlarmTracks:
    """The tracks that some alarms read."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}

    def due(self, alarms: Mapping[str, Alarm], metrics: Mapping[str, float]) -> dict[str, str]:
        """Take the metrics of a step; returns the warnings that are due, by kind."""
        for name in dict.fromkeys(name for alarm in alarms.values() for name in alarm.metrics):
            track = self._tracks.setdefault(name, Track())
            # a step without the metric leaves the track as it is
            if math.isfinite(value := metrics.get(name, math.nan)):
                track.add(value)
        found = {kind: alarm.check(*(self._tracks[name] for name in alarm.metrics)) for kind, alarm in alarms.items()}
        return {kind: text for kind, text in found.items() if text}

    def state_dict(self) -> dict[str, list[list[float]]]:
        """The values that are kept, for a checkpoint."""
        return {name: [list(track.first), list(track.latest)] for name, track in self._tracks.items()}

    def load_state_dict(self, state: Mapping[str, list[list[float]]]) -> None:
        """Restore `state_dict`."""
        self._tracks = {name: Track(list(first), list(latest)) for name, (first, latest) in state.items()}
