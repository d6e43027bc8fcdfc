import json
import math

import pytest
from PIL import Image

from mmrl.comparison import run
from mmrl.comparison.run import run_experiment
from mmrl.errors import RunError, UserError
from mmrl.runs.statistics import paired_difference
from tests.compare.lab import EXPERIMENT


def test_arms_run_on_every_seed_and_are_paired(lab):
    result = lab.run()
    assert result["status"] == "done"
    assert result["arms"]["papo"]["values"] == pytest.approx({"1": 0.56, "2": 0.57, "3": 0.58})
    assert result["arms"]["grpo"]["values"] == pytest.approx({"1": 0.51, "2": 0.52, "3": 0.53})
    assert result["arms"]["grpo"]["mean"] == pytest.approx(0.52)
    difference = result["differences"]["papo"]
    expected = paired_difference([0.56, 0.57, 0.58], [0.51, 0.52, 0.53])
    shown = [difference[key] for key in ("mean", "low", "high", "n", "wins")]
    assert shown == pytest.approx(list(expected))
    assert difference["missing_seeds"] == []
    assert result["failures"] == []
    assert result["budget"] == EXPERIMENT["budget"]
    assert "gain=0.05" in result["arms"]["papo"]["command"]
    assert result["command"].startswith("mmrl compare ")
    assert Image.open(lab.output / "comparison.png").size[0] > 1000
    assert any("3 wins in 3 pairs" in line for line in lab.lines)


def test_every_run_gets_its_seed_its_folder_and_one_thread(lab):
    lab.run(overrides={"trainer": {"steps": 10}}, jobs=1)
    settings = json.loads((lab.output / "runs/papo/seed-2/settings.json").read_text())
    assert settings["seed"] == "2"
    assert settings["trainer.steps"] == "10"
    assert settings["threads"] == "1"
    assert settings["output_dir"] == str(lab.output / "runs/papo/seed-2")


def test_finished_runs_are_not_repeated(lab):
    first = lab.run()
    assert lab.run() == first
    assert lab.starts("runs/papo/seed-1") == ["fresh"]
    assert "6 of 6 runs have already finished" in lab.lines


def test_new_seeds_are_added_to_finished_ones(lab):
    lab.run(seeds=[1, 2])
    assert set(lab.run(seeds=[1, 2, 7])["arms"]["papo"]["values"]) == {"1", "2", "7"}
    assert lab.starts("runs/papo/seed-1") == ["fresh"]


@pytest.mark.slow
def test_a_changed_setting_repeats_the_run(lab):
    lab.run()
    changed = lab.run(arms={"papo": {"overrides": {"gain": 0.2}}, "grpo": {}})
    assert changed["differences"]["papo"]["mean"] == pytest.approx(0.2)
    assert lab.starts("runs/grpo/seed-1") == ["fresh"]
    replaced = json.loads((lab.output / "runs/papo/seed-1.replaced-1/settings.json").read_text())
    assert replaced["gain"] == "0.05"
    (lab.folder / "base.yaml").write_text("recipe: papo\nextends: parent.yaml\n")
    (lab.folder / "parent.yaml").write_text("a: 1\n")
    lab.run(arms={"papo": {"overrides": {"gain": 0.2}}, "grpo": {}})
    (lab.folder / "parent.yaml").write_text("a: 2\n")
    lab.run(arms={"papo": {"overrides": {"gain": 0.2}}, "grpo": {}})
    assert "6 of 6 runs have already finished" not in lab.lines


def test_a_setting_that_the_sweep_overrides_again_does_not_repeat_it(lab):
    sweep = {"parameter": "trainer.learning_rate", "values": [0.01], "seeds": [9], "overrides": {"steps": 4}}
    lab.run(overrides={"steps": 40}, sweep=sweep)
    lab.run(overrides={"steps": 50}, sweep=sweep)
    assert lab.starts("sweep/papo/0.01/seed-9") == ["fresh"]  # 4 steps, whatever the comparison has
    assert (lab.output / "runs/grpo/seed-1.replaced-1").is_dir()


def test_an_interrupted_run_continues_from_its_checkpoint(lab):
    lab.run()
    run = lab.output / "runs/papo/seed-2"
    (run / "result.json").unlink()
    (run / "checkpoints/step-000005").mkdir(parents=True)
    lab.run()
    assert lab.starts("runs/papo/seed-2") == ["fresh", "resume"]


def test_an_interrupted_run_without_checkpoint_starts_again(lab):
    lab.run()
    (lab.output / "runs/papo/seed-2/result.json").unlink()
    lab.run()
    assert lab.starts("runs/papo/seed-2") == ["fresh"]
    assert (lab.output / "runs/papo/seed-2/result.json").exists()


