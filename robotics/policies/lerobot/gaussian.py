"""Policies trained with lerobot (ACT, diffusion, pi0.5, X-VLA, GR00T), evaluated and improved here.

The policy stays frozen in a separate process, in lerobot's Python environment, and predicts chunks of actions. A
learned Gaussian is added on top: its mean is the chunk plus the correction of a small network, which starts at zero,
and each entry of an action has its own standard deviation. Reinforcement learning trains both; before training, greedy
actions are lerobot's own. Each control step is a decision, with the log-density of its D entries. The chunk is stored
with the decisions, so scoring does not call the frozen policy.

The frozen policy's actions are in the units of its data. `action_low` and `action_high` correspond to -1 and 1 in the
simulator; the Gaussian is centred on the converted actions, and its samples are clipped to -1..1.

A policy that uses several consecutive observations, as diffusion does by default, gets those of the last control steps,
like the queues in lerobot's `select_action`. Scoring does not call it and so needs no past.

Source: Residual Policy Learning, arXiv 1812.06298 (frozen policy, correction that starts at zero); huggingface/lerobot
    0.6.1, src/lerobot/scripts/lerobot_eval.py (processors).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from mmrl.fields import bounded, rare
from robotics.policies.base.action_policy import ActionChoice, PolicyInputs, check_demonstrations
from robotics.policies.base.action_tokens import draw_rows
from robotics.policies.lerobot.lerobot_server import LeRobotServerConfig, ServedActionPolicy


@dataclass
class LeRobotPolicyConfig(LeRobotServerConfig):
    """The LeRobot policy to serve, and the Gaussian around its actions."""

    std: float = rare(bounded(0.1, above=0))
    """Initial standard deviation of each entry of an action, on the simulator's scale -1..1."""
    hidden: int = rare(bounded(64, at_least=1))
    """Width of the network that corrects the actions."""


class LeRobotPolicy(ServedActionPolicy):
    """A frozen LeRobot policy and a learned Gaussian around its chunks.

    policy = LeRobotPolicy(LeRobotPolicyConfig("my-act", python="lerobot-env/bin/python"))
    choice = policy.act(batch, torch.Generator().manual_seed(0), greedy=True)
    """

    kind = "lerobot"
    config_class = LeRobotPolicyConfig

    def __init__(self, config: LeRobotPolicyConfig, seed: int = 0) -> None:
        super().__init__(config, "make")
        self.decisions = self.chunk
        size = self.chunk * self.action_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first = nn.Linear((self.config.state_size or 0) + size, config.hidden)
            last = nn.Linear(config.hidden, size)
        # a correction of zero: untrained, the mean is the frozen policy's own action
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.correction = nn.Sequential(first, nn.Tanh(), last)
        self.log_std = nn.Parameter(torch.full((self.action_size,), math.log(config.std)))

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """Choose a chunk of actions for each row; log-probabilities are of the unclipped actions."""
        with torch.no_grad():
            # one seed per batch, since lerobot draws the whole batch from its global generator
            seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
            base = self._base(batch, seed)
            mean, std = self._gaussian(batch, base, temperature)
            noise = draw_rows(torch.randn, mean.shape, generator).to(mean, non_blocking=True)
            drawn = mean if greedy else mean + std * noise
            logp = Normal(mean, std, validate_args=False).log_prob(drawn).sum(-1)
        return ActionChoice(drawn.clamp(-1, 1), torch.cat([drawn, base], -1), logp)

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Score decisions (B, K, 2 D): the sampled actions followed by those of the frozen policy."""
        drawn, base = decisions.to(self.device).float().split(self.action_size, -1)
        mean, std = self._gaussian(batch, base, temperature)
        density = Normal(mean, std, validate_args=False)
        return density.log_prob(drawn).sum(-1), density.entropy().sum(-1)

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning loss: negative log-density of the demonstrated actions, per control step."""
        check_demonstrations(self, batch, actions, mask)
        seed = 0 if generator is None else int(torch.randint(2**31, (), generator=generator, device=generator.device))
        base = self._base(batch, seed)
        logp, _ = self.log_probs(batch, torch.cat([actions.to(base), base], -1))
        weight = mask.to(logp)
        loss = -(logp * weight).sum() / weight.sum().clamp(min=1)
        return loss, {"bc/loss": float(loss.detach())}

    def predict(self, batch: PolicyInputs, seed: int) -> Tensor:
        """Unclipped actions (B, K, D) float32 of the frozen policy in the units of its data."""
        actions = self._server.ask({"seed": seed}, batch)["actions"]
        return torch.from_numpy(actions.copy()).to(self.device)

    def _base(self, batch: PolicyInputs, seed: int) -> Tensor:
        """Actions (B, K, D) of the frozen policy on the simulator's scale."""
        found = self.predict(batch, seed)
        return found if self.action_range is None else self.action_range.to_sim(found)

    def _gaussian(self, batch: PolicyInputs, base: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        seen = [base.flatten(1)]
        if self.config.state_size and batch.state is not None:
            seen.insert(0, batch.state.to(base))
        mean = base + self.correction(torch.cat(seen, -1)).unflatten(1, (self.chunk, self.action_size))
        return mean, (self.log_std.exp() * temperature).expand_as(mean)
