"""The interface of robot policies, their inputs, and policies with action tokens.

Shapes: B rows (one observation each), K control steps of a chunk, D entries of an action, T decisions of a chunk (its
tokens, control steps, denoising steps, or 1), S state entries, V further cameras, H x W pixels, P past control steps,
... any leading dimensions.

A policy chooses a chunk of K actions from one observation by making T decisions, each with a log-probability. The
policy defines the format of its decisions; `log_probs` gets them as returned by `act`.
"""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from mmrl.core.blocks.divergence import generalized_jsd
from mmrl.errors import UserError
from mmrl.recipes import CONTRIB, package_tables
from mmrl.runs.checkpoint import check_model
from mmrl.runs.export import model_folder
from robotics.policies.base.action_statistics import ActionRange, ActionStatistics, StateStatistics
from robotics.policies.base.action_tokens import ActionTokenizer, draw_tokens, score_tokens, token_loss
from robotics.policies.base.saved import read_config
from robotics.sim.interface import RobotInterface

CALLABLE = ("act", "log_probs", "bc_loss", "means", "divergence", "distributions", "divergence_from")
INPUT_SHAPES = {
    "images": "(B, H, W, 3)",
    "state": "(B, S)",
    "views": "(B, V, H, W, 3)",
    "past_images": "(B, P, H, W, 3)",
    "past_state": "(B, P, S)",
    "past_views": "(B, P, V, H, W, 3)",
}
"""Parts of `PolicyInputs` that are tensors or None, and their shapes."""


@dataclass(frozen=True)
class PolicyInputs:
    """Observations and instructions of B rows."""

    images: Tensor | None
    """(B, H, W, 3) uint8 RGB; None without images."""
    state: Tensor | None
    """(B, S) float32 in the simulator's units; None without a state."""
    instructions: tuple[str, ...]
    """One instruction per row."""
    views: Tensor | None = None
    """(B, V, H, W, 3) uint8 RGB of further cameras, in the order of `sim.views`; None without them."""
    past_images: Tensor | None = None
    """(B, P, H, W, 3) uint8 RGB of the last P control steps, oldest first, for policies with a `past`; padded with the
    first observation at the start of an episode. None without a past."""
    past_state: Tensor | None = None
    """(B, P, S) float32 of the same control steps; None without a past."""
    past_views: Tensor | None = None
    """(B, P, V, H, W, 3) uint8 RGB of the same control steps; None without a past."""

    def __post_init__(self) -> None:
        rows = len(self.instructions)
        for name, shape in INPUT_SHAPES.items():
            value = getattr(self, name)
            if value is None:
                continue
            is_image, found = shape.endswith("3)"), tuple(value.shape)
            if len(found) != shape.count(",") + 1 or (is_image and (found[-1] != 3 or value.dtype != torch.uint8)):
                kinds = (" uint8", f"{value.dtype} ") if is_image else ("", "")
                raise ValueError(f"{name} must be {shape}{kinds[0]}; got {kinds[1]}{found}")
            if len(value) != rows:
                raise ValueError(f"{name} has {len(value)} rows, but there are {rows} instructions")

    def __len__(self) -> int:
        return len(self.instructions)

    def to(self, device: torch.device | str) -> Self:
        """Move the tensors to a device."""
        return self._changed(lambda value: value.to(device))

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Select rows by (b,) int64 indices, in their order, or by a (B,) bool mask."""
        index = torch.as_tensor(rows)
        # masks and indices look alike in lists, hence the dtype decides
        index = torch.nonzero(index).flatten() if index.dtype == torch.bool else index.long()
        texts = tuple(self.instructions[row] for row in index.tolist())
        return self._changed(lambda value: value[index.to(value.device)], instructions=texts)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate inputs that have the same parts."""

        def join(name: str) -> Tensor | None:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else torch.cat(values)

        texts = tuple(text for part in parts for text in part.instructions)
        return cls(instructions=texts, **{name: join(name) for name in INPUT_SHAPES})

    def _changed(self, change: Callable[[Tensor], Tensor], **others: Any) -> Self:
        """Apply a function to every tensor."""
        tensors = {name: getattr(self, name) for name in INPUT_SHAPES}
        changed: dict[str, Any] = {name: None if value is None else change(value) for name, value in tensors.items()}
        return dataclasses.replace(self, **changed, **others)


