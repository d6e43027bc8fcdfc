"""A user's RGB-D video in a folder.

my_video/
  rgb/000000.png ...     8-bit colour, JPEG too; frames in the order of their names
  depth/000000.png ...   16-bit, one for each frame; or 000000.npy, metres. May be missing, for a depth model.
  camera.json            {"K": [[fx, 0, cx], [0, fy, cy], [0, 0, 1]], "depth_unit_m": 0.001,
                          "T_world_cam": 4 x 4, optional, "instruction": text, optional}
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.files import expanded, read_json_object
from mmrl.hub.images import ImageError, decode_image, read_image_file
from robotics.data.metadata import named_errors
from robotics.flow3d.extract.video import RejectedVideo, RgbdVideo

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["read_rgbd_folder"]

COLOURS = (".png", ".jpg", ".jpeg")
DEPTHS = (".png", ".npy")


def read_rgbd_folder(folder: str | os.PathLike[str]) -> RgbdVideo:
    """Read a video.

    Args:
        folder: laid out as above.

    Returns:
        The video; its source is the name of the folder.

    Raises:
        RejectedVideo: `camera.json` has no K.
        UserError: a file is missing or damaged, or depth and colour differ in number or size.
    """
    place = expanded(Path(folder))
    camera = read_json_object(place / "camera.json")
    if camera.get("K") is None:
        raise RejectedVideo("no_intrinsics", f'{place / "camera.json"} must have "K", 3 x 3 in pixels')
    colours, depths = _files(place / "rgb", COLOURS), _files(place / "depth", DEPTHS)
    if not colours or (depths and len(depths) != len(colours)):
        raise UserError(
            f"{place} has {len(colours)} frames in rgb/ and {len(depths)} in depth/; must be as many of each"
        )
    if any(path.suffix == ".png" for path in depths) and not camera.get("depth_unit_m"):
        raise UserError(f'{place / "camera.json"} lacks "depth_unit_m", the metres of one unit of depth, such as 0.001')
    with named_errors(f"the video {place}"):
        unit = float(camera.get("depth_unit_m") or 1.0)
        return RgbdVideo(
            rgb=np.stack([np.asarray(_image(path).convert("RGB")) for path in colours]),
            depth_m=np.stack([_depth(path, unit) for path in depths]) if depths else None,
            K=np.asarray(camera["K"], dtype=np.float64),
            T_world_cam=np.asarray(camera.get("T_world_cam", np.eye(4)), dtype=np.float64),
            instruction=str(camera.get("instruction", "")),
            source=place.name,
        )


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in suffixes)


def _image(path: Path) -> Any:
    try:
        return decode_image(read_image_file(path))
    except ImageError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _depth(path: Path, unit_m: float) -> NDArray[np.float32]:
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False).astype(np.float32)
    pixels = np.asarray(_image(path))
    if pixels.ndim != 2 or pixels.dtype == np.uint8:
        raise UserError(f"{path} is {pixels.dtype} {pixels.shape}; depth must be a 16-bit picture of one channel")
    return (pixels * unit_m).astype(np.float32)
