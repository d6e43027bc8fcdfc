import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from PIL import Image

from mmrl.compare import figures
from mmrl.compare.experiment import load_experiment
from mmrl.compare.jobs import Job, run_jobs
from mmrl.compare.overrides import dotted_overrides
from mmrl.compare.plans import plan_arm_run
from mmrl.compare.run import run_experiment, train_command
from mmrl.errors import RunError, UserError
from mmrl.runs.statistics import paired_difference

# Stands for `mmrl train CONFIG a.b=c ... output_dir=...`: the accuracy follows from the seed, the learning rate
# (best at 0.01, or at `best`) and `gain`; `trouble` makes it fail in one of the ways a run can fail.
RUNNER = """
import json, os, sys, time
from pathlib import Path

settings = dict(text.split("=", 1) for text in sys.argv[2:] if "=" in text)
seed, run_dir = int(settings.get("seed", 0)), Path(settings["output_dir"])
trouble = settings.get(f"trouble{seed}", "")
(run_dir / "started").open("a").write("resume " if "--resume" in sys.argv else "fresh ")
if trouble == "config":
    print("mmrl: unknown key 'trainer.stepz'")
    sys.exit(2)
if trouble == "crash" and not os.environ.get("MENDED"):
    print("loss is NaN")
    sys.exit(1)
if trouble == "hang":
    time.sleep(60)
rate = float(settings.get("trainer.learning_rate", 0.01))
value = 0.5 + 0.01 * seed + float(settings.get("gain", 0)) - abs(rate - float(settings.get("best", 0.01)))
with (run_dir / "evaluations.jsonl").open("w") as file:
    for step, share in ((0, 0.0), (5, 0.5), (10, 1.0)):
        for split, shift in (("test", 0.0), ("hard", -0.1)):
            accuracy = 0.1 + (value - 0.1) * share + shift
            record = {"step": step, "tag": "during", "split": split, "n": 9}
            record[settings.get("metric_name", "accuracy/greedy")] = accuracy
            if trouble == "silent":
                del record["accuracy/greedy"]
            file.write(json.dumps(record) + "\\n")
(run_dir / "metrics.jsonl").write_text(json.dumps({"step": 10, "policy/entropy": 1.0 + seed}) + "\\n")
(run_dir / "settings.json").write_text(json.dumps({**settings, "threads": os.environ["OMP_NUM_THREADS"]}))
if trouble != "unfinished":
    (run_dir / "result.json").write_text(json.dumps({"status": "done"}))
"""
EXPERIMENT = {
    "name": "look or copy",
    "base": "base.yaml",
    "arms": {"papo": {"overrides": {"gain": 0.05}}, "grpo": None},
    "baseline": "grpo",
    "seeds": [1, 2, 3],
    "metric": "accuracy/greedy",
    "budget": "10 steps of 8 x 8 samples in every arm",
    "jobs": 3,
}


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


class Lab:
    """An experiment file, the fake runner and what came out."""

    def __init__(self, folder):
        self.folder, self.output, self.lines, self.started = folder, folder / "out", [], []
        (folder / "runner.py").write_text(RUNNER)
        (folder / "base.yaml").write_text("recipe: papo\n")

    def command(self, plan, resume):
        command = train_command(plan, resume)
        return [sys.executable, str(self.folder / "runner.py"), *command[4:]]

    def write(self, **changes):
        content = {key: value for key, value in {**EXPERIMENT, **changes}.items() if value is not None}
        path = self.folder / "experiment.yaml"
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
        return path

    def run(self, only_report=False, **changes):
        self.lines.clear()
        path = self.write(**changes)
        announce = self.lines.append
        run_experiment(path, self.output, only_report=only_report, command=self.command, announce=announce)
        return self.result()

    def result(self):
        return json.loads((self.output / "comparison.json").read_text())

    def starts(self, label):
        path = self.output / label / "started"
        return path.read_text().split() if path.exists() else []


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
    assert "6 of 6 runs are finished already" in lab.lines


def test_new_seeds_run_beside_the_finished_ones(lab):
    lab.run(seeds=[1, 2])
    assert set(lab.run(seeds=[1, 2, 7])["arms"]["papo"]["values"]) == {"1", "2", "7"}
    assert lab.starts("runs/papo/seed-1") == ["fresh"]


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
    assert "6 of 6 runs are finished already" not in lab.lines


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
        ("unfinished", "without a result.json that says done"),
        ("silent", "'accuracy/greedy' is no number in its last evaluation, which has: n, split, step, tag"),
    ],
)
def test_every_kind_of_failure_is_named(lab, trouble, reason):
    arms = {"papo": {"overrides": {"trouble1": trouble}}, "grpo": {}}
    result = lab.run(arms=arms, seeds=[1, 2], timeout_s=2.0)
    assert [failure["run"] for failure in result["failures"]] == ["runs/papo/seed-1"]
    assert reason in result["failures"][0]["reason"]
    assert result["differences"]["papo"]["missing_seeds"] == [1]


