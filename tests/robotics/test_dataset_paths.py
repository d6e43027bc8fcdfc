"""Untrusted paths in a dataset's metadata."""

import json
import shutil
from pathlib import Path

import pytest

from mmrl.errors import UserError
from robotics.data.layout import DATA_PATH, VIDEO_PATH, dataset_file

NUMBERS = {"chunk_index": 0, "file_index": 12}


def test_the_usual_patterns():
    assert dataset_file(Path("set"), DATA_PATH, **NUMBERS) == Path("set/data/chunk-000/file-012.parquet")
    path = dataset_file(Path("set"), VIDEO_PATH, video_key="a.b", **NUMBERS)
    assert path == Path("set/videos/a.b/chunk-000/file-012.mp4")
    assert dataset_file(Path("set"), "images/{{0}}.png") == Path("set/images/{0}.png")


@pytest.mark.parametrize(
    "pattern",
    [
        "../secret/{chunk_index}",
        "data/../../secret",
        "/etc/passwd",
        "data/{video_key}",
        "{chunk_index.__class__}",
        "{chunk_index:>99999999999}",
        "{chunk_index!r:99999999}",
        "{0}",
        "{",
        "data/\0",
        7,
        None,
    ],
)
def test_what_leads_out_is_refused(tmp_path, pattern):
    with pytest.raises(UserError):
        dataset_file(tmp_path, pattern, video_key="../../..", **NUMBERS)


def test_links_out_are_refused_but_those_of_the_hub_cache(tmp_path):
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="is outside the folder"):
        dataset_file(folder, "link")
    (folder / "data").mkdir()
    (folder / "inner").symlink_to(folder / "data")
    dataset_file(folder, "inner")
    cached = tmp_path / "datasets--x--y/snapshots/0123"
    stored = tmp_path / "datasets--x--y/blobs/4567"
    for place in (cached, stored.parent):
        place.mkdir(parents=True)
    stored.write_text("x")
    (cached / "info.json").symlink_to("../../blobs/4567")
    assert dataset_file(cached, "info.json").read_text() == "x"
    (cached / "out").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError):
        dataset_file(cached, "out")


@pytest.mark.parametrize("key", ["data_path", "video_path"])
def test_a_dataset_that_names_files_outside_is_refused(tmp_path, key):
    pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")
    from robotics.data import LeRobotReader
    from tests.robotics.lerobot_folders import write

    folder = write(tmp_path / "set", range(1))
    pattern = {"data_path": DATA_PATH, "video_path": VIDEO_PATH}[key]
    shutil.copytree(folder, tmp_path / "other")
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps(info | {key: "../other/" + pattern}))
    with pytest.raises(UserError, match="which is outside the folder"):
        LeRobotReader(folder).episode(0)
