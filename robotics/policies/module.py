"""A custom module as a robot policy.

Shapes as in `robotics.policies.base.action_policy`: B rows, K control steps of a chunk, D entries of an action, T
decisions of a chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from robotics.policies.base.action_policy import ActionChoice, ActionPolicy, PolicyInputs, check_demonstrations
from robotics.policies.base.saved import read_units, read_weights, write_units, write_weights


class ModuleAdapter(ActionPolicy):
    """Wraps a custom module as a policy.

    The module needs two methods. `obs` is a dict with "images" (B, H, W, 3) uint8, "views" (B, V, H, W, 3) uint8 of
    further cameras and "state" (B, S) float32, if available, and "instructions", a list of B texts:

    * act(obs, generator) -> (actions, logp): actions (B, K, D), or (B, D) if K = 1; logp (B, T), or (B,) if T = 1. Use
      `robotics.draw_rows(torch.randn, shape, generator)`, so that episodes do not depend on each other
    * log_probs(obs, actions) -> logp, or (logp, entropy): of the actions as sampled, before any clipping

    `act` may also accept `temperature` and `greedy`, `log_probs` `temperature`. If the module has a method
    bc_loss(obs, actions, mask), it is used; otherwise the loss is the negative log-probability of the demonstrated
    actions.

    Args:
        module: the custom module.
        action_size: D.
        chunk: K.
        decisions: T: 1 for one log-probability per chunk, K for one per control step, K * D for one per number.

    Raises:
        UserError: a method is missing, or T is not 1, K or K * D.
    """

    views = None

    def __init__(self, module: nn.Module, action_size: int, chunk: int = 1, decisions: int = 1) -> None:
        super().__init__()
        missing = [name for name in ("act", "log_probs") if not callable(getattr(module, name, None))]
        if missing:
            raise UserError(
                f"{type(module).__name__} has no method {' and no method '.join(missing)}; it needs act(obs, "
                "generator) -> (actions, logp) and log_probs(obs, actions) -> logp"
            )
        if chunk < 1 or action_size < 1 or decisions not in (1, chunk, chunk * action_size):
            raise UserError(
                f"decisions={decisions} with chunk={chunk} and action_size={action_size}; must be 1, chunk or "
                "chunk * action_size"
            )
        self.module = module
        self.chunk = chunk
        self.action_size = action_size
        self.decisions = decisions
        # one log-probability for several steps cannot be cut at the step in which an episode ended
        self.by_step = decisions > 1 or chunk == 1

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """Choose a chunk for each row; actions are clipped to -1..1 after their log-probability is computed."""
        method: Any = self.module.act
        name = f"{type(self.module).__name__}.act"
        with torch.no_grad():
            answer = method(_as_dict(batch), generator, **_accepted(method, temperature, greedy, name))
        if not isinstance(answer, tuple) or len(answer) != 2 or not all(isinstance(part, Tensor) for part in answer):
            found = f"{len(answer)} values" if isinstance(answer, tuple) else type(answer).__name__
            raise UserError(f"{name} returned {found}; expected two tensors, (actions, logp)")
        actions, logp = answer
        if tuple(actions.shape) != self._shape(len(batch)):
            raise UserError(
                f"{name} returned actions of the shape {tuple(actions.shape)}; expected {self._shape(len(batch))}, "
                f"with chunk={self.chunk} and action_size={self.action_size}"
            )
        sampled = actions.detach().float().reshape(len(batch), self.chunk, self.action_size)
        return ActionChoice(
            # infinities are not clipped, so that `sim_actions` still sees and reports them
            actions=sampled.clamp(-1, 1).where(sampled.isfinite(), sampled),
            # unclipped: `log_probs` must score what was drawn
            decisions=sampled.reshape(len(batch), self.decisions, -1),
            logp=self._checked_scores(logp, len(batch), name, "logp"),
        )

    def log_probs(
        self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        method: Any = self.module.log_probs
        name = f"{type(self.module).__name__}.log_probs"
        actions = decisions.reshape(self._shape(len(batch)))
        answer = method(_as_dict(batch), actions, **_accepted(method, temperature, False, name))
        logp, entropy = answer if isinstance(answer, tuple) else (answer, None)
        scores = self._checked_scores(logp, len(batch), name, "logp")
        return scores, None if entropy is None else self._checked_scores(entropy, len(batch), name, "entropy")

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning loss; with one log-probability per chunk, incomplete chunks are ignored."""
        check_demonstrations(self, batch, actions, mask)
        own = getattr(self.module, "bc_loss", None)
        if callable(own):
            answer = own(_as_dict(batch), actions, mask)
            loss = answer[0] if isinstance(answer, tuple) else answer
            return loss, {"bc/loss": float(loss.detach())}
        logp, _ = self.log_probs(batch, actions.to(self.device))
        mask = mask.to(logp)
        # a chunk that is cut has no log-probability of its part
        weight = mask.prod(1, keepdim=True) if self.decisions == 1 else self.executed_mask(mask.sum(1).long())
        loss = -(logp * weight).sum() / weight.sum().clamp(min=1)
        return loss, {"bc/loss": float(loss.detach())}

    def save_pretrained(self, path: Path | str) -> None:
        """Write the statistics and the module, using its own `save_pretrained` if it has one."""
        own = getattr(self.module, "save_pretrained", None)
        if callable(own):
            own(path)
        else:
            write_weights(self.module, Path(path))
        write_units(Path(path), self)

    def load_weights(self, path: Path | str) -> None:
        """Read the statistics and the weights, using the module's own `load_weights` if it has one."""
        own = getattr(self.module, "load_weights", None)
        if callable(own):
            own(path)
        else:
            read_weights(self.module, Path(path))
        read_units(Path(path), self)

    def _shape(self, rows: int) -> tuple[int, ...]:
        """Shape of the module's actions."""
        return (rows, self.action_size) if self.chunk == 1 else (rows, self.chunk, self.action_size)

    def _checked_scores(self, values: Any, rows: int, method: str, what: str) -> Tensor:
        expected = (rows, self.decisions)
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        if shape == (rows,) and self.decisions == 1:
            return values.float()[:, None]
        if shape != expected:
            also = f" or {(rows,)}" if self.decisions == 1 else f"; decisions={self.decisions} is set on the adapter"
            raise UserError(f"{method} returned {what} of the shape {shape}; expected {expected}{also}")
        return values.float()


def _as_dict(batch: PolicyInputs) -> dict[str, Any]:
    found = {name: getattr(batch, name) for name in ("images", "views", "state")}
    found |= {"instructions": list(batch.instructions)}
    return {name: value for name, value in found.items() if value is not None}


def _accepted(method: Callable[..., Any], temperature: float, greedy: bool, name: str) -> dict[str, Any]:
    """The options that differ from their defaults, if the user's method takes them."""
    options = (("temperature", temperature, 1.0), ("greedy", greedy, False))
    wanted = {key: value for key, value, usual in options if value != usual}
    known = inspect.signature(method).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    unknown = [key for key in wanted if key not in known and not takes_all]
    if unknown:
        raise UserError(f"{unknown[0]} is {wanted[unknown[0]]}, but {name} has no argument {unknown[0]!r}")
    return wanted
