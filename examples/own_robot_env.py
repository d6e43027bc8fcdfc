"""Train your own robot policy in your own Gymnasium environment."""

import tempfile

import gymnasium
import numpy as np
import torch

from mmrl import train
from robotics import draw_rows


class Cart(gymnasium.Env):
    """Move a cart to a flag."""

    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    observation_space = gymnasium.spaces.Box(-2, 2, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = np.array([0.0, self.np_random.uniform(0.3, 0.8)], np.float32)
        return self.state.copy(), {}

    def step(self, action):
        self.state[0] += 0.1 * float(action[0])
        distance = abs(float(self.state[0] - self.state[1]))
        return self.state.copy(), -distance, distance < 0.05, False, {"success": distance < 0.05}


class Driver(torch.nn.Module):
    """A Gaussian over the speed; `act` samples it, `log_probs` scores the samples."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def act(self, obs, generator):
        mean = self.net(obs["state"])
        action = mean + 0.5 * draw_rows(torch.randn, mean.shape, generator).to(mean)
        return action, self.log_probs(obs, action)

    def log_probs(self, obs, actions):
        return torch.distributions.Normal(self.net(obs["state"]), 0.5).log_prob(actions).sum(-1)


torch.manual_seed(0)
run = train(
    "grpo",
    model=Driver(),
    env=Cart,
    data=50,  # layouts, the seeds of `reset`
    eval_data=20,
    steps=8,
    learning_rate=1e-2,
    output_dir=tempfile.mkdtemp(prefix="own-robot-env-"),
    options={"sim": {"horizon": 20, "image_size": 0, "workers": 2}},
)
print(run.evaluation)