def test_finished_runs_can_leave_their_checkpoints(lab):
    options = {"sweep": {"values": [0.01], "seeds": [9]}, "overrides": {"saves": 1}, "seeds": [1]}
    prepare = [{"config": "base.yaml", "run_dir": "start", "overrides": {"saves": 1}}]
    lab.run(**options, prepare=prepare, keep_checkpoints=False)
    assert [path.parts[-3] for path in lab.output.rglob("step-*")] == ["start"]
    # an experiment that has run is not repeated for them
    lab.run(**options, prepare=prepare, keep_checkpoints=False)
    assert lab.starts("runs/papo/seed-1") == ["fresh"]
    lab.run(**{**options, "seeds": [2]})
    assert "runs/papo/seed-2/checkpoints/step-000010" in {
        str(path.relative_to(lab.output)) for path in lab.output.rglob("step-*")
    }


def test_a_failed_run_is_counted_and_its_pair_is_listed(lab, monkeypatch):
    arms = {"papo": {"overrides": {"gain": 0.05, "trouble2": "crash"}}, "grpo": {}}
    result = lab.run(arms=arms)
    assert result["arms"]["papo"]["values"]["2"] is None
    assert result["differences"]["papo"]["missing_seeds"] == [2]
    assert result["differences"]["papo"]["n"] == 2
    failure = {"run": "runs/papo/seed-2", "reason": "exit code 1: loss is NaN"}
    assert result["failures"] == [failure]
    assert "papo - grpo: no pair for seeds 2" in lab.lines
    assert lab.run(only_report=True, arms=arms) == result
    monkeypatch.setenv("MENDED", "1")
    (lab.output / "runs/papo/seed-2/checkpoints/step-000005").mkdir(parents=True)
    mended = lab.run(arms=arms)
    assert mended["failures"] == []
    assert mended["differences"]["papo"]["n"] == 3
    assert lab.starts("runs/papo/seed-2") == ["fresh"]  # not continued: it would fail again


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("hang", "its time limit"),
        ("unfinished", "without a result.json with status done"),
        ("silent", "'accuracy/greedy' is not a number in its last evaluation, which has: n, split, step, tag"),
    ],
)
def test_every_kind_of_failure_is_named(lab, trouble, reason, monkeypatch):
    poll = run._poll
    limit_s = {True: 0.1, False: math.inf}  # however slow the machine, only the run that hangs is out of time
    monkeypatch.setattr(
        run, "_poll", lambda entry, _: poll(entry, limit_s[{"trouble1=hang", "seed=1"} <= {*entry.job.command}])
    )
    arms = {"papo": {"overrides": {"trouble1": trouble}}, "grpo": {}}
    result = lab.run(arms=arms, seeds=[1, 2])
    assert [failure["run"] for failure in result["failures"]] == ["runs/papo/seed-1"]
    assert reason in result["failures"][0]["reason"]
    assert result["differences"]["papo"]["missing_seeds"] == [1]


def test_no_finished_pair_is_a_failed_run(lab):
    arms = {"papo": {"overrides": {"trouble1": "crash"}}, "grpo": {"overrides": {"trouble2": "crash"}}}
    with pytest.raises(RunError, match=r"no pair of runs has finished: 2 run\(s\) failed.*loss is NaN"):
        lab.run(arms=arms, seeds=[1, 2])
    assert lab.result()["arms"]["papo"]["values"] == pytest.approx({"1": None, "2": 0.52})
    with pytest.raises(RunError, match="nothing has run yet"):
        run_experiment(lab.write(), lab.folder / "empty", only_report=True, announce=lab.lines.append)


def test_a_report_without_a_pair_leaves_an_earlier_one(lab):
    result = lab.run()
    pictures = {path: path.read_bytes() for path in lab.output.glob("*.png")}
    assert pictures
    with pytest.raises(RunError, match="no pair of runs has finished"):
        lab.run(only_report=True, seeds=[101, 102])
    assert lab.result() == result
    assert all(path.read_bytes() == content for path, content in pictures.items())


def test_a_rejected_configuration_stops_the_experiment(lab):
    arms = {"papo": {"overrides": {"trouble1": "config"}}, "grpo": {}}
    with pytest.raises(UserError, match=r"runs/papo/seed-1 was rejected.*trainer\.stepz"):
        lab.run(arms=arms, jobs=1)
    assert not (lab.output / "runs/grpo").exists()


def test_results_are_written_during_the_runs(lab):
    seen = []

    def command(plan, resume):
        path = lab.output / "comparison.json"
        seen.append(json.loads(path.read_text())["status"] if path.exists() else None)
        return lab.command(plan, resume)

    run_experiment(lab.write(jobs=1), lab.output, command=command, announce=lab.lines.append)
    assert "running" in seen
    assert lab.result()["status"] == "done"
    assert not list(lab.output.rglob("*.partial"))


def test_one_pair_has_no_interval(lab):
    result = lab.run(seeds=[4])
    assert result["differences"]["papo"]["mean"] == pytest.approx(0.05)
    assert result["differences"]["papo"]["low"] is None
