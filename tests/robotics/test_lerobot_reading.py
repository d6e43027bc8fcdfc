"""Datasets that others wrote, and damaged ones."""

import io
import json

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.hub.video_writing import write_mp4
from robotics.data import EpisodeWriter, LeRobotReader, action_chunks, robot_features
from robotics.episodes.demonstrations import DemonstrationConfig, load_demonstrations

av = pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")
pa = pytest.importorskip("pyarrow", reason="needs pip install 'mmrl-suite[vlm]'")
pq = pytest.importorskip("pyarrow.parquet")

from robotics.data.images import read_clip  # noqa: E402 - where the packages are there
from tests.robotics.lerobot_folders import (  # noqa: E402 - where the packages are there
    FPS,
    VIDEO,
    all_rows,
    made_episode,
    write,
)


@pytest.fixture
def foreign(tmp_path):
    """Two episodes of 3 and 4 frames in lerobot's layout, written with pyarrow and PyAV alone."""
    scalar = {"dtype": "int64", "shape": [1], "names": None}
    info = {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": 2,
        "total_frames": 7,
        "total_tasks": 2,
        "fps": 10,
        "splits": {"train": "0:2"},
        "chunks_size": 1000,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {
            "observation.state": {"dtype": "float32", "shape": [2], "names": ["a", "b"]},
            "action": {"dtype": "float32", "shape": [1], "names": ["a"]},
            "observation.image": {"dtype": "video", "shape": [3, 32, 48], "names": ["channels", "height", "width"]},
            "grid": {"dtype": "float32", "shape": [2, 2], "names": None},
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
            **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), scalar),
        },
    }
    for folder in ("meta/episodes/chunk-000", "data/chunk-000", "videos/observation.image/chunk-000"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    tasks = pa.table({"task_index": [1, 0], "__index_level_0__": ["push", "lift"]})
    pq.write_table(tasks, tmp_path / "meta/tasks.parquet")
    data = {
        "observation.state": pa.array([[float(i), -float(i)] for i in range(7)], pa.list_(pa.float32())),
        "action": pa.array([float(10 * i) for i in range(7)], pa.float32()),
        "grid": pa.array([[[i, 1.0], [2.0, 3.0]] for i in range(7)], pa.list_(pa.list_(pa.float32()))),
        "timestamp": pa.array([0.0, 0.1, 0.2, 0.0, 0.1, 0.2, 0.3], pa.float32()),
        "frame_index": [0, 1, 2, 0, 1, 2, 3],
        "episode_index": [0, 0, 0, 1, 1, 1, 1],
        "index": list(range(7)),
        "task_index": [1, 1, 1, 0, 0, 0, 0],
    }
    pq.write_table(pa.table(data), tmp_path / "data/chunk-000/file-000.parquet")
    zero = {f"{kind}/{number}": 0 for kind in ("data", "meta/episodes") for number in ("chunk_index", "file_index")}
    video = {f"videos/observation.image/{number}": 0 for number in ("chunk_index", "file_index")}
    rows = []
    for episode, (first, last, task) in enumerate([(0, 3, "push"), (3, 7, "lift")]):
        times = {"from_timestamp": first / 10, "to_timestamp": last / 10}
        row = {"episode_index": episode, "tasks": [task], "length": last - first, **zero, **video}
        row |= {"dataset_from_index": first, "dataset_to_index": last, "stats/action/mean": [0.0]}
        rows.append(row | {f"videos/observation.image/{key}": time for key, time in times.items()})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "meta/episodes/chunk-000/file-000.parquet")
    # With reordered frames, as encoders make them by default.
    with av.open(str(tmp_path / "videos/observation.image/chunk-000/file-000.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"bf": "2", "g": "5"})
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for level in range(7):
            picture = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 30 * level, np.uint8), format="rgb24")
            container.mux(stream.encode(picture.reformat(format="yuv420p")))
        container.mux(stream.encode())
    return tmp_path


def test_a_dataset_that_others_wrote_is_read(foreign):
    reader = LeRobotReader(foreign)
    assert (len(reader), reader.tasks, reader.cameras, reader.stats) == (2, ["lift", "push"], ["observation.image"], {})
    first, second = reader
    assert [(episode.task, episode.success, len(episode)) for episode in (first, second)] == [
        ("push", None, 3),
        ("lift", None, 4),
    ]
    np.testing.assert_array_equal(second.state, [[i, -i] for i in range(3, 7)])
    np.testing.assert_array_equal(second.action, [[30], [40], [50], [60]])
    np.testing.assert_array_equal(second.extra["grid"][:, 0, 0], [3, 4, 5, 6])
    levels = [episode.images["observation.image"].mean((1, 2, 3)) for episode in (first, second)]
    np.testing.assert_allclose(np.concatenate(levels), 30 * np.arange(7), atol=3)
    assert second.images["observation.image"].shape == (4, 32, 48, 3)


