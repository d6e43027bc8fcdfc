import base64
import io
import json
import math

import numpy as np
import pytest
from PIL import Image

from mmrl.report.gallery import shown_image
from mmrl.runs.records import SampleRecord, film, film_frames, read_samples, sample_steps, write_samples


@pytest.fixture
def scene():
    image = Image.new("RGB", (12, 8), (200, 30, 40))
    image.putpixel((3, 4), (0, 255, 0))
    return image


def group(image, rewards=(1.0, 0.0)):
    return [
        SampleRecord(
            id="q1",
            prompt="how many?\n<|image_pad|>",
            response=f"réponse {index} </answer>",
            answer="2",
            images=[image],
            reward=reward,
            terms={"format": 1.0, "number": reward},
            advantage=reward - 0.5,
            finish="eos",
            correct=bool(reward),
        )
        for index, reward in enumerate(rewards)
    ]


def test_what_is_written_is_read_back(tmp_path, scene):
    written = group(scene)
    path = write_samples(tmp_path, 10, "train", written)
    assert path == tmp_path / "samples" / "step-000010" / "train.jsonl"
    read = read_samples(tmp_path, 10, "train")
    for before, after in zip(written, read, strict=True):
        assert after.images[0].tobytes() == scene.tobytes()
        assert {**vars(after), "images": None} == {**vars(before), "images": None}


def test_an_image_is_stored_once_for_its_group_and_for_both_splits(tmp_path, scene):
    write_samples(tmp_path, 1, "train", group(scene) + group(scene.copy()))
    write_samples(tmp_path, 1, "eval", group(scene))
    assert len(list((tmp_path / "samples" / "step-000001").glob("*.png"))) == 1
    first, second = read_samples(tmp_path, 1, "train")[:2]
    assert first.images[0] is second.images[0]


def test_rewards_that_could_not_be_given_are_null(tmp_path):
    record = SampleRecord(id="a", prompt="p", response="r", reward=math.nan, terms={"math": math.nan})
    path = write_samples(tmp_path, 2, "train", [record])
    stored = json.loads(path.read_text())
    assert stored["reward"] is None
    assert stored["terms"] == {"math": None}
    read = read_samples(tmp_path, 2, "train")[0]
    assert read.reward is None
    assert math.isnan(read.terms["math"])


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "F", "P"])
def test_images_of_any_mode_can_be_stored(tmp_path, mode):
    record = SampleRecord(id="a", prompt="p", response="r", images=[Image.new(mode, (3, 3))])
    write_samples(tmp_path, 1, "eval", [record])
    assert read_samples(tmp_path, 1, "eval")[0].images[0].size == (3, 3)


def test_steps_are_listed_by_split(tmp_path, scene):
    for step, split in ((0, "eval"), (20, "eval"), (3, "train")):
        write_samples(tmp_path, step, split, group(scene))
    (tmp_path / "samples" / "step-junk").mkdir()
    assert sample_steps(tmp_path, "eval") == [0, 20]
    assert sample_steps(tmp_path, "train") == [3]
    assert sample_steps(tmp_path / "missing", "train") == []


def test_damaged_files_do_not_stop_a_reader(tmp_path, scene):
    path = write_samples(tmp_path, 1, "train", group(scene))
    next(path.parent.glob("*.png")).write_bytes(b"\x89PNG cut")
    with path.open("a") as file:
        file.write('{"id": "q2", "resp')
    read = read_samples(tmp_path, 1, "train")
    assert [len(record.images) for record in read] == [0, 0]
    assert read_samples(tmp_path, 99, "train") == []


@pytest.mark.parametrize(
    "damage",
    [
        {"id": ["a"]},
        {"prompt": None},
        {"answer": 3},
        {"reward": "high"},
        {"advantage": {}},
        {"correct": 1.0},
        {"terms": [1]},
        {"terms": {"exact": "1"}},
        {"images": 3},
        {"outputs": [["x.png"]]},
    ],
)
def test_a_row_with_a_value_of_another_type_is_left_out(tmp_path, damage):
    path = write_samples(tmp_path, 1, "train", [SampleRecord("q1", "p", "r", terms={"exact": 1.0})] * 2)
    first, second = path.read_text().splitlines()
    path.write_text(json.dumps(json.loads(first) | damage) + "\n" + second + "\n")
    assert [record.id for record in read_samples(tmp_path, 1, "train")] == ["q1"]


def test_a_name_that_no_file_can_have_is_no_image(tmp_path):
    path = write_samples(tmp_path, 1, "train", [SampleRecord("q1", "p", "r")])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"images": ["a\0b.png"]}) + "\n")
    assert read_samples(tmp_path, 1, "train")[0].images == []


def test_writing_a_step_again_replaces_its_samples(tmp_path, scene):
    write_samples(tmp_path, 1, "train", group(scene))
    write_samples(tmp_path, 1, "train", group(scene)[:1])
    assert len(read_samples(tmp_path, 1, "train")) == 1
    assert not list(tmp_path.rglob("*.partial"))


def frames(count, side=16):
    """Frames of their own grey; the fifth is like the fourth."""
    shades = np.arange(count, dtype=np.uint8) * 3
    shades[4:5] = shades[3:4]
    return np.broadcast_to(shades[:, None, None, None], (count, side, side, 3)).copy()


def test_a_film_keeps_its_frames_through_a_file(tmp_path):
    shown = film(frames(7))
    write_samples(tmp_path, 1, "train", [SampleRecord("q1", "p", "", outputs=[shown, film(frames(1))])])
    (record,) = read_samples(tmp_path, 1, "train")
    video, image = record.outputs
    np.testing.assert_array_equal([np.asarray(frame) for frame in film_frames(video)], frames(7))
    np.testing.assert_array_equal(np.asarray(image), frames(1)[0])
    assert len(film_frames(image)) == 1


def test_a_long_film_is_thinned_and_reduced_and_plays_in_the_report(tmp_path):
    shown = film(frames(81, side=320))
    shades = [int(np.asarray(frame)[0, 0, 0]) for frame in film_frames(shown)]
    assert shown.size == (256, 256)
    assert (len(shades), shades[0], shades[-1]) == (32, 0, 240)
    page = shown_image(shown)
    played = Image.open(io.BytesIO(base64.b64decode(page["source"].split(",")[1])))
    assert (played.format, played.n_frames, played.size) == ("WEBP", 16, (128, 128))
    assert sum(played_durations(played)) == 4000
    assert Image.open(io.BytesIO(base64.b64decode(page["still"].split(",")[1]))).size == (128, 128)


def played_durations(image):
    for index in range(image.n_frames):
        image.seek(index)
        image.load()
        yield image.info["duration"]
