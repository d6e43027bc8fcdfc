"""Heads that improve a frozen policy: a residual on its actions, or the noise that its flow starts from.

Shapes: B rows, K executed control steps of a chunk, D entries of an action, V numbers that the head reads, N x M the
noise of a flow.

    residual:  a = clip(a_base(o) + xi tanh(u), -1, 1)
    steered:   a = a_base(o, w),   w = bound tanh(u),   a_base follows its flow from w without noise

with u ~ N(mu, diag(sigma^2)) as in `robotics.policies.squashed`. Log-densities are those of tanh(u); the constant
log xi or log bound is left out, so that temperature and entropy do not depend on it.

The head reads the base's state, with `features` the mean output of its encoder, and for a residual its action. A
decision is a whole chunk: (B, ...) u, then what the head read, so that scoring it does not run the base again.

A residual starts at 0, where the policy is its base to the bit. Acting greedily, a steered policy starts from the noise
bound tanh(mu), which is nearly 0 at first, while its base starts from random noise.

Source: residual: Johannink et al., arXiv 1812.03201, and PLD, arXiv 2511.00091 (a frozen base whose action the head
    reads; critics of the summed action); steering: DSRL, arXiv 2506.15799, and ajwagen/dsrl.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mmrl.core.payload import to_device
from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from robotics.policies.base.action_policy import ActionChoice, ActionPolicy, PolicyInputs, open_policy
from robotics.policies.base.action_statistics import StateStatistics
from robotics.policies.base.action_tokens import draw_rows
from robotics.policies.base.encoder import VOCABULARY_FILE, Vocabulary, open_encoded
from robotics.policies.base.saved import read_units, read_weights, write_config, write_weights
from robotics.policies.squashed import CriticsPolicy, SquashedActionPolicy, SquashedPolicyConfig, score_squashed
from robotics.sim.interface import read_sizes

BASE = "base"
"""Subfolder of a saved policy with the frozen one."""


@dataclass
class ImprovedConfig(SquashedPolicyConfig):
    """The frozen policy, and sizes of the head."""

    base: str = ""
    """Folder of the policy to improve, or a run folder (uses its best checkpoint)."""
    features: bool | None = None
    """Whether the head reads the mean output of the base's encoder; null = if the base reads images with an encoder of
    this package. Without features and without the base's images, the head acts on the state alone."""
    n_action_steps: int = rare(bounded(0, at_least=0))
    """Number of control steps of the base's chunk to execute; 0 = all."""


@dataclass
class ResidualPolicyConfig(ImprovedConfig):
    """A residual on the actions of a frozen policy."""

    xi: float = bounded(0.2, above=0, at_most=2)
    """Maximum residual per entry of an action, which ranges over -1..1."""
    std: float = rare(bounded(0.5, above=0))
    """Initial standard deviation before the tanh."""


@dataclass
class SteeredPolicyConfig(ImprovedConfig):
    """The noise that a frozen flow policy starts from."""

    bound: float = bounded(1.5, above=0)
    """Maximum absolute value of the chosen noise; the base was trained with standard normal noise."""
    repeat: bool = False
    """Whether all control steps of a chunk start from the same noise, as DSRL does with pi0."""


