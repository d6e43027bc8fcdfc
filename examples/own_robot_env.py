"""Train your own robot policy in your own Gymnasium environment."""

import json
import tempfile

import gymnasium
import numpy as np
import torch

from robotics import EpisodeSetConfig, ModuleAdapter, RobotGrpoConfig, SimConfig, draw_rows, train_robot


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


# Environments run in worker processes that import this file, so training must be guarded by this line.
if __name__ == "__main__":
    torch.manual_seed(0)
    config = RobotGrpoConfig(recipe="robot_grpo", output_dir=tempfile.mkdtemp(prefix="own-robot-env-"))
    config.sim = SimConfig(kind="gymnasium", env=f"{__file__}:Cart", horizon=20, image_size=0, workers=2)
    config.data = EpisodeSetConfig(layouts=50)  # layouts are the seeds of `reset`
    config.eval_data = {"held_out": EpisodeSetConfig(layouts=20, split="held_out")}
    config.evaluation.greedy, config.evaluation.samples = False, 1
    config.trainer.steps, config.trainer.learning_rate = 8, 1e-2
    run = train_robot(config, ModuleAdapter(Driver(), action_size=1))

    for line in (run / "evaluations.jsonl").read_text().splitlines():
        row = json.loads(line)
        print(f"{row['tag']} training: success {row['success/sampled']:.2f}")
