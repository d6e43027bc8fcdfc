"""Rewards remembered per prompt, for advantages that compare with earlier rollouts as DDPO's do."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError


class PromptHistory:
    """The latest rewards of each prompt, over rollouts.

    Unlike a group baseline it needs no several images of a prompt in one rollout; it has to be saved with a run.

    Source: kvablack/ddpo-pytorch ddpo_pytorch/stat_tracking.py.
    """

    def __init__(self, buffer_size: int = 16, min_count: int = 16, eps: float = 1e-6) -> None:
        if not 1 <= min_count <= buffer_size:
            raise UserError(f"min_count is {min_count}; must be between 1 and buffer_size, which is {buffer_size}")
        if eps <= 0:
            raise UserError(f"eps is {eps}; must be above 0, because the rewards of a prompt may all be equal")
        self.buffer_size = buffer_size
        self.min_count = min_count
        self.eps = eps
        self._rewards: dict[str, deque[float]] = {}

    def normalise(self, prompts: Sequence[str], rewards: Tensor | Sequence[float]) -> Tensor:
        """Remember the rewards (B,) of a rollout and return its advantages (B,), (reward - mean) / (std + eps).

        Mean and population standard deviation are those of the prompt's buffer, new rewards included, or of this
        rollout while the buffer has fewer than `min_count`. A NaN reward could not be computed: it is left out and its
        advantage is 0.
        """
        if not isinstance(rewards, Tensor):
            rewards = torch.tensor(rewards, dtype=torch.float64)
        if rewards.shape != (len(prompts),):
            raise ValueError(f"rewards have the shape {tuple(rewards.shape)}; must be ({len(prompts)},), one a prompt.")
        wide = rewards.detach().double().cpu()
        scored = ~wide.isnan()
        for prompt, reward, counts in zip(prompts, wide.tolist(), scored.tolist(), strict=True):
            if counts:
                self._buffer(prompt).append(reward)
        whole = wide[scored]
        advantages = torch.zeros_like(wide)
        for prompt in set(prompts):
            rows = scored & torch.tensor([other == prompt for other in prompts])
            kept = self._rewards.get(prompt, ())
            basis = whole if len(kept) < self.min_count else wide.new_tensor(list(kept))
            if rows.any():
                advantages[rows] = (wide[rows] - basis.mean()) / (basis.std(correction=0) + self.eps)
        return advantages.to(rewards)

    def state_dict(self) -> dict[str, Any]:
        """The rewards kept for each prompt, oldest first, as plain Python."""
        return {"rewards": {prompt: list(kept) for prompt, kept in self._rewards.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; a shorter buffer keeps the latest rewards."""
        self._rewards = {
            prompt: deque((float(reward) for reward in kept), maxlen=self.buffer_size)
            for prompt, kept in state["rewards"].items()
        }

    def _buffer(self, prompt: str) -> deque[float]:
        return self._rewards.setdefault(prompt, deque(maxlen=self.buffer_size))