def test_frames_with_chunks_padded_at_the_ends(foreign):
    reader = LeRobotReader(foreign)
    samples = list(reader.frames([-0.1, 0.0, 0.1, 0.2], cameras=["observation.image"]))
    assert [(sample.episode, sample.frame) for sample in samples] == [(0, 0), (0, 1), (0, 2)] + [
        (1, frame) for frame in range(4)
    ]
    assert samples[0].action.ravel().tolist() == [0, 0, 10, 20]
    assert samples[0].valid.tolist() == [False, True, True, True]
    assert samples[2].action.ravel().tolist() == [10, 20, 20, 20]
    assert samples[2].valid.tolist() == [True, True, False, False]
    assert samples[3].action.ravel().tolist() == [30, 30, 40, 50]
    assert samples[4].images["observation.image"].mean() == pytest.approx(120, abs=3)
    assert [sample.frame for sample in reader.frames(episodes=[1])] == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"0\.15 s; must be a multiple of 1/fps = 0\.1"):
        reader.frames([0.15])
    with pytest.raises(UserError, match="unknown camera wrist"):
        reader.frames(cameras=["wrist"])


def test_action_chunks_by_hand():
    chunks, valid = action_chunks(np.arange(3)[:, None], [0, 1])
    assert chunks[..., 0].tolist() == [[0, 1], [1, 2], [2, 2]]
    assert valid.tolist() == [[True, True], [True, True], [True, False]]


def change_info(folder, **changes):
    path = folder / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_other_versions_are_refused(foreign):
    change_info(foreign, codebase_version="v2.1")
    with pytest.raises(UserError, match=r"v2\.1; this reads v3\.0.*convert"):
        LeRobotReader(foreign)


@pytest.mark.parametrize("name", ["meta/info.json", "meta/tasks.parquet"])
def test_missing_metadata_is_named(foreign, name):
    (foreign / name).unlink()
    with pytest.raises(UserError, match=name):
        LeRobotReader(foreign)


@pytest.mark.parametrize("name", ["data/chunk-000/file-000.parquet", "videos/observation.image/chunk-000/file-000.mp4"])
@pytest.mark.parametrize("content", [None, b"nonsense"])
def test_missing_and_broken_files_are_named(foreign, name, content):
    (foreign / name).unlink()
    if content is not None:
        (foreign / name).write_bytes(content)
    reader = LeRobotReader(foreign)
    with pytest.raises(UserError, match=name):
        reader.images(0, "observation.image")


def test_counts_that_disagree_are_named(foreign):
    change_info(foreign, total_episodes=3)
    with pytest.raises(UserError, match=r"counts 3 episodes.*lacks 1 of them, the first is 2"):
        LeRobotReader(foreign)
    change_info(foreign, total_episodes=2)
    path = foreign / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path, partitioning=None).slice(0, 6), path)
    reader = LeRobotReader(foreign)
    assert len(reader.episode(0)) == 3
    with pytest.raises(UserError, match=r"episode 1 has 3 frames in .*file-000\.parquet; meta/episodes has 4"):
        reader.episode(1)
    with pytest.raises(UserError, match=r"no episode 2; .* has 2"):
        reader.episode(2)


def test_columns_and_tasks_that_are_missing_are_named(foreign):
    path = foreign / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path, partitioning=None)
    pq.write_table(table.set_column(table.column_names.index("task_index"), "task_index", pa.array([5] * 7)), path)
    with pytest.raises(UserError, match=r"task_index 5 is used; .* has 2 tasks"):
        LeRobotReader(foreign).episode(0)
    pq.write_table(table.drop_columns(["action"]), path)
    with pytest.raises(UserError, match="lacks the columns action"):
        LeRobotReader(foreign).episode(0)


def test_corrupt_frames_repeat_a_neighbour_and_are_counted(tmp_path):
    write(tmp_path, range(4))
    path = tmp_path / f"videos/{VIDEO}/chunk-000/file-000.mp4"
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    content = bytearray(path.read_bytes())
    lengths = [len(made_episode(number)[0]) for number in range(4)]
    # The third frame of the second episode and the one after it, which builds upon it.
    broken = [lengths[0] + 2, lengths[0] + 3]
    for position, size in (packets[number] for number in broken):
        content[position + 4 : position + size] = b"\xff" * (size - 4)
    path.write_bytes(bytes(content))
    reader = LeRobotReader(tmp_path)
    reader.images(0, "front")
    assert reader.counts["corrupt_frames"] == 0
    found = reader.images(1, "front").astype(int)
    assert 1 <= reader.counts["corrupt_frames"] <= 3
    np.testing.assert_array_equal(found[2], found[1])
    wanted = made_episode(1)[2]["front"]
    assert np.abs(found[[0, 1, 5]] - wanted[[0, 1, 5]]).mean() < 2


