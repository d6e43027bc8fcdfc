"""Policies that the package lerobot trained (ACT, diffusion), evaluated and improved here.

The policy stays frozen in a process of its own, in the interpreter of lerobot, and predicts chunks of actions. Around
them lies a learned Gaussian: its mean is the chunk plus a small network's correction, which begins as zero, and each
entry of an action has its own standard deviation. Reinforcement learning moves both; greedy actions of an untrained one
are lerobot's own. Each control step is a decision, with the log-density of its D entries; the chunk is kept with the
decisions, so that scoring needs no call of the frozen policy.

Actions are those of the data that the policy learned from, clipped to -1..1 as the simulators take them.

Differences from lerobot's own evaluation: a policy here has no memory, so one that takes several observations in a row,
as diffusion does by default, gets the current one repeated.

Source: Residual Policy Learning, arXiv 1812.06298 (frozen policy, correction that begins as zero); huggingface/lerobot
    0.6.1, src/lerobot/scripts/lerobot_eval.py (processors).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from mmrl.errors import RunError, UserError
from mmrl.fields import bounded, check_config
from mmrl.files import expanded
from mmrl.workers.engine import WorkerSpec
from mmrl.workers.failures import WorkerFailure
from mmrl.workers.pool import WorkerPool
from mmrl.workers.worker import Request
from robotics.vla.policy import ActionChoice, ActionPolicy, PolicyInputs, check_demonstrations
from robotics.vla.saved import make_config, read_config, read_statistics, read_weights, write_config, write_weights

__all__ = ["LeRobotPolicy", "LeRobotPolicyConfig"]

LOGGER = logging.getLogger("mmrl")
SERVICE = Path(__file__).resolve().with_name("lerobot_service.py")


@dataclass
class LeRobotPolicyConfig:
    """Which LeRobot policy is served, and the Gaussian around its actions."""

    folder: str = ""
    """Folder that lerobot saved the policy to: config.json, model.safetensors and the processors."""
    python: str | None = None
    """Interpreter of an environment with lerobot; this one when None."""
    device: str = "cpu"
    """Device of the served policy, by torch's name."""
    std: float = bounded(0.1, above=0)
    """Standard deviation of each entry of an action at first, on the scale -1..1."""
    hidden: int = bounded(64, at_least=1)
    """Width of the network that corrects the actions."""
    start_timeout_s: float = bounded(600.0, above=0)
    """Seconds for importing lerobot and loading the policy."""
    call_timeout_s: float = bounded(300.0, above=0)
    """Seconds for one batch of observations."""

    def validate(self) -> None:
        """Refuse an empty folder; raises ValueError."""
        if not self.folder:
            raise ValueError("folder is empty; name the folder of a LeRobot policy, model.options.folder")


