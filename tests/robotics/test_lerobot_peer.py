"""Datasets between this suite and the package lerobot, in both directions.

The default tests read what lerobot 0.6.1 wrote (`lerobot-0.6.1.tar.xz`). The slow ones run lerobot itself, which needs
an environment of its own, for it caps the versions of the stack:

    python3.12 -m venv lerobot-env && lerobot-env/bin/pip install 'lerobot[dataset]==0.6.1'
    MMRL_LEROBOT_PYTHON=lerobot-env/bin/python pytest -m slow tests/robotics/test_lerobot_peer.py
"""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.data import EpisodeWriter, LeRobotReader, robot_features
from robotics.data.features import BOOKKEPT, IMAGES, camera_name
from robotics.data.images import DepthCodes
from tests.robotics import lerobot_peer as peer
from tests.robotics.lerobot_process import run_peer

pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")
pa = pytest.importorskip("pyarrow", reason="needs pip install 'mmrl-suite[vlm]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'mmrl-suite[vlm]'")

CODE_M = 1.35 / 4095 * (4 + 3.5)
"""Metres of a step of the depth video's codes at 4 m, beyond which no depth lies here."""
LEVELS = 10
"""How far a pixel of a lossy video may be off, of 255."""


@pytest.fixture
def foreign(tmp_path):
    """The dataset that lerobot 0.6.1 wrote."""
    with tarfile.open(Path(__file__).with_name("lerobot-0.6.1.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "lerobot-0.6.1"


def columns_of(episode, reader):
    """The reader's value of each feature of an episode."""
    columns = {}
    for key, feature in reader.info["features"].items():
        if key in BOOKKEPT:
            continue
        if feature["dtype"] in IMAGES:
            camera = camera_name(key)
            columns[key] = (episode.depth_m if camera in reader.depth_cameras else episode.images)[camera]
        else:
            columns[key] = {"observation.state": episode.state, "action": episode.action, **episode.extra}[key]
    return columns


def assert_holds(reader, numbers):
    """The reader gives exactly these episodes of `lerobot_peer`, except for the loss of video compression."""
    assert len(reader) == len(numbers)
    for episode, number in zip(reader, numbers, strict=True):
        assert list(episode.frame_tasks) == peer.episode_tasks(number)
        assert episode.task == peer.episode_tasks(number)[0]
        np.testing.assert_allclose(episode.timestamp_s, np.arange(len(episode)) / peer.FPS, atol=1e-6)
        found = columns_of(episode, reader)
        for key, values in peer.episode_values(reader.info["features"], number).items():
            if key != "next.success":
                assert_is(key, found[key], values)
    assert reader.counts["corrupt_frames"] == 0


def assert_is(key, found, values):
    if key.endswith("film") and values.shape[-1] == 3:
        assert np.abs(found.astype(int) - values).max() <= LEVELS
    elif "depth" in key:
        metres = values[..., 0] * 0.001 if values.dtype == np.uint16 else values[..., 0]
        np.testing.assert_allclose(found, metres, atol=CODE_M / 2 if key.endswith("film") else 1e-6)
        assert found.dtype == np.float32
    else:
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values[:, 0] if values.shape[1:] == (1,) else values)


def test_what_lerobot_wrote_is_read(foreign):
    reader = LeRobotReader(foreign)
    assert reader.cameras == ["film", "still"]
    assert reader.depth_cameras == ["depth", "depth_film"]
    assert_holds(reader, range(3))
    assert [episode.success for episode in reader] == [None] * 3
    assert len(set(reader.episode(1).frame_tasks)) == 2
    samples = list(reader.frames([0.0, 1 / peer.FPS]))
    assert [sample.task for sample in samples] == [task for number in range(3) for task in peer.episode_tasks(number)]


def lerobot_quantiles(parts, quantile):
    """Mean of the episodes' quantiles, weighted by their frames, each the smallest value with that part below it."""
    values = [np.quantile(part, quantile, axis=0, method="inverted_cdf") for part in parts]
    return np.average(values, axis=0, weights=[len(part) for part in parts])


def test_statistics_are_those_of_lerobot(foreign):
    reader = LeRobotReader(foreign)
    with EpisodeWriter(foreign.parent / "ours", peer.FPS, peer.FEATURES, "arm") as writer:
        for number in range(3):
            add(writer, number, True)
    ours = LeRobotReader(foreign.parent / "ours").stats
    assert set(reader.stats) == set(ours) - {"next.success"}
    episodes = [peer.episode_values(peer.FEATURES, number) for number in range(3)]
    for key, theirs in reader.stats.items():
        if key == "task_index":  # lerobot numbers tasks in no order
            continue
        span = np.maximum(theirs["max"] - theirs["min"], 1e-9)
        for name in ("min", "max", "mean", "count"):
            np.testing.assert_allclose(ours[key][name] / span, theirs[name] / span, atol=1e-5)
            assert ours[key][name].shape == theirs[name].shape
        # lerobot subtracts squares in float32, whose error in a deviation is the root of that in the variance.
        np.testing.assert_allclose(ours[key]["std"] / span, theirs["std"] / span, atol=3e-3)
        if key in peer.FEATURES and peer.FEATURES[key]["dtype"] not in IMAGES:
            parts = [values[key].reshape(-1, values[key].shape[-1]).astype(float) for values in episodes]
            for name, quantile in {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}.items():
                # lerobot counts in 5000 bins.
                np.testing.assert_allclose(theirs[name] / span, lerobot_quantiles(parts, quantile) / span, atol=4e-4)


def add(writer, number, success):
    """Write an episode of `lerobot_peer` with the suite's writer."""
    values = peer.episode_values(writer.features, number)
    values.pop("next.success", None)
    images = {camera_name(key): values.pop(key) for key in list(values) if key.startswith("observation.images.")}
    state, action = values.pop("observation.state"), values.pop("action")
    writer.add_episode(state, action, images, peer.episode_tasks(number), success, values)


def test_what_lerobot_wrote_is_appended_to(foreign):
    with EpisodeWriter(foreign) as writer:
        with pytest.raises(ValueError, match=r"made without next\.success and does not store success; pass None"):
            add(writer, 3, True)
        add(writer, 3, None)
    with EpisodeWriter(foreign, peer.FPS, peer.FEATURES, "arm") as writer:
        add(writer, 4, None)
    reader = LeRobotReader(foreign)
    assert_holds(reader, range(5))
    rows = sorted((foreign / "meta/episodes").glob("*/*.parquet"))
    schemas = {pq.read_schema(path).remove_metadata() for path in rows}
    assert len(rows) == 3
    assert len(schemas) == 1
    assert "next.success" not in reader.info["features"]
    assert reader.info["total_frames"] == sum(map(peer.episode_length, range(5)))
    force = np.concatenate([peer.episode_values(peer.FEATURES, number)["force"] for number in range(5)]).astype(float)
    np.testing.assert_allclose(reader.stats["force"]["q01"], np.quantile(force, 0.01, axis=0))


def test_every_kind_of_feature_is_read_back(tmp_path):
    for numbers in (range(2), range(2, 4)):
        with EpisodeWriter(tmp_path, peer.FPS, peer.FEATURES, "arm") as writer:
            for number in numbers:
                add(writer, number, number == 2)
    reader = LeRobotReader(tmp_path)
    assert_holds(reader, range(4))
    assert [episode.success for episode in reader] == [False, False, True, False]
    assert [row["tasks"] for row in reader.episodes] == [
        list(dict.fromkeys(peer.episode_tasks(number))) for number in range(4)
    ]
    about = {key: feature.get("info") for key, feature in reader.info["features"].items()}
    assert about["observation.images.depth"] == {"is_depth_map": True, "depth_unit": "mm"}
    film = about["observation.images.depth_film"]
    assert (film["is_depth_map"], film["depth_unit"], film["video.pix_fmt"]) == (True, "m", "gray12le")
    assert about["observation.images.film"]["is_depth_map"] is False
    assert "mode" not in reader.stats


# Of quantize_depth(depth_m, video_backend=None) and dequantize_depth(codes, output_unit="m") in lerobot 0.6.1, and of
# the first with depth_min=0.5, depth_max=4.5, use_log=False.
QUANTIZED = [0, 0, 241, 755, 1630, 4093, 4095]
DEQUANTIZED = [0.01, 0.01, 0.2995946407318115, 0.9995512962341309, 2.500326156616211, 9.991120338439941, 10.0]
QUANTIZED_LINEAR = [0, 0, 0, 512, 2048, 4095, 4095]


def test_depth_codes_are_those_of_lerobot(foreign):
    depth_m = np.array([0.0, 0.01, 0.3, 1.0, 2.5, 9.99, 12.0], np.float32)
    codes = DepthCodes().encode(depth_m)
    assert codes.tolist() == QUANTIZED
    np.testing.assert_allclose(DepthCodes().decode(codes), DEQUANTIZED, rtol=1e-5)
    linear = DepthCodes(depth_min=0.5, depth_max=4.5, use_log=False)
    assert linear.encode(depth_m).tolist() == QUANTIZED_LINEAR
    info = LeRobotReader(foreign).info["features"]["observation.images.depth_film"]["info"]
    assert DepthCodes.from_info(info) == DepthCodes()
    with pytest.raises(UserError, match="depth_min < depth_max"):
        DepthCodes.from_info({"video.depth_min": 11.0})


def test_annotations_of_lerobot_are_read_back_as_lists(tmp_path):
    with EpisodeWriter(tmp_path, 10, robot_features(None, 1)) as writer:
        writer.add_episode(None, np.ones((2, 1)), None, "push", True)
    said = [[{"role": "user", "content": "push"}], []]
    path, info = tmp_path / "data/chunk-000/file-000.parquet", tmp_path / "meta/info.json"
    pq.write_table(pq.read_table(path, partitioning=None).append_column("language_events", pa.array(said)), path)
    content = json.loads(info.read_text())
    content["features"]["language_events"] = {"dtype": "language", "shape": [1], "names": None}
    info.write_text(json.dumps(content))
    assert LeRobotReader(tmp_path).episode(0).extra["language_events"].tolist() == said
    with pytest.raises(UserError, match="language_events of dtype 'language', which this writer does not support"):
        EpisodeWriter(tmp_path)


SMALL = {
    "action": {"dtype": "float32", "shape": [1]},
    "observation.images.depth": {"dtype": "image", "shape": [4, 6, 1], "info": {"is_depth_map": True}},
    "mode": {"dtype": "string", "shape": [1]},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": {"depth": np.ones((2, 4, 6), np.uint8)}}, "has type uint8; depth is uint16 in millimetres or"),
        ({"images": {"depth": np.ones((2, 4, 6), np.float32)}}, "which is 'm'; the dataset stores depth in 'mm'"),
        ({"images": {"depth": np.ones((2, 4, 6, 3), np.uint16)}}, r"expected \(2, 4, 6, 1\)"),
        ({"extra": {"mode": np.array([1, 2])}}, "not texts"),
        ({"task": ["a"]}, "task has 1 texts; the episode has 2 frames"),
        ({"success": None}, "success is None"),
    ],
)
def test_episodes_that_do_not_fit_are_refused(tmp_path, changes, words):
    good = {
        "states": None,
        "actions": np.zeros((2, 1)),
        "images": {"depth": np.full((2, 4, 6), 700, np.uint16)},
        "task": ["open", "close"],
        "success": True,
        "extra": {"mode": ["slow", "fast"]},
    }
    with EpisodeWriter(tmp_path, 10, SMALL) as writer:
        writer.add_episode(**good)
        with pytest.raises(ValueError, match=words):
            writer.add_episode(**(good | changes))
        writer.add_episode(**(good | {"success": np.bool_(True)}))
    reader = LeRobotReader(tmp_path)
    assert len(reader) == 2
    np.testing.assert_allclose(reader.episode(1).depth_m["depth"], 0.7)
    assert reader.episode(1).extra["mode"].tolist() == ["slow", "fast"]
    assert reader.stats["observation.images.depth"]["q50"].tolist() == [[[700.0]]]


