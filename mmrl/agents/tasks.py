"""The tasks of a run: what an environment is asked for, and with which seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AgentTask"]


@dataclass(frozen=True)
class AgentTask:
    """One task; the samples of its group all begin from it."""

    id: str
    """Unique in a run, such as `maze/train/7`."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """What `reset` gets; plain data."""
    seed: int = 0
    instruction: str = ""
    """What the agent is to do, where the first observation does not say it."""
