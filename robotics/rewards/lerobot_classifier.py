"""A reward classifier of LeRobot as judge of success; it runs in lerobot's Python environment.

Source: huggingface/lerobot 0.6.1, src/lerobot/rewards/classifier, src/lerobot/processor/hil_processor.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from robotics.data.features import camera_name
from robotics.policies.lerobot.lerobot_server import LeRobotProcess

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LeRobotClassifier:
    """Probabilities of success from the images of C cameras, as a classifier that lerobot saved sees it.

    judge = LeRobotClassifier("outputs/my-classifier/checkpoints/last/pretrained_model", "lerobot-env/bin/python")
    judge.look(images, instructions)

    Args:
        folder: config.json, model.safetensors and classifier_preprocessor.json.
        python: interpreter of an environment with lerobot.
        device: torch device; the CPU if that environment has no GPU.
        trust_remote_code: whether code that comes with the classifier's encoder may run.

    Raises:
        UserError: the folder has no classifier of two classes, or its encoder is missing or needs code.
        RunError: the process did not start.
    """

    threshold = 0.5
    """Probability that a look has to exceed, as in lerobot."""
    looks = 1
    """Number of consecutive looks, as in lerobot."""

    def __init__(self, folder: str, python: str, device: str = "cpu", *, trust_remote_code: bool = False) -> None:
        self._process = LeRobotProcess(
            "LeRobot reward classifier",
            folder,
            "make_reward",
            {"device": device, "trust_remote_code": trust_remote_code},
            python=python,
            option="success.python",
        )
        height, width = self._process.hello["image_size"]
        self.image_size: tuple[int, int] = (height, width)
        self.cameras = tuple(camera_name(key) for key in self._process.hello["cameras"])

    def look(self, images: NDArray[np.uint8], instructions: Sequence[str]) -> list[float]:
        """Probabilities (B,) of success for images (B, C, H, W, 3) uint8; instructions are not read."""
        found: list[float] = self._process.send({}, {"images": images})["probabilities"].tolist()
        return found

    def check_instructions(self, instructions: Iterable[str]) -> None:
        """Accept any: the classifier reads none."""

    def digest(self) -> str:
        """SHA-256 of the classifier's files."""
        digest = hashlib.sha256()
        for file in sorted(self._process.folder.glob("*")):
            if file.suffix in (".json", ".safetensors"):
                digest.update(file.name.encode() + file.read_bytes())
        return digest.hexdigest()

    def close(self) -> None:
        """End the process."""
        self._process.pool.close()