def test_no_finished_pair_is_a_failed_run(lab):
    arms = {"papo": {"overrides": {"trouble1": "crash"}}, "grpo": {"overrides": {"trouble2": "crash"}}}
    with pytest.raises(RunError, match=r"no pair of runs finished: 2 run\(s\) failed.*loss is NaN"):
        lab.run(arms=arms, seeds=[1, 2])
    assert lab.result()["arms"]["papo"]["values"] == pytest.approx({"1": None, "2": 0.52})
    with pytest.raises(RunError, match="nothing has run yet"):
        run_experiment(lab.write(), lab.folder / "empty", only_report=True, announce=lab.lines.append)


def test_a_report_without_a_pair_leaves_an_earlier_one(lab):
    result = lab.run()
    pictures = {path: path.read_bytes() for path in lab.output.glob("*.png")}
    assert pictures
    with pytest.raises(RunError, match="no pair of runs finished"):
        lab.run(only_report=True, seeds=[101, 102])
    assert lab.result() == result
    assert all(path.read_bytes() == content for path, content in pictures.items())


def test_a_rejected_configuration_stops_the_experiment(lab):
    arms = {"papo": {"overrides": {"trouble1": "config"}}, "grpo": {}}
    with pytest.raises(UserError, match=r"runs/papo/seed-1 was rejected.*trainer\.stepz"):
        lab.run(arms=arms, jobs=1)
    assert not (lab.output / "runs/grpo").exists()


def test_the_sweep_chooses_a_value_for_each_arm(lab):
    sweep = {"values": [0.001, 0.01, 0.1], "seeds": [11, 12]}
    result = lab.run(sweep=sweep, seeds=[1, 2])
    assert result["sweep"]["chosen"] == {"papo": 0.01, "grpo": 0.01}
    rows = result["sweep"]["arms"]["grpo"]["rows"]
    assert [row["mean"] for row in rows] == pytest.approx([0.606, 0.615, 0.525])
    assert rows[0]["values"] == pytest.approx({"11": 0.601, "12": 0.611})
    assert result["sweep"]["arms"]["grpo"]["at_edge"] is False
    assert result["arms"]["papo"]["chosen"] == {"trainer.learning_rate": 0.01}
    settings = json.loads((lab.output / "runs/papo/seed-1/settings.json").read_text())
    assert settings["trainer.learning_rate"] == "0.01"


def test_a_shared_sweep_chooses_the_value_of_the_best_mean_over_arms(lab):
    arms = {"papo": {"overrides": {"best": 0.005}}, "grpo": {}}
    sweep = {"values": [0.001, 0.01], "seeds": [11, 12]}
    assert lab.run(arms=arms, sweep=sweep, seeds=[1])["sweep"]["chosen"] == {"papo": 0.001, "grpo": 0.01}
    result = lab.run(arms=arms, sweep={**sweep, "shared": True}, seeds=[1])
    assert result["sweep"]["chosen"] == {"papo": 0.01, "grpo": 0.01}
    assert {arm: result["arms"][arm]["chosen"]["trainer.learning_rate"] for arm in arms} == {"papo": 0.01, "grpo": 0.01}
    assert lab.starts("sweep/papo/0.001/seed-11") == ["fresh"]  # the runs of the sweep are the same


def test_a_shared_sweep_leaves_out_values_that_an_arm_did_not_finish(lab):
    sweep = {"values": [0.01, 0.1], "seeds": [11, 12], "shared": True}
    arms = {"papo": {"overrides": {"trouble12": "crash"}}, "grpo": {}}
    with pytest.raises(RunError, match="no value of the sweep finished in all arms"):
        lab.run(arms=arms, sweep=sweep)


def test_runs_of_the_sweep_may_be_shorter(lab):
    sweep = {"values": [0.001, 0.01], "seeds": [11], "overrides": {"trainer": {"steps": 1}}}
    result = lab.run(sweep=sweep, seeds=[1, 2], overrides={"trainer.steps": 3})
    assert result["sweep"]["overrides"] == {"trainer": {"steps": 1}}
    short = json.loads((lab.output / "sweep/papo/0.01/seed-11/settings.json").read_text())
    long = json.loads((lab.output / "runs/papo/seed-1/settings.json").read_text())
    assert (short["trainer.steps"], long["trainer.steps"]) == ("1", "3")


