import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import DatasetCard

from mmrl.errors import UserError
from robotics.data import EpisodeWriter, LeRobotReader, StorageSettings, robot_features

av = pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")
pa = pytest.importorskip("pyarrow", reason="needs pip install 'mmrl-suite[vlm]'")
pq = pytest.importorskip("pyarrow.parquet")

from robotics.data.images import DepthCodes, read_clip, write_depth_mp4  # noqa: E402
from tests.robotics.lerobot_folders import (  # noqa: E402 - where the packages are there
    FPS,
    QUANTILES,
    VIDEO,
    all_rows,
    assert_holds,
    assert_is_clean,
    features,
    made_episode,
    write,
)

# lerobot 0.4.4: create_empty_dataset_info, DEFAULT_FEATURES, _save_episode_data, _save_episode_video, save_episode.
INFO_KEYS = {
    "codebase_version",
    "robot_type",
    "total_episodes",
    "total_frames",
    "total_tasks",
    "chunks_size",
    "data_files_size_in_mb",
    "video_files_size_in_mb",
    "fps",
    "splits",
    "data_path",
    "video_path",
    "features",
}
ROW_KEYS = {
    "episode_index",
    "tasks",
    "length",
    "dataset_from_index",
    "dataset_to_index",
    "data/chunk_index",
    "data/file_index",
    "meta/episodes/chunk_index",
    "meta/episodes/file_index",
    f"videos/{VIDEO}/chunk_index",
    f"videos/{VIDEO}/file_index",
    f"videos/{VIDEO}/from_timestamp",
    f"videos/{VIDEO}/to_timestamp",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("written") / "set", range(5))


def test_files_are_those_of_the_format(written):
    found = {path.relative_to(written).as_posix() for path in written.rglob("*") if path.is_file()}
    assert found == {
        "README.md",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
        f"videos/{VIDEO}/chunk-000/file-000.mp4",
    }
    assert_is_clean(written, 5)


def test_the_card_is_one_of_lerobots_kind(written):
    card = DatasetCard.load(written / "README.md")
    assert "LeRobot" in card.data.tags
    assert card.data.configs == [{"config_name": "default", "data_files": "data/*/*.parquet"}]
    assert "5 episodes" in card.text
    info = json.loads((written / "meta/info.json").read_text())
    assert json.loads(re.search(r"```json\n(.*?)\n```", card.text, re.DOTALL)[1]) == info


def test_info_has_the_keys_of_the_format(written):
    info = json.loads((written / "meta/info.json").read_text())
    assert set(info) == INFO_KEYS
    assert info["codebase_version"] == "v3.0"
    assert (info["fps"], info["robot_type"]) == (FPS, "arm")
    lengths = [len(made_episode(number)[0]) for number in range(5)]
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (5, sum(lengths), 2)
    assert (info["chunks_size"], info["data_files_size_in_mb"], info["video_files_size_in_mb"]) == (1000, 100, 200)
    assert info["splits"] == {"train": "0:5"}
    assert info["data_path"] == "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    assert info["video_path"] == "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    kinds = {key: (feature["dtype"], feature["shape"]) for key, feature in info["features"].items()}
    assert kinds == {
        "observation.state": ("float32", [3]),
        "action": ("float32", [2]),
        VIDEO: ("video", [16, 24, 3]),
        "next.success": ("bool", [1]),
        "timestamp": ("float32", [1]),
        "frame_index": ("int64", [1]),
        "episode_index": ("int64", [1]),
        "index": ("int64", [1]),
        "task_index": ("int64", [1]),
    }
    assert info["features"]["observation.state"]["names"] == ["x", "y", "z"]
    assert info["features"][VIDEO]["names"] == ["height", "width", "channels"]
    assert info["features"][VIDEO]["info"] == {
        "video.height": 16,
        "video.width": 24,
        "video.codec": "h264",
        "video.pix_fmt": "yuv420p",
        "is_depth_map": False,
        "video.fps": FPS,
        "video.channels": 3,
        "has_audio": False,
    }


