"""Videos of users: folders with video files, LeRobotDatasets, and data sets built of them."""

import dataclasses
import io
import json
import re
import shutil

import av
import numpy as np
import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.hub.video_writing import write_mp4
from robotics.data import EpisodeWriter, robot_features
from robotics.flow3d.data import FlowReader
from robotics.flow3d.extract import (
    FunctionDetector,
    FunctionTracker,
    LeRobotVideos,
    RejectedVideo,
    RgbdVideo,
    build_from_folder,
    build_from_lerobot,
    read_rgbd_folder,
)
from robotics.flow3d.extract.sources import depth_of
from robotics.toy.extracted_clips import build_from_scenes
from tests.hub.numbered_clips import even_times, write_clip
from tests.robotics.flow3d.rgbd_scene import rgbd_video
from tests.robotics.flow3d.test_extract import write_folder

K = [[60.0, 0, 16], [0, 60, 12], [0, 0, 1]]


@pytest.fixture(scope="module")
def video(backend):
    return rgbd_video("place", "box", seed=2, size=128)


def small_folder(folder, depth, unit=None, suffix="npz", **camera):
    frames = np.random.default_rng(0).integers(0, 256, (5, 24, 32, 3), dtype=np.uint8) // 16 * 16
    folder.mkdir()
    write_mp4(folder / "rgb.mp4", frames, fps=10)
    np.savez(folder / "depth.npz", depth)
    (folder / "camera.json").write_text(json.dumps({"K": K, "depth_unit_m": unit} | camera))
    return folder


def test_a_folder_with_a_video_file_and_an_archive_of_depth(tmp_path):
    metres = np.random.default_rng(1).uniform(0.5, 2, (5, 24, 32)).astype(np.float32)
    read = read_rgbd_folder(small_folder(tmp_path / "metres", metres))
    assert read.rgb.shape == (5, 24, 32, 3)
    np.testing.assert_array_equal(read.depth_m, metres)
    codes = np.rint(metres / 0.001).astype(np.uint16)
    moving = np.tile(np.eye(4), (5, 1, 1)).tolist()
    read = read_rgbd_folder(small_folder(tmp_path / "codes", codes, unit=0.001, T_world_cam=moving))
    np.testing.assert_allclose(read.depth_m, metres, atol=0.51e-3)
    assert read.T_world_cams.shape == (5, 4, 4)


def test_intrinsics_of_another_resolution_and_unknown_entries_are_said(tmp_path, caplog):
    metres = np.ones((5, 24, 32), np.float32)
    read_rgbd_folder(small_folder(tmp_path / "fits", metres))
    assert not caplog.text
    double = [[120.0, 0, 32], [0, 120, 24], [0, 0, 1]]
    read_rgbd_folder(small_folder(tmp_path / "double", metres, K=double, T_cam_world=np.eye(4).tolist()))
    assert re.search(r"double.camera\.json puts the camera's axis at \(32, 24\) of 32 x 24 pixels", caplog.text)
    assert "double has T_cam_world, which nothing reads; its entries are K, depth_unit_m" in caplog.text


@pytest.mark.skipif(not hasattr(av.VideoStream, "set_display_rotation"), reason="PyAV writes turned files since 18")
def test_a_video_from_a_phone_is_upright(tmp_path):
    folder = small_folder(tmp_path / "phone", np.ones((5, 24, 32), np.float32))
    write_clip(folder / "rgb.mp4", even_times(5), turned=90, frame=lambda number: np.full((32, 24, 3), 40, np.uint8))
    assert read_rgbd_folder(folder).rgb.shape == (5, 24, 32, 3)


