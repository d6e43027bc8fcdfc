"""Tables, paths and images of rows that a program passes, and what is read of them again."""

import datasets
import pyarrow as pa
import pytest
from PIL import Image

from mmrl.api.inputs import Inputs, take_rows
from mmrl.api.rows import place
from mmrl.errors import UserError
from mmrl.recipes import all_recipes
from mmrl.vlm.data.dataset import DataConfig, load_tasks


@pytest.fixture
def photo(tmp_path, monkeypatch):
    """Path, relative to the working directory, of a red image."""
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8), "red").save("photos/red.png")
    return "photos/red.png"


def tasks_of(data, folder, settings=None):
    inputs = Inputs(all_recipes()["vlm"], folder)
    take_rows(inputs, data, None, settings or {})
    return load_tasks(DataConfig(path=inputs.values["data"]["path"], **(settings or {}))).tasks


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list, pa.Table.from_pylist])
@pytest.mark.parametrize(("column", "settings"), [("image", {}), ("screen", {"image_key": "screen"})])
def test_relative_paths_start_from_the_working_directory(make, column, settings, photo, tmp_path):
    task = tasks_of(make([{"prompt": "What?", "answer": "red", column: photo}]), tmp_path / "run", settings)[0]
    assert task.load_images()[0].getpixel((0, 0)) == (255, 0, 0)


def test_relative_paths_inside_cells_of_a_dataset(photo, tmp_path):
    content = [{"type": "image", "image": photo, "text": None}, {"type": "text", "image": None, "text": "What?"}]
    clip = {"frames": [photo, photo], "fps": 1}
    row = {"prompt": [{"role": "user", "content": content}], "video": clip, "answer": photo}
    path = place(datasets.Dataset.from_list([row]), tmp_path / "run", "train")
    (stored,) = datasets.load_from_disk(path)
    whole = str(tmp_path / photo)
    assert stored["prompt"][0]["content"][0]["image"] == whole
    assert stored["video"]["frames"] == [whole, whole]
    assert stored["answer"] == photo  # no media


def test_images_of_pairs_start_from_the_working_directory(photo, tmp_path):
    from diffusion.data.image_pairs import ImagePairConfig, load_pairs

    Image.new("RGB", (8, 8), "blue").save("photos/blue.png")
    row = {"prompt": "red", "chosen": photo, "rejected": "photos/blue.png"}
    for number, data in enumerate(([row], datasets.Dataset.from_list([row]))):
        inputs = Inputs(all_recipes()["diffusion_dpo"], tmp_path / f"run{number}")
        take_rows(inputs, data, None, {})
        chosen, rejected = load_pairs(ImagePairConfig(path=inputs.values["pairs"]["path"])).tasks[0].read()
        assert chosen[0, 0].tolist() == [255, 0, 0]
        assert rejected[0, 0].tolist() == [0, 0, 255]


@pytest.mark.parametrize("mode", ["P", "PA", "CMYK", "I;16", "YCbCr"])
def test_images_that_datasets_encodes_as_tiff_are_read(mode, tmp_path):
    image = Image.new("RGB", (8, 8), "white").convert("I" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.new(mode, (8, 8), 65535)
    rows = [{"prompt": "What?", "answer": "a", "images": each} for each in ([image, image], [])]
    stored = datasets.Dataset.from_list(rows)
    stored.save_to_disk(tmp_path / "own")
    for data in (stored, datasets.load_from_disk(tmp_path / "own")):
        first = tasks_of(data, tmp_path / "run")[0]
        assert [shown.convert("RGB").getpixel((0, 0)) for shown in first.load_images()] == [(255, 255, 255)] * 2


def test_an_image_without_a_known_range_is_refused_where_it_is(tmp_path):
    data = datasets.Dataset.from_list([{"prompt": "What?", "answer": "a", "image": Image.new("F", (8, 8))}])
    with pytest.raises(UserError, match=r"train\[0\]\['image'\].*mode F: the range of floating-point"):
        place(data, tmp_path, "train")


def test_csv_files_are_tables_whose_columns_have_one_type(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('problem,answer,level\n"How many,\nsay?",2,1\nWho?,None,\nWhat?,NA,3\n', "utf-8-sig")
    tasks = load_tasks(DataConfig(path=str(file))).tasks
    assert [task.columns for task in tasks] == [
        {"answer": "2", "level": 1},
        {"answer": "None", "level": None},
        {"answer": "NA", "level": 3},
    ]
    assert tasks[0].messages[0]["content"][0]["text"] == "How many,\nsay?"
    assert tasks[1].id == "rows.csv row 2"
    file.write_text("problem,answer,level\nWhich code?,007,0.5\nWhich?,12,0\n")
    codes = [task.columns for task in load_tasks(DataConfig(path=str(file))).tasks]
    assert codes == [{"answer": "007", "level": 0.5}, {"answer": "12", "level": 0.0}]


def test_text_files_have_a_prompt_a_line(tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text("What is 2 + 2?\nWho?\n")
    assert [task.messages[0]["content"][0]["text"] for task in load_tasks(DataConfig(path=str(file))).tasks] == [
        "What is 2 + 2?",
        "Who?",
    ]
