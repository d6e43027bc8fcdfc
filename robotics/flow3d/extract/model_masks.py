"""Masks by models of transformers: Grounding DINO finds a box by words, SAM 2 cuts the thing out of a box.

As in the paper, with the gripper out of the way before points are chosen by their motion:

    words = GroundedMask("IDEA-Research/grounding-dino-tiny", "facebook/sam2.1-hiera-tiny", "robot gripper. hand.")
    detector = WithoutGripper(EarlyMotion(tracker, gripper=True), words)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded
from robotics.flow3d.extract.video import RejectedVideo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.extract.protocols import Detector
    from robotics.flow3d.extract.video import RgbdVideo


@dataclass(frozen=True)
class GroundedMask:
    """Detector of what words describe, in the first frame, whether it moves or not."""

    detector: str
    """Folder or hub id of a Grounding DINO, or another that `AutoModelForZeroShotObjectDetection` loads."""
    segmenter: str
    """Folder or hub id of a SAM 2."""
    words: str = ""
    """Phrases such as "robot gripper. hand."; the instruction of each video where empty."""
    all_boxes: bool = False
    """Mask every box that is found instead of the surest."""
    threshold: float = bounded(0.25, at_least=0, at_most=1)
    """Least score of a box."""
    device: str = "cpu"
    """Of torch."""

    def detect(self, video: RgbdVideo) -> NDArray[np.bool_]:
        """Mask what the words say; see `Detector`."""
        boxes = self.boxes(video.rgb[0], self.words or video.instruction)
        if not len(boxes):
            raise RejectedVideo("no_moving_object", f"no box for {self.words or video.instruction!r}")
        mask = self._segment.masks(video.rgb[0], boxes if self.all_boxes else boxes[:1]).any(0)
        if not mask.any():
            raise RejectedVideo("no_moving_object", "the mask in the box is empty")
        return np.asarray(mask, dtype=bool)

    def boxes(self, rgb: NDArray[np.uint8], words: str) -> NDArray[np.float64]:
        """Look for words in a picture.

        Args:
            rgb: (H, W, 3).
            words: phrases, each with a full stop.

        Returns:
            (n, 4) left, top, right, bottom in pixels, the surest first.

        Raises:
            UserError: there are no words.
        """
        import torch

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
        surest = torch.argsort(found["scores"], descending=True, stable=True)
        return found["boxes"][surest].double().cpu().numpy()

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        return _load(self.detector, "AutoModelForZeroShotObjectDetection", "AutoProcessor", self.device)

    @cached_property
    def _segment(self) -> _Segmenter:
        return _Segmenter(self.segmenter, self.device)


@dataclass(frozen=True)
class SegmentedBox:
    """Detector that cuts out what is in the box of another one, such as the rule of `EarlyMotion`."""

    inner: Detector
    """Says where the object is."""
    segmenter: str
    """Folder or hub id of a SAM 2."""
    device: str = "cpu"
    """Of torch."""

    def detect(self, video: RgbdVideo) -> NDArray[np.bool_]:
        """Mask the thing in the box; see `Detector`."""
        rows, columns = np.nonzero(self.inner.detect(video))
        box = np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], dtype=np.float64)
        (mask,) = self._segment.masks(video.rgb[0], box)
        if not mask.any():
            raise RejectedVideo("no_moving_object", "the mask in the box is empty")
        return mask

    @cached_property
    def _segment(self) -> _Segmenter:
        return _Segmenter(self.segmenter, self.device)


class _Segmenter:
    """A SAM 2 that is asked with boxes."""

    def __init__(self, name: str, device: str) -> None:
        self._processor, self._model = _load(name, "Sam2Model", "Sam2Processor", device)
        self._device = device

    def masks(self, rgb: NDArray[np.uint8], boxes_px: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Cut things out.

        Args:
            rgb: (H, W, 3).
            boxes_px: (n, 4) left, top, right, bottom.
        """
        import torch

        inputs = self._processor(images=rgb, input_boxes=[boxes_px.tolist()], return_tensors="pt").to(self._device)
        with torch.no_grad():
            outputs = self._model(**inputs, multimask_output=False)
        (masks,) = self._processor.post_process_masks(outputs.pred_masks.cpu(), inputs["original_sizes"].cpu())
        return np.asarray(masks[:, 0].numpy(), dtype=bool)


@dataclass(frozen=True)
class WithoutGripper:
    """Detector that first masks gripper or hand, which its inner one then leaves out."""

    inner: Detector
    """Finds the object, outside of `RgbdVideo.gripper_mask`: `RevealedDepth`, or `EarlyMotion` with gripper=True."""
    gripper: Detector
    """Finds gripper or hand; where it finds none, nothing is left out."""

    def detect(self, video: RgbdVideo) -> NDArray[np.bool_]:
        """Mask the object; see `Detector`."""
        try:
            mask = self.gripper.detect(video)
        except RejectedVideo:
            mask = np.zeros(video.rgb.shape[1:3], dtype=bool)
        return self.inner.detect(replace(video, gripper_mask=mask))


def _load(name: str, model_class: str, processor_class: str, device: str) -> tuple[Any, Any]:
    from mmrl.hub.compat import ensure_torchvision

    ensure_torchvision()
    import transformers

    try:
        processor = getattr(transformers, processor_class).from_pretrained(name)
        return processor, getattr(transformers, model_class).from_pretrained(name).to(device).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be loaded by {model_class}: {' '.join(str(error).split())}") from error
