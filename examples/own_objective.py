"""Compose an objective from the suite's blocks and your own, and train a small table of logits with it."""

from dataclasses import dataclass

import torch

from mmrl.core import Objective, PolicyOutputs, Rollouts
from mmrl.core.blocks.advantage import GroupMeanStd
from mmrl.core.blocks.clip import Clip
from mmrl.core.loss import TokenMean
from mmrl.fields import bounded


@dataclass(frozen=True)
class SoftClip(Clip):
    """Squashes the log-ratio instead of cutting it off, so that the gradient fades out smoothly."""

    kind = "soft"
    width: float = bounded(0.2, above=0)
    """Log-ratio at which the gradient has fallen to 42%."""

    def __call__(self, log_ratio, logp, advantage):
        return -advantage.detach() * self.width * torch.tanh(log_ratio / self.width), {}

    def formula(self):
        return f"-A_it {self.width:g} tanh(log r_it / {self.width:g})"


SOFT = Objective("soft_grpo", GroupMeanStd(), SoftClip(width=0.3), TokenMean(), citation="this file")
# Your own recipe uses it with `self.objective = SOFT` at the end of its `__init__`.

if __name__ == "__main__":
    SOFT.validate()
    print(SOFT.describe())
    torch.manual_seed(0)
    logits = torch.zeros(6, 10, requires_grad=True)  # a policy that writes 6 digits, one after the other
    optimizer = torch.optim.Adam([logits], lr=0.1)
    group, rows = torch.zeros(16, dtype=torch.long), torch.arange(6)
    for step in range(60):
        digits = torch.distributions.Categorical(logits=logits.detach()).sample((16,))
        reward = (digits == 7).float().mean(1)
        logp_old = logits.detach().log_softmax(-1)[rows, digits]
        rollouts = SOFT.compute_advantages(Rollouts(group, torch.ones(16, 6), logp_old=logp_old, reward=reward))
        denominators = SOFT.denominators(rollouts)
        for _ in range(2):  # in the second pass the ratio is no longer 1, and the clip acts
            optimizer.zero_grad()
            outputs = PolicyOutputs(logits.log_softmax(-1)[rows, digits])
            SOFT.loss(outputs, rollouts, denominators).loss.backward()
            optimizer.step()
        if step % 20 == 0 or step == 59:
            print(f"step {step}: mean reward {reward.mean():.2f}")
