"""A network that tells from an image and the instruction whether a task is solved.

The encoder is that of the small policies. The head is that of HIL-SERL: Dense 256, Dropout 0.1, LayerNorm, ReLU, logit.

Source: HIL-SERL, arXiv 2410.21845; rail-berkeley/hil-serl serl_launcher/networks/reward_classifier.py. Differences: its
    encoder is a frozen ResNet-10 that was trained on ImageNet; this one is small and trained with the head.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from mmrl.files import expanded, read_json_object, write_atomically
from mmrl.runs.export import model_folder
from mmrl.runs.fingerprint import weights_digest
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.encoder import VOCABULARY_FILE, EncoderConfig, ObservationEncoder, Vocabulary
from robotics.policies.base.saved import build_fitting, make_config, read_weights, write_weights

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AT_ONCE = 64
"""Maximum number of images in a pass without gradient."""
CONFIG_FILE, KIND = "success.json", "mmrl_success_classifier"


@dataclass
class SuccessModelConfig:
    """Sizes of a success classifier, and how its probabilities become a verdict."""

    threshold: float = bounded(0.85, above=0, below=1)
    """Probability of success that a look has to exceed."""
    looks: int = bounded(2, at_least=1)
    """Number of consecutive looks that have to exceed it before an episode counts as solved."""
    width: int = rare(bounded(256, at_least=1))
    """Width of the head's hidden layer."""
    dropout: float = rare(bounded(0.1, at_least=0, below=1))
    """Fraction of hidden entries that training sets to 0."""
    encoder: EncoderConfig = field(default_factory=lambda: EncoderConfig(layers=1))
    """Sizes of the encoder. The size of the images is read from the data."""


def first_success(probabilities: Iterable[float], threshold: float, looks: int) -> int | None:
    """Number of the look at which `looks` probabilities in a row exceed the threshold; None if that never happens."""
    streak = 0
    for place, probability in enumerate(probabilities):
        streak = streak + 1 if probability > threshold else 0
        if streak == looks:
            return place
    return None


class SuccessClassifier(nn.Module):
    """Probability of success for images of one size and instructions of known words.

    Args:
        config: sizes; `encoder.image_size` is that of the images.
        vocabulary: words of the instructions.
        camera: name of the camera.
        seed: initialises the weights; the global generator is not used.
    """

    model_kind = "success classifier"

    def __init__(self, config: SuccessModelConfig, vocabulary: Vocabulary, camera: str = "", seed: int = 0) -> None:
        super().__init__()
        self.config, self.vocabulary, self.camera = config, vocabulary, camera
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = ObservationEncoder(config.encoder, vocabulary, queries=1)
            self.hidden = nn.Linear(config.encoder.width, config.width)
            self.head = nn.Sequential(nn.LayerNorm(config.width), nn.ReLU(), nn.Linear(config.width, 1))

    def forward(self, images: Tensor, instructions: Sequence[str], kept: Tensor | None = None) -> Tensor:
        """Logits (B,) float32 of success for images (B, H, W, 3) uint8; raises UserError for another size.

        `kept` (B, width) bool has the hidden entries that dropout keeps, in training. Gradient: into all weights.
        """
        hidden = self.hidden(self.encoder(PolicyInputs(images, None, tuple(instructions)))[:, 0])
        if kept is not None:
            hidden = hidden * kept / (1 - self.config.dropout)
        logits: Tensor = self.head(hidden)
        return logits[:, 0].float()

    @torch.no_grad()
    def probabilities(self, images: Tensor, instructions: Sequence[str]) -> list[float]:
        """Probabilities (B,) of success for images (B, H, W, 3) uint8, without dropout."""
        # an episode may have thousands of images, of several megabytes each as features
        parts = [slice(at, at + AT_ONCE) for at in range(0, len(images), AT_ONCE)]
        return [chance for part in parts for chance in self(images[part], instructions[part]).sigmoid().tolist()]

    @property
    def image_size(self) -> tuple[int, int]:
        """(H, W) pixels."""
        height, width = self.config.encoder.image_size or (0, 0)
        return height, width

    @property
    def cameras(self) -> tuple[str, ...]:
        """Name of its one camera; empty if its data had none."""
        return (self.camera,)

    @property
    def threshold(self) -> float:
        """Probability that a look has to exceed."""
        return self.config.threshold

    @property
    def looks(self) -> int:
        """Number of consecutive looks that have to exceed it."""
        return self.config.looks

    def look(self, images: NDArray[np.uint8], instructions: Sequence[str]) -> list[float]:
        """Probabilities (B,) of success for images (B, 1, H, W, 3) uint8."""
        return self.probabilities(torch.from_numpy(images[:, 0]), instructions)

    def digest(self) -> str:
        """SHA-256 of the weights."""
        return weights_digest(self)

    def close(self) -> None:
        """Nothing to free."""

    def check_instructions(self, instructions: Iterable[str]) -> None:
        """Raise UserError for words that are not in the vocabulary."""
        unknown = [word for text in instructions for word in self.vocabulary.unknown_words(text)]
        if unknown:
            raise UserError(
                f"the success classifier does not know {unknown[0]!r} of an instruction; its episodes had the words "
                f"{', '.join(self.vocabulary.words)}"
            )

    def save_pretrained(self, path: Path | str) -> None:
        """Write sizes, threshold, camera, words and weights to a folder."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        about = {"kind": KIND, "camera": self.camera, **dataclasses.asdict(self.config)}
        write_atomically(folder / CONFIG_FILE, json.dumps(about, indent=2) + "\n")
        self.vocabulary.save(folder / VOCABULARY_FILE)
        write_weights(self, folder)

    def load_weights(self, path: Path | str) -> None:
        """Read the weights of a folder; raises UserError if it has other words or sizes."""
        self.vocabulary.check_same(Path(path) / VOCABULARY_FILE)
        read_weights(self, Path(path))

    @classmethod
    def from_pretrained(cls, path: str) -> Self:
        """Load a folder of `save_pretrained`, or the best checkpoint of a run; raises UserError."""
        folder = expanded(model_folder(path))
        if not (folder / CONFIG_FILE).is_file():
            raise UserError(
                f"{path} has no success classifier ({CONFIG_FILE}); train one with the recipe robot_success, or set "
                "success.python to use a reward classifier of LeRobot"
            )
        entries: dict[str, Any] = dict(read_json_object(folder / CONFIG_FILE))
        if entries.pop("kind", None) != KIND:
            raise UserError(f"{folder / CONFIG_FILE} does not describe a success classifier")
        camera, sizes = str(entries.pop("camera", "")), dict(entries)
        encoder = make_config(EncoderConfig, entries.pop("encoder", {}), f"encoder in {folder}")
        config = make_config(SuccessModelConfig, entries | {"encoder": encoder}, str(folder))
        words = Vocabulary.load(folder / VOCABULARY_FILE)
        found = build_fitting(lambda: cls(config, words, camera), sizes, folder)
        found.load_weights(folder)
        return found.eval()