def test_damaged_folders_are_named_with_their_fault(tmp_path):
    metres = np.ones((5, 24, 32), np.float32)
    with pytest.raises(UserError, match="depth_unit_m"):
        read_rgbd_folder(small_folder(tmp_path / "unit", metres.astype(np.uint16)))
    with pytest.raises(UserError, match="must be 16-bit integers"):
        read_rgbd_folder(small_folder(tmp_path / "bits", metres.astype(np.uint8), unit=0.01))
    with pytest.raises(UserError, match="5 colour frames and 4 depth frames"):
        read_rgbd_folder(small_folder(tmp_path / "short", metres[:4]))
    for unit in (1000, -0.001):
        with pytest.raises(UserError, match=f"depth_unit_m is {unit}; must be the metres of one unit of .*depth.npz"):
            read_rgbd_folder(small_folder(tmp_path / f"unit{unit}", metres.astype(np.uint16), unit=unit))
    folder = small_folder(tmp_path / "twice", metres)
    (folder / "depth").mkdir()
    np.save(folder / "depth/0.npy", metres[0])
    with pytest.raises(UserError, match=r"depth\.npz and images"):
        read_rgbd_folder(folder)
    folder = small_folder(tmp_path / "both", metres)
    (folder / "rgb").mkdir()
    Image.new("RGB", (32, 24)).save(folder / "rgb/0.png")
    with pytest.raises(UserError, match=r"rgb\.mp4 and images"):
        read_rgbd_folder(folder)
    shutil.rmtree(folder / "rgb")
    (folder / "rgb.mp4").write_bytes(b"no video")
    with pytest.raises(UserError, match=r"rgb\.mp4 cannot be read as a video"):
        read_rgbd_folder(folder)
    (folder / "rgb.mp4").unlink()
    with pytest.raises(UserError, match="has no frames"):
        read_rgbd_folder(folder)


def test_frames_are_in_the_order_of_their_numbers(tmp_path):
    for name in ("rgb", "depth"):
        (tmp_path / name).mkdir()
    for number in range(12):
        Image.new("RGB", (4, 3), (number, 0, 0)).save(tmp_path / f"rgb/frame{number}.png")
        np.save(tmp_path / f"depth/{number}.npy", np.full((3, 4), 1.0 + number))
    (tmp_path / "camera.json").write_text(json.dumps({"K": np.asarray(K).tolist()}))
    found = read_rgbd_folder(tmp_path)
    assert found.rgb[:, 0, 0, 0].tolist() == list(range(12))
    assert found.depth_m[:, 0, 0].tolist() == [1.0 + number for number in range(12)]