def test_a_dataset_is_opened_by_its_folder_alone(tmp_path):
    with pytest.raises(UserError, match=r"no dataset found in .*; pass fps and features"):
        EpisodeWriter(tmp_path / "none")
    with EpisodeWriter(tmp_path, 10, robot_features(None, 1), "arm") as writer:
        writer.add_episode(None, np.ones((3, 1)), None, "push", True)
    with EpisodeWriter(tmp_path) as writer:
        writer.add_episode(None, np.ones((2, 1)), None, "pull", False)
    reader = LeRobotReader(tmp_path)
    assert (reader.fps, reader.info["robot_type"], reader.cameras) == (10, "arm", [])
    assert [(len(one), one.task, one.success, one.state.shape[1]) for one in reader] == [
        (3, "push", True, 0),
        (2, "pull", False, 0),
    ]
    with pytest.raises(UserError, match="'hand' is a camera and a depth camera"):
        robot_features(1, 1, {"hand": (4, 4)}, depth={"hand": (4, 4)})


# Below: the package itself.


@pytest.fixture(scope="module")
def run(lerobot):
    """Runs commands of `lerobot_peer`."""
    return lambda *steps: run_peer(lerobot, peer, *" , ".join(" ".join(map(str, step)) for step in steps).split())


def assert_lerobot_reads_the_same(reader, path):
    """lerobot and the suite's reader give the same values for a dataset."""
    with np.load(path) as file:
        theirs = dict(file)
    episodes = list(reader)
    columns = [columns_of(episode, reader) for episode in episodes]
    for key in columns[0]:
        found = theirs[f"frame/{key}"]
        ours = np.concatenate([part[key] for part in columns])
        if key.startswith("observation.images."):
            compare_images(key, found, ours)
        elif ours.dtype == object:
            assert found.tolist() == ours.tolist()
        else:  # lerobot makes float32 of float64
            np.testing.assert_array_equal(found, ours.astype(found.dtype) if found.dtype == np.float32 else ours)
    tasks = [task for episode in episodes for task in episode.frame_tasks]
    assert theirs["frame/task"].tolist() == tasks
    np.testing.assert_array_equal(theirs["frame/timestamp"], np.concatenate([one.timestamp_s for one in episodes]))
    offsets = [step / reader.fps for step in (-1, 0, 1, 2)]
    samples = list(reader.frames(offsets))
    np.testing.assert_array_equal(theirs["chunk/action"], [sample.action for sample in samples])
    np.testing.assert_array_equal(theirs["chunk/action_is_pad"], [~sample.valid for sample in samples])
    compare_metadata(reader, json.loads(str(theirs["meta"])))


