"""Small datasets whose numbers, colours and texts tell their episodes, and what has to hold for their files."""

import av
import numpy as np
import pyarrow.parquet as pq

from robotics.data import EpisodeWriter, robot_features

FPS = 20
VIDEO = "observation.images.front"
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def features(video=True, size=(16, 24)):
    return robot_features(["x", "y", "z"], 2, {"front": size}, video)


def made_episode(number, size=(16, 24)):
    """Arguments of add_episode: length, numbers, colour, task and success encode the index."""
    rng = np.random.default_rng(number)
    length = 5 + number % 4
    ramp = np.linspace(0, 40, size[1])[None, None, :, None] + 5.0 * np.arange(length)[:, None, None, None]
    frames = np.broadcast_to(ramp + 15 * number % 150, (length, *size, 3)).astype(np.uint8)
    states, actions = rng.normal(size=(length, 3)), rng.uniform(-1, 1, size=(length, 2))
    return states, actions, {"front": frames}, f"task {number % 2}", number % 3 == 0


def write(folder, numbers, settings=None, **options):
    with EpisodeWriter(folder, FPS, features(**options), "arm", settings) as writer:
        for number in numbers:
            writer.add_episode(*made_episode(number))
    return folder


def assert_holds(reader, numbers, lossless=False):
    """The reader gives exactly these made episodes."""
    assert len(reader) == len(numbers)
    for place, number in enumerate(numbers):
        states, actions, images, task, success = made_episode(number)
        found = reader.episode(place)
        assert (found.number, found.task, found.success) == (place, task, success)
        np.testing.assert_array_equal(found.state, states.astype(np.float32))
        np.testing.assert_array_equal(found.action, actions.astype(np.float32))
        np.testing.assert_allclose(found.timestamp_s, np.arange(len(states)) / FPS, atol=1e-6)
        error = np.abs(found.images["front"].astype(int) - images["front"]).mean((1, 2, 3))
        # A frame on the brightness differs by 5, an episode on by 15.
        assert error.max() <= (0 if lossless else 2)
    assert reader.counts["corrupt_frames"] == 0


def all_rows(folder, kind):
    files = sorted((folder / kind).glob("*/*.parquet"))
    return [row for path in files for row in pq.read_table(path, partitioning=None).to_pylist()]


def assert_is_clean(folder, episodes, spare_pictures=False):
    """Episodes as read by a reader that takes every file in order, as lerobot's does."""
    frames = all_rows(folder, "data")
    assert [frame["index"] for frame in frames] == list(range(len(frames)))
    rows = all_rows(folder, "meta/episodes")
    assert [row["episode_index"] for row in rows] == list(range(episodes))
    videos = {video_place(folder, row) for row in rows if f"videos/{VIDEO}/file_index" in row}
    assert videos == set((folder / "videos").rglob("*.mp4"))
    assert not list(folder.rglob("*.tmp"))
    for path in videos:
        with av.open(str(path)) as container:
            length = sum(row["length"] for row in rows if video_place(folder, row) == path)
            pictures = sum(1 for _ in container.decode(video=0))
        assert pictures >= length if spare_pictures else pictures == length


def video_place(folder, row):
    chunk, file = row[f"videos/{VIDEO}/chunk_index"], row[f"videos/{VIDEO}/file_index"]
    return folder / f"videos/{VIDEO}/chunk-{chunk:03d}/file-{file:03d}.mp4"