def test_the_sweep_survives_failed_runs_and_says_when_nothing_is_left(lab):
    sweep = {"values": [0.01, 0.1], "seeds": [11, 12]}
    arms = {"papo": {"overrides": {"trouble11": "crash"}}, "grpo": {}}
    result = lab.run(arms=arms, sweep=sweep)
    assert result["sweep"]["arms"]["papo"]["rows"][0]["values"] == pytest.approx({"11": None, "12": 0.62})
    assert result["sweep"]["arms"]["papo"]["at_edge"] is True
    assert len(result["failures"]) == 2
    with pytest.raises(RunError, match="sweep of arm 'papo'"):
        lab.run(arms=arms, sweep={**sweep, "seeds": [11]})
    assert lab.result()["status"] == "failed"


def test_lower_can_be_better(lab):
    sweep = {"values": [0.01, 0.1], "seeds": [11]}
    result = lab.run(higher_is_better=False, sweep=sweep, seeds=[1, 2])
    assert result["sweep"]["chosen"]["papo"] == 0.1
    assert result["differences"]["papo"]["wins"] == 0
    assert result["differences"]["papo"]["mean"] == pytest.approx(0.05)


def test_split_and_secondary_metrics(lab):
    result = lab.run(split="hard", secondary_metrics=["n", "policy/entropy", "missing"])
    assert result["arms"]["grpo"]["values"]["1"] == pytest.approx(0.41)
    secondary = result["arms"]["grpo"]["secondary"]
    assert secondary["n"]["mean"] == 9
    assert secondary["policy/entropy"]["values"] == {"1": 2.0, "2": 3.0, "3": 4.0}
    assert secondary["missing"]["n"] == 0


def test_a_secondary_metric_of_another_task_set(lab):
    result = lab.run(split="test", secondary_metrics=["hard/accuracy/greedy", "nowhere/accuracy/greedy"])
    arm = result["arms"]["grpo"]
    assert arm["values"]["2"] == pytest.approx(0.52)
    assert arm["secondary"]["hard/accuracy/greedy"]["values"]["2"] == pytest.approx(0.42)
    assert arm["secondary"]["nowhere/accuracy/greedy"]["n"] == 0


def test_an_arm_may_call_the_metrics_otherwise(lab):
    arms = {"papo": {"overrides": {"gain": 0.05, "metric_name": "success/own"}}, "grpo": None}
    arms["papo"]["metrics"] = {"accuracy/greedy": "success/own"}
    result = lab.run(arms=arms, split="test", secondary_metrics=["hard/accuracy/greedy"])
    assert result["differences"]["papo"]["mean"] == pytest.approx(0.05)
    assert result["differences"]["papo"]["n"] == 3
    assert result["arms"]["papo"]["secondary"]["hard/accuracy/greedy"]["values"]["1"] == pytest.approx(0.46)


def test_an_arm_may_read_the_runs_of_another(lab):
    arms = {"rule": {"runs_of": "papo", "metrics": {"accuracy/greedy": "n"}}, "papo": {}, "grpo": {}}
    result = lab.run(arms=arms, sweep={"values": [0.01, 0.1], "seeds": [11]})
    assert result["arms"]["rule"]["values"] == {"1": 9, "2": 9, "3": 9}
    assert result["arms"]["papo"]["values"]["1"] == pytest.approx(0.51)
    assert result["sweep"]["chosen"]["rule"] == 0.01
    assert set(result["sweep"]["arms"]) == {"papo", "grpo"}
    assert lab.starts("runs/papo/seed-1") == ["fresh"]
    assert not (lab.output / "runs/rule").exists()
    assert not any("finished already" in line for line in lab.lines)


def test_an_arm_may_stand_for_the_start(lab, monkeypatch):
    drawn = []
    whole = figures.comparison_figure
    monkeypatch.setattr(figures, "comparison_figure", lambda *views: drawn.append(views[-1]) or whole(*views))
    arms = {"start": {"runs_of": "papo", "reads": "start"}, "papo": {"overrides": {"gain": 0.05}}, "grpo": {}}
    result = lab.run(arms=arms, split="test", secondary_metrics=["hard/accuracy/greedy"])
    assert result["arms"]["start"]["values"] == pytest.approx({"1": 0.1, "2": 0.1, "3": 0.1})
    assert result["arms"]["start"]["secondary"]["hard/accuracy/greedy"]["mean"] == pytest.approx(0.0)
    assert result["arms"]["papo"]["values"]["1"] == pytest.approx(0.56)
    assert not (lab.output / "runs/start").exists()
    assert [len(steps) for steps, _ in drawn[-1]["start"]] == [1, 1, 1]
    assert min(len(steps) for steps, _ in drawn[-1]["papo"]) > 1


