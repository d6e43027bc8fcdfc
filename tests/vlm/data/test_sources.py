import io

import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.vlm.data.dataset import DataConfig, TaskError, VlmTask, load_tasks
from mmrl.vlm.data.task import TASK_ERRORS, VideoClip, load_videos
from tests.vlm.data.rows import BLUE, RED, TRL, colours, layout, load, png


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (b"", "empty_image"),
        (Image.new("RGB", (0, 5)), "empty_image"),
        ("empty.png", "empty_image"),
        (b"not an image", "unreadable_image"),
        (png()[:40], "unreadable_image"),
        ("cut.png", "unreadable_image"),
        (".", "missing_image"),
        ("data:image/png;base64,???", "unreadable_image"),
        (Image.new("F", (4, 4)), "unreadable_image"),
        ("gone.png", "missing_image"),
        ("https://example.org/a.png", "missing_image"),
        ({"bytes": None, "path": None}, "missing_image"),
        (None, "missing_image"),
        (3, "missing_image"),
    ],
)
def test_bad_images_are_task_errors_when_they_are_loaded(folder, source, kind):
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.png").write_bytes(png(size=(200, 200))[:100])
    task = VlmTask("t1", [], [png(), source])
    with pytest.raises(TaskError, match="image 2 of 2") as caught:
        task.load_images()
    assert caught.value.kind == kind
    assert caught.value.place == "t1"
    assert kind in TASK_ERRORS


def test_bad_image_files_do_not_stop_the_loading(folder):
    (folder / "empty.png").write_bytes(b"")
    good, bad = load([TRL, TRL | {"image": "empty.png"}]).tasks
    assert colours(good) == [RED]
    with pytest.raises(TaskError, match="is empty"):
        bad.load_images()


def test_a_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(TaskError, match="exceeds limit"):
        VlmTask("t", [], [png()]).load_images()


def test_every_kind_of_source_and_mode_becomes_rgb(folder):
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    palette = Image.new("P", (2, 2))
    palette.info["transparency"] = 0
    deep = Image.new("I;16", (2, 2), 65535 // 2)
    sources = [
        "red.png",
        png("blue"),
        {"bytes": png("blue"), "path": "x"},
        {"path": "red.png"},
        Image.new("L", (2, 2), 9),
    ]
    images = VlmTask("t", [], [*sources, clear, palette, deep]).load_images()
    assert {image.mode for image in images} == {"RGB"}
    pixels = [image.getpixel((0, 0)) for image in images]
    white = (255, 255, 255)
    assert pixels[:7] == [RED, BLUE, BLUE, RED, (9, 9, 9), white, white]
    assert pixels[7][0] in (127, 128)


def test_images_stand_upright():
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 6)).save(buffer, "JPEG", exif=exif)
    assert VlmTask("t", [], [buffer.getvalue()]).load_images()[0].size == (6, 8)


def test_a_gif_is_a_video_and_not_one_of_its_frames(folder):
    (folder / "a.gif").write_bytes(b"GIF89a")
    row = TRL | {"image": None, "prompt": "<video><video>Which?"}
    for cell in (["a.gif", "a.gif"], [{"video": "a.gif"}, "a.gif"]):
        (task,) = load([row | {"videos": cell}]).tasks
        assert [video.source for video in task.videos] == ["a.gif"] * 2


@pytest.mark.parametrize("form", ["WEBP", "PNG", "GIF"])
def test_animations_are_no_frames_of_one_video(form):
    shots, buffer = [Image.new("RGB", (8, 6), colour) for colour in (RED, BLUE)], io.BytesIO()
    shots[0].save(buffer, form, save_all=True, append_images=shots[1:])
    clip = VideoClip([buffer.getvalue()] * 2)
    with pytest.raises(TaskError, match=f"frame 1 of video 1 is itself a video, an animated {form}"):
        load_videos(VlmTask("t", [], videos=[clip]), 14)


def test_a_video_stored_in_a_table_is_not_looked_for_in_the_folder(folder, cache):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {"problem": "<video>Which?", "answer": "1", "video": {"bytes": b"...", "path": "a.mp4"}}
    parquet.write_table(arrow.Table.from_pylist([row]), "rows.parquet")
    with pytest.raises(UserError, match="a video is stored as bytes"):
        load_tasks(DataConfig(path="rows.parquet"))


def test_parquet_with_stored_images(folder, cache):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    two = [{"bytes": png(), "path": None}, {"bytes": png("blue"), "path": "x"}]
    rows = [
        {"problem": "<image>a<image>b", "answer": "1", "images": two},
        {"problem": "<image>a<image>b", "answer": "1", "images": two[:1]},
        {"problem": "text", "answer": "2", "images": []},
        {"problem": "text", "answer": "3", "images": None},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), "data.parquet")
    loaded = load_tasks(DataConfig(path="data.parquet", on_bad_row="skip"))
    assert loaded.skipped == {"placeholder_mismatch": 1}
    assert "data.parquet row 2" in loaded.examples["placeholder_mismatch"]
    assert [colours(task) for task in loaded.tasks] == [[RED, BLUE], [], []]
    assert [task.columns for task in loaded.tasks] == [{"answer": "1"}, {"answer": "2"}, {"answer": "3"}]
    single = [{"prompt": "p", "image": png(), "answer": 1}, {"prompt": "q", "image": None, "answer": 2}]
    parquet.write_table(arrow.Table.from_pylist(single), "single.parquet")
    loaded = load_tasks(DataConfig(path="single.parquet", on_bad_row="skip"))
    assert [colours(task) for task in loaded.tasks] == [[RED]]
    assert loaded.skipped == {"missing_image": 1}
    parquet.write_table(arrow.Table.from_pylist(rows)[:0], "empty.parquet")
    with pytest.raises(UserError, match="is empty"):
        load_tasks(DataConfig(path="empty.parquet"))


@pytest.fixture
def saved(folder, cache):
    datasets = pytest.importorskip("datasets")
    columns = {
        "prompt": ["a", "b"],
        "image": [Image.new("RGB", (4, 4), "red"), Image.new("RGB", (5, 4), "blue")],
        "answer": [1, 2],
    }
    dataset = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    dataset.save_to_disk("one")
    splits = datasets.DatasetDict({"train": dataset.select([0]), "test": dataset.select([1])})
    splits.save_to_disk("several")
    return splits


def test_folders_of_datasets(saved):
    tasks = load_tasks(DataConfig(path="one")).tasks
    assert [layout(task) for task in tasks] == [["IMAGE", "a"], ["IMAGE", "b"]]
    assert [colours(task) for task in tasks] == [[RED], [BLUE]]
    (task,) = load_tasks(DataConfig(path="several", split="test")).tasks
    assert colours(task) == [BLUE]
    assert task.columns == {"answer": 2}
    with pytest.raises(UserError, match="has no split 'val'; it has: train, test"):
        load_tasks(DataConfig(path="several", split="val"))


def test_hub_ids(saved, monkeypatch):
    def fake(name, subset):
        if (name, subset) != ("owner/name", "small"):
            raise ConnectionError("no network")
        return saved

    monkeypatch.setattr("datasets.load_dataset", fake)
    (task,) = load_tasks(DataConfig(path="owner/name", subset="small", split="test")).tasks
    assert colours(task) == [BLUE]
    with pytest.raises(UserError, match=r"file or folder not found: owner/other.*no network"):
        load_tasks(DataConfig(path="owner/other"))
