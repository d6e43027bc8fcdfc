"""The campaign detects kills, hangs, crashes, tracebacks, differences and processes left behind."""

import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.data import EpisodeWriter, robot_features
from tests.faults import batches, children
from tests.faults.batches import InputCampaign, Kind, Verdict, of_call, of_command
from tests.faults.children import Nursery
from tests.faults.damage import damage_bytes, damage_text, damage_tree
from tests.faults.sameness import differences
from tests.faults.stages import Kill, Watch


def write_three(child, folder, kill=None):
    """Three files, each through a temporary name, with stages installed."""
    watch = Watch(child, folder, kill)
    watch.install()
    for number in range(3):
        (folder / "samples").mkdir(exist_ok=True)
        partial = folder / f"samples/{number}.partial"
        partial.write_text("whole")
        partial.rename(folder / f"samples/{number}.txt")
    (folder.parent / "counts.json").write_text(json.dumps(watch.counts))
    return 0


def test_a_kill_hits_every_file_operation_before_it_happens(tmp_path):
    nursery = Nursery()
    run = tmp_path / "run"
    run.mkdir()
    assert nursery.run(lambda child: write_three(child, run), limit_s=60).code == 0
    total = json.loads((tmp_path / "counts.json").read_text())["files:samples"]
    assert total == 3 * 3  # mkdir, open, rename
    for place, files in ((1, []), (2, []), (3, ["0.partial"]), (4, ["0.txt"]), (9, ["0.txt", "1.txt", "2.partial"])):
        folder = tmp_path / f"killed-{place}"
        folder.mkdir()
        ending = nursery.run(lambda child, f=folder, p=place: write_three(child, f, Kill("files:samples", p)), 60)
        assert ending.killed
        assert ending.stage == "files:samples"
        assert sorted(path.name for path in folder.rglob("*.*")) == files


def test_a_torn_write_leaves_half_a_file(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    kill = Kill("files:samples", 2, torn=True)
    assert Nursery().run(lambda child: write_three(child, run, kill), 60).killed
    assert (run / "samples/0.partial").read_text() == "{"


def test_times_hangs_and_exit_codes_are_distinguished(tmp_path):
    nursery = Nursery()
    timed = nursery.run(lambda child: time.sleep(60), limit_s=60, kill_after_s=0.1)
    assert (timed.killed, timed.hung) == (True, False)
    hanging = nursery.run(lambda child: time.sleep(60), limit_s=0.2)
    assert (hanging.killed, hanging.hung) == (False, True)
    assert nursery.run(lambda child: 3, limit_s=60).code == 3
    raised = nursery.run(lambda child: {}["nothing"], limit_s=60)
    assert raised.code == 70
    assert "KeyError" in raised.output


def test_a_process_that_outlives_its_run_is_noted_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "LINGER_SECONDS", 0.3)
    nursery = Nursery()
    words = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

    def start(child):
        subprocess.Popen(words, start_new_session=True)
        child.die()

    assert nursery.run(start, limit_s=60).killed
    nursery.close()
    assert len(nursery.left_behind) == 1
    assert "time.sleep(600)" in nursery.left_behind[0]


def attempt(prepared, rng, folder):
    """Each possible fault in turn."""
    assert not list(folder.iterdir())
    number = int((folder.parent / "number").read_text())
    (folder.parent / "number").write_text(str(number + 1))
    faulthandler.disable()  # pytest's, whose report of the crash would only confuse
    if number == 1:
        time.sleep(60)
    if number == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 3:
        return of_call(lambda: {}["x"])
    if number == 4:
        return of_call(lambda: (_ for _ in ()).throw(UserError("no")))
    return Verdict("done")


def prepare(folder):
    (folder.parent / "number").write_text("0")


