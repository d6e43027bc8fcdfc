"""From video to flow, compared with the simulator's ground truth."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from benchmarks.robotics.flow3d_extractors import (
    ClassicalFlow,
    EarlyMotion,
    moving_points,
    score_detector,
    score_tracker,
)
from mmrl.errors import UserError
from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.extract import (
    FlowExtractor,
    FunctionDepth,
    FunctionTracker,
    RejectedVideo,
    RevealedDepth,
    RigidChain,
    SimSegmentation,
    SimState,
    read_rgbd_folder,
)
from robotics.flow3d.extract.backends import Tracks
from robotics.flow3d.extract.camera import klt_tracks
from robotics.flow3d.extract.depth import SensorDepth, depth_noise_m
from robotics.flow3d.extract.extractor import QualityLimits
from robotics.flow3d.extract.rigid_chain import align_to_surface, fitted_normals, surface_normals
from robotics.flow3d.geometry import angle_rad, apply_pose, intrinsics, make_pose, project
from robotics.flow3d.metrics import draw_flow, flow_strip
from robotics.flow3d.video import RgbdVideo
from tests.robotics.flow3d.rgbd_scene import rgbd_video
from tests.robotics.flow3d.some_clips import a_clip

EIGHT = FlowEncoding(num_frames=8, grid=4)


@pytest.fixture(scope="module")
def video(backend):
    return rgbd_video("place", "box", seed=2, size=128)


def reason(video, **parts):
    with pytest.raises(RejectedVideo) as caught:
        FlowExtractor(EIGHT, **parts).extract(video)
    return caught.value.reason


def test_the_simulators_flow_is_the_motion_of_the_object(video):
    clip = FlowExtractor(EIGHT, SimSegmentation(), SimState()).extract(video)
    assert clip.flow.shape == (8, 4, 4, 4)
    T = video.truth.T_t_0[np.floor(np.linspace(0, 40, 9)).astype(int)[1:]]
    np.testing.assert_allclose(clip.flow_cam_m, apply_pose(T, clip.points_cam_m[None]), atol=1e-9)
    assert clip.quality["rigid_rmse_m"] < 1e-9
    assert clip.quality["outside"] < 0.1
    visible = clip.flow[..., 3] > 0
    u, v = clip.flow[..., 0].astype(int), clip.flow[..., 1].astype(int)
    frames = np.broadcast_to(np.floor(np.linspace(0, 40, 9)).astype(int)[1:, None, None], u.shape)
    assert video.truth.masks[frames[visible], v[visible], u[visible]].mean() > 0.8


def test_the_offline_backends_find_and_follow_the_object(video):
    assert score_detector(RevealedDepth(), video).iou > 0.85
    score = score_tracker(RigidChain(), video)
    assert score.median_cm < 1.0
    assert score.final_rotation_deg < 15
    plain = score_tracker(ClassicalFlow(), video)
    assert plain.median_cm > 2 * score.median_cm
    clip = FlowExtractor(EIGHT).extract(video)
    assert clip.quality["lost_frames"] < 0.2
    assert clip.quality["moved_m"] > 0.1


def test_the_public_rule_on_made_tracks():
    rng = np.random.default_rng(0)
    tracks = np.repeat(rng.uniform(0, 200, (1, 30, 2)), 10, axis=0)
    tracks[6:, :8] += np.linspace(5, 20, 4)[:, None, None]
    tracks[1:, 8:12] += 30.0  # moves early: the gripper
    moving = moving_points(tracks, 5, 1.0, 10.0)
    assert moving.tolist() == [True] * 8 + [False] * 22
    with pytest.raises(RejectedVideo, match="28\\.3 px at most, must be 40"):
        moving_points(tracks, 5, 1.0, 40.0)


def test_classical_flow_follows_a_shifted_image():
    rng = np.random.default_rng(1)
    noise = np.kron(rng.integers(0, 255, (24, 24)), np.ones((4, 4))).astype(np.uint8)
    frames = np.stack([np.roll(noise, (shift, 2 * shift), axis=(0, 1)) for shift in range(4)])
    points = np.array([[40.0, 40.0], [52.0, 36.0], [30.0, 50.0]])
    tracks, alive = klt_tracks(list(frames), points)
    assert alive.all()
    np.testing.assert_allclose(tracks[-1], points + np.array([6, 3]), atol=0.5)


def test_the_rule_with_a_perfect_tracker_finds_the_object(video):
    class Truth:
        def track(self, video, mask, uv_px):
            return SimState().track(video, mask, uv_px)

    box = EarlyMotion(Truth(), grid=64).detect(video)
    true = video.truth.masks[0]
    assert (box & true).sum() > 0.8 * true.sum()
    assert box.sum() < 2.5 * true.sum()


def test_surface_alignment_undoes_a_small_motion():
    size, K = (80, 80), intrinsics((80, 80), fov_y_rad=0.8)
    v, u = np.mgrid[:80, :80] + 0.5
    rays = np.stack([(u - 40) / K[0, 0], (v - 40) / K[1, 1], np.ones_like(u)], -1)
    # Three walls of a corner that opens to the camera determine all six degrees of freedom.
    walls = np.array([[0.7, 0.0, 1.0], [-0.6, 0.5, 1.0], [0.0, -0.7, 1.0]])
    depth = np.min(0.8 / np.maximum(rays @ walls.T, 1e-6), -1).astype(np.float32)
    points = (rays * depth[..., None])[10:70:3, 10:70:3].reshape(-1, 3)
    assert np.allclose(project(points, K)[:, 0], u[10:70:3, 10:70:3].ravel())
    start = make_pose(np.array([[1, -0.01, 0], [0.01, 1, 0], [0, 0, 1.0]]), np.array([0.003, -0.002, 0.002]))
    found = align_to_surface(start, points, depth, surface_normals(depth, K), K, 0.02, iterations=15)
    assert np.linalg.norm(apply_pose(found, points) - points, axis=-1).mean() < 5e-4
    assert angle_rad(found, np.eye(4)) < 5e-3
    assert size == (80, 80)


def test_planes_through_noisy_depth_have_the_normals_of_the_surface():
    K = intrinsics((80, 60), fov_y_rad=0.8)
    v, u = np.mgrid[:60, :80] + 0.5
    rays = np.stack([(u - K[0, 2]) / K[0, 0], (v - K[1, 2]) / K[1, 1], np.ones_like(u)], -1)
    slope = np.array([0.3, -0.2, -1.0]) / np.linalg.norm([0.3, -0.2, -1.0])
    depth = -0.8 * np.linalg.norm([0.3, -0.2, -1.0]) ** -1 / (rays @ slope)
    depth[:, 60:] += 0.2
    noisy = (depth + np.random.default_rng(0).normal(0, 0.008, depth.shape)).astype(np.float32)
    noisy[5, 5] = np.nan
    around = np.array([[10.0, 10.0], [62.0, 40.0], [np.nan, np.nan]])
    found = fitted_normals(noisy, K, around, 0.008)
    error = np.degrees(np.arccos(np.clip(found[:52, 2:56] @ slope, -1, 1)))
    plain = np.degrees(np.arccos(np.clip(surface_normals(noisy, K)[1:51, 2:56] @ slope, -1, 1)))
    assert np.nanmedian(error) < 0.5 * np.nanmedian(plain)
    assert np.isnan(found[20, 59:61]).all(), "no normal at an edge"
    assert np.isnan(found[5, 5]).all(), "nor in a hole"
    assert np.isnan(found[55:]).all(), "nor far from the object"
    assert np.isnan(fitted_normals(noisy, K, around[2:], 0.008)).all()


def test_noisy_depth_also_corrects_the_rotation(video):
    """Without any correction the rotation at the end is off by 10 degrees or more."""
    errors = np.random.default_rng(7).standard_normal(video.depth_m.shape, dtype=np.float32)
    noisy = dataclasses.replace(video, depth_m=video.depth_m * (1 + np.float32(0.01) * errors))
    corrected = score_tracker(RigidChain(), noisy)
    without = score_tracker(RigidChain(correct_surface=False), noisy)
    assert corrected.final_rotation_deg < without.final_rotation_deg


def test_noise_of_depth_is_estimated():
    rng = np.random.default_rng(0)
    depth = (1 + 0.01 * rng.normal(size=(2, 80, 80))).astype(np.float32)
    # The deviation of a median of 6400 is about 2% of the value; ten times that is allowed.
    assert depth_noise_m(depth) == pytest.approx(0.01, rel=0.2)


def test_unusable_videos_are_rejected_with_a_reason(video):
    still = np.repeat(video.depth_m[:1], len(video), axis=0)
    assert reason(dataclasses.replace(video, K=None)) == "no_intrinsics"
    assert reason(dataclasses.replace(video, depth_m=None)) == "missing_depth"
    assert reason(dataclasses.replace(video, depth_m=np.zeros_like(video.depth_m))) == "missing_depth"
    assert reason(dataclasses.replace(video, depth_m=still)) == "no_moving_object"
    holed = video.depth_m.copy()
    holed[0][video.truth.masks[0]] = np.nan
    assert reason(dataclasses.replace(video, depth_m=holed), detector=SimSegmentation()) == "holed_depth"
    line = np.zeros_like(video.truth.masks)
    rows, columns = np.nonzero(video.truth.masks[0])
    line[:, rows[len(rows) // 2], columns[len(rows) // 2]] = True
    thin = dataclasses.replace(video, truth=dataclasses.replace(video.truth, masks=line))
    assert reason(thin, detector=SimSegmentation(), tracker=SimState()) == "degenerate_geometry"
    hidden = np.repeat(video.depth_m, 1, axis=0)
    hidden[1:] = np.nan
    near = dataclasses.replace(video, depth_m=hidden)
    assert reason(near, detector=SimSegmentation(), tracker=SimState()) == "too_few_visible_points"
    assert reason(near, detector=SimSegmentation()) == "lost_track"


def test_truth_is_asked_of_simulators_only(video):
    with pytest.raises(UserError, match="no ground truth from a simulator"):
        FlowExtractor(EIGHT, SimSegmentation()).extract(dataclasses.replace(video, truth=None))


def test_a_point_that_is_never_seen_keeps_the_depth_of_its_pixel():
    steps = 2 * np.arange(12)
    depth, mask = np.ones((12, 48, 64), np.float32), np.zeros((48, 64), bool)
    mask[16:30, 10:26] = True
    for step, frame in zip(steps, depth, strict=True):
        frame[16:30, 10 + step : 26 + step] = 0.9

    def track(video, mask, uv):
        visible = np.ones((12, len(uv)))
        visible[:, 3], visible[:6, 5] = 0.0, 0.0
        return Tracks(uv + np.stack([steps, 0 * steps], -1)[:, None], visible)

    rgb = np.random.default_rng(0).integers(0, 256, (12, 48, 64, 3), dtype=np.uint8)
    video = RgbdVideo(rgb, depth, np.array([[60.0, 0, 32], [0, 60, 24], [0, 0, 1]]))
    parts = {"detector": SimpleNamespace(detect=lambda _: mask), "depth": SensorDepth()}
    limits = QualityLimits(most_camera_px=None)
    found = FlowExtractor(EIGHT, tracker=SimpleNamespace(track=track), limits=limits, **parts).extract(video)
    np.testing.assert_allclose([*found.flow[..., 2].ravel(), *found.points[..., 2].ravel()], 0.9, rtol=1e-6)
    with pytest.raises(UserError, match="mask is uint8; must be bool"):
        FlowExtractor(EIGHT, SimpleNamespace(detect=lambda _: mask.astype(np.uint8)), limits=limits).extract(video)
    nowhere = SimpleNamespace(track=lambda *given: Tracks(track(*given).uv_px * np.nan, np.ones((12, 16))))
    with pytest.raises(RejectedVideo, match="lost_track"):
        FlowExtractor(EIGHT, tracker=nowhere, limits=limits, **parts).extract(video)


def test_a_users_functions(video, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "def stay(rgb, uv):\n"
        "    return np.repeat(uv[None], len(rgb), 0), np.ones((len(rgb), len(uv)))\n"
        "def metre(rgb):\n"
        "    return np.ones(rgb.shape[:3])\n"
        "def short(rgb, uv):\n"
        "    return uv, uv\n"
    )
    uv = np.array([[3.0, 4.0]])
    tracks = FunctionTracker(f"{file}:stay").track(video, video.truth.masks[0], uv)
    assert tracks.uv_px.shape == (41, 1, 2)
    assert (FunctionDepth(f"{file}:metre").depth_m(video) == 1).all()
    with pytest.raises(UserError, match=r"returned the shapes \(1, 2\)"):
        FunctionTracker(f"{file}:short").track(video, video.truth.masks[0], uv)


def write_folder(folder, video, unit=0.0005, **camera):
    for name in ("rgb", "depth"):
        (folder / name).mkdir(parents=True)
    for number in range(4):
        Image.fromarray(video.rgb[number]).save(folder / f"rgb/{number:06d}.png")
        codes = np.rint(video.depth_m[number] / unit).astype(np.uint16)
        Image.fromarray(codes).save(folder / f"depth/{number:06d}.png")
    (folder / "camera.json").write_text(json.dumps({"K": video.K.tolist(), "depth_unit_m": unit} | camera))
    return folder


def test_a_folder_of_frames(video, tmp_path):
    read = read_rgbd_folder(write_folder(tmp_path / "cup", video, instruction="lift"))
    np.testing.assert_array_equal(read.rgb, video.rgb[:4])
    np.testing.assert_allclose(read.depth_m, video.depth_m[:4], atol=0.26e-3)
    assert (read.source, read.instruction) == ("cup", "lift")
    with pytest.raises(RejectedVideo, match="no_intrinsics"):
        read_rgbd_folder(write_folder(tmp_path / "a", video, K=None))
    with pytest.raises(UserError, match="depth_unit_m"):
        read_rgbd_folder(write_folder(tmp_path / "b", video, depth_unit_m=None))
    (tmp_path / "cup/depth/000003.png").unlink()
    with pytest.raises(UserError, match="4 colour frames and 3 depth frames"):
        read_rgbd_folder(tmp_path / "cup")
    (tmp_path / "cup/rgb/000003.png").unlink()
    (tmp_path / "cup/depth/000001.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"depth/000001\.png cannot be read"):
        read_rgbd_folder(tmp_path / "cup")


def test_a_strip_shows_points_and_tracks():
    clip = a_clip(0, size=(40, 30))
    assert flow_strip(clip, 60).shape == (60, 4 * 80, 3)
    assert flow_strip(a_clip(0, size=(40, 30), mask=False), 60).shape == (60, 3 * 80, 3)
    black = np.zeros((30, 40, 3), np.uint8)
    points, flow = np.array([[[5.0, 10.0, 1.0]]]), np.array([[[[35.0, 10.0, 1.0, 1.0]]]])
    drawn = np.asarray(draw_flow(black, points, flow, width_px=160)).max(-1)
    assert drawn[40, 20:140].min() > 100  # the line, four times as large
    assert drawn[60:].max() == drawn[:25].max() == 0
    assert np.asarray(draw_flow(black, points, flow[:0], width_px=160))[40, 60:].max() == 0
