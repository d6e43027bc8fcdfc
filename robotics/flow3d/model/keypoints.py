"""Keypoints: positions in an image of the objects that an instruction names."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from robotics.vla.encoder import GROUPS, KEYPOINT_SHARPNESS, expected_places
from robotics.vla.place_codes import octave_code, octave_size


class Keypoints(nn.Module):
    """Expected positions of learned features in an image, as one token.

    A small network with patches alone takes many times as long to learn where a goal is.

    Source: spatial softmax, Levine et al., arXiv 1504.00702; features scaled and shifted by the instruction (FiLM),
        arXiv 1709.07871. Not in 3DFlowAction, which has a pretrained CLIP.
    """

    def __init__(self, count: int, channels: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels // 2, 5, stride=2, padding=2)
        self.second = nn.Conv2d(channels // 2, channels, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.film = nn.Linear(width, 2 * channels)
        self.scores = nn.Conv2d(channels, count, 1)
        # with nearly equal scores all keypoints are at the image's center, and learning starts slowly
        nn.init.normal_(self.scores.weight, std=KEYPOINT_SHARPNESS / channels**0.5)
        self.token = nn.Linear(octave_size(2 * count), width)

    def forward(self, pixels: Tensor, text: Tensor) -> Tensor:
        """Images (B, 3, S, S) in -1..1 and instructions (B, width) -> (B, width)."""
        features = self.norm(self.second(functional.gelu(self.first(pixels))))
        scale, shift = self.film(text)[:, :, None, None].chunk(2, 1)
        features = functional.gelu(features * (1 + scale) + shift)
        found: Tensor = self.token(octave_code(expected_places(self.scores(features)).to(text.dtype)))
        return found
