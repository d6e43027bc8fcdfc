import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from mmrl.report.gallery import before_after, evaluation_columns, image_grid, sample_gallery, shown_image
from mmrl.runs.records import SampleRecord, write_samples


def tile(step, prompt, seed, side=32):
    return Image.new("RGB", (side, side), (step, prompt, seed))


def drawings(step, prompts=14, images=5):
    return [
        SampleRecord(
            id=f"prompt-{prompt}",
            prompt=f"{prompt} red circles",
            response="",
            outputs=[tile(step, prompt, seed) for seed in range(images)],
            reward=step / 100 + prompt,
            terms={"graded": 0.25, "strict": float("nan")},
        )
        for prompt in range(prompts)
    ]


def answer(index):
    return SampleRecord(id=f"question-{index}", prompt=f"{index}?", response=f"it is {index}", reward=1.0)


def opened(source):
    kind, _, data = source.removeprefix("data:image/").partition(";base64,")
    return kind, Image.open(io.BytesIO(base64.b64decode(data, validate=True)))


def colour(shown):
    return opened(shown["source"])[1].convert("RGB").getpixel((0, 0))


def steps_of(columns):
    return [int(re.search(r"step (\d+)", label)[1]) for label in columns]


def test_every_cell_holds_the_images_of_its_prompt_evaluation_and_seeds(tmp_path):
    for step in (0, 10, 20):
        write_samples(tmp_path, step, "eval", drawings(step))
    grid = image_grid([("run", tmp_path)])
    assert grid["columns"] == ["before training (step 0)", "during training (step 10)", "after training (step 20)"]
    assert [row["prompt"] for row in grid["rows"]] == [f"{prompt} red circles" for prompt in range(12)]
    assert "first 12 of the 14 prompts" in grid["note"]
    for prompt, row in enumerate(grid["rows"]):
        found = [[colour(shown) for shown in cell["images"]] for cell in row["cells"]]
        assert found == [[(step, prompt, seed) for seed in range(4)] for step in (0, 10, 20)]
    assert [cell["reward"] for cell in grid["rows"][1]["cells"]] == ["reward 1", "reward 1.1", "reward 1.2"]
    assert grid["rows"][0]["cells"][0]["terms"] == "graded 0.25, strict –"


@pytest.mark.parametrize(
    ("kept", "shown"),
    [
        ([0], [0]),
        ([0, 5], [0, 5]),
        ([0, 1, 2], [0, 1, 2]),
        ([0, 1, 2, 3, 4, 5], [0, 2, 3, 5]),
        (list(range(0, 110, 10)), [0, 30, 70, 100]),
    ],
)
def test_evaluations_between_the_ends_are_picked_evenly(tmp_path, kept, shown):
    for step in kept:
        write_samples(tmp_path, step, "eval", drawings(step, prompts=1, images=1))
    assert steps_of(image_grid([("run", tmp_path)])["columns"]) == shown


def test_picked_evaluations_are_distinct_and_inside_for_every_number(tmp_path):
    for last in range(12):
        write_samples(tmp_path, last, "eval", drawings(last, prompts=1, images=1))
        for during in range(5):
            steps = steps_of([label for label, _ in evaluation_columns([("run", tmp_path)], during)])
            assert steps == sorted(set(steps))
            assert steps[0] == 0
            assert steps[-1] == last
            assert len(steps) == min(last + 1, 2 + during)


def test_a_prompt_that_an_evaluation_did_not_keep_leaves_a_hole(tmp_path):
    write_samples(tmp_path, 0, "eval", drawings(0, prompts=1))
    write_samples(tmp_path, 9, "eval", drawings(9, prompts=2))
    rows = image_grid([("run", tmp_path)])["rows"]
    assert rows[1]["cells"][0] is None
    assert colour(rows[1]["cells"][1]["images"][0]) == (9, 1, 0)