def test_hangs_crashes_and_tracebacks_cost_their_case_only(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "GRACE_S", 0.2)
    campaign = InputCampaign(tmp_path, 0, (Kind("toy", prepare, attempt, limit_s=0.3),))
    campaign.run(8, say=lambda line: None)
    found = campaign.counts["toy"]
    crash = f"crash: exit None, signal {int(signal.SIGSEGV)}"
    assert found == {"done": 4, "hang": 1, crash: 1, "traceback": 1, "refused": 1}
    assert [fault["number"] for fault in campaign.faults] == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "outcome"),
    [(("list", "recipes"), "done"), (("train", "nowhere.yaml"), "refused"), (("trian",), "refused")],
)
def test_commands_are_judged_by_code_and_line(words, outcome):
    assert of_command(*words).outcome == outcome


def test_two_lines_or_a_traceback_are_not_accepted(monkeypatch):
    for text, outcome in (("mmrl: error: a\nmmrl: error: b\n", "more than one line"), ("mmrl: error: a\n", "refused")):
        monkeypatch.setattr(batches, "main", lambda words, text=text: (sys.stderr.write(text), 2)[1])
        assert of_command("train").outcome == outcome
    monkeypatch.setattr(batches, "main", lambda words: {}["x"])
    assert of_command("train").outcome == "traceback"
    monkeypatch.setattr(batches, "main", lambda words: (sys.stderr.write("mmrl: unexpected\n"), 1)[1])
    assert of_command("train").outcome == "exit 1"


def test_damage_follows_from_the_seed_and_changes_something():
    tree, text, data = {"a": {"b": [1, 2, {"c": "x"}]}, "d": 4}, "one\ntwo\nthree", bytes(range(200))
    for damage, sound in ((damage_tree, tree), (damage_text, text), (damage_bytes, data)):
        found = [repr(damage(random.Random(seed), sound)) for seed in range(50)]
        assert found == [repr(damage(random.Random(seed), sound)) for seed in range(50)]
        assert sum(one != repr(sound) for one in found) > 40
        assert len(set(found)) > 25
    assert tree == {"a": {"b": [1, 2, {"c": "x"}]}, "d": 4}


def write_run(folder, reward=1.0, seconds=1.0, weight=0.5):
    (folder / "checkpoints/step-000001").mkdir(parents=True)
    rows = [{"step": step, "reward/mean": reward * step, "time/step": seconds} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = {"weights": torch.tensor([weight, -0.0]), "totals": {"seconds": seconds, "samples": 3}}
    torch.save(state, folder / "checkpoints/step-000001/state.pt")
    return folder


def test_runs_are_compared_bit_for_bit_apart_from_times(tmp_path):
    first = write_run(tmp_path / "first")
    assert differences(first, write_run(tmp_path / "slower", seconds=9.0)) == []
    (reward,) = differences(first, write_run(tmp_path / "other", reward=1.0000001))
    assert reward.startswith("metrics.jsonl: [0].reward/mean: 1.0 and 1.0000001")
    (weights,) = differences(first, write_run(tmp_path / "moved", weight=0.50000006))
    assert weights == "checkpoints/step-000001/state.pt: .weights: other numbers"
    more = write_run(tmp_path / "more")
    os.remove(more / "metrics.jsonl")
    assert differences(first, more) == ["metrics.jsonl only in first"]


def test_a_dataset_is_compared_by_its_episodes_and_not_by_its_files(tmp_path):
    def record(name, sessions):
        episodes = iter(range(3))
        for count in sessions:
            with EpisodeWriter(tmp_path / name / "record", 10, robot_features(state=1, action=1), "arm") as writer:
                for _ in range(count):
                    value = np.full((2, 1), next(episodes), np.float32)
                    writer.add_episode(value, value + (name == "other"), {}, task="push", success=True)
        return tmp_path / name

    whole, continued, other = record("whole", [3]), record("continued", [1, 2]), record("other", [3])
    assert len(list((continued / "record/data").rglob("*.parquet"))) == 2
    assert differences(whole, continued) == []
    assert "record: other episodes" in differences(whole, other)
