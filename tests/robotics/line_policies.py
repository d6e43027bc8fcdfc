"""Policies for the line: a user's plain module, and one that always reaches the goal."""

import torch
from torch import nn

from robotics import draw_rows


class GaussianWalker(nn.Module):
    """A user's module: one action of one number from the state, with a learned standard deviation."""

    def __init__(self, bias: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.net[-1].weight.data.zero_()
        self.net[-1].bias.data.fill_(bias)
        self.log_std = nn.Parameter(torch.tensor(-0.5))

    def act(self, obs, generator, temperature=1.0, greedy=False):
        mean = self.net(obs["state"])
        noise = torch.zeros_like(mean) if greedy else draw_rows(torch.randn, mean.shape, generator)
        action = mean + self.log_std.exp() * temperature * noise.to(mean, non_blocking=True)
        return action, self.log_probs(obs, action, temperature)[0]

    def log_probs(self, obs, actions, temperature=1.0):
        spread = self.log_std.exp() * temperature
        normal = torch.distributions.Normal(self.net(obs["state"]), spread, validate_args=False)
        return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)


def make_walker(bias: float = 0.0) -> nn.Module:
    """Factory for `model.kind`."""
    return GaussianWalker(bias)


class PictureReader(GaussianWalker):
    """Walks to the goal shown in the image, and stays there."""

    def act(self, obs, generator, temperature=1.0, greedy=False):
        column = obs["images"][:, 0, :, 1].float().argmax(1)
        action = ((column - 16) / 20 - obs["state"][:, 0])[:, None] / 0.1
        return action.clamp(-1, 1), torch.zeros(len(action))


def make_reader(bias: float = 0.0) -> nn.Module:
    """Factory for `model.kind`."""
    return PictureReader(bias)
