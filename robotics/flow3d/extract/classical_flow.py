"""Points followed from frame to frame by optical flow of OpenCV, each on its own.

Such points drift, and those next to something that moves are dragged along; `rigid_chain` follows the object as a
whole instead.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.fields import bounded, choice
from robotics.flow3d.extract.protocols import Tracks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.extract.video import RgbdVideo

METHODS = ("klt", "dis")


@dataclass(frozen=True)
class ClassicalFlow:
    """Lucas-Kanade (sparse) or DIS (dense) optical flow, chained."""

    method: str = choice("klt", METHODS)
    """klt or dis."""
    window_px: int = bounded(11, at_least=3)
    """Side of the patch that klt compares."""
    levels: int = bounded(3, at_least=0)
    """Halvings of the picture for klt."""
    forward_backward_px: float = bounded(0.7, above=0)
    """A klt point that does not come back this close is lost from then on."""

    def track(self, video: RgbdVideo, mask: NDArray[np.bool_], uv_px: NDArray[np.float64]) -> Tracks:
        """Follow points; see `Tracker`. A lost point stays where it was, hidden."""
        frames, (width, height) = grey_frames(video.rgb), video.size_px
        places, alive = [uv_px], [np.ones(len(uv_px), dtype=bool)]
        step = _dis() if self.method == "dis" else self._klt
        for before, after in itertools.pairwise(frames):
            moved, good = step(before, after, places[-1])
            inside = (moved >= 0).all(-1) & (moved[:, 0] < width) & (moved[:, 1] < height)
            alive.append(alive[-1] & good & inside)
            places.append(np.where((good & inside)[:, None], moved, places[-1]))
        return Tracks(np.stack(places), np.stack(alive).astype(np.float64))

    def _klt(
        self, before: NDArray[np.uint8], after: NDArray[np.uint8], uv_px: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        return klt_step(before, after, uv_px, self.window_px, self.levels, self.forward_backward_px)


def klt_step(
    before: NDArray[np.uint8],
    after: NDArray[np.uint8],
    uv_px: NDArray[np.float64],
    window_px: int = 11,
    levels: int = 3,
    forward_backward_px: float = 0.7,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Follow points by one frame with Lucas-Kanade.

    Args:
        before: (H, W) grey.
        after: (H, W) grey.
        uv_px: (n, 2) in the first; the middle of the first pixel is at 0.5, other than in OpenCV.
        window_px: side of the patch.
        levels: halvings of the picture.
        forward_backward_px: a good point comes back this close.

    Returns:
        (n, 2) places in the second, and (n,) whether they are good.
    """
    import cv2

    lucas_kanade: Any = cv2.calcOpticalFlowPyrLK
    if not len(uv_px):
        return uv_px, np.zeros(0, dtype=bool)
    options: dict[str, Any] = {"winSize": (window_px, window_px), "maxLevel": levels}
    start = np.ascontiguousarray(uv_px - 0.5, dtype=np.float32)[:, None]
    there, found, _ = lucas_kanade(before, after, start, None, **options)
    back, found_back, _ = lucas_kanade(after, before, there, None, **options)
    error = np.linalg.norm((back - start)[:, 0], axis=-1)
    good = (found[:, 0] > 0) & (found_back[:, 0] > 0) & (error < forward_backward_px)
    return there[:, 0].astype(np.float64) + 0.5, good


def grey_frames(rgb: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """(L, H, W, 3) as a list of (H, W) grey pictures."""
    import cv2

    return [np.asarray(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), dtype=np.uint8) for frame in rgb]


def _dis() -> Any:
    import cv2 as library

    cv2: Any = library
    flow_of = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)

    def step(
        before: NDArray[np.uint8], after: NDArray[np.uint8], uv_px: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        field = flow_of.calc(before, after, None)
        at = (uv_px - 0.5).astype(np.float32)
        moved = cv2.remap(field, at[:, None, 0], at[:, None, 1], cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
        return uv_px + moved[:, 0], np.ones(len(uv_px), dtype=bool)

    return step
