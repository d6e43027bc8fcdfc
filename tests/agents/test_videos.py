import numpy as np
import pytest

from mmrl.agents.environments.environment import Observation
from mmrl.agents.environments.videos import RED, Video, draw_frames, write_videos
from mmrl.report.gallery import videos_of

SEEN = Observation("", (np.full((30, 40, 3), 90, np.uint8),))


def video(task="maze/1", success=True, marks=None):
    made = Video(task)
    made.add(SEEN, "click(x=10, y=20)", {"marks": marks} if marks is not None else None)
    made.add(Observation("only text"), "wait" * 200, {"action_error": "out_of_bounds"})
    made.end(SEEN, 1.0, success)
    return made


def test_a_video_has_a_frame_per_turn_and_the_marks_at_their_positions():
    plain, marked = (list(draw_frames(video(marks=marks))) for marks in (None, [(10, 20), (30, 6)]))
    assert [frame.shape for frame in marked] == [marked[0].shape] * 3
    height, width = 8 * 30, 8 * 40  # enlarged by a whole factor
    assert marked[0].shape[1] == width
    assert marked[0].shape[0] > height
    np.testing.assert_array_equal(plain[0][:height, :width], 90)
    changed = (marked[0][:height, :width] != 90).any(-1)
    centre = lambda x, y: (int((y + 0.5) * 8), int((x + 0.5) * 8))  # noqa: E731
    for x, y in ((10, 20), (30, 6)):
        assert tuple(marked[0][centre(x, y)]) == RED
    assert changed[centre(20, 13)], "the line of a drag"
    assert not changed[centre(2, 2)]
    np.testing.assert_array_equal(marked[2][:height, :width], 90)
    assert (marked[1][height:] != marked[2][height:]).any(), "captions differ"


@pytest.mark.parametrize("marks", ["here", [1], [[1, 2, 3]], [[float("nan"), 1]], object(), [["a", "b"]], {}, []])
def test_marks_that_are_none_are_left_out(marks):
    assert video(marks=marks).frames[0].marks == ()


@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (2000, 1500), (28, 28)])
def test_images_of_any_size_fit(shape):
    made = Video("x")
    made.end(Observation("", (np.zeros((*shape, 3), np.uint8),)), 0.0, False)
    (frame,) = draw_frames(made)
    assert max(frame.shape) <= 1280 + 100


def test_the_report_finds_the_videos(tmp_path):
    pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")
    videos = [video(f"maze / {number}", success=number % 3 == 0) for number in range(8)]
    videos.append(Video("cut off"))
    paths = write_videos(tmp_path / "videos", "step-000010-held_out", videos, count=2)
    assert [path.name for path in paths] == [
        "step-000010-held_out-success-maze.0.mp4",
        "step-000010-held_out-success-maze.3.mp4",
        "step-000010-held_out-failure-maze.1.mp4",
        "step-000010-held_out-failure-maze.2.mp4",
    ]
    shown = videos_of(tmp_path)
    assert len(shown) == 4
    assert all(video["source"].startswith("data:video/mp4;base64,") for video in shown)


def test_a_long_task_has_a_file_of_a_shorter_name(tmp_path):
    pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")
    videos = [video("漢" * 200 + end, success=True) for end in "ab"]
    paths = write_videos(tmp_path, f"step-000010-{'x' * 100}", videos, count=2)
    assert len({path.name for path in paths}) == 2
    assert all(len(path.name.encode()) < 255 for path in paths)
