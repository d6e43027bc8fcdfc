"""Backends that are models: Grounding DINO and SAM 2 of transformers, or a user's own functions.

Grounding DINO finds a box by words, SAM 2 masks the object in a box. As in the paper, the gripper is masked before
the object is looked for:

    words = GroundedMask("IDEA-Research/grounding-dino-tiny", "facebook/sam2.1-hiera-tiny", "robot gripper. hand.")
    detector = WithoutGripper(RevealedDepth(), words)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.hub.compat import ensure_torchvision
from mmrl.rewards.reward_loading import load_function
from robotics.flow3d.extract.backends import Detector, Tracks
from robotics.flow3d.geometry import BoolArray, DepthArray, FloatArray, ImageArray
from robotics.flow3d.video import RejectedVideo, RgbdVideo


@dataclass(frozen=True)
class GroundedMask:
    """Detects the object that words describe in the first frame, whether it moves or not."""

    detector: str
    """Folder or Hub id of a Grounding DINO, or of another model that `AutoModelForZeroShotObjectDetection` can load."""
    segmenter: str
    """Folder or Hub id of a SAM 2 model."""
    words: str = ""
    """Phrases such as "robot gripper. hand."; empty = each video's instruction."""
    all_boxes: bool = False
    """Mask all boxes instead of the most confident one."""
    threshold: float = bounded(0.25, at_least=0, at_most=1)
    """Minimum score of a box."""
    device: str = "cpu"
    """Torch device."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the described object; see `Detector`."""
        boxes = self.boxes(video.rgb[0], self.words or video.instruction)
        if not len(boxes):
            raise RejectedVideo("no_moving_object", f"no box for {self.words or video.instruction!r}")
        mask = self._segment.masks(video.rgb[0], boxes if self.all_boxes else boxes[:1]).any(0)
        if not mask.any():
            raise RejectedVideo("no_moving_object", "the mask in the box is empty")
        return np.asarray(mask, dtype=bool)

    def boxes(self, rgb: ImageArray, words: str) -> FloatArray:
        """(n, 4) left, top, right, bottom of boxes that match phrases in an image (H, W, 3), the best first."""
        import torch

        # Grounding DINO was trained on lower-case phrases that end with a full stop
        phrase = words.strip().lower().rstrip(".")
        if not phrase:
            raise UserError("GroundedMask needs words, such as 'robot gripper. hand.', or videos with an instruction")
        processor, model = self._loaded
        inputs = processor(images=rgb, text=f"{phrase}.", return_tensors="pt").to(self.device)
        with torch.no_grad():
            outputs = model(**inputs)
        sizes = [(rgb.shape[0], rgb.shape[1])]
        (found,) = processor.post_process_grounded_object_detection(
            outputs, inputs["input_ids"], threshold=self.threshold, target_sizes=sizes
        )
        # stable: boxes with equal scores keep the processor's order
        best = torch.argsort(found["scores"], descending=True, stable=True)
        return found["boxes"][best].double().cpu().numpy()

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        return _load(self.detector, "AutoModelForZeroShotObjectDetection", "AutoProcessor", self.device)

    @cached_property
    def _segment(self) -> _Segmenter:
        return _Segmenter(self.segmenter, self.device)


@dataclass(frozen=True)
class SegmentedBox:
    """Segments the object in the box of another detector."""

    inner: Detector
    """Finds the box."""
    segmenter: str
    """Folder or Hub id of a SAM 2 model."""
    device: str = "cpu"
    """Torch device."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the object in the box; see `Detector`."""
        rows, columns = np.nonzero(self.inner.detect(video))
        # the right and bottom edges are exclusive
        box = np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], dtype=np.float64)
        (mask,) = self._segment.masks(video.rgb[0], box)
        if not mask.any():
            raise RejectedVideo("no_moving_object", "the mask in the box is empty")
        return mask

    @cached_property
    def _segment(self) -> _Segmenter:
        return _Segmenter(self.segmenter, self.device)


class _Segmenter:
    """A SAM 2 with boxes as prompts."""

    def __init__(self, name: str, device: str) -> None:
        self._processor, self._model = _load(name, "Sam2Model", "Sam2Processor", device)
        self._device = device

    def masks(self, rgb: ImageArray, boxes_px: FloatArray) -> BoolArray:
        """(n, H, W) masks of boxes (n, 4) in an image (H, W, 3)."""
        import torch

        inputs = self._processor(images=rgb, input_boxes=[boxes_px.tolist()], return_tensors="pt").to(self._device)
        with torch.no_grad():
            # one mask per box; with several the best would have to be chosen by score
            outputs = self._model(**inputs, multimask_output=False)
        # masks come at the model's resolution
        (masks,) = self._processor.post_process_masks(outputs.pred_masks.cpu(), inputs["original_sizes"].cpu())
        return np.asarray(masks[:, 0].numpy(), dtype=bool)


