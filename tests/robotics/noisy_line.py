"""The line of `line_sim` without images, with an expert, a gripper that does nothing, and a full state."""

from dataclasses import replace

import numpy as np

from tests.robotics.line_sim import LineSim


class NoisyLine(LineSim):
    """The full state also has the number of control steps so far."""

    action_size, action_names, full_state_size = 2, ("dx", "gripper"), 3
    image_size = None

    def expert_actions(self):
        gap = self.goal[self.live] - self.place[self.live]
        return np.stack([np.clip(gap / 0.1, -0.5, 0.5), np.ones(len(gap))], 1)

    def full_state(self):
        return self._whole(self.live)

    def _whole(self, rows):
        return np.stack([self.place[rows], self.goal[rows], self.elapsed[rows]], 1).astype(np.float32)

    def _picture(self, row):
        return np.zeros((1, 1, 3), np.uint8)

    def _result(self, rows, rewards, steps):
        result = super()._result(rows, rewards, steps)
        return replace(
            result, observation=replace(result.observation, images=None, views=None), full_state=self._whole(rows)
        )


def open_noisy(config):
    """Factory for `sim.kind`."""
    return NoisyLine(**config.options)