def compare_images(key, found, ours):
    if "depth" in key:
        # lerobot gives whole millimetres, as floats.
        assert found.shape[1] == 1
        np.testing.assert_allclose(found[:, 0], ours * 1000, atol=0.51)
    else:
        # Decoders of other versions may round colours otherwise.
        assert np.abs(np.moveaxis(found, 1, -1) * 255 - ours).max() <= (2.01 if key.endswith("film") else 0.01)


def compare_metadata(reader, meta):
    assert meta["tasks"] == reader.tasks
    assert [camera_name(key) for key in meta["depth_keys"]] == reader.depth_cameras
    assert meta["info"]["features"] == reader.info["features"]
    for theirs, ours in zip(meta["episodes"], reader.episodes, strict=True):
        shared = [key for key in ours if key in theirs and not key.startswith("meta/")]
        assert {key: theirs[key] for key in shared} == {key: ours[key] for key in shared}
        assert len(shared) >= 8
    assert set(meta["stats"]) == set(reader.stats)
    for key, part in meta["stats"].items():
        in_metres = (reader.info["features"][key].get("info") or {}).get("depth_unit") == "m"
        for name, values in part.items():
            # lerobot brings statistics of depth to the unit that it reads depth in, millimetres.
            scale = 1000.0 if in_metres and name != "count" else 1
            np.testing.assert_allclose(values, reader.stats[key][name] * scale, rtol=1e-12)