def test_data_columns_are_those_of_the_format(written):
    table = pq.read_table(written / "data/chunk-000/file-000.parquet", partitioning=None)
    types = {field.name: field.type for field in table.schema}
    assert types == {
        "observation.state": pa.list_(pa.float32(), 3),
        "action": pa.list_(pa.float32(), 2),
        "next.success": pa.bool_(),
        "timestamp": pa.float32(),
        "frame_index": pa.int64(),
        "episode_index": pa.int64(),
        "index": pa.int64(),
        "task_index": pa.int64(),
    }
    columns = table.to_pydict()
    lengths = [len(made_episode(number)[0]) for number in range(5)]
    assert columns["episode_index"] == [number for number in range(5) for _ in range(lengths[number])]
    assert columns["frame_index"] == [frame for length in lengths for frame in range(length)]
    assert columns["task_index"] == [number % 2 for number in range(5) for _ in range(lengths[number])]
    ends = np.cumsum(lengths) - 1
    assert np.flatnonzero(columns["next.success"]).tolist() == [int(ends[0]), int(ends[3])]
    described = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert described["action"] == {"feature": {"dtype": "float32", "_type": "Value"}, "length": 2, "_type": "Sequence"}


def test_episode_rows_point_to_frames_and_images(written):
    table = pq.read_table(written / "meta/episodes/chunk-000/file-000.parquet", partitioning=None)
    plain = {name for name in table.column_names if not name.startswith("stats/")}
    assert plain == ROW_KEYS | {"success"}
    frames = 0
    for number, row in enumerate(table.to_pylist()):
        states, _, _, task, success = made_episode(number)
        assert (row["episode_index"], row["tasks"], row["success"]) == (number, [task], success)
        assert (row["length"], row["dataset_from_index"]) == (len(states), frames)
        assert row[f"videos/{VIDEO}/from_timestamp"] == pytest.approx(frames / FPS)
        frames += len(states)
        assert row["dataset_to_index"] == frames
        assert row[f"videos/{VIDEO}/to_timestamp"] == pytest.approx(frames / FPS)
        assert {row[key] for key in plain if key.endswith(("chunk_index", "file_index"))} == {0}
        np.testing.assert_allclose(row["stats/observation.state/mean"], states.astype(np.float32).mean(0), atol=1e-6)
        assert np.shape(row[f"stats/{VIDEO}/mean"]) == (3, 1, 1)


