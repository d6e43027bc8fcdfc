"""Clips on disk: written clips are read back, in an order that depends on a seed, and damage is named."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from mmrl.errors import UserError
from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.data import DatasetInfo, FlowReader, FlowWriter, ShardSettings
from robotics.flow3d.data import reader as reader_module
from robotics.flow3d.data import writer as writer_module
from robotics.flow3d.data.format import depth_unit, quantile_of
from robotics.toy.drifted_clips import drifted_clips
from tests.robotics.flow3d.some_clips import a_clip

FEW = ShardSettings(clips_per_shard=4, clips_per_group=2)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path):
    """Eleven clips in shards of four; the last is in the test split."""
    with FlowWriter(tmp_path / "clips", num_frames=3, grid=2, settings=FEW) as writer:
        for seed in range(10):
            writer.add(a_clip(seed, source="arm" if seed % 2 else "hand", task="pour" if seed > 6 else "place"))
        writer.add(a_clip(10, mask=False), split="test")
    return tmp_path / "clips"


def seeds(clips):
    return [clip.meta["seed"] for clip in clips]


def test_a_clip_is_read_back(folder):
    for clip, read in ((a_clip(3, source="arm"), FlowReader(folder, split="train")[3]), (a_clip(10), None)):
        read = read or FlowReader(folder, split="test")[0]
        for name in ("rgb", "K", "T_world_cam"):
            np.testing.assert_array_equal(getattr(read.observation, name), getattr(clip.observation, name))
        depth = np.where(np.isfinite(clip.observation.depth_m), clip.observation.depth_m, 0)
        # Half of a unit, and the rounding of float32 at a depth of 1.2.
        np.testing.assert_allclose(read.observation.depth_m, depth, atol=0.5e-4 + 1.2e-7, rtol=0)
        assert read.observation.depth_m[0, :3].tolist() == [0, 0, 0]
        assert read.observation.depth_m.dtype == np.float32
        np.testing.assert_allclose(read.points, clip.points, rtol=1e-7)
        np.testing.assert_allclose(read.flow, clip.flow, rtol=1e-7)
        assert (read.source, read.quality) == (clip.source, clip.quality)
        assert read.observation.instruction == clip.observation.instruction
        assert {"split", *clip.meta} == set(read.meta)
    np.testing.assert_array_equal(FlowReader(folder)[4].observation.mask, a_clip(3).observation.mask)
    assert FlowReader(folder, split="test")[0].observation.mask is None


def test_clips_are_selected_by_split_source_and_task(folder):
    assert seeds(FlowReader(folder, split="train")) == list(range(10))
    assert seeds(FlowReader(folder, split="train", sources=["arm"])) == [1, 3, 5, 7, 9]
    assert seeds(FlowReader(folder, sources=["arm"], tasks=["pour"])) == [7, 9]
    reader = FlowReader(folder, split="train", tasks=["pour"])
    assert len(reader) == 3
    assert seeds(reader[number] for number in range(3)) == seeds(reader) == seeds(reader[0:3]) == [7, 8, 9]
    assert reader[-1].meta["seed"] == 9
    with pytest.raises(UserError, match="no task 'pourr'; did you mean 'pour'"):
        FlowReader(folder, tasks=["pourr"])
    with pytest.raises(UserError, match="no clips of split test, source arm together"):
        FlowReader(folder, split="test", sources=["arm"])


def test_the_order_follows_the_seed(folder):
    reader = FlowReader(folder, split="train")
    first = seeds(reader.shuffled(seed=1, buffer=5))
    assert sorted(first) == list(range(10))
    assert first != list(range(10))
    assert seeds(FlowReader(folder, split="train").shuffled(seed=1, buffer=5)) == first
    assert seeds(reader.shuffled(seed=1, buffer=5, skip=4)) == first[4:]
    others = [seeds(reader.shuffled(seed=seed, epoch=epoch, buffer=5)) for seed, epoch in ((1, 1), (2, 0))]
    assert first not in others
    assert others[0] != others[1]


def test_a_large_buffer_makes_every_order_likely(folder, monkeypatch):
    whole = reader_module.read_group
    read = functools.cache(lambda path, group, columns: whole(path, group, columns))  # 120 times the same
    monkeypatch.setattr(
        reader_module, "read_group", lambda path, group, columns=None: read(path, group, columns and tuple(columns))
    )
    reader = FlowReader(folder, split="train")
    places = np.zeros((10, 10))
    for epoch in range(120):
        for place, seed in enumerate(seeds(reader.shuffled(seed=0, epoch=epoch, buffer=64))):
            places[seed, place] += 1
    # Binomial with n = 120 and p = 0.1: mean 12, deviation 3.3; beyond 8 deviations for none of the 100.
    assert places.min() > 0
    assert places.max() < 12 + 8 * 3.3


def test_only_the_buffer_is_in_memory(folder, monkeypatch):
    from robotics.flow3d.data import reader as module

    read, whole = [], module.read_group

    def counted(path, number, columns=None):
        read.append((path.name, number))
        return whole(path, number, columns)

    monkeypatch.setattr(module, "read_group", counted)
    clips = FlowReader(folder, split="train").shuffled(seed=0, buffer=2)
    read.clear()
    next(clips)
    assert len(read) == 2  # three clips: two that wait and one to put in
    assert len(list(clips)) == 9


def test_a_killed_writer_loses_nothing(tmp_path):
    program = (
        "import sys, time\n"
        "from robotics.flow3d.data import FlowWriter, ShardSettings\n"
        "from tests.robotics.flow3d.some_clips import a_clip\n"
        "writer = FlowWriter(sys.argv[1], num_frames=3, grid=2, settings=ShardSettings(clips_per_shard=4))\n"
        "for seed in range(6):\n"
        "    writer.add(a_clip(seed))\n"
        "print('written', flush=True)\n"
        "time.sleep(60)\n"
    )
    folder = tmp_path / "clips"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    ) as child:
        assert child.stdout.readline() == b"written\n"
        assert seeds(FlowReader(folder)) == [0, 1, 2, 3]  # while it is being written
        child.send_signal(signal.SIGKILL)
    assert seeds(FlowReader(folder)) == [0, 1, 2, 3]
    with FlowWriter(folder, num_frames=3, grid=2) as writer:
        writer.add(a_clip(6))
    assert seeds(FlowReader(folder)) == list(range(7))
    assert not list((folder / "data").glob(".*"))


def test_a_journal_is_read_up_to_where_it_breaks_off(tmp_path):
    writer = FlowWriter(tmp_path / "clips", num_frames=3, grid=2)
    for seed in range(3):
        writer.add(a_clip(seed))
    (journal,) = (tmp_path / "clips/data").glob(".*.journal")
    journal.write_bytes(journal.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"another writer is using .*clips; finish it first"):
        FlowWriter(tmp_path / "clips", num_frames=3, grid=2)
    del writer  # killed
    FlowWriter(tmp_path / "clips", num_frames=3, grid=2)
    assert seeds(FlowReader(tmp_path / "clips")) == [0, 1]


def test_a_closed_writer_takes_no_clips_and_leaves_the_folder_to_the_next(tmp_path):
    folder = tmp_path / "clips"
    first = FlowWriter(folder, num_frames=3, grid=2)
    first.add(a_clip(0))
    first.close()
    with FlowWriter(folder, num_frames=3, grid=2) as second:
        second.add(a_clip(1))
        second.close()
        first.close()
        with pytest.raises(ValueError, match=r"the writer of .*clips is closed; create a new one to append clips"):
            first.add(a_clip(2))
    assert seeds(FlowReader(folder)) == [0, 1]
    assert sum(DatasetInfo.read(folder).shards.values()) == 2


@pytest.mark.parametrize(("grid", "refused"), [(2, False), (3, True)])
def test_a_writer_reads_what_another_wrote_before_it_had_the_folder(grid, refused, tmp_path, monkeypatch):
    folder, held = tmp_path / "clips", writer_module.hold_folder

    def after_another(writer, path):
        monkeypatch.setattr(writer_module, "hold_folder", held)
        with FlowWriter(path, num_frames=3, grid=2, title="Theirs") as other:
            other.add(a_clip(0))
        return held(writer, path)

    monkeypatch.setattr(writer_module, "hold_folder", after_another)
    if refused:
        with pytest.raises(UserError, match="has clips of T=3 and N=2, not T=3 and N=3"):
            FlowWriter(folder, num_frames=3, grid=grid)
    else:
        FlowWriter(folder, num_frames=3, grid=grid).close()
    assert DatasetInfo.read(folder).title == "Theirs"
    FlowWriter(folder, num_frames=3, grid=2).close()  # the lock was given back


def test_a_journal_whose_shard_is_there_is_not_counted_twice(folder):
    shard = folder / "data/train-00000.parquet"
    kept = FlowWriter(folder, num_frames=3, grid=2)
    kept.add(a_clip(11))
    (journal,) = (folder / "data").glob(".*.journal")
    journal.rename(journal.with_name(".train-00000.journal"))
    del kept
    FlowWriter(folder, num_frames=3, grid=2)
    assert seeds(FlowReader(folder, split="train")) == list(range(10))
    assert shard.is_file()


def test_the_datasets_library_reads_it(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in found.items()} == {"train": 10, "test": 1}
    row, clip = found["train"][2], a_clip(2)
    np.testing.assert_array_equal(np.asarray(row["rgb"]), clip.observation.rgb)
    np.testing.assert_allclose(np.asarray(row["flow"]).reshape(3, 2, 2, 4), clip.flow, rtol=1e-6)
    codes = np.asarray(row["depth"], dtype=np.int64)
    np.testing.assert_allclose(codes[1] * row["depth_unit_m"], clip.observation.depth_m[1], atol=0.51e-4)


def test_info_and_card_count_the_contents(folder):
    info = json.loads((folder / "info.json").read_text())
    assert (info["version"], info["num_frames"], info["grid"], info["clips"]) == (1, 3, 2, 11)
    assert info["splits"] == {"test": 1, "train": 10}
    assert info["sources"] == {"arm": 5, "hand": 6}
    assert info["tasks"] == {"place": 8, "pour": 3}
    assert sum(info["shards"].values()) == 11
    clips = [a_clip(seed) for seed in range(11)]
    depths = np.concatenate(
        [np.concatenate([clip.points[..., 2].ravel(), clip.flow[..., 2].ravel()]) for clip in clips]
    )
    for name, share in (("q01", 0.01), ("q50", 0.5), ("q99", 0.99)):
        exact = np.quantile(depths, share, method="inverted_cdf")
        assert info["statistics"]["depth_m"][name] == pytest.approx(exact, abs=0.51e-3)  # half a bin
    moved = [np.median(np.linalg.norm(clip.flow_cam_m[-1] - clip.points_cam_m, axis=-1)) for clip in clips]
    assert info["statistics"]["moved_m"]["max"] == pytest.approx(max(moved), abs=0.51e-3)
    visible = np.mean([clip.visible.mean() for clip in clips])
    assert info["statistics"]["visible"] == pytest.approx(visible, rel=1e-6)
    assert info["statistics"]["quality"]["depth_holes"] == pytest.approx(0.05)
    card = (folder / "README.md").read_text()
    assert "11 clips of 3D flow" in card
    assert "| arm | 5 |" in card
    assert f"{100 * visible:.1f}% of the future points are visible" in card


def test_quantiles_of_bins():
    assert quantile_of({}, 0.5) is None
    assert quantile_of({10: 1, 20: 98, 30: 1}, 0.01) == 0.0105
    assert quantile_of({10: 1, 20: 98, 30: 1}, 0.02) == quantile_of({10: 1, 20: 98, 30: 1}, 0.99) == 0.0205
    assert quantile_of({10: 1, 20: 98, 30: 1}, 1.0) == 0.0305


def test_the_encoding_of_a_data_set_covers_its_depths(folder):
    info = FlowReader(folder).info
    encoding = info.encoding(target="displacement")
    assert (encoding.num_frames, encoding.grid, encoding.target) == (3, 2, "displacement")
    assert 0.49 < encoding.z_min_m < 0.52
    assert 1.18 < encoding.z_max_m < 1.21
    with pytest.raises(UserError, match="no clips"):
        DatasetInfo(3, 2).encoding()


@pytest.mark.parametrize(("name", "wrong"), [("num_frames", {"num_frames": 4, "grid": 2}), ("grid", {"num_frames": 3})])
def test_a_model_of_other_flows_is_refused(folder, name, wrong):
    FlowReader(folder, encoding=FlowEncoding(num_frames=3, grid=2))
    with pytest.raises(UserError, match=f"flows with {name}="):
        FlowReader(folder, encoding=FlowEncoding(**wrong))


def test_clips_and_folders_that_do_not_fit_are_refused(folder, tmp_path):
    with FlowWriter(tmp_path / "new", num_frames=3, grid=2) as writer:
        with pytest.raises(UserError, match=r"\(4, 2, 2, 4\); .* \(3, 2, 2, 4\)"):
            writer.add(a_clip(frames=4))
        with pytest.raises(UserError, match="'a/b'"):
            writer.add(a_clip(), split="a/b")
        lost = a_clip(source="arm")
        lost.flow[1, 0, 0, 0] = np.nan
        with pytest.raises(UserError, match="flow of the clip 'arm', 'do 0', are not finite; lost points keep"):
            writer.add(lost)
    with pytest.raises(UserError, match="has no clips"):
        FlowReader(tmp_path / "new")
    with pytest.raises(UserError, match="T=3 and N=2, not T=5"):
        FlowWriter(folder, num_frames=5, grid=2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        FlowWriter(tmp_path / "other", num_frames=3, grid=2)
    with pytest.raises(UserError, match="file not found"):
        FlowReader(tmp_path / "other")


def test_another_version_is_refused(folder):
    info = json.loads((folder / "info.json").read_text())
    (folder / "info.json").write_text(json.dumps(info | {"version": 2}))
    with pytest.raises(UserError, match=r"version 2; this suite reads .* version 1"):
        FlowReader(folder)


@pytest.mark.parametrize("damage", ["tail", "middle", "gone", "other"])
def test_a_damaged_shard_is_named(folder, damage):
    shard = folder / "data/train-00001.parquet"
    content = bytearray(shard.read_bytes())
    if damage == "gone":
        shard.unlink()
    elif damage == "tail":
        shard.write_bytes(content[:-40])
    elif damage == "other":
        pq.write_table(pq.read_table(shard).replace_schema_metadata(None), shard)
    else:  # a bit inside an image
        place = content.find(b"IDAT") + 20
        content[place] ^= 1
        shard.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00001\.parquet"):
        list(FlowReader(folder, split="train"))


@pytest.mark.parametrize("column", ["K", "T_world_cam"])
def test_a_clip_without_a_camera_is_refused(folder, column):
    shard = folder / "data/test-00000.parquet"
    table = pq.read_table(shard)
    pq.write_table(table.drop_columns([column]), shard)
    with pytest.raises(UserError, match=rf"test-00000\.parquet .*no (intrinsics|pose of the camera): {column} is None"):
        FlowReader(folder, split="test")[0]


def test_far_depths_get_a_coarser_unit(tmp_path):
    assert depth_unit(np.array([[6.55]], np.float32), 1e-4) == 1e-4
    assert depth_unit(np.array([[6.6, np.inf]], np.float32), 1e-4) == 2e-4
    assert depth_unit(np.array([[60.0, np.nan]], np.float32), 1e-4) == 1e-3
    clip = a_clip(depth_m=(20.0, 40.0))
    with FlowWriter(tmp_path / "clips", num_frames=3, grid=2) as writer:
        writer.add(clip)
    read = FlowReader(tmp_path / "clips")[0].observation.depth_m
    known = np.isfinite(clip.observation.depth_m)
    np.testing.assert_allclose(read[known], clip.observation.depth_m[known], atol=0.5e-3 + 4e-6, rtol=0)


def test_the_fingerprint_distinguishes_selections_and_data(folder):
    prints = [FlowReader(folder).fingerprint(), FlowReader(folder, split="train").fingerprint()]
    assert FlowReader(folder).fingerprint() == prints[0]
    with FlowWriter(folder, num_frames=3, grid=2) as writer:
        writer.add(a_clip(12))
    assert len({*prints, FlowReader(folder).fingerprint()}) == 3


def test_instructions_are_those_of_the_selected_clips(folder):
    for options in ({}, {"split": "train"}):
        reader = FlowReader(folder, **options)
        assert reader.instructions() == list(dict.fromkeys(clip.observation.instruction for clip in reader))


def test_drifted_clips_end_next_to_the_true_ones(folder):
    true = list(FlowReader(folder, split="train"))
    wrong = drifted_clips(str(folder), split="train", drift_cm=(4.0, 0.0, -2.0))
    assert len(wrong) == len(true)
    way = np.array([c.flow_cam_m for c in wrong]) - np.array([c.flow_cam_m for c in true])
    np.testing.assert_allclose(way[:, -1], np.broadcast_to([0.04, 0.0, -0.02], way[:, -1].shape), atol=1e-9)
    share = (np.arange(way.shape[1]) + 1)[:, None, None] / way.shape[1]
    np.testing.assert_allclose(way, share * way[:, -1:], atol=1e-9)
    assert all(np.array_equal(a.flow[..., 3], b.flow[..., 3]) for a, b in zip(wrong, true, strict=True))
    with pytest.raises(UserError, match="must be three finite numbers"):
        drifted_clips(str(folder), drift_cm=(1.0, 2.0))