def test_a_video_that_ends_early_is_counted_or_named(tmp_path, caplog):
    write(tmp_path, range(2))
    path = tmp_path / f"videos/{VIDEO}/chunk-000/file-000.mp4"
    with av.open(str(path)) as container:
        frames = [picture.to_ndarray(format="rgb24") for picture in container.decode(video=0)]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"bf": "0"})
        stream.width, stream.height, stream.pix_fmt = 24, 16, "yuv420p"
        for frame in frames[:8]:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="yuv420p")))
        container.mux(stream.encode())
    reader = LeRobotReader(tmp_path)
    assert len(reader.images(1, "front")) == 6
    assert reader.counts["corrupt_frames"] == 3
    lost = f"3 of the 6 images {VIDEO} of episode 1 in {path} cannot be decoded, the first of them is 3"
    assert lost in caplog.text
    row = reader.episodes[1]
    row[f"videos/{VIDEO}/from_timestamp"] = 2.0
    with pytest.raises(UserError, match=r"no readable frame from 2\.000 s on"):
        reader.images(1, "front")


def test_an_episode_that_lost_more_than_a_tenth_of_its_images_is_refused(tmp_path):
    frames = np.full((40, 32, 32, 3), 100, np.uint8)
    rows = np.zeros((40, 2), np.float32)
    with EpisodeWriter(tmp_path, fps=10, features=robot_features(2, 2, {"front": (32, 32)})) as writer:
        writer.add_episode(rows, rows, {"front": frames}, task="push", success=True)
    (path,) = tmp_path.glob("videos/**/*.mp4")
    write_mp4(path, frames[:10], 10)
    with pytest.raises(UserError, match=r"30 of the 40 images .*front of episode 0 in .*mp4 .* is 10; at most"):
        load_demonstrations(DemonstrationConfig(str(tmp_path)))
    write_mp4(path, frames[::2], 5)  # half the rate of the data
    with pytest.raises(UserError, match="20 of the 40 images"):
        LeRobotReader(tmp_path).images(0, "front")
    write_mp4(path, frames[:37], 10)
    assert len(LeRobotReader(tmp_path).images(0, "front")) == 40


def test_broken_pngs_are_counted(tmp_path):
    write(tmp_path, [0], video=False)
    path = tmp_path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path, partitioning=None)
    cells = table[VIDEO].to_pylist()
    cells[3]["bytes"] = b"nonsense"
    changed = pa.array(cells, table.schema.field(VIDEO).type)
    pq.write_table(table.set_column(table.column_names.index(VIDEO), VIDEO, changed), path)
    reader = LeRobotReader(tmp_path)
    found = reader.images(0, "front")
    assert reader.counts["corrupt_frames"] == 1
    np.testing.assert_array_equal(found[3], made_episode(0)[2]["front"][2])


def test_images_are_those_of_pillow(tmp_path):
    image = pytest.importorskip("PIL.Image")
    write(tmp_path, [0], video=False)
    cell = all_rows(tmp_path, "data")[2][VIDEO]
    np.testing.assert_array_equal(image.open(io.BytesIO(cell["bytes"])), made_episode(0)[2]["front"][2])


@pytest.mark.parametrize(
    ("video_fps", "times_s", "expected"),
    [
        (30, [0.0, 0.1, 0.2, 0.3], [6, 9, 12, 15]),  # recorded faster than the rows
        (30, [0.0, 0.1, 0.24, 0.3], [6, 9, 13, 15]),  # rows at times of their own
        (10, [0.0, 0.1, 0.2, 0.3], [2, 3, 4, 5]),
        (5, [0.0, 0.1, 0.2, 0.3], [1, 1, 2, 2]),  # each frame serves two rows
    ],
)
def test_a_row_has_the_frame_of_its_time(tmp_path, video_fps, times_s, expected):
    """As lerobot, which asks the decoder for from_timestamp + timestamp; the clip begins at 0.2 s."""
    path = write_mp4(tmp_path / "a.mp4", (np.full((32, 48, 3), 10 * n, np.uint8) for n in range(20)), video_fps)
    frames, decoded = read_clip(path, 0.2, 4, 10, (32, 48), times_s=np.array(times_s, np.float32))
    assert np.rint(frames.mean((1, 2, 3)) / 10).tolist() == expected
    assert decoded.tolist() == ([True, False, True, False] if video_fps == 5 else [True] * 4)


def test_times_of_rows_are_read_from_the_data(foreign):
    """The camera dropped the second frame of episode 1: two rows show the third."""
    path = foreign / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path).to_pydict()
    table["timestamp"][3:] = [0.0, 0.2, 0.2, 0.3]
    before = LeRobotReader(foreign).images(1, "observation.image")
    pq.write_table(pa.table(table), path)
    reader = LeRobotReader(foreign)
    np.testing.assert_array_equal(reader.images(1, "observation.image"), before[[0, 2, 2, 3]])
    assert reader.counts["corrupt_frames"] == 0
