"""Messages between a pool of environments and its processes: observations as arrays, info as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmrl.agents.environment import MalformedError, Observation, Outcome, as_outcome
from mmrl.workers.values import decode, encode

if TYPE_CHECKING:
    import numpy as np

Fields = tuple[dict[str, Any], "dict[str, np.ndarray]"]

NOT_SENT = "not_sent"
"""Entry of the info with the names of those entries that cannot leave the environment's process."""


def pack_outcome(outcome: Outcome) -> Fields:
    """Encode an outcome; entries of the info that are not plain data are only named."""
    info, not_sent = {}, []
    for key, value in outcome.info.items():
        try:
            encode(value)
        except (TypeError, RecursionError):
            not_sent.append(str(key))
        else:
            info[str(key)] = value
    if not_sent:
        info[NOT_SENT] = not_sent
    parts = (outcome.observation.text, list(outcome.observation.images), outcome.reward)
    tree, arrays = encode([*parts, outcome.terminated, outcome.truncated, info])
    return {"outcome": tree}, arrays


def unpack_outcome(fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Outcome:
    """Decode `pack_outcome`, checked again because the other side runs users' code; raises MalformedError."""
    try:
        text, images, reward, terminated, truncated, info = decode(fields["outcome"], arrays)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MalformedError(f"the process sent something else than an outcome: {error!r:.200}") from None
    return as_outcome((Observation(text, tuple(images)), reward, terminated, truncated, info))