def test_tasks_are_the_index_of_their_numbers(written):
    table = pq.read_table(written / "meta/tasks.parquet", partitioning=None)
    assert table.to_pydict() == {"task_index": [0, 1], "task": ["task 0", "task 1"]}
    assert json.loads(table.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert [frame.iloc[number].name for number in (0, 1)] == ["task 0", "task 1"]


def test_stats_are_those_of_all_frames(written):
    stats = json.loads((written / "meta/stats.json").read_text())
    actions = np.concatenate([made_episode(number)[1] for number in range(5)]).astype(np.float32).astype(np.float64)
    found = stats["action"]
    assert set(found) == {"min", "max", "mean", "std", "count", *QUANTILES}
    np.testing.assert_allclose(found["min"], actions.min(0))
    np.testing.assert_allclose(found["max"], actions.max(0))
    np.testing.assert_allclose(found["mean"], actions.mean(0))
    np.testing.assert_allclose(found["std"], actions.std(0))
    assert found["count"] == [len(actions)]
    for name, quantile in QUANTILES.items():
        np.testing.assert_allclose(found[name], np.quantile(actions, quantile, axis=0))
    pictures = np.concatenate([made_episode(number)[2]["front"] for number in range(5)]) / 255
    np.testing.assert_allclose(np.ravel(stats[VIDEO]["mean"]), pictures.mean((0, 1, 2)))
    np.testing.assert_allclose(np.ravel(stats[VIDEO]["std"]), pictures.std((0, 1, 2)))
    assert set(stats) == set(json.loads((written / "meta/info.json").read_text())["features"])


def test_what_is_written_is_read(written):
    reader = LeRobotReader(written)
    assert (reader.fps, reader.cameras, reader.tasks) == (FPS, ["front"], ["task 0", "task 1"])
    assert_holds(reader, range(5))
    assert [episode.number for episode in reader] == list(range(5))
    np.testing.assert_array_equal(reader.images(1, "front"), reader.episode(1).images["front"])


def test_png_is_lossless_and_lies_in_the_data(tmp_path):
    folder = write(tmp_path, range(3), video=False)
    assert_holds(LeRobotReader(folder), range(3), lossless=True)
    assert not (folder / "videos").exists()
    assert json.loads((folder / "meta/info.json").read_text())["video_path"] is None
    cell = all_rows(folder, "data")[0][VIDEO]
    assert cell["bytes"][:4] == b"\x89PNG"
    assert set(cell) == {"bytes", "path"}


@pytest.mark.parametrize("size", [(15, 22), (14, 23)])
def test_videos_of_odd_sizes_are_refused_and_images_are_not(tmp_path, size):
    with pytest.raises(UserError, match=r"front' has shape .*; expected an even height and width, .* dtype image"):
        EpisodeWriter(tmp_path / "video", FPS, features(size=size))
    assert not (tmp_path / "video").exists()
    frames = made_episode(1, size)[2]
    with EpisodeWriter(tmp_path / "images", FPS, features(False, size)) as writer:
        writer.add_episode(*made_episode(1)[:2], frames, "task", True)
    np.testing.assert_array_equal(LeRobotReader(tmp_path / "images").images(0, "front"), frames["front"])


def test_frames_that_are_in_no_episode_are_named_before_they_are_lost(tmp_path):
    states, actions, images, task, success = made_episode(0)
    writer = EpisodeWriter(tmp_path / "open", FPS, features(), "arm")
    writer.add_frame(states[0], actions[0], {"front": images["front"][0]})
    with pytest.raises(ValueError, match=r"1 frames from add_frame have not been saved to .*open; call save_episode"):
        writer.finish()
    assert writer.save_episode(task, success) == 0  # the writer is still open
    writer.finish()
    assert len(LeRobotReader(tmp_path / "open")) == 1
    writer = EpisodeWriter(tmp_path / "left", FPS, features(), "arm")
    writer.add_episode(states, actions, images, task, success)
    writer.add_frame(states[0], actions[0], {"front": images["front"][0]})
    with pytest.raises(ValueError, match="1 frames from add_frame have not been saved"):
        writer.__exit__(None)
    assert_is_clean(tmp_path / "left", 1)  # what was saved is whole
    writer = EpisodeWriter(tmp_path / "broken", FPS, features(), "arm")
    writer.add_frame(states[0], actions[0], {"front": images["front"][0]})
    writer.__exit__(KeyError)  # the user's own error stays the one that is raised


@pytest.mark.parametrize("size", [(64, 64), (48, 63), (33, 41)])
def test_noisy_depth_loses_no_code_in_a_video(tmp_path, size):
    codes, seen = DepthCodes(use_log=False), np.random.default_rng(0).integers(0, 4096, (6, *size))
    path = write_depth_mp4(tmp_path / "depth.mp4", codes.decode(seen.astype(np.uint16)), 10, codes)
    np.testing.assert_array_equal(read_clip(path, 0.0, 6, 10, size, "gray12le")[0], seen)


def test_a_second_writer_is_refused_until_the_first_is_finished(tmp_path):
    first = EpisodeWriter(tmp_path, FPS, features(), "arm")
    for folder in (tmp_path, f"{tmp_path}/../{tmp_path.name}"):
        with pytest.raises(UserError, match=r"another writer is using .*; finish it first"):
            EpisodeWriter(folder)
    first.add_episode(*made_episode(0))
    child = "import sys; from robotics.data import EpisodeWriter; EpisodeWriter(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "another writer is using" in done.stderr
    first.finish()
    with EpisodeWriter(tmp_path) as second:
        second.add_episode(*made_episode(1))
    assert_holds(LeRobotReader(tmp_path), range(2))


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        ("float32", 1e39, r"next.reward has the value 1e\+39, which the dataset's float32 cannot represent"),
        ("uint8", 300, "has the value 300, which the dataset's uint8 cannot represent"),
        ("int64", 0.5, "has the value 0.5, which the dataset's int64 cannot represent"),
    ],
)
def test_values_that_the_stored_type_cannot_hold_are_refused(tmp_path, dtype, value, words):
    more = features() | {"next.reward": {"dtype": dtype, "shape": [1]}}
    reward = np.zeros(5, np.asarray(value).dtype)
    reward[3] = value
    with EpisodeWriter(tmp_path, FPS, more) as writer:
        with pytest.raises(ValueError, match=words):
            writer.add_episode(*made_episode(0), {"next.reward": reward})
        assert writer.episodes == 0