@dataclass(frozen=True)
class ActionChoice:
    """Chunks of actions and the decisions behind them."""

    actions: Tensor
    """(B, K, D) float32 in -1..1; policies with `statistics` may exceed this range, which is then extrapolated."""
    decisions: Tensor
    """(B, ...) in the format expected by `log_probs`; tokens are (B, T) int64."""
    logp: Tensor
    """(B, T) float32, nats."""


class ActionPolicy(nn.Module, ABC):
    """A policy that chooses chunks of actions and scores its decisions.

    `policy("log_probs", batch, decisions)` calls `policy.log_probs(batch, decisions)`; it exists because mixed
    precision only applies to calls of the module itself.
    """

    chunk: int
    """K."""
    action_size: int
    """D."""
    decisions: int
    """T."""
    by_step: bool = True
    """Whether decisions are ordered by control step, with the same number for each; otherwise each decision concerns
    the whole chunk."""
    views: int | None = 0
    """V, number of cameras it uses in addition to `images`; None for any number."""
    past: int = 0
    """P, number of past control steps whose observations `act` and `bc_loss` also use. `log_probs` does not get them,
    because rollouts do not store them: a policy with a past has to store what it needs in its decisions."""
    cameras: tuple[str, ...] = ()
    """The policy's names for its cameras, `images` first; empty if it has none."""
    image_fit: str | None = None
    """How the policy's own processor treats non-square images: pad or stretch; None if it was trained on the
    simulator's images as they are."""
    action_range: ActionRange | None = None
    """Values in the policy's own units that correspond to -1 and 1 in the simulator; applied inside the policy."""
    units_known: bool = True
    """Whether anything says the units of its actions: options, or statistics of its data."""
    action_bounds: ActionRange | None = None
    """Values in the environment's own units that correspond to -1 and 1 in the simulator used for training; None if the
    environment uses -1..1 too. Saved with the policy, for driving a real robot."""
    interface: RobotInterface | None = None
    """Names and order of states and actions, cameras and control rate used in training; None if untrained. Saved with
    the policy and compared with every simulator it acts in."""

    @property
    def robot_bounds(self) -> ActionRange | None:
        """Values for -1 and 1 in a robot's units: those of the simulator, or of the data if it was never in one."""
        return self.action_range if self.interface is None and self.action_bounds is None else self.action_bounds

    has_means: bool = False
    """Whether decisions are Gaussians with fixed noise. The policy then has `means(batch, decisions)` and
    `divergence(batch, decisions, means_old, temperature)`, the exact divergence (B, T) from Gaussians around
    `means_old`."""
    mixes: bool | None = None
    """None if the observation alone does not determine the distribution of a decision. Otherwise the policy has
    `distributions(batch, temperature)` and `divergence_from(batch, others, beta, temperature)`, the exact divergence
    (B, T) from another policy of the same kind: KL(others || own) for beta 0, KL(own || others) for beta 1. True if the
    betas in between (Jensen-Shannon divergences) are exact too."""
    noise_shape: tuple[int, int] | None = None
    """Shape of the noise of a row that `act` can start from, given as `start` (B, N, M); None without such noise."""
    inpaints: bool = False
    """Whether `act` takes `previous`, a `RunningChunk` that the next chunk continues (real-time chunking). Its
    decisions then have no log-probability."""
    statistics: ActionStatistics | None = None
    """Statistics that normalised the demonstrated actions; saved with the policy, applied outside it."""

    @abstractmethod
    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """Choose a chunk of actions for each row.

        Args:
            batch: B rows.
            generator: for sampling; use `draw_rows`, so that rows do not depend on each other.
            temperature: scales the spread of the samples; 1 is the policy's own.
            greedy: take the most likely actions.

        Returns:
            Actions, decisions and their log-probabilities.

        Gradient: none.
        """

    @abstractmethod
    def log_probs(
        self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Score decisions.

        Args:
            batch: the B rows for which the decisions were made.
            decisions: (B, ...) from `ActionChoice.decisions`.
            temperature: the temperature used for sampling.

        Returns:
            Log-probabilities (B, T) float32, equal to those of `act` if the weights are the same, and entropies (B, T)
            or None.

        Gradient: into all trainable weights.
        """

    @abstractmethod
    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning loss.

        Args:
            batch: B rows.
            actions: demonstrated actions (B, K, D) in -1..1.
            mask: (B, K), 1 before the end of the demonstration.
            generator: for policies that learn from noisy actions.

        Returns:
            Loss () and metrics.

        Gradient: into all trainable weights.
        """

    @abstractmethod
    def save_pretrained(self, path: Path | str) -> None:
        """Write the policy to a folder, created with its parents."""

    def export(self, path: Path | str) -> None:
        """Write a self-contained folder of the policy, with adapters merged into the weights."""
        self.save_pretrained(path)

    @abstractmethod
    def load_weights(self, path: Path | str) -> None:
        """Restore what `save_pretrained` wrote, bit for bit; raises UserError if it does not fit the policy."""

    def scale_states(self, statistics: StateStatistics) -> None:
        """Set the state statistics of a dataset, which are saved with the weights; no effect without a state input.

        Raises:
            UserError: the statistics have a different number of entries.
        """

    def executed_mask(self, steps: Tensor) -> Tensor:
        """Mask of the decisions that determined executed actions.

        Args:
            steps: (...) int64, number of executed control steps of the chunk.

        Returns:
            (..., T) float32, 1 if a decision counts; decisions about the whole chunk count if any step was executed.
        """
        if not self.by_step:
            return (steps > 0).float()[..., None].expand(*steps.shape, self.decisions)
        each = self.decisions // self.chunk  # decisions of one control step
        return (torch.arange(self.decisions, device=steps.device) < steps[..., None] * each).float()

    def forward(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method in `CALLABLE` by name; the last four exist depending on `has_means` and `mixes`."""
        if method not in CALLABLE:
            raise ValueError(f"a policy has no method {method!r} to call; available: {', '.join(CALLABLE)}")
        return getattr(self, method)(*arguments, **options)

    @property
    def device(self) -> torch.device:
        """Device of the weights; the CPU if there are none."""
        return next((weight.device for weight in self.parameters()), torch.device("cpu"))


class TokenPolicy(ActionPolicy):
    """A policy whose decisions are K * D action tokens, independent given the observation.

    Tokens are ordered by step: step 0 dims 0..D-1, step 1, ... A subclass computes their logits in one pass.

    Source: OpenVLA-OFT, arXiv 2502.19645 (parallel decoding); HL-Gauss, arXiv 2403.03950 (Gaussian target).
    """

    mixes = True

    def __init__(
        self, tokenizer: ActionTokenizer, chunk: int, action_size: int, smoothing: float = 0.0, spread: float = 0.0
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.smoothing = smoothing
        self.spread = spread
        self.chunk = chunk
        self.action_size = action_size
        self.decisions = chunk * action_size

    @abstractmethod
    def logits(self, batch: PolicyInputs) -> Tensor:
        """Logits of every token (B, T, bins), any float dtype."""

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """Choose a chunk of actions per row; log-probabilities of greedy tokens use the temperature too."""
        with torch.no_grad():
            tokens, logp = draw_tokens(self.logits(batch), generator, temperature, greedy)
        actions = self.tokenizer.decode(tokens).unflatten(1, (self.chunk, self.action_size))
        return ActionChoice(actions, tokens, logp)

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Score decisions; decisions are (B, T) int64 tokens."""
        return score_tokens(self.logits(batch), decisions, temperature)

    def distributions(self, batch: PolicyInputs, temperature: float = 1.0) -> Tensor:
        """Log-probabilities of every token (B, T, bins) float32."""
        check_temperature(temperature)
        # float32 before the division: bfloat16 would round the scaled logits again
        return (self.logits(batch).float() / temperature).log_softmax(-1)

    def divergence_from(self, batch: PolicyInputs, others: Tensor, beta: float, temperature: float = 1.0) -> Tensor:
        """Divergence (B, T) from the tokens of another policy; see `mixes` and `generalized_jsd`.

        Gradient: into all trainable weights.
        """
        return generalized_jsd(self.distributions(batch, temperature), others, beta)

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning loss: cross-entropy."""
        check_demonstrations(self, batch, actions, mask)
        logits = self.logits(batch)
        # step-major, the order of the tokens: step 0 dims 0..D-1, step 1, ...
        wanted = actions.to(logits.device).flatten(1)
        # a mask of control steps becomes one of tokens: D neighbouring tokens belong to each step
        weight = mask.to(logits.device, torch.float32).repeat_interleave(self.action_size, 1)
        tokens = self.tokenizer.encode(wanted)
        targets = self._blurred(wanted) if self.spread else tokens
        loss = token_loss(logits, targets, weight, self.smoothing)
        with torch.no_grad():
            best, count = logits.argmax(-1), weight.sum().clamp(min=1)  # a batch may only have steps after the end
            distance = (self.tokenizer.decode(best) - wanted).abs()
            metrics = {
                "bc/loss": loss,
                "bc/token_accuracy": ((best == tokens) * weight).sum() / count,
                "bc/action_error": (distance * weight).sum() / count,
            }
        return loss, {name: float(value.detach()) for name, value in metrics.items()}

    def _blurred(self, actions: Tensor) -> Tensor:
        """Gaussian targets (B, T, bins) around actions (B, T); indices with the same centre share its probability."""
        centres = torch.from_numpy(self.tokenizer.centres).to(actions)
        # out-of-range demonstrations go to the outermost bin instead of between bins
        far = (actions.clamp(-1, 1)[..., None] - centres) / self.spread
        return (-0.5 * far.square()).softmax(-1)


def open_policy(path: Path | str) -> ActionPolicy:
    """Load a saved policy of this package.

    Args:
        path: folder written by `save_pretrained`, or a run folder, in which case its best checkpoint is used.

    Returns:
        The policy, on the CPU.

    Raises:
        UserError: the folder is not a saved policy, or is damaged.
    """
    path = model_folder(str(path))
    check_model(Path(path))
    kind = read_config(Path(path)).get("kind")
    if not isinstance(kind, str) or kind not in SAVED_POLICIES:
        raise UserError(
            f"{path} contains a policy of unknown kind {kind!r}; known: {', '.join(SAVED_POLICIES)}; docs/adding.md "
            "explains how to add one"
        )
    # imported on demand, since some kinds need packages that others do not
    module, name = SAVED_POLICIES[kind].split(":")
    policy: ActionPolicy = getattr(importlib.import_module(module), name).from_pretrained(path)
    return policy


def check_demonstrations(policy: ActionPolicy, batch: PolicyInputs, actions: Tensor, mask: Tensor) -> None:
    """Check that demonstrations are (B, K, D) with a mask (B, K); raises ValueError."""
    expected = (len(batch), policy.chunk, policy.action_size)
    if tuple(actions.shape) != expected or tuple(mask.shape) != expected[:2]:
        raise ValueError(
            f"actions {tuple(actions.shape)} and mask {tuple(mask.shape)} must be {expected} and {expected[:2]}"
        )


def check_temperature(temperature: float) -> None:
    """Check that a temperature is above 0; raises ValueError."""
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; must be above 0. Use greedy to act without noise.")


CONTRIB_POLICIES: dict[str, tuple[str, str]] = {
    kind: specs for table in package_tables("POLICIES", CONTRIB) for kind, specs in table.items()
}
"""Classes and options of the policies of single papers, by kind."""
SAVED_POLICIES = {
    "small": "robotics.policies.small:SmallVlaPolicy",
    "gaussian": "robotics.policies.gaussian:GaussianActionPolicy",
    "squashed": "robotics.policies.squashed:SquashedActionPolicy",
    "residual": "robotics.policies.improved:ResidualPolicy",
    "steered": "robotics.policies.improved:SteeredPolicy",
    "flow": "robotics.policies.flow:FlowActionPolicy",
    "vlm": "robotics.policies.vlm:VlmActionPolicy",
    "lerobot": "robotics.policies.lerobot.gaussian:LeRobotPolicy",
    "lerobot_flow": "robotics.policies.lerobot.flow:LeRobotFlowPolicy",
    "openvla": "robotics.policies.openvla.tokens:OpenVlaPolicy",
    "openvla_regression": "robotics.policies.openvla.regression:OpenVlaRegressionPolicy",
    **{kind: policy for kind, (policy, _) in CONTRIB_POLICIES.items()},
}
"""Classes of saved policies by kind."""
