"""What `reset` of a vector environment is asked for, as Gymnasium's own vector environments take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def row_seeds(seed: int | Sequence[int | None] | None, rows: int) -> list[int | None]:
    """Seeds of all rows."""
    if seed is None:
        return [None] * rows
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + row for row in range(rows)]
    if len(seed) != rows:
        raise UserError(f"seed is a list of {len(seed)}; expected {rows}, one for each environment")
    return [None if value is None else int(value) for value in seed]


def rows_to_reset(options: Mapping[str, Any] | None, rows: int) -> tuple[NDArray[np.bool_], dict[str, Any] | None]:
    """Take `reset_mask` out of the options of a reset."""
    if options is None or "reset_mask" not in options:
        return np.ones(rows, bool), None if options is None else dict(options)
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray) or mask.shape != (rows,) or mask.dtype != np.bool_ or not mask.any():
        raise UserError(
            f"options['reset_mask'] is {mask!r:.80}; expected a NumPy array of {rows} bools, at least one of them True"
        )
    return mask.copy(), {key: value for key, value in options.items() if key != "reset_mask"}


def fresh_seed(seed: int | None, failures: int) -> int | None:
    """Seed for an environment that has to start again, from its first one and the number of its failures."""
    return None if seed is None else int(np.random.SeedSequence([abs(seed), failures]).generate_state(1)[0])
