"""SmolVLA, pi0 and pi0.5 from lerobot, improved here by reinforcement learning of their action expert.

Shapes: B rows, K control steps, D entries of an action, M >= D entries of the head (lerobot pads actions to M), S
denoising steps, E = K M numbers of a point of the chain.

The policy runs in a separate process, in lerobot's Python environment, which returns velocities and their gradients.
The trained weights are float32 parameters here and are sent there whenever they change. Optimiser, clipping, averaging
and checkpoints are therefore the suite's, and the policy itself learns rather than a correction on top of it. The
trained weights are those that a velocity depends on once the observation has been turned into keys and values: the
action expert with its projections of actions and time, and in pi0 also of the state, which pi0.5 reads as text. The
vision-language model is frozen.

Sampling works as in `robotics.policies.flow`: a decision is one denoising step of Flow-GRPO's SDE, which has the same
marginals as the policy's own ODE. Greedy actions follow the ODE and equal lerobot's `predict_action_chunk` for the same
noise.

Source: SmolVLA, arXiv 2506.01844; pi_0, arXiv 2410.24164; pi_0.5, arXiv 2504.16054; Flow-GRPO, arXiv 2505.05470, and
    pi_RL, arXiv 2510.25889 (denoising steps as decisions).

`action_low` and `action_high` are the values in the policy's data that correspond to -1 and 1 in the simulator. They
convert executed and demonstrated actions; the chain and its density are in the units of the head.

Differences from pi_RL: all numbers of the chain are scored unless `scored` is `actions`, because padded entries and
control steps that are not executed affect the others in the next step; every step has noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from diffusion.sampling.steps import FlowSdeStep, OdeStep, StepKernel
from mmrl.fields import bounded, choice, rare
from robotics.policies.base.action_policy import ActionChoice, PolicyInputs, check_demonstrations, check_temperature
from robotics.policies.base.action_tokens import draw_rows
from robotics.policies.base.inpainting import RunningChunk
from robotics.policies.base.saved import write_config, write_weights
from robotics.policies.lerobot.lerobot_server import LeRobotServer, LeRobotServerConfig, ServedActionPolicy

REDUCTIONS = ("sum", "mean")
SCORED = ("chain", "actions")
TIME_POWER, TIME_SCALE, TIME_OFFSET = 1.5, 0.999, 0.001
"""Times of the cloning loss are 0.999 u + 0.001 with u from Beta(1.5, 1), as in lerobot's training."""
INSIDE = "lerobot"
"""Subfolder of an export that contains the complete policy."""


@dataclass
class LeRobotFlowConfig(LeRobotServerConfig):
    """The LeRobot policy to train, and its denoising steps."""

    steps: int | None = rare(bounded(None, at_least=2))
    """S, denoising steps. Default: the policy's own number."""
    noise_level: float = rare(bounded(0.5, above=0))
    """Scale of the noise of a step, a in g = a sqrt(sigma / (1 - sigma))."""
    logp_reduction: str = rare(choice("sum", REDUCTIONS))
    """sum: log-density of a step; mean: divided by the number of its entries, as for images."""
    scored: str = rare(choice("chain", SCORED))
    """chain: all K M numbers of a step, its exact density; actions: the K D numbers that become actions, as in pi_RL,
    which excludes the noise of the padding and its effect on later steps from the gradient."""


