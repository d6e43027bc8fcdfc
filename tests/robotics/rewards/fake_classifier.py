"""A service like `RewardService` without lerobot: the brightness of the wrist, if the front is darker."""


class Brightness:
    """Probabilities of two cameras."""

    def __init__(self, folder, device, trust_remote_code):
        self.given = [folder, device, trust_remote_code]

    def hello(self):
        cameras = ["observation.images.wrist", "observation.images.front"]
        return {"cameras": cameras, "image_size": [32, 32], "lerobot": "none"}

    def answer(self, fields, arrays):
        wrist, front = (arrays["images"][:, number].mean((1, 2, 3)) / 255 for number in (0, 1))
        return {}, {"probabilities": (wrist * (front < wrist)).astype("float32")}

    def close(self):
        pass


def make_reward(folder, device, trust_remote_code):
    """Factory for `mmrl.workers`."""
    return Brightness(folder, device, trust_remote_code)
