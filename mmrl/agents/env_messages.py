"""What goes between a pool of environments and its processes: observations as arrays, information as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmrl.agents.environment import MalformedError, Observation, Outcome, as_outcome
from mmrl.workers.values import decode, encode

if TYPE_CHECKING:
    import numpy as np

Fields = tuple[dict[str, Any], "dict[str, np.ndarray]"]

NOT_SENT = "not_sent"
"""Entry of the information that lists the names of those that cannot leave the environment's process."""


def pack_outcome(outcome: Outcome) -> Fields:
    """Make the fields and arrays of a message; entries of the information that are no plain data are named only."""
    info, lost = {}, []
    for key, value in outcome.info.items():
        try:
            encode(value)
        except (TypeError, RecursionError):
            lost.append(str(key))
        else:
            info[str(key)] = value
    if lost:
        info[NOT_SENT] = lost
    parts = (outcome.observation.text, list(outcome.observation.images), outcome.reward)
    tree, arrays = encode([*parts, outcome.terminated, outcome.truncated, info])
    return {"outcome": tree}, arrays


def unpack_outcome(fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Outcome:
    """Read what `pack_outcome` made, and check it again: the other side runs code of users."""
    try:
        text, images, reward, terminated, truncated, info = decode(fields["outcome"], arrays)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MalformedError(f"the process sent something else than an outcome: {error!r:.200}") from None
    return as_outcome((Observation(text, tuple(images)), reward, terminated, truncated, info))
