"""Findings of `mmrl watch` from folders: states, progress, warnings, samples and the queue of a comparison."""

import json
import math
import re

import numpy as np
import pytest
from PIL import Image

from mmrl.cli import main
from mmrl.cli.watch.folders import WatchedFolders, lines, planned_runs, sparkline
from mmrl.cli.watch.server import _curves, charts, differences
from mmrl.comparison.plans import sweep_label
from mmrl.errors import UserError
from mmrl.runs.records import SampleRecord, write_samples
from tests.cli.watch.runs import append, lock, make_run


def watched(*folders):
    found = WatchedFolders(folders)
    found.refresh(math.inf)
    return found


def only(folder):
    (run,) = watched(folder).runs.values()
    return run


@pytest.mark.parametrize(
    ("prepare", "state"),
    [
        (lambda folder: lock(folder), "running"),
        (lambda folder: lock(folder, host="elsewhere"), "running"),
        (lambda folder: lock(folder, process=2**22 + 1), "stopped"),
        (lambda folder: (folder / "result.json").write_text('{"status": "done"}'), "finished"),
        (lambda folder: (folder / "result.json").write_text('{"status": "nothing_learned", "reason": "no"}'), "failed"),
        (lambda folder: (folder / "experiment_run.json").write_text('{"failed": "out of memory"}'), "failed"),
        (lambda folder: (folder / "mmrl-crash-1.txt").write_text("Traceback\nValueError: broken\n"), "failed"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "waiting"),
    ],
)
def test_state_of_a_run(prepare, state, tmp_path):
    prepare(make_run(tmp_path / "run"))
    found, reason = only(tmp_path / "run").state()
    assert found == state
    assert bool(reason) == (state == "failed")


def test_progress_follows_the_file(tmp_path):
    folder = make_run(tmp_path / "run", steps=3, total=10)
    lock(folder)
    found = watched(folder)
    assert [(run["step"], run["steps"], run["left_s"]) for run in (r.status() for r in found.runs.values())] == [
        (3, 10, 7)
    ]
    append(folder / "metrics.jsonl", {"step": 4, "time": 1010.0, "reward/mean": 0.4})
    found.refresh()
    (status,) = (run.status() for run in found.runs.values())
    assert (status["step"], status["left_s"]) == (4, 18)  # 9 s for the last three steps
    assert ("reward", "0.4") in status["headline"]


def test_what_failed_is_told(tmp_path):
    folder = make_run(tmp_path / "run", **{"reward/errors": 2, "sim/crashed": 5, "optim/skipped": 0})
    append(folder / "warnings.jsonl", {"step": 2, "kind": "x", "message": "all rewards are equal"})
    (folder / "failures").mkdir()
    (folder / "failures" / "crash.txt").write_text("Traceback:\n\nRuntimeError: gripper\x1b[31m\n\n")
    assert only(folder).notes() == [
        "all rewards are equal",
        "reward/errors: 6 in 3 steps",
        "sim/crashed: 5",
        "crash.txt: RuntimeError: gripper\ufffd[31m",
    ]


def test_samples_of_a_step(tmp_path):
    folder = make_run(tmp_path / "run")
    image = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
    record = SampleRecord("q", "how many?", "<b>7</b>", "7", [image], reward=1.0, terms={"exact": 1.0}, correct=True)
    write_samples(folder, 20, "train", [record])
    (folder / "videos").mkdir()
    (folder / "videos" / "step-000030-held-success-a.1.mp4").write_bytes(b"film")
    run = only(folder)
    assert run.sample_steps() == [20, 30]
    (row,) = run.samples(20)["splits"]["train"]
    assert (row["response"], row["reward"], row["terms"]) == ("<b>7</b>", 1.0, {"exact": 1.0})
    assert run.file(row["images"][0]).read_bytes()[1:4] == b"PNG"
    (video,) = run.samples(30)["videos"]
    assert run.file(video).read_bytes() == b"film"


def test_texts_of_samples_are_those_of_the_report(tmp_path):
    folder = make_run(tmp_path / "run")
    prompt = "<|im_start|>user\nhow many?<|im_end|>\n<|im_start|>assistant\n"
    write_samples(folder, 20, "train", [SampleRecord("q", prompt, "7\n\n\n\n\n", "7", [])])
    (row,) = only(folder).samples(20)["splits"]["train"]
    assert row["question"] == "how many?"
    assert row["prompt"] == prompt
    assert row["response"] == "7\\n×5"


def test_only_images_and_videos_of_the_folder_are_served(tmp_path):
    folder = make_run(tmp_path / "run")
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    (folder / "samples" / "step-000001").mkdir(parents=True)
    (folder / "samples" / "step-000001" / "link.png").symlink_to(secret)
    run = only(folder)
    inside = "samples/step-000001"
    for path in (
        f"{inside}/link.png",
        f"{inside}/../../../secret.png",
        str(secret),
        "config.yaml",
        "metrics.jsonl",
        "",
    ):
        assert run.file(path) is None