def test_a_chain_shows_the_start_of_each_run_and_the_course_of_the_last(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        for step in (0, 4, 8):
            write_samples(folder, step, "eval", drawings(step, prompts=1))
    columns = image_grid([("first", first), ("second", second)])["columns"]
    names = ["before first (step 0)", "before second (step 0)", "during second (step 4)", "after second (step 8)"]
    assert columns == names


def test_an_earlier_run_on_other_prompts_has_no_column(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write_samples(first, 0, "eval", [answer(1)])
    write_samples(second, 0, "eval", drawings(0, prompts=1))
    assert image_grid([("first", first), ("second", second)])["columns"] == ["before second (step 0)"]
    write_samples(second, 6, "eval", drawings(6, prompts=3)[1:])
    assert image_grid([("second", second)])["columns"] == ["after training (step 6)"]


def test_runs_of_words_have_no_grid_and_runs_of_images_no_text_boxes(tmp_path):
    words, images, both = (tmp_path / name for name in ("words", "images", "both"))
    for step in (0, 3):
        write_samples(words, step, "eval", [answer(1)])
        write_samples(images, step, "eval", drawings(step))
        write_samples(both, step, "eval", [answer(1), *drawings(step, prompts=1)])
    assert image_grid([("words", words)]) is None
    assert before_after([("images", images)]) is None
    assert [task["id"] for task in before_after([("words", words)])["tasks"]] == ["question-1"]
    assert [task["id"] for task in before_after([("both", both)])["tasks"]] == ["question-1"]
    assert [row["id"] for row in image_grid([("both", both)])["rows"]] == ["prompt-0"]


def test_group_shows_its_images_rewards_terms_and_advantages(tmp_path):
    rows = [
        SampleRecord(
            id="p",
            prompt="two red circles",
            response="",
            outputs=[tile(1, 2, seed)],
            reward=seed / 10,
            terms={"graded": seed / 10, "judge": 0.5},
            advantage=seed - 1.0,
            finish="image",
        )
        for seed in range(3)
    ]
    write_samples(tmp_path, 1, "train", rows)
    task = sample_gallery(tmp_path)[0]["tasks"][0]
    assert task["drawn"]
    assert not task["show_finish"]
    assert task["prompt"] is None
    assert [colour(sample["outputs"][0]) for sample in task["samples"]] == [(1, 2, 0), (1, 2, 1), (1, 2, 2)]
    assert [sample["terms"] for sample in task["samples"]] == [["0", "0.5"], ["0.1", "0.5"], ["0.2", "0.5"]]
    assert [sample["advantage"] for sample in task["samples"]] == ["-1.000", "+0.000", "+1.000"]
    assert [sample["tone"] for sample in task["samples"]] == ["bad", "", "good"]
    rows[1].finish = "overflow"
    write_samples(tmp_path, 1, "train", rows)
    assert sample_gallery(tmp_path)[0]["tasks"][0]["show_finish"]


@pytest.mark.parametrize(("side", "shown"), [(8, 96), (28, 84), (32, 96), (64, 128), (127, 254)])
def test_small_images_are_kept_pixel_by_pixel_and_scaled_up_by_a_whole_number(side, shown):
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    found = shown_image(Image.fromarray(pixels))
    assert (found["width"], found["height"], found["pixelated"]) == (shown, shown, True)
    kind, image = opened(found["source"])
    assert kind == "png"
    assert np.array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize(
    ("size", "shown"), [((128, 128), (128, 128)), ((1024, 512), (256, 128)), ((96, 300), (82, 256))]
)
def test_large_images_are_reduced_and_keep_their_shape(size, shown):
    found = shown_image(Image.new("RGBA", size, (200, 30, 40, 255)))
    assert (found["width"], found["height"], found["pixelated"]) == (*shown, False)
    kind, image = opened(found["source"])
    assert kind == "jpeg"
    assert image.size == shown
    assert np.allclose(image.getpixel((1, 1)), (200, 30, 40), atol=4)