def test_preparations_run_once_and_arms_find_them(lab):
    (lab.folder / "sft.yaml").write_text("recipe: sft\n")
    prepare = [{"config": "sft.yaml", "run_dir": "prepare/sft", "overrides": {"seed": 5}}]
    arms = {"papo": {"overrides": {"model.path": "{output_dir}/prepare/sft/model"}}, "grpo": {}}
    lab.run(prepare=prepare, arms=arms, seeds=[1])
    lab.run(prepare=prepare, arms=arms, seeds=[1, 2])
    assert lab.starts("prepare/sft") == ["fresh"]
    settings = json.loads((lab.output / "runs/papo/seed-2/settings.json").read_text())
    assert settings["model.path"] == f"{lab.output}/prepare/sft/model"


def test_a_failed_preparation_stops_the_experiment(lab):
    prepare = [{"config": "base.yaml", "run_dir": "sft", "overrides": {"seed": 5, "trouble5": "crash"}}]
    with pytest.raises(RunError, match="preparation sft failed: exit code 1: loss is NaN"):
        lab.run(prepare=prepare)
    assert not (lab.output / "runs").exists()


def test_a_preparation_made_by_hand_is_used_when_its_settings_agree(lab):
    sft = lab.folder / "sft"
    sft.mkdir()
    (sft / "result.json").write_text('{"status": "done"}')
    (sft / "config.yaml").write_text("recipe: papo\nseed: 5\ntrainer: {steps: 9, learning_rate: 1e-3}\n")
    same = {"config": "base.yaml", "run_dir": str(sft), "overrides": {"seed": 5, "trainer.steps": 9}}
    assert lab.run(prepare=[same])["status"] == "done"
    for other in ({"seed": 6}, {"trainer": {"steps": 8}}):
        with pytest.raises(UserError, match="no experiment wrote"):
            lab.run(prepare=[{**same, "overrides": other}])
    assert (sft / "result.json").exists()


def test_results_are_written_while_runs_are_under_way(lab):
    seen = []

    def command(plan, resume):
        path = lab.output / "comparison.json"
        seen.append(json.loads(path.read_text())["status"] if path.exists() else None)
        return lab.command(plan, resume)

    run_experiment(lab.write(jobs=1), lab.output, command=command, announce=lab.lines.append)
    assert "running" in seen
    assert lab.result()["status"] == "done"
    assert not list(lab.output.rglob("*.partial"))


def test_the_record_shows_the_command_that_a_user_would_type(lab):
    path = lab.write()
    with pytest.raises(RunError):
        run_experiment(path, lab.output, only_report=True, announce=lab.lines.append)
    command = lab.result()["arms"]["papo"]["command"]
    assert command.startswith(f"mmrl train {lab.folder}/base.yaml gain=0.05 seed=1 output_dir=")


def test_one_pair_has_no_interval(lab):
    result = lab.run(seeds=[4])
    assert result["differences"]["papo"]["mean"] == pytest.approx(0.05)
    assert result["differences"]["papo"]["low"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [1]}, "unknown key 'sedes'; did you mean 'seeds'"),
        ({"arms": {"papo": {"override": {}}, "grpo": {}}}, "unknown key 'arms.papo.override'"),
        ({"jobs": "many"}, "jobs"),
        ({"metric": None}, "'metric' must be given"),
        ({"baseline": "grop"}, "did you mean 'grpo'"),
        ({"arms": {"grpo": {}}}, "at least two"),
        ({"arms": {"a/b": {}, "grpo": {}}}, "folder name"),
        ({"arms": {"a": {"runs_of": "b"}, "grpo": {}}}, "arms with runs: grpo"),
        ({"arms": {"a": {"runs_of": "grpo"}, "grpo": {}}}, "with which `metrics` it differs"),
        ({"arms": {"a": {"runs_of": "grpo", "overrides": {"gain": 1}}, "grpo": {}}}, "no config and no overrides"),
        ({"seeds": []}, "`seeds` is empty"),
        ({"seeds": [1, 1]}, "repeats a seed"),
        ({"sweep": {"values": [1.0], "seeds": [3, 4]}}, r"seeds \[3\]"),
        ({"sweep": {"values": [], "seeds": [4]}}, r"sweep\.values"),
        ({"sweep": {"values": [1.0], "seeds": [9], "parameter": "gain"}}, "which `sweep` chooses"),
        (
            {"sweep": {"values": [1.0], "seeds": [9], "overrides": {"trainer": {"learning_rate": 1}}}},
            r"`sweep\.overrides` sets 'trainer\.learning_rate', which `sweep` chooses",
        ),
        ({"overrides": {"seed": 3}}, "sets 'seed'"),
        ({"arms": {"papo": {"overrides": {"output_dir": "x"}}, "grpo": {}}}, "sets 'output_dir'"),
        ({"base": "nowhere.yaml"}, "there is no file nowhere.yaml"),
        ({"base": None}, "no `config` and there is no `base`"),
        ({"prepare": [{"config": "nowhere.yaml", "run_dir": "x"}]}, r"prepare\[0\]"),
        ({"jobs": 0}, "at least 1"),
    ],
)
def test_bad_experiment_files_are_refused_before_anything_runs(lab, changes, message):
    with pytest.raises(UserError, match=message):
        lab.run(**changes)
    assert not lab.output.exists()