def write_dataset(folder, metres):
    """A LeRobotDataset with depth as numbers, and as an image feature that is then stored in 16 bits."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    length, height, width = metres.shape
    features = robot_features(2, 2, {"front": (height, width), "front_depth": (height, width)}, video=False)
    features["depth_m"] = {"dtype": "float32", "shape": [height * width], "names": None}
    rgb = np.random.default_rng(0).integers(0, 256, (length, height, width, 3), dtype=np.uint8)
    with EpisodeWriter(folder, fps=10, features=features) as writer:
        for _ in range(2):
            extra = {"depth_m": metres.reshape(length, -1)}
            frames = {"front": rgb, "front_depth": np.zeros_like(rgb)}
            writer.add_episode(
                np.zeros((length, 2)), np.zeros((length, 2)), frames, task="Lift it", success=True, extra=extra
            )
    for path in folder.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        name = "observation.images.front_depth"
        cells = [{"bytes": png(depth), "path": None} for depth in np.tile(metres, (len(table) // length, 1, 1))]
        column = pa.array(cells, type=table.schema.field(name).type)
        pq.write_table(table.set_column(table.schema.get_field_index(name), name, column), path)
    return folder, rgb


@pytest.mark.parametrize("video", [True, False])
def test_a_depth_camera_is_depth_in_metres(video, tmp_path):
    metres = np.random.default_rng(1).uniform(0.5, 2, (4, 48, 64)).astype(np.float32)
    metres[:, :4] = 0  # not measured
    features = robot_features(None, 1, {"front": (48, 64)}, video, depth={"front_depth": (48, 64)})
    with EpisodeWriter(tmp_path, fps=10, features=features) as writer:
        images = {"front": np.zeros((4, 48, 64, 3), np.uint8), "front_depth": metres}
        writer.add_episode(None, np.zeros((4, 1)), images, task="Lift it", success=True)
    found = LeRobotVideos(tmp_path, camera="front", depth="front_depth", K=K)[0].depth_m
    # A code of the video stands for 1.35 / 4095 of depth + 3.5 m.
    np.testing.assert_allclose(found, metres, atol=1.35 / 4095 * 5.5 / 2 if video else 0)
    assert not found[:, :4].any()


def png(metres):
    buffer = io.BytesIO()
    Image.fromarray(np.rint(metres * 1000).astype(np.uint16)).save(buffer, format="PNG")
    return buffer.getvalue()


def test_episodes_of_a_lerobot_dataset(tmp_path):
    metres = np.random.default_rng(1).uniform(0.5, 2, (4, 24, 32)).astype(np.float32)
    folder, rgb = write_dataset(tmp_path / "demos", metres)
    videos = LeRobotVideos(folder, camera="front", depth="depth_m", K=K)
    assert len(videos) == 2
    np.testing.assert_array_equal(videos[1].rgb, rgb)
    np.testing.assert_array_equal(videos[1].depth_m, metres)
    assert (videos[1].instruction, videos[-1].meta) == ("Lift it", {"episode": 1})
    images = LeRobotVideos(folder, camera="front", depth="front_depth", K=K, depth_unit_m=0.001)
    np.testing.assert_allclose(images[0].depth_m, metres, atol=0.51e-3)
    assert LeRobotVideos(folder, camera="front", depth=None, K=K)[0].depth_m is None
    with pytest.raises(RejectedVideo, match=r"no_intrinsics.*pass K"):
        LeRobotVideos(folder, camera="front", depth="depth_m", K=None)
    with pytest.raises(UserError, match=r"unknown camera 'back'.*front"):
        LeRobotVideos(folder, camera="back", depth="depth_m", K=K)
    with pytest.raises(UserError, match=r"unknown depth camera 'far'.*depth_m"):
        LeRobotVideos(folder, camera="front", depth="far", K=K)
    info = folder / "meta/info.json"
    right = info.read_text()
    info.write_text(right.replace('"image"', '"video"'))
    with pytest.raises(UserError, match="stored as 8-bit video"):
        LeRobotVideos(folder, camera="front", depth="front_depth", K=K)
    info.write_text(right)
    with pytest.raises(UserError, match="none of the 2 videos gives a clip"):
        build_from_lerobot(str(tmp_path / "out"), dataset=str(folder), camera="front", depth="depth_m", K=K)
    assert not (tmp_path / "out").exists()


def write_video_folder(folder, video):
    folder.mkdir(parents=True)
    write_mp4(folder / "rgb.mp4", video.rgb, fps=10)
    np.savez(folder / "depth.npz", video.depth_m)
    camera = {"K": video.K.tolist(), "T_world_cam": video.T_world_cam.tolist(), "instruction": video.instruction}
    (folder / "camera.json").write_text(json.dumps(camera))


def test_a_data_set_of_folders_with_reasons_images_and_card(video, tmp_path):
    source = tmp_path / "videos"
    still = dataclasses.replace(video, depth_m=np.repeat(video.depth_m[:1], len(video), 0))
    for name, one in (("a", video), ("b", still), ("c", video)):
        write_video_folder(source / name, one)
    out = build_from_folder(str(tmp_path / "clips"), videos=str(source), held_out_share=0.34, grid=3, num_frames=5)
    report = json.loads((out / "extraction.json").read_text())
    assert report == {
        "videos": 3,
        "clips": 2,
        "left_out": {"no_moving_object": 1},
        "numbers": {"no_moving_object": [1]},
    }
    (clip,) = FlowReader(out, split="held_out")
    assert (clip.source, clip.flow.shape) == ("c", (5, 3, 3, 4))
    assert {"visible", "moved_m", "rigid_rmse_m", "lost_frames"} <= set(clip.quality)
    assert "quality of the extraction" in (out / "README.md").read_text()
    assert np.asarray(Image.open(out / "strips/001.png")).std() > 10
    with pytest.raises(UserError, match="already exists"):
        build_from_folder(str(out), videos=str(source))
    with pytest.raises(UserError, match=r"no folder in .* contains a camera\.json"):
        build_from_folder(str(tmp_path / "none"), videos=str(tmp_path / "clips"))


def test_a_damaged_video_is_counted_and_does_not_end_the_extraction(video, tmp_path, caplog):
    source = tmp_path / "videos"
    write_video_folder(source / "a", video)
    write_video_folder(source / "b", video)
    (source / "b/rgb.mp4").write_bytes(b"cut off")
    out = build_from_folder(str(tmp_path / "clips"), videos=str(source), held_out_share=0, grid=3, num_frames=5)
    report = json.loads((out / "extraction.json").read_text())
    assert (report["clips"], report["left_out"], report["numbers"]) == (1, {"unreadable": 1}, {"unreadable": [1]})
    assert "b/rgb.mp4" in caplog.text
    (source / "a/rgb.mp4").write_bytes(b"cut off")
    with pytest.raises(UserError, match=r"none of the 2 videos gives a clip: \{'unreadable': 2\}.*rgb\.mp4"):
        build_from_folder(str(tmp_path / "none"), videos=str(source))


def test_floats_that_cannot_be_metres_are_refused(video):
    with pytest.raises(UserError, match=r"depth\.npz has floats with a median of .*cannot be metres"):
        depth_of(video.depth_m * 1000, None, "depth.npz")
    assert (depth_of(video.depth_m, None, "depth.npz") == video.depth_m).all()


def test_a_users_own_extractor(video, tmp_path):
    source = tmp_path / "videos"
    write_folder(source / "a", video)
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "from robotics.flow3d.extract import FlowExtractor, FunctionDetector, FunctionTracker, QualityLimits\n"
        "def extractor(encoding, moved_m):\n"
        "    limits = QualityLimits(least_moved_m=moved_m, least_extent_m=0)\n"
        "    here = __file__\n"
        "    return FlowExtractor(encoding, FunctionDetector(here + ':detect'), FunctionTracker(here + ':track'),\n"
        "        limits=limits)\n"
        "def detect(rgb, depth_m):\n"
        "    mask = np.zeros(rgb.shape[1:3], bool)\n"
        "    mask[40:60, 40:60] = True\n"
        "    return mask\n"
        "def track(rgb, uv):\n"
        "    return uv + np.arange(len(rgb))[:, None, None], np.ones((len(rgb), len(uv)))\n"
    )
    options = {"videos": str(source), "extractor": f"{file}:extractor"}
    out = build_from_folder(str(tmp_path / "clips"), **options, extractor_options={"moved_m": 0.0}, held_out_share=0)
    (clip,) = FlowReader(out)
    np.testing.assert_allclose(clip.flow[-1, ..., :2], clip.points[..., :2] + 3, atol=1e-4)
    with pytest.raises(UserError, match=r"no_moving_object': 1"):
        build_from_folder(str(tmp_path / "far"), **options, extractor_options={"moved_m": 9.0})
    other = tmp_path / "other.py"
    other.write_text("def extractor(encoding):\n    return 1\n")
    with pytest.raises(UserError, match="returned a int; expected a FlowExtractor"):
        build_from_folder(str(tmp_path / "wrong"), videos=str(source), extractor=f"{other}:extractor")


def test_detectors_of_users_are_checked(video, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "def nothing(rgb, depth_m):\n"
        "    return np.zeros(depth_m.shape[1:])\n"
        "def flat(rgb, depth_m):\n"
        "    return np.ones(7)\n"
    )
    with pytest.raises(RejectedVideo, match=r"mine\.py:nothing found nothing"):
        FunctionDetector(f"{file}:nothing").detect(video)
    with pytest.raises(UserError, match=r"returned the shape \(7,\)"):
        FunctionDetector(f"{file}:flat").detect(video)


def test_a_tracker_with_the_call_of_cotracker(tmp_path):
    """The example of `FunctionTracker`, with a stand-in that has its signature and pixels."""
    example = FunctionTracker.__doc__.split('offline")\n')[1].split("Source:")[0]
    stand_in = (
        "import torch\n"
        "def model(video, queries):\n"
        "    assert video.shape[:3] == (1, 4, 3) and video.max() > 1 and (queries[..., 0] == 0).all()\n"
        "    steps = torch.arange(video.shape[1])[None, :, None, None]\n"
        "    tracks = queries[:, None, :, 1:] + steps * torch.tensor([2.0, 1.0])\n"
        "    inside = (tracks[..., 0] <= video.shape[4] - 1) & (tracks[..., 1] <= video.shape[3] - 1)\n"
        "    return tracks, inside\n"
    )
    lines = [line[8:] for line in example.splitlines()]
    (tmp_path / "trackers.py").write_text(stand_in + "\n".join(lines))
    video = RgbdVideo(np.full((4, 20, 30, 3), 200, np.uint8), None, None)
    uv = np.array([[0.5, 0.5], [26.5, 10.5]])
    tracks = FunctionTracker(f"{tmp_path}/trackers.py:cotracker").track(video, np.ones((20, 30), bool), uv)
    np.testing.assert_allclose(tracks.uv_px[2], uv + np.array([4, 2]), atol=1e-4)
    np.testing.assert_array_equal(tracks.visible, [[1, 1], [1, 1], [1, 0], [1, 0]])


@pytest.mark.parametrize("name", ["offline", "simulator"])
def test_clips_of_the_scenes_by_either_backend(backend, tmp_path, name):
    pytest.importorskip("mujoco")
    out = build_from_scenes(
        str(tmp_path / "clips"), backend=name, scenes=1, held_out_scenes=0, tasks=["place_red"], actors=["panda"]
    )
    (clip,) = FlowReader(out)
    assert clip.source == "simulator/panda/place_red"
    assert clip.quality["moved_m"] > 0.02
    with pytest.raises(UserError, match="available: offline, simulator"):
        build_from_scenes(str(tmp_path / "no"), backend="magic")
