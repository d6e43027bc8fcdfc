"""Clips with needles, candidate frames, and rows that cannot be used."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.hub.video_reading import decode_frames, read_index
from mmrl.hub.video_writing import write_mp4
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.data.task import TaskError
from mmrl.vlm.toy.needles import build_needles, build_readings
from mmrl.vlm.tspo import splice
from mmrl.vlm.tspo.needle_tasks import load_needle_tasks, open_candidates, question_without_options, read_needle
from mmrl.vlm.tspo.splice import build_spliced, sampled_numbers
from tests.hub.numbered_clips import numbers_of, write_clip
from tests.vlm.tspo.builders import FRAMES, data_folder


def grey_video(path, total, level=100, fps=2.0, size=(32, 48)):
    return write_mp4(path, (np.full((*size, 3), level, np.uint8) for _ in range(total)), fps)


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(path=str(path))


def test_the_needle_is_a_flash_and_what_follows_it():
    (folder,) = [data_folder()]
    tasks, skipped = load_needle_tasks(DataConfig(path=str(folder / "needles.jsonl")), 1.0, 0)
    assert len(tasks) == 4
    assert not skipped
    for task in tasks:
        assert len(task.video) == FRAMES
        (start, *_), total = np.flatnonzero(task.needle).tolist(), int(task.needle.sum())
        assert total == 8
        frames = np.stack(list(task.video.frames())).astype(float)
        redness = (frames[..., 0] - frames[..., 1:].max(-1)).mean((1, 2))
        assert sorted(np.argsort(-redness)[:2].tolist()) == [start, start + 1]
        assert task.answer in "0123456789"
        assert task.specific
        assert "flash" in task.query


def test_clips_repeat_and_answers_are_digits_of_the_clip(tmp_path):
    for name in ("one", "two"):
        build_needles(tmp_path / name / "x.jsonl", count=3, frames=60, decoys=2, seed=5)
    one, two = ((tmp_path / name / "x.jsonl").read_text() for name in ("one", "two"))
    assert one == two
    for row in map(json.loads, one.splitlines()):
        shown = row["digits"].split()
        assert len(set(shown)) == 3
        assert row["answer"] in shown
    with pytest.raises(ValueError, match="has no room for 5 decoys; they need 80 frames"):
        build_needles(tmp_path / "y.jsonl", frames=79, decoys=5)


def test_readings_show_the_flash_before_the_digit(tmp_path):
    build_readings(tmp_path / "r.jsonl", count=3, picks=5, frames=80)
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert all(len(row["images"]) == 5 and row["problem"].count("<image>") == 5 for row in rows)
    assert all((tmp_path / name).is_file() for row in rows for name in row["images"])
    assert not list(tmp_path.rglob("*.mp4"))


def test_readings_of_a_clip_share_its_digit_and_those_of_others_do_not(tmp_path):
    build_readings(tmp_path / "r.jsonl", count=12, frames=26, decoys=0, per_clip=3)
    answers = [json.loads(line)["answer"] for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert answers == [answer for answer in answers[::3] for _ in range(3)]
    assert len(set(answers)) > 1


@pytest.mark.parametrize(
    ("fps", "most", "expected"),
    [
        (0, 0, list(range(20))),
        (2.0, 0, list(range(20))),
        (9.0, 0, list(range(20))),
        (1.0, 0, list(range(0, 20, 2))),
        (0.5, 0, [0, 4, 8, 12, 16]),
        (0, 4, [0, 6, 13, 19]),
        (1.0, 10, list(range(0, 20, 2))),
    ],
)
def test_candidates_follow_the_rate(fps, most, expected, tmp_path):
    candidates = open_candidates(str(grey_video(tmp_path / "a.mp4", 20)), fps, most)
    assert list(candidates.numbers) == expected
    assert candidates.seconds == [number / 2 for number in expected]
    assert len(list(candidates.frames())) == len(expected)
    assert sorted(candidates.images([2, 0, 2])) == [0, 2]


def test_the_digest_follows_content_and_choice(tmp_path):
    path = str(grey_video(tmp_path / "a.mp4", 6))
    same = str(grey_video(tmp_path / "b.mp4", 6))
    other = str(grey_video(tmp_path / "c.mp4", 6, level=180))
    digests = [open_candidates(*made).digest for made in ((path,), (path, 2.0), (path, 1.0, 2), (other,))]
    assert len(set(digests)) == 4
    assert open_candidates(same).digest == digests[0]


@pytest.mark.parametrize("value", [5, "x", [3], [4, 2], [[0, 2], [3]], [0.5, 2], [-1, 3], [[1, "a"]], {"a": 1}])
def test_what_is_no_needle_is_refused(value):
    with pytest.raises(TaskError, match=r"row 1: its needle is .*expected \[start, stop\]"):
        read_needle(value, "row 1")


def test_needles_are_pairs_or_lists_of_them():
    assert read_needle([2, 5], "x") == [(2, 5)]
    assert read_needle([[0, 1], [4, 9]], "x") == [(0, 1), (4, 9)]
    assert read_needle(None, "x") == read_needle([], "x") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"needle": [10, 21]}, "frames 10 to 20, but the video has 20 frames"),
        ({"needle": [1, 2]}, "none of its needle's frames is a candidate"),
        ({"needle": [7, 3]}, r"expected \[start, stop\]"),
        ({"needle": None, "type": "specific"}, "'specific' and it has no needle"),
        ({"type": "other"}, "expected: specific, general"),
        ({"videos": ["a.mp4", "a.mp4"], "problem": "<video><video>What?"}, "2 videos; exactly one is needed"),
        ({"videos": [], "problem": "What?"}, "0 videos; exactly one is needed"),
        ({"images": ["a.png"], "problem": "<image><video>What?"}, "it has images, too"),
        ({"videos": [{"video": "a.mp4", "fps": 1.0}]}, "its video has the options fps"),
        ({"videos": ["missing.mp4"]}, "missing.mp4"),
        ({"videos": ["cut.mp4"]}, "is truncated"),
        ({"videos": ["empty.mp4"]}, "zero bytes"),
    ],
)
def test_bad_rows_are_named_or_skipped(change, message, tmp_path):
    whole = grey_video(tmp_path / "a.mp4", 20)
    (tmp_path / "cut.mp4").write_bytes(whole.read_bytes()[:-400])
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "a.png").touch()
    good = {"problem": "<video>What?", "answer": "1", "videos": ["a.mp4"], "needle": [2, 6]}
    config = write_rows(tmp_path / "rows.jsonl", good, good | change)
    with pytest.raises(UserError, match=message):
        load_needle_tasks(config, 1.0, 0)
    config.on_bad_row = "skip"
    tasks, skipped = load_needle_tasks(config, 1.0, 0)
    assert len(tasks) == 1
    assert sum(skipped.values()) == 1
    config = write_rows(tmp_path / "bad.jsonl", good | change)
    config.on_bad_row = "skip"
    with pytest.raises(UserError, match="no usable row"):
        load_needle_tasks(config, 1.0, 0)


def test_a_row_without_needle_is_general_and_its_query_has_no_options(tmp_path):
    grey_video(tmp_path / "a.mp4", 4)
    row = {"problem": "<video>Who sings?\n(A) a dog\n(B) a cat", "answer": "B", "videos": ["a.mp4"]}
    ((task,), _) = load_needle_tasks(write_rows(tmp_path / "rows.jsonl", row), 1.0, 0)
    assert task.query == "Who sings?"
    assert not task.specific
    assert not task.needle.any()
    assert question_without_options("What?\nA. one\nB. two") == "What?"
    assert question_without_options("Is A good?") == "Is A good?"


def test_a_format_prompt_is_no_part_of_the_query(tmp_path):
    grey_video(tmp_path / "a.mp4", 4)
    rows = [
        {"problem": "<video>Who sings?\n(A) a dog\n(B) a cat", "answer": "B", "videos": ["a.mp4"]},
        {"problem": "<video>Who dances?", "answer": "a cat", "videos": ["a.mp4"]},
    ]
    config = write_rows(tmp_path / "rows.jsonl", *rows)
    config.format_prompt = "First think. {{ content }}\nThen answer."
    tasks, _ = load_needle_tasks(config, 1.0, 0)
    assert [task.query for task in tasks] == ["Who sings?", "Who dances?"]
    assert tasks[1].task.messages[0]["content"][-1]["text"] == "Who dances?\nThen answer."


def test_questions_about_one_video_share_the_list_of_its_frames(tmp_path):
    grey_video(tmp_path / "a.mp4", 20)
    row = {"problem": "<video>What?", "answer": "1", "videos": ["a.mp4"]}
    one, two = load_needle_tasks(write_rows(tmp_path / "rows.jsonl", row, row | {"needle": [2, 6]}), 1.0, 0)[0]
    assert one.video is two.video
    assert two.needle.sum() == 2


def test_sampling_at_one_a_second_is_that_of_the_public_code():
    assert sampled_numbers(600, 10.0) == list(range(0, 600, 10))
    assert sampled_numbers(300, 10.0) == np.linspace(0, 299, 128, dtype=int).tolist()
    assert sampled_numbers(10_000, 10.0) == np.linspace(0, 9999, 128, dtype=int).tolist()


def test_a_video_is_spliced_into_others_of_another_size(tmp_path):
    grey_video(tmp_path / "own.mp4", 60, level=220, fps=1.0)
    hay = tmp_path / "hay"
    hay.mkdir()
    for name, level in (("a", 20), ("b", 60)):
        grey_video(hay / f"{name}.mp4", 9, level=level, size=(48, 32))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"problem": "<video>What?", "answer": "1", "video": "own.mp4"}) + "\n")
    path = build_spliced(
        tmp_path / "out/needles.jsonl", questions=str(rows), haystack=str(hay), clip_frames=5, clips=3, repeats=(2, 2)
    )
    ((task,), _) = load_needle_tasks(DataConfig(path=str(path)), 0, 0)
    assert task.needle.sum() == 10
    levels = [float(frame.mean()) for frame in task.video.frames()]
    assert len(levels) == 25
    assert ((np.array(levels) > 150) == task.needle).all()
    assert next(task.video.frames()).shape == (32, 48, 3)
    index = read_index(task.video.index.path)
    assert index.fps == pytest.approx(1.0)
    assert len(list(decode_frames(index, [0, 24]))) == 2
    with pytest.raises(UserError, match="has no video other than"):
        build_spliced(tmp_path / "x.jsonl", questions=str(rows), haystack=str(tmp_path / "nothing"))


def test_questions_for_splicing_have_the_forms_of_a_data_set(tmp_path):
    """Of a folder of tables, whose paths are relative to it, and of chats, whose answers are kept."""
    datasets = pytest.importorskip("datasets")
    grey_video(tmp_path / "own.mp4", 60, fps=1.0)
    chat = [{"from": "human", "value": "<video>What?"}, {"from": "gpt", "value": "A"}]
    rows = datasets.Dataset.from_list([{"conversations": chat, "answer": "A", "video": {"path": "own.mp4"}}])
    rows.save_to_disk(tmp_path / "saved")
    shutil.move(tmp_path / "own.mp4", tmp_path / "saved")
    path = build_spliced(
        tmp_path / "needles.jsonl", questions=str(tmp_path / "saved"), haystack=str(tmp_path), clip_frames=2, clips=0
    )
    ((task,), _) = load_needle_tasks(DataConfig(path=str(path)), 0, 0)
    assert (task.query, task.answer) == ("What?", "A")
    assert task.task.columns["completion"] == "A"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "What?", "videos": [{"path": "a.mp4", "fps": 1}]}))
    with pytest.raises(UserError, match=r"rows.jsonl line 1: needs one video file without options"):
        build_spliced(tmp_path / "x.jsonl", questions=str(tmp_path / "rows.jsonl"), haystack=str(tmp_path), clips=0)


RATES = {
    "screen": [*map(float, range(60)), *[60 + number / 30 for number in range(150)]],
    "dark": [*[number / 22 for number in range(220)], *[10 + number / 30 for number in range(300)]],
    "slides": [0.0, 7.0, 7.5, 8.0, 30.0, 31.0],
}
"""Seconds at which frames are shown: a screen recording, a phone that slows down in the dark, slides."""


@pytest.mark.parametrize(
    ("name", "needle", "candidates", "marked"),
    [("screen", [60, 120], 65, [60, 61]), ("dark", [220, 340], 20, [10, 11, 12, 13]), ("slides", [1, 4], 5, [1, 2])],
)
def test_a_variable_rate_is_picked_and_marked_by_frame_and_time(tmp_path, name, needle, candidates, marked):
    times = RATES[name]
    path = write_clip(tmp_path / "a.mp4", times, gop=60)
    (tmp_path / "q.jsonl").write_text(
        json.dumps({"problem": "<video>What?", "answer": "1", "videos": ["a.mp4"], "needle": needle}) + "\n"
    )
    ((task,), _) = load_needle_tasks(DataConfig(path=str(tmp_path / "q.jsonl")), 1.0, 0)
    video = task.video
    assert len(video) == candidates
    assert list(video.numbers) == numbers_of(video.frames())
    assert video.seconds == pytest.approx([times[number] for number in video.numbers], abs=1e-3)
    assert np.flatnonzero(task.needle).tolist() == marked
    assert [needle[0] <= number < needle[1] for number in video.numbers] == task.needle.tolist()
    few = open_candidates(str(path), 1.0, 4)
    assert len(few) <= 4
    assert few.numbers[-1] == len(times) - 1
    assert few.digest != video.digest
    everything = open_candidates(str(path), 0)
    assert list(everything.numbers) == list(range(len(times)))


def test_features_are_not_those_of_other_frames(tmp_path):
    """A cache is named after the candidates themselves, so that a change of their choice is noticed."""
    video = open_candidates(str(write_clip(tmp_path / "a.mp4", RATES["slides"])))
    moved = replace(video, numbers=(0, *video.numbers[2:]))
    assert moved.digest != replace(moved, numbers=video.numbers).digest == video.digest


def test_clips_of_a_variable_rate_are_spliced_by_time(tmp_path):
    """The needle at a frame a second, the haystack at evenly spaced times."""
    index = read_index(write_clip(tmp_path / "own.mp4", RATES["dark"]))
    chosen = splice._numbers_by_time(index)
    assert len(chosen) == 128
    assert np.diff([RATES["dark"][number] for number in chosen]).max() < 0.25
    slides = read_index(write_clip(tmp_path / "slides.mp4", RATES["slides"]))
    assert splice._spread(slides, 5) == [0, 2, 3, 3, 5]
