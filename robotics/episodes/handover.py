"""From one chunk to the next: a simulated inference delay, and what happens to actions that two chunks predict.

Shapes: R rows, L of them running, K control steps of a chunk, D entries of an action, s control steps between two
observations, d control steps of delay.

    observation      0           s           2s
    first chunk      0 ......... s .. s+d                the robot waits for it
    second chunk                 | d  s+d ...... 2s+d    until then, the first chunk runs
    seam                              ^          ^

A robot does not stop while its policy computes, so the first d control steps after an observation execute the chunk
before, and a new chunk takes over at its entry d. The jump of the actions there is that of a seam.

Source: Real-Time Chunking, arXiv 2506.07339; Physical-Intelligence/real-time-chunking-kinetix src/eval_flow.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, only_with, rare
from robotics.policies.base.inpainting import GUIDANCE, MODES, RunningChunk, blend, check_inpaints


@dataclass
class DelaySettings:
    """Inference delay of an evaluation, and the way from one chunk to the next."""

    steps: int = rare(bounded(0, at_least=0))
    """Control steps that pass while a chunk is computed; meanwhile the robot executes the chunk before. 0 = the
    simulator waits for the policy."""
    mode: str = rare(choice("naive", MODES))
    """naive: execute the new chunk as it is; blend: average it with the rest of the chunk before, whose weight decays;
    rtc: real-time chunking, in which a flow policy inpaints a chunk that continues the one before."""
    guidance: float = rare(only_with(bounded(GUIDANCE, above=0), mode="rtc"))
    """Maximum weight of the pull towards the chunk before."""

    @property
    def active(self) -> bool:
        """Whether chunks overlap."""
        return self.steps > 0 or self.mode != "naive"

    def check(self, policy: Any, n_action_steps: int) -> None:
        """Check that a policy's chunks are long enough, and that it can continue one.

        Raises:
            UserError: they are not, or it cannot.
        """
        taken, chunk = n_action_steps or policy.chunk, policy.chunk
        if self.mode == "rtc":
            check_inpaints(policy)
        # before the next chunk arrives, the robot needs d actions more than it executes between observations
        needed = max(self.steps, 1)
        if (self.active and not needed <= chunk - taken) or self.steps > taken:
            fits = f"set acting.n_action_steps to {needed}..{chunk - needed}"
            raise UserError(
                f"chunks have {chunk} control steps, of which {taken} are executed between two observations. "
                f"evaluation.delay, {self.steps} control steps in mode {self.mode}, needs {needed} of them left over "
                f"and may not exceed the executed ones; {fits if chunk >= 2 * needed else 'the chunks are too short'}"
            )


class Handover:
    """Chooses the executed actions of rows that run at the same time.

    Args:
        settings: the delay d, and the mode.
        taken: s.
        rows: R.
    """

    def __init__(self, settings: DelaySettings, taken: int, rows: int) -> None:
        self._settings, self._taken, self._count = settings, taken, rows
        self._left: NDArray[np.float32] | None = None  # (R, K - s, D), from the next observation on

    def previous(self, rows: ArrayLike) -> dict[str, RunningChunk]:
        """The option `previous` of `ActionPolicy.act` for rows (L,); none for the first chunk and in other modes."""
        if self._left is None or self._settings.mode != "rtc":
            return {}
        left = torch.from_numpy(self._left[np.asarray(rows)])
        delay = torch.full((len(left),), self._settings.steps)
        return {"previous": RunningChunk(left, delay, self._settings.guidance)}

    def execute(self, chunks: NDArray[np.float32], rows: ArrayLike) -> NDArray[np.float32]:
        """Actions (L, s, D) from one observation to the next, given the new chunks (L, K, D) of rows (L,)."""
        index, taken, delay = np.asarray(rows), self._taken, self._settings.steps
        if self._left is None:  # every row begins at the same time
            self._left = np.zeros((self._count, chunks.shape[1] - taken, chunks.shape[2]), np.float32)
            executed = chunks[:, :taken]
        else:
            before = self._left[index]
            if self._settings.mode == "blend":
                chunks = blend(before, chunks, [delay] * len(chunks))
            executed = np.concatenate([before[:, :delay], chunks[:, delay:taken]], 1)
        self._left[index] = chunks[:, taken:]
        return executed


def action_jumps(
    actions: Sequence[ArrayLike], taken: int, delay: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distances of consecutive executed actions, at the seams of chunks and inside of chunks.

    Args:
        actions: executed actions (steps, D) of each episode.
        taken: s.
        delay: d.

    Returns:
        Euclidean distances at seams, and all others, over all episodes.
    """
    seams, inside = [np.zeros(0)], [np.zeros(0)]
    for episode in actions:
        values = np.asarray(episode, np.float64)
        if len(values) < 2:
            continue
        jumps = np.linalg.norm(np.diff(values, axis=0), axis=1)  # entry i leads to control step i + 1
        step = np.arange(1, len(values))
        at_seam = (step >= taken + delay) & ((step - delay) % taken == 0)
        seams.append(jumps[at_seam])
        inside.append(jumps[~at_seam])
    return np.concatenate(seams), np.concatenate(inside)
