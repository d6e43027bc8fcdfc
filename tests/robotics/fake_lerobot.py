"""A service like `robotics.policies.lerobot.service` without lerobot: it walks to the goal of LineSim, too slowly.

With cameras it walks faster by the brightness of the first image, and slower by that of each view.
"""

from pathlib import Path

import numpy as np

CHUNK = 4
ROW = 3
"""Observations in a row that `Row` takes."""


class SlowWalk:
    """Chunks of CHUNK equal actions of 0.12 to the side of the goal; the noise of the seed is a hundredth of that."""

    def __init__(self, folder, device, cameras=()):
        self.folder, self.cameras = folder, list(cameras)

    def hello(self):
        size = [32, 32] if self.cameras else None
        sizes = {"image_size": size, "state_size": 2, "chunk": CHUNK, "action_size": 1, "cameras": self.cameras}
        return {"type": "slow", "history": 1, "executed": CHUNK, "lerobot": "none", **sizes}

    def answer(self, fields, arrays):
        assert set(arrays) == {"state", *(["images"] if self.cameras else []), *(["views"] if self.cameras[1:] else [])}
        place, goal = arrays["state"].T
        speed = 0.12 + sum(_brightness(part) * sign for part, sign in self._seen(arrays))
        drawn = np.random.default_rng(fields["seed"]).normal(scale=0.0012, size=(len(place), CHUNK, 1))
        return {}, {"actions": ((speed * np.sign(goal - place))[:, None, None] + drawn).astype(np.float32)}

    def _seen(self, arrays):
        images = [(arrays["images"], 1)] if self.cameras else []
        return images + [(arrays["views"][:, number], -1) for number in range(len(self.cameras[1:]))]

    def close(self):
        pass


def _brightness(images):
    return images.mean((1, 2, 3)) / 255


class Row:
    """Chunks that `choose` makes of ROW observations, for the environment `ball_env` and in its own units."""

    def hello(self):
        cameras = ["observation.images.top", "observation.images.side"]
        sizes = {"image_size": [64, 64], "state_size": 2, "chunk": CHUNK, "action_size": 2, "cameras": cameras}
        return {"type": "row", "history": ROW, "executed": CHUNK, "lerobot": "none", **sizes}

    def answer(self, fields, arrays):
        rows = []
        for name in ("images", "state", "views"):
            before = arrays.get(f"past_{name}", np.repeat(arrays[name][:, None], ROW - 1, 1))
            rows.append(np.concatenate([before, arrays[name][:, None]], 1))
        return {}, {"actions": np.stack([choose(*parts) for parts in zip(*rows, strict=True)]).astype(np.float32)}

    def close(self):
        pass


def choose(images, state, views):
    """(CHUNK, 2) actions that every one of the ROW observations moves; views are (ROW, 1, H, W, 3)."""
    seen = 0.3 * state[:, 0] + images[..., 2].mean((1, 2)) + (255 - views).mean((1, 2, 3, 4))
    first, push = seen @ [1.0, -2.0, 3.0], 0.05 * (state[-1, 1] - state[0, 1])
    return np.array([[np.clip(first + 60 * step, 0, 512), np.clip(push + step, -2, 6)] for step in range(CHUNK)])


def make(folder, device="cpu", cameras=()):
    """Factory for `mmrl.workers`."""
    return Row() if Path(folder).name == "row" else SlowWalk(folder, device, cameras)


class SlowFlow(SlowWalk):
    """A flow that ends at gain * (goal - position): its velocity is (x - end) / time, so its gradient is known.

    Actions have 1 entry and one more of padding, which ends at `shift`; the data's actions are twice the head's.
    """

    def __init__(self, folder, device, cameras=()):
        super().__init__(folder, device, cameras)
        self.weights = {"head.gain": np.full(1, 0.25, np.float32), "head.shift": np.zeros(1, np.float32)}
        self.upload = 0

    def hello(self):
        return {**super().hello(), "steps": 3, "width": 2}

    def answer(self, fields, arrays):
        if fields["do"] not in ("upload", "initial") and fields["upload"] != self.upload:
            return {"stale": True}, {}
        return {}, getattr(self, {"upload": "receive"}.get(fields["do"], fields["do"]))(fields, arrays)

    def initial(self, fields, arrays):
        return self.weights

    def receive(self, fields, arrays):
        self.upload = fields["upload"]
        self.weights = {**self.weights, **arrays}
        return {}

    def sample(self, fields, arrays):
        chain, velocities = [arrays["noise"][:, 0]], []
        for step, (time, kept, moved, std) in enumerate(arrays["table"]):
            velocities.append(self.velocity(arrays["state"], chain[-1], time))
            chain.append(kept * chain[-1] + moved * velocities[-1] + std * arrays["noise"][:, step + 1])
        return {"chain": np.stack(chain, 1), "velocities": np.stack(velocities, 1), "actions": 2 * chain[-1][..., :1]}

    def velocities(self, fields, arrays):
        return {"velocities": self.velocity(arrays["state"][:, None], arrays["points"], _wide(arrays["times"]))}

    def gradients(self, fields, arrays):
        place, goal = arrays["state"].T
        weight = -arrays["cotangents"] / _wide(arrays["times"])
        gain = (weight[..., 0].sum((1, 2)) * (goal - place)).sum()
        return {"head.gain": np.float32([gain]), "head.shift": np.float32([weight[..., 1].sum()])}

    def normalised(self, fields, arrays):
        return {"actions": np.concatenate([arrays["actions"] / 2, np.zeros_like(arrays["actions"])], -1)}

    def save(self, fields, arrays):
        np.savez(f"{fields['folder']}/saved.npz", **self.weights)
        return {"bytes": np.array(1)}

    def velocity(self, state, points, time):
        end = np.zeros_like(points)
        end[..., 0] = self.weights["head.gain"] * (state[..., 1] - state[..., 0])[..., None]
        end[..., 1] = self.weights["head.shift"]
        return ((points - end) / time).astype(np.float32)


def _wide(times):
    return times[..., None, None]


def make_flow(folder, device="cpu", cameras=()):
    """Factory for `mmrl.workers`."""
    return SlowFlow(folder, device, cameras)