def test_frame_by_frame_gives_the_same_files(tmp_path, written):
    with EpisodeWriter(tmp_path, FPS, features(), "arm") as writer:
        for number in range(5):
            states, actions, images, task, success = made_episode(number)
            for at in range(len(states)):
                writer.add_frame(states[at], actions[at], {"front": images["front"][at]})
            assert writer.save_episode(task, success) == number
        writer.add_frame(states[0], actions[0], {"front": images["front"][0]})
        writer.discard_frames()
    for name in ("meta/info.json", "meta/stats.json", "data/chunk-000/file-000.parquet"):
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()


def test_other_features_are_kept(tmp_path):
    more = features() | {"next.reward": {"dtype": "float32", "shape": [1]}, "contact": {"dtype": "int64", "shape": [4]}}
    reward, contact = np.arange(5.0), np.arange(20).reshape(5, 4)
    with EpisodeWriter(tmp_path, FPS, more) as writer:
        writer.add_episode(*made_episode(0), {"next.reward": reward, "contact": contact})
    extra = LeRobotReader(tmp_path).episode(0).extra
    np.testing.assert_array_equal(extra["next.reward"], reward)
    np.testing.assert_array_equal(extra["contact"], contact)
    assert extra["next.success"].tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("video", [True, False])
def test_appending_continues_in_new_files(tmp_path, video):
    write(tmp_path, range(3), video=video)
    write(tmp_path, range(3, 6), video=video)
    reader = LeRobotReader(tmp_path)
    assert_holds(reader, range(6), lossless=not video)
    assert [row["data/file_index"] for row in reader.episodes] == [0, 0, 0, 1, 1, 1]
    actions = np.concatenate([made_episode(number)[1] for number in range(6)]).astype(np.float32)
    np.testing.assert_allclose(reader.stats["action"]["q01"], np.quantile(actions.astype(float), 0.01, axis=0))
    pictures = np.concatenate([made_episode(number)[2]["front"] for number in range(6)]) / 255
    np.testing.assert_allclose(reader.stats[VIDEO]["mean"].ravel(), pictures.mean((0, 1, 2)))
    assert_is_clean(tmp_path, 6)


@pytest.mark.parametrize("part", ["all", "count"])
def test_appending_to_statistics_of_unknown_frames_is_refused(tmp_path, part):
    write(tmp_path, range(2))
    path = tmp_path / "meta/stats.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({key: {n: v for n, v in one.items() if n != "count"} for key, one in known.items()}))
    if part == "all":
        path.unlink()
    with pytest.raises(UserError, match=r"stats\.json does not say from how many frames of .* it was computed"):
        write(tmp_path, range(2, 3))
    assert len(LeRobotReader(tmp_path)) == 2


def test_appending_other_things_is_refused(tmp_path):
    write(tmp_path, [0])
    with pytest.raises(UserError, match=r"different features.*action"):
        EpisodeWriter(tmp_path, FPS, robot_features(3, 5, {"front": (16, 24)}), "arm")
    with pytest.raises(UserError, match="fps 20, not 10"):
        EpisodeWriter(tmp_path, 10, features(), "arm")
    with pytest.raises(UserError, match="robot_type 'arm', not 'leg'"):
        EpisodeWriter(tmp_path, FPS, features(), "leg")
    with pytest.raises(UserError, match=r"has observation.state with the entries x, y, z, not z, y, x"):
        EpisodeWriter(tmp_path, FPS, robot_features(["z", "y", "x"], 2, {"front": (16, 24)}))


def test_appending_actions_of_other_bounds_is_refused(tmp_path):
    def reaching(metres):
        found = robot_features(1, 1)
        found["action"]["info"] = {"units": "normalised", "low": [-metres], "high": [metres]}
        return found

    for _ in range(2):
        with EpisodeWriter(tmp_path, FPS, reaching(0.05)) as writer:
            writer.add_episode(np.zeros((2, 1)), np.zeros((2, 1)), None, "reach", True)
    with pytest.raises(UserError, match=r"has action with low \[-0\.05\], not \[-0\.1\]"):
        EpisodeWriter(tmp_path, FPS, reaching(0.1))


