"""Untrusted metadata of a dataset: one line names the fault, and nothing is allocated for it."""

import json
import tracemalloc

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.data import EpisodeWriter, LeRobotReader, robot_features

pa = pytest.importorskip("pyarrow", reason="needs pip install 'mmrl-suite[vlm]'")
pq = pytest.importorskip("pyarrow.parquet")

IMAGE = "observation.images.front"


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "set"
    with EpisodeWriter(folder, 10, robot_features(2, 1, {"front": (4, 6)}, video=False), "arm") as writer:
        for number in range(2):
            frames = np.full((3, 4, 6, 3), 40 * number, np.uint8)
            writer.add_episode(np.zeros((3, 2)), np.zeros((3, 1)), {"front": frames}, "push", True)
    return folder


def change(folder, name, **entries):
    path = folder / "meta" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def read_all(folder):
    return [(len(episode), episode.images["front"].shape) for episode in LeRobotReader(folder)]


def line(folder):
    with pytest.raises(UserError) as refused:
        read_all(folder)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600
    return str(refused.value)


def test_the_dataset_itself_can_be_read(dataset):
    assert read_all(dataset) == [(3, (3, 4, 6, 3))] * 2


@pytest.mark.parametrize("total", [10**12, 2**62, 3])
def test_absurd_counts_take_no_memory(total, dataset):
    change(dataset, "info.json", total_episodes=total)
    tracemalloc.start()
    assert f"counts {total} episodes; meta/episodes lacks {total - 2} of them, the first is 2" in line(dataset)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


@pytest.mark.parametrize("value", [None, "2", -1, 1.5, True, [2], {"n": 2}, 2**70, float("nan")])
@pytest.mark.parametrize("key", ["total_episodes", "fps", "features"])
def test_wrong_types_are_named(key, value, dataset):
    if (key, value) in (("fps", 1.5),):
        return
    change(dataset, "info.json", **{key: value})
    named = "feature 'n' is 2" if (key, value) == ("features", {"n": 2}) else f"{key} is {value!r}"
    assert named in line(dataset)


@pytest.mark.parametrize(
    ("feature", "part"),
    [
        (None, "expected dtype"),
        ({"dtype": 3, "shape": [4, 6, 3]}, "expected dtype"),
        ({"dtype": "image", "shape": "4"}, "shape '4'"),
        ({"dtype": "image", "shape": [4, 6]}, "three sizes"),
        ({"dtype": "image", "shape": [10**9, 10**9, 3]}, "1000000000 x 1000000000 pixels"),
        ({"dtype": "video", "shape": [4, -6, 3]}, "expected a list of whole numbers"),
        ({"dtype": "float32", "shape": [10**9]}, "more than 1000000 entries"),
        ({"dtype": "image", "shape": [4, 6, 3], "names": 5}, "names 5"),
    ],
)
def test_features_that_no_file_can_hold(feature, part, dataset):
    features = json.loads((dataset / "meta/info.json").read_text())["features"] | {IMAGE: feature}
    change(dataset, "info.json", features=features)
    found = line(dataset)
    assert part in found
    assert IMAGE in found


@pytest.mark.parametrize("content", ["[]", "3", "null", "[" * 100_000, "\ud800", '{"codebase_version": []}'])
@pytest.mark.parametrize("name", ["info.json", "stats.json"])
def test_files_of_another_kind(name, content, dataset):
    (dataset / "meta" / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    assert str(dataset) in line(dataset)


def rewrite(path, **columns):
    table = pq.read_table(path, partitioning=None)
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.set_column(place, name, values)
    pq.write_table(table, path)


@pytest.mark.parametrize(
    ("file", "columns"),
    [
        ("meta/episodes/chunk-000/file-000.parquet", {"length": pa.array(["x", "y"])}),
        ("meta/episodes/chunk-000/file-000.parquet", {"length": pa.array([10**15, 3])}),
        ("meta/episodes/chunk-000/file-000.parquet", {"episode_index": pa.array([None, 1], pa.int64())}),
        ("meta/episodes/chunk-000/file-000.parquet", {"data/file_index": pa.array([-1, 0])}),
        ("meta/tasks.parquet", {"task_index": pa.array([None], pa.int64())}),
        ("meta/tasks.parquet", {"task_index": pa.array(["zero"])}),
        ("data/chunk-000/file-000.parquet", {"task_index": pa.array([10**6] * 6)}),
        ("data/chunk-000/file-000.parquet", {"action": pa.array(["x"] * 6)}),
        ("data/chunk-000/file-000.parquet", {"action": pa.array([[1.0], [1.0, 2.0], [], [1.0], [1.0], [1.0]])}),
        ("data/chunk-000/file-000.parquet", {"episode_index": pa.array(["0"] * 6)}),
        ("data/chunk-000/file-000.parquet", {IMAGE: pa.array([1] * 6)}),
    ],
)
def test_columns_of_other_types(file, columns, dataset):
    rewrite(dataset / file, **columns)
    assert line(dataset)
