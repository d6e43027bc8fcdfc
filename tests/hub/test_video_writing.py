import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.hub.video_writing import VideoRecorder, VideoSettings, copy_video, write_mp4

av = pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")
ROOT = Path(__file__).resolve().parents[2]


def moving_ramp(length=12, height=48, width=64):
    """Smooth images whose brightness encodes the frame index."""
    down, across = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    levels = [np.stack([80 * across + 10 * t, 80 * down + 60, 0 * down + 200 - 10 * t], -1) for t in range(length)]
    return np.stack(levels).astype(np.uint8)


def decoded(path):
    with av.open(str(path)) as container:
        video = container.streams.video[0]
        pictures = list(container.decode(video))
        times = [float(picture.pts * picture.time_base) for picture in pictures]
    return np.stack([picture.to_ndarray(format="rgb24") for picture in pictures]), np.array(times)


def test_frames_and_times_are_read_back(tmp_path):
    frames = moving_ramp()
    path = write_mp4(tmp_path / "new" / "a.mp4", frames, fps=20)
    found, times = decoded(path)
    assert found.shape == frames.shape
    # The loss that the module's docstring states; one frame on differs by 10 in two channels.
    assert np.abs(found.astype(int) - frames).mean() < 2
    np.testing.assert_allclose(times, np.arange(12) / 20, atol=1e-6)
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec.canonical_name == "h264"
        assert container.streams.video[0].pix_fmt == "yuv420p"
    assert sorted(os.listdir(path.parent)) == ["a.mp4"]


def test_odd_sizes_are_padded_by_the_edge(tmp_path):
    frames = moving_ramp(4, 47, 63)
    found, _ = decoded(write_mp4(tmp_path / "a.mp4", frames, 10))
    assert found.shape == (4, 48, 64, 3)
    assert np.abs(found[:, :47, :63].astype(int) - frames).mean() < 2
    assert np.abs(found[:, 47, :63].astype(int) - frames[:, 46]).mean() < 4


def test_the_same_frames_give_the_same_bytes(tmp_path):
    contents = set()
    for _ in range(20):
        path = write_mp4(tmp_path / "a.mp4", moving_ramp(), 20)
        contents.add(path.read_bytes())
        # Fills the memory that the next encoder gets with something else.
        decoded(path)
    assert len(contents) == 1


def test_fewer_key_frames_make_a_smaller_file(tmp_path):
    sizes = [write_mp4(tmp_path / "a.mp4", moving_ramp(), 20, VideoSettings(gop=gop)).stat().st_size for gop in (1, 12)]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(
    ("frames", "fps", "error", "words"),
    [
        (np.zeros((0, 8, 8, 3), np.uint8), 20, UserError, "no frames"),
        (np.zeros((2, 8, 8, 3), np.uint8), 0, UserError, "fps is 0"),
        (np.zeros((2, 8, 8, 3)), 20, ValueError, "float64"),
        (np.zeros((2, 8, 8), np.uint8), 20, ValueError, r"\(8, 8\)"),
        ([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 6, 3), np.uint8)], 20, ValueError, "frame 1 has shape"),
    ],
)
def test_bad_input_is_named_and_leaves_the_old_video(tmp_path, frames, fps, error, words):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old")
    with pytest.raises(error, match=words):
        write_mp4(path, frames, fps)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_an_unknown_encoder_is_named(tmp_path):
    with pytest.raises(UserError, match="libnothing"):
        write_mp4(tmp_path / "a.mp4", moving_ramp(2), 20, VideoSettings(encoder="libnothing"))


def test_the_recorder_writes_the_same_file_as_write_mp4(tmp_path):
    frames = moving_ramp()
    with VideoRecorder(tmp_path / "a.mp4", fps=20) as video:
        for frame in frames:
            video.add(frame)
        assert video.frames == 12
        assert not video.path.exists()
    found, times = decoded(tmp_path / "a.mp4")
    expected, expected_times = decoded(write_mp4(tmp_path / "b.mp4", frames, 20, VideoSettings(gop=20)))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(times, expected_times)
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "b.mp4"]
    with pytest.raises(ValueError, match="closed"):
        video.add(frames[0])
    assert video.close() == video.path


def test_an_exception_keeps_what_was_recorded(tmp_path):
    def record_and_fail():
        with VideoRecorder(tmp_path / "a.mp4", 20) as video:
            for frame in moving_ramp(5):
                video.add(frame)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        record_and_fail()
    assert len(decoded(tmp_path / "a.mp4")[0]) == 5


def test_no_frames_no_file(tmp_path):
    with VideoRecorder(tmp_path / "a.mp4", 20) as video:
        pass
    assert video.close() is None
    assert os.listdir(tmp_path) == []


def test_a_killed_recorder_leaves_a_video_that_plays(tmp_path):
    script = (
        "import sys, time, numpy as np\n"
        "from mmrl.hub.video_writing import VideoRecorder\n"
        "video = VideoRecorder(sys.argv[1], fps=5)\n"
        "for t in range(100):\n"
        "    video.add(np.full((32, 32, 3), t, np.uint8))\n"
        "print('recorded', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.mp4")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.readline() == b"recorded\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found, _ = decoded(tmp_path / "a.part.mp4")
    assert 40 <= len(found) <= 100
    np.testing.assert_allclose(found.mean((1, 2, 3)), np.arange(len(found)), atol=3)


def test_videos_behind_each_other_keep_frames_and_rate(tmp_path):
    parts = [moving_ramp(5), moving_ramp(12)[7:], moving_ramp(3)]
    settings = VideoSettings(gop=2)
    paths = [write_mp4(tmp_path / f"{n}.mp4", frames, 20, settings) for n, frames in enumerate(parts)]
    alone = [decoded(path)[0] for path in paths]
    copy_video(paths, paths[0])
    found, times = decoded(paths[0])
    np.testing.assert_array_equal(found, np.concatenate(alone))
    np.testing.assert_allclose(times, np.arange(13) / 20, atol=1e-6)


FULL_DISK = """
import resource, signal, sys
import numpy as np
from mmrl.hub.video_writing import VideoRecorder, copy_video, write_mp4

folder = sys.argv[1]
frames = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), np.uint8)
whole = write_mp4(f"{folder}/whole.mp4", frames, 10)
size = whole.stat().st_size

def record():
    with VideoRecorder(f"{folder}/recorded.mp4", 10) as video:
        for frame in frames:
            video.add(frame)

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (0, 10, 30, 40, 48, 1000, size // 2):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for write in (
        lambda: write_mp4(f"{folder}/full.mp4", frames, 10),
        record,
        lambda: copy_video([whole], whole.with_name("copied.mp4")),
    ):
        try:
            write()
        except OSError as error:
            assert error.strerror == "File too large", error
        else:
            raise SystemExit(f"{write} succeeded with {limit} bytes")
"""


def test_a_full_disk_is_an_error_that_ends_no_process(tmp_path):
    found = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr  # FFmpeg's writer of mp4 crashes after a write that fails
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recorded.part.mp4", "whole.mp4"]


def test_nothing_to_copy_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no videos"):
        copy_video([], tmp_path / "a.mp4")
    assert os.listdir(tmp_path) == []


def test_importing_loads_no_codec():
    code = (
        "import sys, mmrl.hub.video_writing, robotics.data; print({'av', 'pyarrow', 'PIL', 'torch'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "set()"
