"""The last observations of an episode, for policies that take several.

Loaded by its path in an environment's own Python, so it needs only Python 3.8 and numpy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np


class RecentObservations:
    """The current observation of an episode and those of the P control steps before it."""

    def __init__(self, past: int) -> None:
        self.past = past
        self._seen: deque[dict[str, Any]] = deque(maxlen=past + 1)

    def add(self, parts: Mapping[str, Any]) -> None:
        """Add the next control step."""
        # copies, because an environment may reuse its buffers
        self._seen.append({name: np.array(part) for name, part in parts.items()})

    def before(self) -> dict[str, Any]:
        """Parts (P, ...) of the control steps before the last one added, the oldest first.

        Steps before the episode repeat its first observation.
        """
        seen = list(self._seen)
        steps = [seen[0]] * (self.past + 1 - len(seen)) + seen[:-1]
        return {name: np.stack([parts[name] for parts in steps]) for name in seen[0]}