class ImprovedPolicy(CriticsPolicy, ActionPolicy):
    """A frozen policy and a head, which is a squashed Gaussian of what it reads; see the module.

    policy = ResidualPolicy.improve(base, ResidualPolicyConfig(1, 1, xi=0.2), state_size=10, instructions=["push"])
    """

    base: ActionPolicy
    """The frozen policy."""
    by_step = False
    kind: ClassVar[str]
    config_class: ClassVar[type[ImprovedConfig]]
    config: ImprovedConfig
    noise_chosen: tuple[int, int] | None = None
    """See `SquashedActionPolicy.noise_chosen`."""

    def __init__(self, config: ImprovedConfig, vocabulary: Vocabulary, base: ActionPolicy, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = vocabulary
        self.head = SquashedActionPolicy(config, vocabulary, seed)
        # a decision is a whole chunk: see the module
        self.decisions = 1
        self.chunk = config.n_action_steps or base.chunk
        self.action_size = base.action_size
        # not a registered module: it is neither trained, nor averaged, nor among the weights of this policy
        self.__dict__[BASE] = base.requires_grad_(False).eval()
        self.views, self.cameras, self.image_fit = base.views, base.cameras, base.image_fit
        self.action_bounds, self.interface = base.action_bounds, base.interface
        nn.init.zeros_(self.head.mean.weight)

    @classmethod
    def improve(
        cls, base: ActionPolicy, config: Any, state_size: int, instructions: Iterable[str], seed: int = 0
    ) -> Self:
        """Put a new head on a policy, which is frozen.

        Args:
            base: the policy.
            config: settings; sizes of the head's input and output are set here.
            state_size: number of entries of the simulator's state.
            instructions: of the tasks; their words are the head's vocabulary.
            seed: of the head's weights.

        Raises:
            UserError: the base cannot be improved in this way.
        """
        if base.past:
            raise UserError(
                f"the base reads {base.past} past control steps, which a replay does not store; choose another policy"
            )
        if config.n_action_steps > base.chunk:
            raise UserError(f"n_action_steps is {config.n_action_steps}, but the base's chunk has {base.chunk} steps")
        encoder = getattr(base, "encoder", None)
        features = config.features
        if features is None:
            features = encoder is not None and encoder.config.image_size is not None
        if features and encoder is None:
            raise UserError(f"features is true, but a {type(base).__name__} has no encoder whose outputs could be read")
        rows, size = cls._head_shape(base, config)
        changed = dataclasses.replace(config, chunk=rows, action_size=size, features=features)
        seen = state_size + cls._further_numbers(base, changed)
        changed.encoder = dataclasses.replace(config.encoder, image_size=None, state_size=seen)
        return cls(changed, Vocabulary.from_texts(instructions), base, seed)

    @property
    def observation_sizes(self) -> SimpleNamespace:
        """See `robotics.sim.interface.read_sizes`: images are the base's, and the head reads the state."""
        own = read_sizes(self.base)
        images = {"image_size": own.image_size} if hasattr(own, "image_size") else {}
        further = self._further_numbers(self.base, self.config)
        return SimpleNamespace(**images, state_size=(self.config.encoder.state_size or 0) - further)

    @classmethod
    def _head_shape(cls, base: ActionPolicy, config: Any) -> tuple[int, int]:
        """Rows and entries of u."""
        return config.n_action_steps or base.chunk, base.action_size

    @classmethod
    def _further_numbers(cls, base: Any, config: Any) -> int:
        """How many numbers the head reads in addition to the state."""
        return base.encoder.config.width if config.features else 0

    def act(
        self,
        batch: PolicyInputs,
        generator: torch.Generator,
        temperature: float = 1.0,
        greedy: bool = False,
        base_only: bool = False,
    ) -> ActionChoice:
        """Choose a chunk of actions for each row; the temperature multiplies the head's standard deviation.

        With `base_only`, the head has no influence: a residual is 0, and noise is drawn from a normal distribution.
        Decisions are (B, ...) float32 as described in the module; log-probabilities are (B, 1).
        """
        with torch.no_grad():
            seen = self.look(batch, generator)
            mean, log_std = self.head.gaussian(self._read(seen, batch.instructions), temperature)
            noise = to_device(draw_rows(torch.randn, mean.shape, generator), mean.device)
            before = self._of_base(noise) if base_only else mean if greedy else mean + log_std.exp() * noise
            actions = self._execute(batch, seen, before.tanh(), generator)
            logp = score_squashed(before, mean, log_std).sum(1, keepdim=True)
        return ActionChoice(actions, torch.cat([before.flatten(1), seen], 1), logp)

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, None]:
        """Score decisions of `act`; the base is not run, and the entropy has no closed form."""
        before, seen = self.split(decisions)
        mean, log_std = self.head.gaussian(self._read(seen, batch.instructions), temperature)
        return score_squashed(before.to(mean), mean, log_std).sum(1, keepdim=True), None

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Not available: clone the base instead; raises UserError."""
        raise UserError(f"a policy of kind {self.kind} is not cloned; clone its base, and improve that")

    def split(self, decisions: Tensor) -> tuple[Tensor, Tensor]:
        """The parts (..., rows, entries) u and (..., V) of decisions."""
        shape = (self.config.chunk, self.config.action_size)
        size = shape[0] * shape[1]
        return decisions[..., :size].unflatten(-1, shape), decisions[..., size:]

    def look(self, batch: PolicyInputs, generator: torch.Generator) -> Tensor:
        """Input (B, V) float32 of the head for a batch of observations."""
        raise NotImplementedError

    def chosen(self, decisions: Tensor) -> Tensor:
        """Action input of the critics for decisions, (..., rows, entries) in -1..1."""
        raise NotImplementedError

    def draw(self, batch: PolicyInputs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw what critics judge, and its log-densities (B, rows); `state` is what `look` gives.

        Gradient: into all weights of the head.
        """
        return self.head.draw(batch, generator)

    def looks(self, states: Tensor, decisions: Tensor) -> Tensor:
        """Input (..., V) of the head at each decision."""
        return self.split(decisions)[1]

    def _read(self, seen: Tensor, instructions: tuple[str, ...]) -> PolicyInputs:
        return PolicyInputs(None, seen, instructions)

    def _state_and_features(self, batch: PolicyInputs) -> list[Tensor]:
        if batch.state is None:
            raise UserError(f"a policy of kind {self.kind} reads the state, but the observations have none")
        state = batch.state.float().to(self.device)
        encoded: Any = self.base
        return [state, encoded.features(batch).float()] if self.config.features else [state]

    def _of_base(self, noise: Tensor) -> Tensor:
        """The u at which the policy is its base, given standard normal noise."""
        raise NotImplementedError

    def _execute(self, batch: PolicyInputs, seen: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
        """Actions (B, K, D) of what the head chose."""
        raise NotImplementedError

    def _base_actions(self, batch: PolicyInputs, generator: torch.Generator, **options: Any) -> Tensor:
        """Greedy actions (B, K, D) of the base in the simulator's -1..1."""
        actions = self.base.act(batch, generator, greedy=True, **options).actions[:, : self.chunk]
        statistics = self.base.statistics
        if statistics is not None:
            actions = torch.from_numpy(statistics.unnormalise(actions.float().cpu().numpy()))
        return actions.to(self.device, torch.float32).clamp(-1, 1)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.base._apply(fn)
        return super()._apply(fn, recurse)

    def scale_states(self, statistics: StateStatistics) -> None:
        """Standardise what the head reads."""
        self.head.scale_states(statistics)

    def save_pretrained(self, path: Path | str) -> None:
        """Write a folder that holds both the head and the base."""
        self._save_head(Path(path))
        self.base.save_pretrained(Path(path) / BASE)

    def export(self, path: Path | str) -> None:
        """Write a self-contained folder."""
        self._save_head(Path(path))
        self.base.export(Path(path) / BASE)

    def _save_head(self, path: Path) -> None:
        write_config(path, self.kind, self.config, self)
        self.vocabulary.save(path / VOCABULARY_FILE)
        write_weights(self, path)

    def load_weights(self, path: Path | str) -> None:
        """Restore the head; the base never changes."""
        self.vocabulary.check_same(Path(path) / VOCABULARY_FILE)
        read_weights(self, Path(path))
        read_units(Path(path), self)

    @classmethod
    def from_pretrained(cls, path: Path | str) -> Self:
        """Load what `save_pretrained` or `export` wrote."""
        opened: Self = open_encoded(cls, Path(path), lambda folder: open_policy(folder / BASE))
        return opened


class ResidualPolicy(ImprovedPolicy):
    """A frozen policy whose actions are changed by at most xi."""

    kind = "residual"
    config_class = ResidualPolicyConfig
    config: ResidualPolicyConfig

    @classmethod
    def _further_numbers(cls, base: Any, config: Any) -> int:
        rows, size = cls._head_shape(base, config)
        return rows * size + super()._further_numbers(base, config)

    def look(self, batch: PolicyInputs, generator: torch.Generator) -> Tensor:
        """The base's action, then the state, then features, (B, V)."""
        actions = self._base_actions(batch, generator).flatten(1)
        return torch.cat([actions, *self._state_and_features(batch)], 1)

    def chosen(self, decisions: Tensor) -> Tensor:
        """The summed actions (..., K, D)."""
        before, seen = self.split(decisions)
        return self._sum(seen, before.tanh())

    def draw(self, batch: PolicyInputs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw summed actions (B, K, D) and the log-densities (B, K) of their residuals; `state` is what `look` gives.

        Gradient: into all weights of the head, through the actions, except where they are clipped.
        """
        residuals, logp = self.head.draw(batch, generator)
        assert batch.state is not None
        return self._sum(batch.state, residuals), logp

    def _sum(self, seen: Tensor, residuals: Tensor) -> Tensor:
        own = seen[..., : self.chunk * self.action_size].unflatten(-1, (self.chunk, self.action_size))
        return (own + self.config.xi * residuals).clamp(-1, 1)

    def _of_base(self, noise: Tensor) -> Tensor:
        return torch.zeros_like(noise)

    def _execute(self, batch: PolicyInputs, seen: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
        return self._sum(seen, chosen)


class SteeredPolicy(ImprovedPolicy):
    """A frozen flow policy that starts from chosen noise (DSRL)."""

    kind = "steered"
    config_class = SteeredPolicyConfig
    config: SteeredPolicyConfig

    def __init__(self, config: SteeredPolicyConfig, vocabulary: Vocabulary, base: ActionPolicy, seed: int = 0) -> None:
        super().__init__(config, vocabulary, base, seed)
        self.noise_chosen = (config.chunk, config.action_size)

    @classmethod
    def _head_shape(cls, base: ActionPolicy, config: Any) -> tuple[int, int]:
        if base.noise_shape is None:
            raise UserError(
                f"a {type(base).__name__} does not start from noise, so it cannot be steered; choose a policy of kind "
                "flow, lerobot_flow or beso, or model.kind residual"
            )
        rows, size = base.noise_shape
        return (1 if config.repeat else rows), size

    def look(self, batch: PolicyInputs, generator: torch.Generator) -> Tensor:
        """The state, then features, (B, V)."""
        return torch.cat(self._state_and_features(batch), 1)

    def chosen(self, decisions: Tensor) -> Tensor:
        """The noise (..., N, M), divided by its bound."""
        return self.split(decisions)[0].tanh()

    def _of_base(self, noise: Tensor) -> Tensor:
        # within the bound, whose inverse tanh is infinite
        inside = 1 - 1e-5
        return (noise / self.config.bound).clamp(-inside, inside).atanh()

    def _execute(self, batch: PolicyInputs, seen: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
        assert self.base.noise_shape is not None
        start = self.config.bound * chosen
        return self._base_actions(batch, generator, start=start.expand(-1, self.base.noise_shape[0], -1))


class BaseActs:
    """Acts as the frozen base of a policy."""

    past = 0

    def __init__(self, policy: ImprovedPolicy) -> None:
        self._policy = policy
        self.chunk = policy.chunk

    def act(self, batch: PolicyInputs, generator: torch.Generator, **options: Any) -> ActionChoice:
        """Choose a chunk of actions for each row."""
        return self._policy.act(batch, generator, **options, base_only=True)