class LeRobotPolicy(ActionPolicy):
    """A frozen LeRobot policy and a learned Gaussian around its chunks.

        policy = LeRobotPolicy(LeRobotPolicyConfig("my-act", python="lerobot-env/bin/python"))
        choice = policy.act(batch, torch.Generator().manual_seed(0), greedy=True)

    Args:
        config: which policy, and the Gaussian.
        seed: of the correction's weights; the global generator is not used.

    Raises:
        UserError: the folder is no policy that can be served.
        RunError: the process of the policy cannot be started.
    """

    def __init__(self, config: LeRobotPolicyConfig, seed: int = 0) -> None:
        super().__init__()
        check_config(config)
        self.settings, self._server = config, _Server(config)
        hello = self._server.hello
        self.chunk, self.action_size = hello["chunk"], hello["action_size"]
        self.decisions = self.chunk
        self.config = _Inputs(_Sizes(_pair(hello["image_size"]), hello["state_size"]))
        size = self.chunk * self.action_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first = nn.Linear((hello["state_size"] or 0) + size, config.hidden)
            last = nn.Linear(config.hidden, size)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.correction = nn.Sequential(first, nn.Tanh(), last)
        self.log_std = nn.Parameter(torch.full((self.action_size,), math.log(config.std)))

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """See `ActionPolicy.act`; log-probabilities are of the actions before they are clipped."""
        with torch.no_grad():
            seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
            base = self.predict(batch, seed)
            mean, std = self._gaussian(batch, base, temperature)
            noise = torch.randn(mean.shape, generator=generator, device=generator.device).to(mean)
            drawn = mean if greedy else mean + std * noise
            logp = Normal(mean, std, validate_args=False).log_prob(drawn).sum(-1)
        return ActionChoice(drawn.clamp(-1, 1), torch.cat([drawn, base], -1), logp)

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """See `ActionPolicy.log_probs`; decisions are (B, K, 2 D): the actions drawn, and the frozen policy's."""
        drawn, base = decisions.to(self.device).float().split(self.action_size, -1)
        mean, std = self._gaussian(batch, base, temperature)
        density = Normal(mean, std, validate_args=False)
        return density.log_prob(drawn).sum(-1), density.entropy().sum(-1)

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """See `ActionPolicy.bc_loss`; minus the log-density of the demonstrated actions, by control step."""
        check_demonstrations(self, batch, actions, mask)
        seed = 0 if generator is None else int(torch.randint(2**31, (), generator=generator, device=generator.device))
        base = self.predict(batch, seed)
        logp, _ = self.log_probs(batch, torch.cat([actions.to(base), base], -1))
        weight = mask.to(logp)
        loss = -(logp * weight).sum() / weight.sum().clamp(min=1)
        return loss, {"bc/loss": float(loss.detach())}

    def save_pretrained(self, path: Path | str) -> None:
        """Write the correction, and where the frozen policy lies; that folder is not copied."""
        write_config(Path(path), "lerobot", self.settings, self.statistics)
        write_weights(self, Path(path))

    def load_weights(self, path: Path | str) -> None:
        """See `ActionPolicy.load_weights`."""
        read_weights(self, Path(path))
        self.statistics = read_statistics(Path(path))

    @classmethod
    def from_pretrained(cls, path: Path | str) -> Self:
        """Open what `save_pretrained` wrote; the frozen policy has to lie where it was."""
        entries = {key: value for key, value in read_config(Path(path)).items() if key != "kind"}
        policy = cls(make_config(LeRobotPolicyConfig, entries, f"{path}/policy.json"))
        policy.load_weights(path)
        return policy

    def predict(self, batch: PolicyInputs, seed: int) -> Tensor:
        """Ask the frozen policy.

        Args:
            batch: B rows.
            seed: of the noise of policies that draw their actions.

        Returns:
            (B, K, D) float32 actions in the units of its data, not clipped.

        Raises:
            UserError: the observations lack what the policy needs.
            RunError: its process failed.
        """
        return self._server.predict(batch, seed, self.config.encoder).to(self.device)

    def close(self) -> None:
        """End the process of the frozen policy; another call of the policy starts a new one."""
        self._server.pool.close()

    def _gaussian(self, batch: PolicyInputs, base: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        seen = [base.flatten(1)]
        if self.config.encoder.state_size and batch.state is not None:
            seen.insert(0, batch.state.to(base))
        mean = base + self.correction(torch.cat(seen, -1)).unflatten(1, (self.chunk, self.action_size))
        return mean, (self.log_std.exp() * temperature).expand_as(mean)


@dataclass(frozen=True)
class _Sizes:
    image_size: tuple[int, int] | None
    state_size: int | None


@dataclass(frozen=True)
class _Inputs:
    """What the policy sees, under the name where `check_fit` looks."""

    encoder: _Sizes


class _Server:
    """The process of the frozen policy; copies of the policy share it."""

    def __init__(self, config: LeRobotPolicyConfig) -> None:
        self.config, folder = config, expanded(config.folder).resolve()
        spec = WorkerSpec(
            f"{SERVICE}:make",
            {"folder": str(folder), "device": config.device},
            purpose=f"the LeRobot policy {folder}",
            python=config.python,
            environment={"HF_HUB_OFFLINE": "1"},
            start_timeout_s=config.start_timeout_s,
            heartbeat_timeout_s=None,
        )
        self.pool = WorkerPool(spec, 1)
        hello = self.pool.start()
        if isinstance(hello, WorkerFailure):
            raise _error(hello, folder)
        self.hello: dict[str, Any] = dict(hello.fields)
        if self.hello["history"] > 1:
            LOGGER.warning(
                "%s takes %d observations in a row; here it gets the current one repeated, unlike what it learned",
                folder,
                self.hello["history"],
            )

    def predict(self, batch: PolicyInputs, seed: int, inputs: _Sizes) -> Tensor:
        arrays = {}
        for name, value, needed in (
            ("images", batch.images, inputs.image_size),
            ("state", batch.state, inputs.state_size),
        ):
            if needed and value is None:
                raise UserError(f"{self.config.folder} needs {name}, which the observations lack")
            if needed and value is not None:
                arrays[name] = value.cpu().numpy()
        request = Request({"tasks": list(batch.instructions), "seed": seed}, arrays)
        answer = self.pool.ask({0: request}, self.config.call_timeout_s)[0]
        if isinstance(answer, WorkerFailure):
            raise _error(answer, Path(self.config.folder))
        return torch.from_numpy(answer.arrays["actions"].copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _error(failure: WorkerFailure, folder: Path) -> UserError | RunError:
    if failure.for_user:
        return UserError(failure.reason)
    return RunError(
        f"the process of the LeRobot policy {folder} {failure.kind}: {failure.reason}; it needs an interpreter with "
        f"lerobot, model.options.python\n{failure.evidence}"
    )


def _pair(size: list[int] | None) -> tuple[int, int] | None:
    return None if size is None else (size[0], size[1])