@pytest.mark.slow
def test_both_read_write_and_append(run, tmp_path):
    theirs, ours, plain = tmp_path / "theirs", tmp_path / "ours", tmp_path / "plain"
    with EpisodeWriter(ours, peer.FPS, peer.FEATURES, "arm") as writer:
        for number in range(3):
            add(writer, number, number != 1)
    with EpisodeWriter(plain, peer.FPS, robot_features(3, ["left", "right"])) as writer:
        add(writer, 0, True)
    (tmp_path / "dumps").mkdir()
    dumps = {name: tmp_path / f"dumps/{name}.npz" for name in ("theirs", "ours", "plain", "appended", "mixed", "last")}
    run(
        ("write", theirs),
        ("read", theirs, dumps["theirs"]),
        ("read", plain, dumps["plain"]),
        ("read", ours, dumps["ours"]),
    )
    for folder in (theirs, ours, plain):
        reader = LeRobotReader(folder)
        assert_holds(reader, range(len(reader)))
        assert_lerobot_reads_the_same(reader, dumps[folder.name])
    assert [episode.success for episode in LeRobotReader(ours)] == [True, False, True]

    with EpisodeWriter(theirs) as writer:
        add(writer, 3, None)
    run(("append", ours, 3), ("read", ours, dumps["appended"]), ("read", theirs, dumps["mixed"]))
    assert_holds(LeRobotReader(ours), range(4))
    assert_holds(LeRobotReader(theirs), range(4))
    assert_lerobot_reads_the_same(LeRobotReader(ours), dumps["appended"])
    assert_lerobot_reads_the_same(LeRobotReader(theirs), dumps["mixed"])

    with EpisodeWriter(ours) as writer:
        add(writer, 4, False)
    run(("append", theirs, 4), ("read", theirs, dumps["mixed"]), ("read", ours, dumps["last"]))
    assert_holds(LeRobotReader(theirs), range(5))
    assert_holds(LeRobotReader(ours), range(5))
    assert_lerobot_reads_the_same(LeRobotReader(theirs), dumps["mixed"])
    assert_lerobot_reads_the_same(LeRobotReader(ours), dumps["last"])
    assert LeRobotReader(ours).episode(4).success is False