def test_videos_and_episode_rows_roll_over(tmp_path):
    # An episode's row alone takes 48 kB as a file, its video 1.7 kB.
    write(tmp_path, range(9), StorageSettings(data_mb=110_000 / 1024**2, video_mb=4000 / 1024**2, files_per_chunk=2))
    reader = LeRobotReader(tmp_path)
    assert_holds(reader, range(9))
    assert_is_clean(tmp_path, 9)
    assert max(path.stat().st_size for path in (tmp_path / "videos").rglob("*.mp4")) <= 4000
    for prefix in ("data", "meta/episodes", f"videos/{VIDEO}"):
        places = [(row[f"{prefix}/chunk_index"], row[f"{prefix}/file_index"]) for row in reader.episodes]
        assert places == sorted(places)
        # No number is left out, and the second file of a chunk is its last.
        assert sorted(set(places)) == [divmod(number, 2) for number in range(len(set(places)))]
        assert 3 <= len(set(places)) < 9


def test_data_files_roll_over(tmp_path):
    # 100 kB of noise an episode as PNG, so that two go into a file; no such file of rows reaches the limit.
    noise = np.random.default_rng(0).integers(0, 256, (5, 8, 64, 64, 3), dtype=np.uint8)
    numbers, limit = np.zeros((8, 3)), 262_000
    settings = StorageSettings(data_mb=limit / 1024**2)
    with EpisodeWriter(tmp_path, FPS, features(False, (64, 64)), "arm", settings) as writer:
        for number in range(5):
            writer.add_episode(numbers, numbers[:, :2], {"front": noise[number]}, "task", True)
    reader = LeRobotReader(tmp_path)
    assert [row["data/file_index"] for row in reader.episodes] == [0, 0, 1, 1, 2]
    assert {row["meta/episodes/file_index"] for row in reader.episodes} == {0}
    assert max(path.stat().st_size for path in (tmp_path / "data").rglob("*.parquet")) <= limit
    for number, episode in enumerate(reader):
        np.testing.assert_array_equal(episode.images["front"], noise[number])
    assert_is_clean(tmp_path, 5)


def test_a_limit_below_one_episode_gives_each_its_file(tmp_path):
    settings = StorageSettings(data_mb=1e-6, video_mb=1e-6)
    write(tmp_path, range(3), settings)
    assert_holds(LeRobotReader(tmp_path), range(3))
    assert_is_clean(tmp_path, 3)
    assert len(list((tmp_path / "data").rglob("*.parquet"))) == 3


def test_unfinished_writing_is_readable(tmp_path):
    writer = EpisodeWriter(tmp_path, FPS, features(), "arm")
    assert len(LeRobotReader(tmp_path)) == 0
    for number in range(4):
        writer.add_episode(*made_episode(number))
        assert_holds(LeRobotReader(tmp_path), range(number + 1))
    stats = LeRobotReader(tmp_path).stats["action"]
    actions = np.concatenate([made_episode(number)[1] for number in range(4)]).astype(np.float32)
    np.testing.assert_allclose(stats["std"], actions.astype(float).std(0))
    writer.finish()
    writer.finish()
    assert_holds(LeRobotReader(tmp_path), range(4))
    with pytest.raises(ValueError, match="finished"):
        writer.add_episode(*made_episode(4))


