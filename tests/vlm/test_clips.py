"""Synthetic clips of digits: their contents and times, reproducible from a seed, streamed at any length."""

import itertools
import json
import weakref

import numpy as np
import pytest

from mmrl.hub.video_reading import decode_frames, read_index
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.data.task import VideoOptions, load_videos
from mmrl.vlm.toy import digit_clips
from mmrl.vlm.toy.digit_clips import (
    FPS,
    QUESTIONS,
    SHOT_FRAMES,
    Shot,
    build_questions,
    clip_frames,
    first_frames,
    write_clip,
)
from mmrl.vlm.toy.digits import reads_digits, scan_pool, scans_and_labels
from mmrl.vlm.toy.tiny import train_tokenizer

pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")


def is_red(frame: np.ndarray) -> bool:
    red, green, blue = frame.reshape(-1, 3).mean(0)
    return bool(red > 150 > 80 > max(green, blue))


def test_a_clip_shows_its_shots_and_digits_move():
    frames = list(clip_frames([Shot(3, 5), Shot(2, cue=True), Shot(12, 7)], seed=1))
    assert [is_red(frame) for frame in frames] == [False] * 3 + [True] * 2 + [False] * 12
    assert all(frame.shape == (56, 56, 3) and frame.dtype == np.uint8 for frame in frames)
    ink = frames[5].mean(-1), frames[16].mean(-1)
    places = [np.argwhere(picture > picture.max() * 0.7).mean(0) for picture in ink]
    assert np.abs(places[0] - places[1]).max() > 1
    assert first_frames([Shot(3, 5), Shot(2, cue=True), Shot(12, 7)]) == [0, 3, 5]


def test_a_shot_does_not_depend_on_earlier_shots():
    """Long clips are composed of shots; changing an early one does not change later ones."""
    one, two = (list(clip_frames([Shot(2, scan), Shot(2, 9)], seed=4)) for scan in (3, 8))
    assert not np.array_equal(one[0], two[0])
    assert np.array_equal(one[3], two[3])
    assert not np.array_equal(one[3], list(clip_frames([Shot(2, 3), Shot(2, 9)], seed=5))[3])


def test_long_clips_are_drawn_while_they_are_encoded(tmp_path, monkeypatch):
    drawn, most = [], []
    original = digit_clips.write_mp4

    def watched(path, frames, fps, settings):
        def pulled():
            for frame in frames:
                drawn.append(weakref.ref(frame))
                most.append(sum(reference() is not None for reference in drawn))
                yield frame

        return original(path, pulled(), fps, settings)

    monkeypatch.setattr(digit_clips, "write_mp4", watched)
    shots = [Shot(50, scan) for scan in range(12)]
    index = read_index(write_clip(tmp_path / "a.mp4", shots, fps=10, seed=2))
    assert index.total == len(drawn) == 600
    assert max(most) <= 3
    assert len(index.key_pts) >= 6  # one each ten seconds, and more where the picture changes
    (last,) = itertools.islice(clip_frames(shots, seed=2), 599, None)
    (frame,) = decode_frames(index, [599])
    assert np.abs(frame.astype(int) - last).mean() < 6  # what the encoder loses


def test_answers_match_the_contents_of_the_clips(tmp_path):
    path = build_questions(tmp_path / "train.jsonl", count=40, max_digits=4, seed=7)
    rows = [json.loads(line) for line in path.open()]
    assert {row["kind"] for row in rows} == set(QUESTIONS)
    for row in rows:
        frames = list(
            decode_frames(index := read_index(tmp_path / row["videos"][0]), range(0, index.total, SHOT_FRAMES))
        )
        digits = row["digits"].split()
        cue = [is_red(frame) for frame in frames].index(True)
        assert len(frames) == len(digits) + 1
        assert len(set(digits)) == len(digits)
        expected = {"first": digits[0], "last": digits[-1]}
        if row["kind"] == "after_cue":
            expected["after_cue"] = digits[cue]
        assert row["answer"] == expected[row["kind"]]
        place = digits.index(row["answer"])
        assert row["answer_s"] == (place + (place >= cue)) * SHOT_FRAMES / FPS
    assert reads_digits([row["completion"] for row in rows], [row["digits"] for row in rows]) == [1.0] * 40
    assert all(row["completion"].endswith(f"<answer>{row['answer']}</answer>") for row in rows)


def test_the_model_sees_every_frame_and_the_same_seed_the_same_clips(tmp_path):
    paths = [build_questions(tmp_path / name / "train.jsonl", count=3, seed=3) for name in ("a", "b")]
    options = VideoOptions(min_pixels=3136, max_pixels=3136)
    one, two = (load_tasks(DataConfig(path=str(path), video=options)).tasks for path in paths)
    for task, again in zip(one, two, strict=True):
        (frames, metadata), (other, _) = load_videos(task, 14)[0], load_videos(again, 14)[0]
        assert metadata["frames_indices"] == list(range(metadata["total_num_frames"]))
        assert frames.shape[1:] == (3, 56, 56)
        assert (frames == other).all()
        assert task.columns == again.columns


def test_training_and_test_clips_show_other_scans(tmp_path, monkeypatch):
    shown = {}
    monkeypatch.setattr("mmrl.vlm.toy.digit_clips.write_clip", lambda path, shots, **_: shown[split].extend(shots))
    for split in ("train", "test"):
        shown[split] = []
        build_questions(tmp_path / f"{split}.jsonl", count=20, split=split)
        scans = {shot.scan for shot in shown[split] if shot.scan is not None}
        assert scans <= set(scan_pool(split).tolist())
    assert len(scans_and_labels()[1]) == 1797


def test_numbers_of_digits_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="min_digits is 3 and max_digits is 2"):
        build_questions(tmp_path / "a.jsonl", min_digits=3, max_digits=2)


def test_every_question_has_short_tokens():
    from mmrl.vlm.toy.digit_clips import corpus

    tokenizer = train_tokenizer(corpus(), 400)
    longest = max(len(tokenizer.encode(text)) for question in QUESTIONS.values() for text in question.texts)
    assert longest <= 12
