"""Real-time chunking: a flow's next chunk is inpainted to agree with the chunk that runs while it is computed.

Shapes: B rows, K control steps of a chunk, D entries of an action, n control steps that are left of the running chunk.

A robot that computes a chunk while it moves executes d more actions of the chunk before. These are fixed, and the new
chunk has to continue them. Each Euler step therefore pulls the velocity towards the running chunk,

    v + min(limit, (1 - tau) / (tau r^2)) J^T (W * (A_prev - A_hat)),    r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2),

with the estimate A_hat = A_tau + (1 - tau) v of the actions and its Jacobian J. The soft mask W is 1 for the d fixed
actions, decays to 0 until the end of the running chunk, and is 0 for the control steps after it.

The paper's time tau runs from noise to actions. Here sigma = 1 - tau and the velocity is noise - actions, so
A_hat = x - sigma v, and the pull is subtracted.

Source: Real-Time Chunking, arXiv 2506.07339, eq. 1-5; Physical-Intelligence/real-time-chunking-kinetix src/model.py.

Differences: a step of 1 / S with a weight above S would overshoot the running chunk, so policies with fewer than 5
steps use at most S. lerobot 0.4.4 (policies/rtc/modeling_rtc.py) takes J = 1, because it evaluates the velocity before
it records gradients; here J is the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

MODES = ("naive", "blend", "rtc")
"""Ways from one chunk to the next: as it is, averaged with the one before, or inpainted."""
GUIDANCE = 5.0
"""Maximum weight of the pull, beta of the paper."""


def soft_mask(delay: ArrayLike, left: int, chunk: int) -> NDArray[np.float32]:
    """Weights (B, K) of the running chunk.

    With c = (n - i) / (n - d + 1), the weight of control step i is 1 for i < d, c (e^c - 1) / (e - 1) for d <= i < n,
    and 0 from n on.

    Args:
        delay: (B,) d, control steps of the running chunk that are fixed, at most n.
        left: n, control steps that are left of it.
        chunk: K.

    Source: arXiv 2506.07339, eq. 5.
    """
    fixed = np.asarray(delay, np.float64)[:, None]
    share = np.clip((left - np.arange(chunk)) / (left - fixed + 1), 0.0, 1.0)
    return (share * np.expm1(share) / (math.e - 1)).astype(np.float32)


def blend(before: NDArray[np.float32], chunks: NDArray[np.float32], delay: ArrayLike) -> NDArray[np.float32]:
    """Average the rest of running chunks (L, n, D) with new ones (L, K, D), with the weights of `soft_mask`."""
    left = before.shape[1]
    weight = soft_mask(delay, left, left)[..., None]
    return np.concatenate([weight * before + (1 - weight) * chunks[:, :left], chunks[:, left:]], 1)


def guided_velocity(
    predict: Callable[[Tensor], Tensor],
    latents: Tensor,
    sigma: Tensor | float,
    previous: Tensor,
    weights: Tensor,
    limit: float = GUIDANCE,
) -> Tensor:
    """Velocity of a flow, pulled towards a running chunk.

    Args:
        predict: the velocity noise - actions at some latents (B, ...), differentiable.
        latents: (B, ...) at time sigma.
        sigma: time in (0, 1], 1 for noise.
        previous: (B, ...) the running chunk, in the units of the latents.
        weights: its weights, broadcastable to (B, ...).
        limit: maximum weight of the pull.

    Returns:
        (B, ...) like `latents`.

    Gradient: none.
    """
    import torch

    sigma = float(sigma)
    with torch.enable_grad():
        point = latents.detach().requires_grad_()
        velocity = predict(point)
        clean = point - sigma * velocity
        error = weights * (previous - clean.detach())
        (pull,) = torch.autograd.grad(clean, point, error.to(clean))
    # (1 - tau) / (tau r^2) in sigma; infinite for pure noise
    scale = math.inf if sigma == 1 else (sigma**2 + (1 - sigma) ** 2) / (sigma * (1 - sigma))
    return velocity.detach() - min(limit, scale) * pull


@dataclass(frozen=True, eq=False)  # tensors cannot be compared by ==
class RunningChunk:
    """The chunk that runs while a policy computes the next one."""

    actions: Tensor
    """(B, n, D) float32 in the policy's units, from the control step of the observation on."""
    delay: Tensor
    """(B,) int64, d: how many of them are executed before the next chunk begins."""
    limit: float = GUIDANCE
    """Maximum weight of the pull."""

    def __post_init__(self) -> None:
        shape = tuple(self.actions.shape)
        if len(shape) != 3 or tuple(self.delay.shape) != shape[:1] or not shape[1]:
            raise ValueError(f"actions {shape} and delay {tuple(self.delay.shape)} must be (B, n, D) and (B,), n >= 1")
        if bool(((self.delay < 0) | (self.delay > shape[1])).any()):
            raise ValueError(f"delay is {self.delay.tolist()}; must be in 0..{shape[1]}, the actions left")

    def padded(self, chunk: int, action_size: int) -> tuple[Tensor, Tensor]:
        """Actions (B, K, D), zero after the first n, and their weights (B, K, 1); raises ValueError on other sizes."""
        import torch

        count, left, size = self.actions.shape
        if left > chunk or size != action_size:
            raise ValueError(
                f"a running chunk (n, D) of ({left}, {size}); the policy's chunks are {chunk, action_size}"
            )
        weights = torch.from_numpy(soft_mask(self.delay.cpu().numpy(), left, chunk)).to(self.actions.device)
        actions = self.actions.new_zeros(count, chunk, size)
        actions[:, :left] = self.actions
        return actions, weights[..., None]


def check_inpaints(policy: Any) -> None:
    """Check that a policy can continue a running chunk; raises UserError."""
    if not getattr(policy, "inpaints", False):
        kind = getattr(policy, "kind", type(policy).__name__)
        raise UserError(
            f"a policy of kind {kind} cannot inpaint its next chunk: real-time chunking guides the denoising steps of "
            "a flow (kinds flow and lerobot_flow). Blend overlapping chunks instead (mode blend)"
        )