def test_curves_of_several_runs_lie_over_one_another(tmp_path):
    one, two = make_run(tmp_path / "one", steps=3, **{"time/x": 1}), make_run(tmp_path / "two", steps=5)
    interval = {"accuracy/greedy": 0.5, "accuracy/greedy/low": 0.4, "accuracy/greedy/high": 0.6}
    append(two / "evaluations.jsonl", {"step": 0, "tag": "before", "split": "held", **interval})
    append(two / "evaluations.jsonl", {"step": 9, "tag": "evaluate", "split": "held", **interval})
    runs = list(watched(one, two).runs.values())
    found = {chart["title"]: chart for chart in charts(runs)}
    assert [(one["run"], one["step"]) for one in found["Reward"]["series"]] == [
        ("one", [1, 2, 3]),
        ("two", [1, 2, 3, 4, 5]),
    ]
    (accuracy,) = found["Accuracy on held, greedy"]["series"]
    assert [accuracy[key] for key in ("run", "step", "mean", "low", "high")] == ["two", [0], [50], [40], [60]]
    assert found["Accuracy on held, greedy"]["unit"] == "%"
    assert found["time"]["more"]
    assert differences(runs) == [{"option": "seed", "values": ["3", "5"]}]


def comparison(folder):
    arm = {"n": 1, "mean": 0.5, "low": None, "high": None, "chosen": {"lr": 0.1}, "command": "mmrl train x output_dir="}
    content = {
        "status": "running",
        "name": "trial",
        "metric": "accuracy/greedy",
        "seeds": [11, 12],
        "sweep": {"seeds": [1], "arms": {"a": {"rows": [{"value": 0.1}, {"value": "b c"}]}}},
        "arms": {
            name: {**arm, "command": f"mmrl train x.yaml 'output_dir={folder}/runs/a/seed-11'"}
            for name in ("a", "start")
        },
        "differences": {"start": {"mean": -0.05, "low": -0.1, "high": 0.0, "n": 2}},
    }
    folder.mkdir()
    (folder / "comparison.json").write_text(json.dumps(content))
    return content


def test_queue_of_a_comparison(tmp_path):
    folder = tmp_path / "out put"
    content = comparison(folder)
    assert list(planned_runs(content)) == [
        "sweep/a/0.1/seed-1",
        sweep_label("a", "b c", 1),
        "runs/a/seed-11",
        "runs/a/seed-12",
    ]
    make_run(folder / "base", status="done")
    make_run(folder / "sweep/a/0.1/seed-1", status="done")
    make_run(folder / "runs/a/seed-11.replaced-1")
    lock(make_run(folder / "runs/a/seed-11"))
    (shown,) = watched(folder).comparisons()
    assert [(entry["label"], entry["state"]) for entry in shown["queue"]] == [
        ("base", "finished"),
        ("sweep/a/0.1/seed-1", "finished"),
        (sweep_label("a", "b c", 1), "waiting"),
        ("runs/a/seed-11", "running"),
        ("runs/a/seed-12", "waiting"),
    ]
    assert shown["counts"] == {"finished": 2, "waiting": 2, "running": 1}
    assert [arm["difference"] for arm in shown["arms"]] == ["–", "-5.0 [-10.0, +0.0]"]
    assert shown["queue"][3]["run"] == "out put/runs/a/seed-11"


def test_text(tmp_path, capsys):
    folder = make_run(tmp_path / "run", status="done")
    (tmp_path / "other").mkdir()
    assert main(["watch", str(folder), str(tmp_path / "other"), "--text", "--once"]) == 0
    shown = capsys.readouterr().out
    assert "run · finished · step 3 of 10 · updated " in shown
    assert "▁▅█" in shown
    assert "other · waiting" in shown
    assert sparkline([1.0, 1.0]) == "▁▁"
    comparison(tmp_path / "trial")
    assert next(lines(watched(tmp_path / "trial"))) == "trial: 4 waiting"


def test_the_headline_is_of_the_first_split_and_each_split_has_a_curve(tmp_path, capsys):
    folder = make_run(tmp_path / "run", status="done")
    rows = [
        {"step": step, "split": split, "n": 10, "accuracy/greedy": value + step / 10}
        for step in (0, 3)
        for split, value in (("heldout", 0.5), ("blind", 0.1))
    ]
    append(folder / "evaluations.jsonl", *rows)
    assert main(["watch", str(folder), "--text", "--once"]) == 0
    shown = capsys.readouterr().out
    assert "greedy on heldout, step 3 80.0%" in shown
    assert re.search(r"greedy on heldout +▁█ +0\.8 ", shown)
    assert re.search(r"greedy on blind +▁█ +0\.4 ", shown)


def test_bad_arguments(tmp_path, capsys):
    with pytest.raises(UserError, match="folder not found"):
        WatchedFolders([tmp_path / "none"])
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert main(["watch", str(tmp_path), "--port", "70000"]) == 2
    assert "must be from 0 to 65535" in capsys.readouterr().err


def test_runs_of_folders_with_equal_ends_have_names_of_their_own(tmp_path):
    for name in ("one/arm/seed-1", "two/arm/seed-1"):
        make_run(tmp_path / name)
    assert list(watched(tmp_path / "one/arm/seed-1", tmp_path / "two/arm/seed-1").runs) == [
        "one/arm/seed-1",
        "two/arm/seed-1",
    ]


def test_a_run_that_stays_at_zero_is_drawn_and_may_have_a_comma_in_its_name(tmp_path):
    for name, reward in (("lr=1,kl=2", 0.0), ("other", 0.5)):
        (tmp_path / name).mkdir()
        for step in (1, 2):
            append(tmp_path / name / "metrics.jsonl", {"step": step, "reward/mean": reward})
    found = _curves(watched(tmp_path / "lr=1,kl=2", tmp_path / "other"), {"runs": "lr=1,kl=2\0other"})
    assert [one["run"] for one in found["charts"][0]["series"]] == ["lr=1,kl=2", "other"]