@pytest.mark.parametrize(
    "value",
    [3, 0.001, 1e-05, True, None, "text", "true", "3", "1e-3", "a: b", "[x", "#", "", "é", [1, "2", None], {}],
)
def test_overrides_survive_the_command_line(value):
    text = dotted_overrides({"a": {"b": value}}, Path("out"))
    assert OmegaConf.to_container(OmegaConf.from_dotlist(text)) == {"a": {"b": value}}


def test_nested_and_dotted_keys_are_the_same(lab):
    nested = plan_arm_run(load_experiment(lab.write(overrides={"a": {"b": 1, "c": 2}})), lab.output, "grpo", 1)
    dotted = plan_arm_run(load_experiment(lab.write(overrides={"a.b": 1, "a.c": 2})), lab.output, "grpo", 1)
    assert nested == dotted
    assert nested.overrides == ("a.b=1", "a.c=2", "seed=1")


def test_the_real_command_trains_with_the_overrides(lab):
    plan = plan_arm_run(load_experiment(lab.write()), lab.output, "papo", 2)
    command = train_command(plan, resume=True)
    config = str(lab.folder / "base.yaml")
    folder = f"output_dir={lab.output}/runs/papo/seed-2"
    assert command == [
        *[sys.executable, "-m", "mmrl.cli", "train", config, "gain=0.05", "seed=2", folder, "--resume"],
    ]


def test_at_most_the_limit_runs_at_once(tmp_path):
    script = "import time; print(time.time()); time.sleep(0.3); print(time.time())"
    jobs = [Job(f"j{i}", (sys.executable, "-c", script), tmp_path / f"{i}.log") for i in range(4)]
    ended = []
    run_jobs(jobs, 2, 30.0, ended.append)
    spans = [tuple(map(float, job.log.read_text().split())) for job in jobs]
    for start, _ in spans:
        assert sum(begin <= start < end for begin, end in spans) <= 2
    assert sorted(result.job.label for result in ended) == ["j0", "j1", "j2", "j3"]
    assert all(result.reason is None for result in ended)


def test_nothing_is_left_behind_when_the_caller_is_stopped(tmp_path):
    script = "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; "
    script += "time.sleep(60)']); print(os.getpid(), child.pid, flush=True); time.sleep(60)"
    sleeper = Job("sleeper", (sys.executable, "-c", script), tmp_path / "sleeper.log")
    quick = Job("quick", (sys.executable, "-c", "import time; time.sleep(0.7)"), tmp_path / "quick.log")

    def stop(result):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([sleeper, quick], 2, 30.0, stop)
    pids = [int(word) for word in sleeper.log.read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid):
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")  # a killed orphan may stay as a zombie until it is reaped
        return not Path("/proc/self").exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_terminated_comparison_leaves_no_run_behind(tmp_path):
    code = (
        "import pathlib, sys\n"
        "from mmrl.compare.jobs import Job, run_jobs\n"
        "child = 'import os, pathlib, time; pathlib.Path(\"pid\").write_text(str(os.getpid())); time.sleep(60)'\n"
        "run_jobs([Job('a', (sys.executable, '-c', child), pathlib.Path('a.log'))], 1, 60.0, print)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    pid, deadline = tmp_path / "pid", time.monotonic() + 30
    while not (pid.is_file() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not is_alive(int(pid.read_text()))