@dataclass(frozen=True)
class WithoutGripper:
    """Masks gripper or hand first and excludes it from the inner detector."""

    inner: Detector
    """Finds the object, outside of `RgbdVideo.gripper_mask`, such as `RevealedDepth`."""
    gripper: Detector
    """Finds the gripper or hand; if it finds none, nothing is excluded."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the object; see `Detector`."""
        try:
            mask = self.gripper.detect(video)
        # a video without a visible gripper is still usable
        except RejectedVideo:
            mask = np.zeros(video.rgb.shape[1:3], dtype=bool)
        return self.inner.detect(replace(video, gripper_mask=mask))


def _load(name: str, model_class: str, processor_class: str, device: str) -> tuple[Any, Any]:
    ensure_torchvision()
    import transformers

    from mmrl.runs.export import foreign_model

    name = foreign_model(name, "a detector")
    try:
        processor = getattr(transformers, processor_class).from_pretrained(name, trust_remote_code=False)
        model = getattr(transformers, model_class).from_pretrained(name, trust_remote_code=False)
        return processor, model.to(device).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be loaded by {model_class}: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class FunctionDetector:
    """Calls `function(rgb, depth_m)`.

    It gets (L, H, W, 3) uint8 frames and their depth (L, H, W) in metres, or None if that is unknown, and returns an
    (H, W) mask of the object in the first frame, empty if it finds none.
    """

    function: str
    """module:function."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the object; see `Detector`."""
        mask = np.asarray(load_function(self.function, what="detector")(video.rgb, video.depth_m))
        if mask.shape != video.rgb.shape[1:3]:
            raise UserError(f"{self.function} returned the shape {mask.shape}; must be {video.rgb.shape[1:3]}")
        if not mask.any():
            raise RejectedVideo("no_moving_object", f"{self.function} found nothing")
        return mask.astype(bool)


@dataclass(frozen=True)
class FunctionTracker:
    """Calls `function(rgb, uv_px)`.

    It gets (L, H, W, 3) uint8 frames and (n, 2) points of the first, and returns (L, n, 2) positions and (L, n)
    visibility of 0 to 1. The center of the first pixel is at (0.5, 0.5).

    CoTracker3, which has the center of the first pixel at (0, 0), for `FunctionTracker("trackers.py:cotracker")`:

        model = torch.hub.load("facebookresearch/co-tracker", "cotracker3_offline")

        def cotracker(rgb, uv_px):
            video = torch.from_numpy(rgb).permute(0, 3, 1, 2)[None].float()  # (1, L, 3, H, W), 0 to 255
            points = torch.from_numpy(uv_px - 0.5).float()
            queries = torch.cat([torch.zeros(len(points), 1), points], 1)[None]  # (1, n, 3): frame, x, y
            with torch.no_grad():
                tracks, visible = model(video, queries=queries)  # (1, L, n, 2), (1, L, n)
            return tracks[0].double().numpy() + 0.5, visible[0].double().numpy()

    Source: facebookresearch/co-tracker README.md, cotracker/predictor.py.
    """

    function: str
    """module:function."""

    def track(self, video: RgbdVideo, mask: BoolArray, uv_px: FloatArray) -> Tracks:
        """Follow points; see `Tracker`."""
        found = load_function(self.function, what="tracker")(video.rgb, uv_px)
        uv, visible = (np.asarray(part, dtype=np.float64) for part in found)
        shape = (len(video), len(uv_px))
        if uv.shape != (*shape, 2) or visible.shape != shape:
            raise UserError(
                f"{self.function} returned the shapes {uv.shape} and {visible.shape}; must be {(*shape, 2)}, {shape}"
            )
        return Tracks(uv, np.clip(visible, 0.0, 1.0))


@dataclass(frozen=True)
class FunctionDepth:
    """Calls `function(rgb)`, which gets (L, H, W, 3) uint8 and returns (L, H, W) metres."""

    function: str
    """module:function."""

    def depth_m(self, video: RgbdVideo) -> DepthArray:
        """Depth of each frame; see `DepthSource`."""
        depth = np.asarray(load_function(self.function, what="depth")(video.rgb), dtype=np.float32)
        if depth.shape != video.rgb.shape[:3]:
            raise UserError(f"{self.function} returned the shape {depth.shape}; must be {video.rgb.shape[:3]}")
        return np.where(np.isfinite(depth) & (depth > 0), depth, np.float32(np.nan))
