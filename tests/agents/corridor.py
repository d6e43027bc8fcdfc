"""A corridor that an untrained model can walk: every answer is a step, and its length decides the direction."""

import os

import numpy as np


class Corridor:
    """Ends after some steps with the share of right ones; the image shows the position."""

    actions = {"left": "", "right": "", "finish": "ask for the verdict"}  # noqa: RUF012

    def __init__(self, length=3, side=56, fail_at=None, twins=True, reports=False, raise_at=None, early=False):
        self.length, self.side, self.fail_at, self.twins = length, side, fail_at, twins
        self.reports, self.raise_at, self.early = reports, raise_at, early
        self.resets = 0

    def reset(self, task, seed):
        self.resets += 1
        self.place, self.right, self.seed = 0, 0, seed
        return self._look()

    def step(self, action):
        self.place += 1
        self.right += action.name == "right"
        if self.fail_at == self.place and action.name == "left":
            os._exit(1)
        if self.raise_at == self.place and action.name == "left":
            raise ValueError("the corridor has fallen in")
        over = self.place == self.length or action.name == "finish" or (self.early and action.name == "left")
        info = {"marks": [(3, 4)]} | ({"success": self.right > 0} if self.reports else {})
        return self._look(), (self.right / self.length if over else 0.0), over, info

    def close(self):
        pass

    def _look(self):
        image = np.full((self.side, self.side, 3), 40 * self.seed % 256, np.uint8)
        image[:, : 8 * (self.place + 1)] = 250
        if not self.twins:
            image[0, 0] = self.resets
        return {"image": image, "text": f"step {self.place}"}
