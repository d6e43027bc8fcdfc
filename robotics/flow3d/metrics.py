"""Errors of predicted flow, and drawings of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.clip import VISIBLE, FlowClip, U, V
from robotics.flow3d.geometry import FloatArray, ImageArray, angle_rad, lift
from robotics.flow3d.rigid_motion import fit_motions

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw


WIDTH_PX = 384
FIRST, LAST = np.array([60, 110, 255]), np.array([255, 70, 40])
"""Colours of the first and the last step."""


def draw_flow(
    rgb: ImageArray, points: FloatArray, flow: FloatArray, truth: FloatArray | None = None, width_px: int = WIDTH_PX
) -> Image:
    """Draw the paths of query points (N, N, 3) along a flow (T, N, N, 4) over an image, from blue to red over time.

    Lines are thinner while a point is not visible; the true flow is drawn below as thin white lines.
    """
    from PIL import Image, ImageDraw

    height, width = rgb.shape[:2]
    scale = width_px / width
    image = Image.fromarray(rgb).resize((width_px, round(height * scale)), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    if truth is not None:
        for path in _paths(points, truth, scale):
            pen.line([tuple(pixel) for pixel in path], fill=(255, 255, 255), width=1)
    draw_paths(pen, points, flow, scale)
    return image


def draw_paths(pen: ImageDraw, points: FloatArray, flow: FloatArray, scale: float) -> None:
    """Draw the paths of points (N, N, 3) along a flow (T, N, N, 4) at a scale of the original image."""
    paths, frames = _paths(points, flow, scale), len(flow)
    seen = flow[..., VISIBLE].reshape(frames, len(paths)) > 0.5
    colours = path_colours(np.arange(frames) / max(frames - 1, 1)).tolist()
    for index, path in enumerate(paths):
        for frame, colour in enumerate(colours):
            line = [tuple(path[frame]), tuple(path[frame + 1])]
            pen.line(line, fill=tuple(colour), width=2 if seen[frame, index] else 1)
        pen.ellipse([*(path[-1] - 2.5), *(path[-1] + 2.5)], fill=tuple(LAST.tolist()))


def path_colours(shares: FloatArray) -> ImageArray:
    """(n, 3) colours of moments (n,), from 0 at the start of a flow to 1 at its end."""
    return ((1 - shares[:, None]) * FIRST + shares[:, None] * LAST).astype(np.uint8)


def _paths(points: FloatArray, flow: FloatArray, scale: float) -> FloatArray:
    """(N * N, T + 1, 2) pixels in the drawing."""
    pixels = np.concatenate([points[None, ..., [U, V]], flow[..., [U, V]]])
    paths: FloatArray = pixels.reshape(len(pixels), -1, 2).swapaxes(0, 1) * scale
    return paths


def flow_strip(clip: FlowClip, height_px: int = 256) -> ImageArray:
    """Draw a clip."""
    from PIL import Image

    rgb, mask = clip.observation.rgb, clip.observation.mask
    size = (round(rgb.shape[1] * height_px / rgb.shape[0]), height_px)
    frames = [rgb]
    if mask is not None:
        tint = 0.45 * rgb + 0.55 * np.array([255, 60, 60])
        frames.append(np.where(mask[..., None], tint, 0.6 * rgb).astype(np.uint8))
    panels = [Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in frames]
    dark = (0.75 * rgb).astype(np.uint8)
    panels += [draw_flow(dark, clip.points, flow, width_px=size[0]).resize(size) for flow in (clip.flow[:0], clip.flow)]
    return np.concatenate([np.asarray(panel) for panel in panels], axis=1)


NEAR_M = 0.05
"""Distance within which a point counts as correct."""
LEARNED_M = 0.03
"""Scale of the robust fit for flow from a model."""


def flow_metrics(predicted_m: FloatArray, true_m: FloatArray, visible: FloatArray | None = None) -> dict[str, float]:
    """Errors of one flow (T, n, 3): ade_m and fde_m, the mean distance over all frames and in the last one.

    Also over visible points, those above 0.5 in `visible` (T, n), as ade_visible_m and fde_visible_m, NaN without any,
    and acc_5cm, the fraction of points of all frames within 5 cm.

    Source: ADE and FDE as in michaelyuancb/general_flow.
    """
    if predicted_m.shape != true_m.shape or predicted_m.ndim != 3 or predicted_m.shape[-1] != 3:
        raise UserError(f"predicted flow {predicted_m.shape} and true flow {true_m.shape} must both be (T, n, 3)")
    distance = np.linalg.norm(predicted_m - true_m, axis=-1)
    seen = np.ones(distance.shape, np.bool_) if visible is None else np.asarray(visible) > 0.5
    return {
        "ade_m": float(distance.mean()),
        "fde_m": float(distance[-1].mean()),
        "ade_visible_m": _mean(distance[seen]),
        "fde_visible_m": _mean(distance[-1][seen[-1]]),
        "acc_5cm": float((distance < NEAR_M).mean()),
    }


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else float("nan")


@dataclass(frozen=True)
class FlowErrors:
    """Errors of K samples for one clip, means over the samples unless noted."""

    ade_cm: float
    """Mean distance over all frames and points."""
    fde_cm: float
    """Mean distance in the last frame."""
    ade_visible_cm: float
    """Mean distance over visible points; NaN without any."""
    fde_visible_cm: float
    """The same in the last frame."""
    best_ade_cm: float
    """Mean distance of the best sample."""
    within_5cm: float
    """Fraction of points of all frames within 5 cm."""
    rotation_deg: float
    """Angle between the rotations of the object to the last frame, fitted to predicted and to true points."""
    zero_motion_ade_cm: float
    """Mean distance of a flow without motion, for comparison."""
    zero_motion_fde_cm: float
    """The same in the last frame."""


def flow_errors(predicted: FloatArray, clip: FlowClip) -> FlowErrors:
    """Compare sampled flows (K, T, N, N, 4) with a clip."""
    found = lift(predicted[..., :VISIBLE], clip.observation.K).reshape(len(predicted), len(clip.flow), -1, 3)
    true, start = clip.flow_cam_m, clip.points_cam_m
    each = [flow_metrics(sample, true, clip.visible) for sample in found]
    still = flow_metrics(np.broadcast_to(start, true.shape), true)

    def mean(name: str, factor: float = 100.0) -> float:
        return factor * float(np.mean([metrics[name] for metrics in each]))

    return FlowErrors(
        ade_cm=mean("ade_m"),
        fde_cm=mean("fde_m"),
        ade_visible_cm=mean("ade_visible_m"),
        fde_visible_cm=mean("fde_visible_m"),
        best_ade_cm=100 * min(metrics["ade_m"] for metrics in each),
        within_5cm=mean("acc_5cm", 1.0),
        rotation_deg=_rotation_deg(start, found[:, -1], true[-1]),
        zero_motion_ade_cm=100 * still["ade_m"],
        zero_motion_fde_cm=100 * still["fde_m"],
    )


def goal_reached(end_m: FloatArray, goals_m: dict[str, list[float]], instruction: str) -> bool:
    """Whether the mean of points (n, 3) is nearest to the instruction's goal; `goals_m` has (3,) for each."""
    names = list(goals_m)
    away = np.linalg.norm(np.array([goals_m[name] for name in names]) - end_m.mean(0), axis=-1)
    return names[int(away.argmin())] == instruction


def _rotation_deg(start: FloatArray, found: FloatArray, true: FloatArray) -> float:
    wanted = fit_motions(start, true[None]).T_t_0[0]
    # a model's flow is noisier than the truth, so its fit gets a wider scale
    fitted = [fit_motions(start, sample[None], scale_m=LEARNED_M).T_t_0[0] for sample in found]
    return float(np.degrees(angle_rad(np.stack(fitted), wanted)).mean())