class LeRobotFlowPolicy(ServedActionPolicy):
    """A SmolVLA, pi0 or pi0.5 policy of LeRobot with a trainable action expert.

    policy = LeRobotFlowPolicy(LeRobotFlowConfig("my-smolvla", python="lerobot-env/bin/python"))
    choice = policy.act(batch, torch.Generator().manual_seed(0))
    logp, _ = policy.log_probs(batch, choice.decisions)
    logp.sum().backward()
    policy.export("trained")  # trained/lerobot is a folder that lerobot loads
    """

    kind = "lerobot_flow"
    config_class = LeRobotFlowConfig
    by_step = False
    inpaints = True

    def __init__(self, config: LeRobotFlowConfig) -> None:
        super().__init__(config, "make_flow")
        self.width = self._server.hello["width"]
        self.decisions = config.steps or self._server.hello["steps"]
        # with lerobot's padding
        self.noise_shape = (self.chunk, self.width)
        initial = self._server.ask({"do": "initial"})
        self._names = tuple(initial)
        # torch does not allow dots in parameter names
        # copied: arrays of a message are read-only
        weights = {name: torch.from_numpy(values.copy()) for name, values in initial.items()}
        self.expert = nn.ParameterDict({_plain(name): nn.Parameter(value) for name, value in weights.items()})
        self._remote = _RemoteWeights(self._server, weights)
        # sigma_max is the second time of the grid, 1 - 1 / S
        self._kernel = FlowSdeStep(sigma_max=1 - 1 / self.decisions, noise_level=config.noise_level)

    def act(
        self,
        batch: PolicyInputs,
        generator: torch.Generator,
        temperature: float = 1.0,
        greedy: bool = False,
        start: Tensor | None = None,
        previous: RunningChunk | None = None,
    ) -> ActionChoice:
        """Choose a chunk of actions for each row.

        The temperature multiplies the noise of the steps. Greedy follows the flow without noise from a random start,
        the usual way to evaluate flow policies; its steps have no density, so the log-probabilities are NaN. `start`
        (B, K, M) replaces the random start. Chunks that continue `previous` have no log-probabilities either.
        """
        check_temperature(temperature)
        shape = (len(batch), self.decisions + 1, self.chunk, self.width)
        # All noise is drawn here, from the generators of the rows, and the steps are sent as a table: the process of
        # lerobot only evaluates velocities and adds, so it needs neither a generator nor the kernel.
        noise = draw_rows(torch.randn, shape, generator)
        if start is not None:
            noise[:, 0] = start.to(noise)
        table = _affine(OdeStep() if greedy else self._kernel, self._sigmas(), 0.0 if greedy else temperature)
        arrays = {"noise": noise.cpu().numpy(), "table": table.numpy()}
        limits = {} if previous is None else {"limit": min(previous.limit, self.decisions)}
        with torch.no_grad():
            arrays |= {} if previous is None else self._guidance(batch, previous)
            found = self._remote.ask("sample", self._weights(), batch, arrays, **limits)
            chain, velocities = self._tensor(found["chain"]), self._tensor(found["velocities"])
            # scored here and not in the process: sampling and update have to use the same kernel
            logp, _ = self._scores(chain, velocities, temperature)
            if greedy or previous is not None:
                logp = torch.full_like(logp, math.nan)
        actions = self._tensor(found["actions"])
        if self.action_range is not None:
            actions = self.action_range.to_sim(actions)
        return ActionChoice(actions.clamp(-1, 1), chain.flatten(2), logp)

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Score decisions (B, S + 1, E); the entropies do not depend on the weights."""
        expected = (len(batch), self.decisions + 1, self.chunk * self.width)
        if tuple(decisions.shape) != expected:
            raise ValueError(f"decisions have the shape {tuple(decisions.shape)}; expected {expected}")
        check_temperature(temperature)
        chain = decisions.to(self.device).float().unflatten(2, (self.chunk, self.width))
        times = self._sigmas()[:-1].expand(len(batch), -1)
        return self._scores(chain, self._velocities(batch, chain[:, :-1], times), temperature)

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning loss: flow matching with lerobot's times, over the D entries of an action."""
        check_demonstrations(self, batch, actions, mask)
        if generator is None:
            raise ValueError("flow matching samples times and noise; pass bc_loss a generator")
        # past the end of a demonstration, 0 in the simulator's units is no motion
        wanted = actions.detach().cpu().float().where(mask.cpu()[..., None] > 0, 0.0)
        if self.action_range is not None:
            wanted = self.action_range.to_data(wanted)
        found = self._remote.ask("normalised", self._weights(), batch, {"actions": wanted.numpy()})
        clean = self._tensor(found["actions"])
        noise = draw_rows(torch.randn, clean.shape, generator).to(clean)
        # u^(1 / 1.5) of a uniform u has the distribution Beta(1.5, 1)
        uniform = draw_rows(torch.rand, (len(batch),), generator).to(clean)
        time = TIME_SCALE * uniform ** (1 / TIME_POWER) + TIME_OFFSET
        share = time[:, None, None]
        velocity = self._velocities(batch, (share * noise + (1 - share) * clean)[:, None], time[:, None])[:, 0]
        # padding of the action has no target
        error = (velocity - (noise - clean))[..., : self.action_size].square()
        weight = mask.to(error)[..., None].expand_as(error)
        loss = (error * weight).sum() / weight.sum().clamp(min=1)
        return loss, {"bc/loss": float(loss.detach())}

    def export(self, path: Path | str) -> None:
        """Write a self-contained folder; lerobot itself can load its subfolder `lerobot`."""
        target = (Path(path) / INSIDE).resolve()
        target.mkdir(parents=True, exist_ok=True)
        write_config(Path(path), self.kind, self.settings, self, inside=INSIDE)
        self._remote.ask("save", self._weights(), None, {}, folder=str(target))
        write_weights(self, Path(path))

    def _guidance(self, batch: PolicyInputs, previous: RunningChunk) -> dict[str, Any]:
        """Running chunk and its weights (B, K, M) in the units of the head; its padding is left alone."""
        actions, weights = (part.cpu() for part in previous.padded(self.chunk, self.action_size))
        if self.action_range is not None:
            actions = self.action_range.to_data(actions)
        found = self._remote.ask("normalised", self._weights(), batch, {"actions": actions.numpy()})["actions"]
        weight = torch.zeros(found.shape)
        weight[..., : self.action_size] = weights
        return {"previous": found.copy(), "weights": weight.numpy()}

    def _weights(self) -> list[Tensor]:
        return [self.expert[_plain(name)] for name in self._names]

    def _sigmas(self) -> Tensor:
        """Times (S + 1,), computed as in lerobot, whose time encoding distinguishes neighbouring float32 numbers."""
        step = -1.0 / self.decisions
        return torch.tensor([*(1.0 + number * step for number in range(self.decisions)), 0.0], device=self.device)

    def _velocities(self, batch: PolicyInputs, points: Tensor, times: Tensor) -> Tensor:
        """(B, S, K, M) and (B, S) -> (B, S, K, M), differentiable with respect to the trained weights."""
        arrays = {"points": points.detach().cpu().numpy(), "times": times.contiguous().cpu().numpy()}
        found: Tensor = _ServedVelocity.apply(self._remote, batch, arrays, *self._weights())
        return found

    def _scores(self, chain: Tensor, velocities: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-densities and entropies (B, S) of the steps of a chain (B, S + 1, K, M)."""
        size = self.width if self.settings.scored == "chain" else self.action_size
        count = self.chunk * size if self.settings.logp_reduction == "sum" else 1
        sigmas = self._sigmas()
        logp = []
        entropy = []
        for step in range(self.decisions):
            # transition in full width: the padding's velocity moves the rest of the chunk in later steps
            mean, std = self._kernel.transition(velocities[:, step], chain[:, step], sigmas[step], sigmas[step + 1])
            std = (std * temperature).expand(len(chain))
            # the kernel averages over the scored numbers; `count` turns the mean into a sum
            logp.append(count * self._kernel.log_prob(chain[:, step + 1, :, :size], mean[..., :size], std))
            entropy.append(count * (0.5 * math.log(2 * math.pi * math.e) + std.log()))
        return torch.stack(logp, 1), torch.stack(entropy, 1)

    def _tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(values.copy()).to(self.device)


class _RemoteWeights:
    """Sends changed weights to a server before each request; copies of a policy share it."""

    def __init__(self, server: LeRobotServer, weights: Mapping[str, Tensor]) -> None:
        self._server = server
        self._number = 0  # of the last upload; a restarted process answers "stale" to any other number
        self._sent = {name: value.clone() for name, value in weights.items()}

    def ask(
        self,
        task: str,
        weights: Sequence[Tensor],
        batch: PolicyInputs | None,
        arrays: Mapping[str, Any],
        **fields: Any,
    ) -> Mapping[str, Any]:
        self._send(weights, everything=False)
        answer = self._server.ask({"do": task, "upload": self._number, **fields}, batch, arrays)
        if not answer:  # stale: the process was restarted and has the weights of the folder
            self._send(weights, everything=True)
            answer = self._server.ask({"do": task, "upload": self._number, **fields}, batch, arrays)
        return answer

    def _send(self, weights: Sequence[Tensor], everything: bool) -> None:
        """Upload the weights that changed since the last upload."""
        # compared by value, because fused optimisers change weights without incrementing a tensor's `_version`
        changed = {}
        for (name, old), new in zip(self._sent.items(), weights, strict=True):
            value = new.detach().float().cpu()
            if everything or not torch.equal(old, value):
                old.copy_(value)
                changed[name] = old.numpy()
        if changed:
            self._number += 1
            self._server.ask({"do": "upload", "upload": self._number}, arrays=changed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class _ServedVelocity(torch.autograd.Function):
    """Velocities of the served policy; for the backward pass, its process computes them again with a graph."""

    @staticmethod
    def forward(
        ctx: Any, remote: _RemoteWeights, batch: PolicyInputs, arrays: dict[str, Any], *weights: Tensor
    ) -> Tensor:
        ctx.call = (remote, batch, arrays)
        # saved so that autograd notices weights that change before the backward pass, which would evaluate the new ones
        ctx.save_for_backward(*weights)
        found = remote.ask("velocities", weights, batch, arrays)["velocities"]
        return torch.from_numpy(found.copy()).to(weights[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Any, ...]:
        remote, batch, arrays = ctx.call
        weights = ctx.saved_tensors
        arrays = arrays | {"cotangents": cotangents.float().cpu().numpy()}
        found = remote.ask("gradients", weights, batch, arrays)
        # in the order of the names, which is that of the weights
        gradients = [torch.from_numpy(values.copy()).to(weights[0].device) for values in found.values()]
        return (None, None, None, *gradients)


def _affine(kernel: StepKernel, sigmas: Tensor, temperature: float) -> Tensor:
    """Table (S, 4) float32: time, a, b and std of each step x' = a x + b velocity + std noise."""
    # the mean of every kernel is linear in x and velocity, so probing it with 0 and 1 gives the coefficients
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    rows = []
    for now, later in zip(sigmas[:-1].cpu(), sigmas[1:].cpu(), strict=True):
        kept, std = kernel.transition(zero, one, now, later)
        moved, _ = kernel.transition(one, zero, now, later)
        rows.append(torch.stack([now, kept[0, 0], moved[0, 0], std[0] * temperature]))
    return torch.stack(rows).float()


def _plain(name: str) -> str:
    return name.replace(".", "/")
