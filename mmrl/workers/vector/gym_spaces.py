"""Gymnasium's spaces, rebuilt from their plain form (`mmrl.workers.vector.spaces.describe`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces


def build_space(tree: Mapping[str, Any]) -> spaces.Space[Any]:
    """Build a space from its description."""
    kind = tree["kind"]
    if kind == "Dict":
        return spaces.Dict({key: build_space(part) for key, part in tree["parts"]})
    if kind == "Tuple":
        return spaces.Tuple([build_space(part) for _, part in tree["parts"]])
    dtype: Any = np.dtype(tree["dtype"])
    if kind == "Box":
        return spaces.Box(tree["low"], tree["high"], tuple(tree["shape"]), dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(tree["n"]), start=int(tree["start"]), dtype=dtype.type)
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(tree["nvec"], dtype=dtype.type, start=tree["start"])
    shape = tuple(tree["shape"])
    return spaces.MultiBinary(shape if len(shape) > 1 else shape[0])
