"""Rows with images next to their file, if a folder of that name already exists."""

import json

import pytest
from PIL import Image

from mmrl.vlm.data.dataset import write_rows


def grey(level):
    return lambda: (Image.new("L", (4, 4), level), {"answer": str(level)})


def test_a_second_writer_of_the_same_rows_keeps_the_images_of_the_first(tmp_path):
    for _ in range(2):
        write_rows(tmp_path / "rows.jsonl", 2, grey(7))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["images"] for row in rows] == [["rows/00000.png"], ["rows/00001.png"]]
    assert all(Image.open(tmp_path / row["images"][0]).getpixel((0, 0)) == 7 for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "rows.jsonl"]


@pytest.mark.parametrize("content", ["run", "other pictures"])
def test_a_folder_with_other_content_is_refused_and_stays(tmp_path, content):
    folder = tmp_path / "rows"
    if content == "run":  # `output_dir` of a run whose data file has its name
        folder.mkdir()
        (folder / "run.lock").touch()
    else:  # the file alone was removed, and the options have changed
        write_rows(tmp_path / "rows.jsonl", 2, grey(1))
        (tmp_path / "rows.jsonl").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=r"rows.jsonl would be written to .*rows, which has other content"):
        write_rows(tmp_path / "rows.jsonl", 2, grey(9))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