def run_and_die(folder, steps):
    """Write in a child process that is killed before its steps-th change of a file; return whether it finished."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done = 0

    def counted(change):
        def change_or_die(*arguments, **options):
            nonlocal done
            if done == steps:
                os._exit(9)
            done += 1
            return change(*arguments, **options)

        return change_or_die

    Path.replace, Path.unlink = counted(Path.replace), counted(Path.unlink)
    try:
        write(folder, range(4), StorageSettings(data_mb=110_000 / 1024**2, video_mb=3500 / 1024**2))
    except BaseException:
        os._exit(1)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_the_finished_episodes(tmp_path):
    seen, steps, finished = set(), 3, False
    while not finished:
        folder = tmp_path / str(steps)
        finished = run_and_die(folder, steps)
        count = len(LeRobotReader(folder))
        seen.add(count)
        assert_holds(LeRobotReader(folder), range(count))
        write(folder, range(count, count + 1))
        assert_holds(LeRobotReader(folder), range(count + 1))
        assert_is_clean(folder, count + 1, spare_pictures=True)
        steps += 3
    assert seen == {0, 1, 2, 3, 4}


def test_an_episode_that_fails_is_not_there(tmp_path, monkeypatch):
    writer = EpisodeWriter(tmp_path, FPS, features(), "arm")
    writer.add_episode(*made_episode(0))
    monkeypatch.setattr("robotics.data.writer.describe_video", None)
    monkeypatch.setattr("robotics.data.writer._row_table", None)
    with pytest.raises(TypeError):
        writer.add_episode(*made_episode(1))
    monkeypatch.undo()
    writer.add_episode(*made_episode(2))
    writer.finish()
    assert_holds(LeRobotReader(tmp_path), [0, 2])
    assert_is_clean(tmp_path, 2)


STATES, ACTIONS, PICTURES, TASK, SUCCESS = made_episode(0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"states": STATES[:-1]}, r"observation.state has shape \(4, 3\)|action has shape"),
        ({"actions": ACTIONS[:, :1]}, "action has shape"),
        ({"actions": np.full((5, 2), np.nan)}, "action has values that are not finite"),
        ({"images": {}}, VIDEO),
        ({"images": {"side": PICTURES["front"]}}, "unknown camera side; the dataset has front"),
        ({"images": {"front": PICTURES["front"] / 255.0}}, "images are uint8"),
        ({"states": STATES[:0], "actions": ACTIONS[:0], "images": {"front": PICTURES["front"][:0]}}, "at least one"),
        ({"states": None}, "observation.state"),
        ({"extra": {"mood": np.zeros(5)}}, "mood"),
    ],
)
def test_wrong_episodes_are_refused_whole(tmp_path, changes, words):
    good = {"states": STATES, "actions": ACTIONS, "images": PICTURES, "task": TASK, "success": SUCCESS}
    with EpisodeWriter(tmp_path, FPS, features(), "arm") as writer:
        with pytest.raises(ValueError, match=words):
            writer.add_episode(**(good | changes))
        writer.add_episode(**good)
    assert_holds(LeRobotReader(tmp_path), [0])


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        ({"a/b": {"dtype": "float32", "shape": [1]}}, "'/'"),
        ({"a": {"dtype": "complex64", "shape": [1]}}, "complex64.*must be one of"),
        ({"a": {"dtype": "float32", "shape": [2, 0]}}, r"shape \[2, 0\].*sizes of at least 1"),
        ({"a": {"dtype": "float32", "shape": [1] * 6}}, r"1 to 5 sizes"),
        ({"a": {"dtype": "float32", "shape": []}}, r"shape \[\]"),
        ({"a": {"dtype": "string", "shape": [2]}}, r"shape \[2\]; expected \[1\]"),
        ({"a": {"dtype": "image", "shape": [8, 8, 1]}}, "is_depth_map"),
        ({"a": {"dtype": "video", "shape": [8, 8]}}, r"\[H, W, 3\]"),
    ],
)
def test_features_that_cannot_be_stored_are_named(tmp_path, feature, words):
    with pytest.raises(UserError, match=words):
        EpisodeWriter(tmp_path, FPS, feature)
    with pytest.raises(UserError, match=r"fps is -12\.5; expected frames per second, above 0"):
        EpisodeWriter(tmp_path, -12.5, features())


@pytest.mark.parametrize("video", [False, True])
def test_a_fractional_rate_survives(tmp_path, video):
    with EpisodeWriter(tmp_path, 12.5, features(video), "arm") as writer:
        assert writer.fps == 12.5
        for number in range(3):
            writer.add_episode(*made_episode(number))
    with EpisodeWriter(tmp_path, 12.5, features(video), "arm") as writer:
        writer.add_episode(*made_episode(3))
    with pytest.raises(UserError, match=r"has fps 12\.5, not 12"):
        EpisodeWriter(tmp_path, 12, features(video))
    reader = LeRobotReader(tmp_path)
    assert (reader.fps, json.loads((tmp_path / "meta/info.json").read_text())["fps"]) == (12.5, 12.5)
    for number, found in enumerate(reader):
        np.testing.assert_allclose(found.timestamp_s, np.arange(len(found.action)) / 12.5, rtol=1e-6)
        pictures = made_episode(number)[2]["front"].astype(int)
        assert np.abs(found.images["front"].astype(int) - pictures).mean((1, 2, 3)).max() <= (2 if video else 0)
