"""A service like `robotics.vla.lerobot_service` without lerobot: it walks to the goal of LineSim, too slowly."""

import numpy as np

CHUNK = 4


class SlowWalk:
    """Chunks of CHUNK equal actions of 0.12 to the side of the goal; the noise of the seed is a hundredth of that."""

    def __init__(self, folder, device):
        self.folder = folder

    def hello(self):
        sizes = {"image_size": None, "state_size": 2, "chunk": CHUNK, "action_size": 1}
        return {"type": "slow", "history": 1, "lerobot": "none", **sizes}

    def answer(self, fields, arrays):
        assert set(arrays) == {"state"}
        place, goal = arrays["state"].T
        drawn = np.random.default_rng(fields["seed"]).normal(scale=0.0012, size=(len(place), CHUNK, 1))
        return {}, {"actions": (0.12 * np.sign(goal - place)[:, None, None] + drawn).astype(np.float32)}

    def close(self):
        pass


def make(folder, device="cpu"):
    """For `mmrl.workers`."""
    return SlowWalk(folder, device)
