"""A stand-in for the training command, and an experiment file with its results."""

import json
import sys

from omegaconf import OmegaConf

from mmrl.comparison.run import run_experiment, train_command

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
if settings.get("saves"):
    (run_dir / "checkpoints/step-000010").mkdir(parents=True)
if trouble == "hang":
    time.sleep(60)
rate = float(settings.get("trainer.learning_rate", 0.01))
value = 0.5 + 0.01 * seed + float(settings.get("gain", 0)) - abs(rate - float(settings.get("best", 0.01)))
with (run_dir / "evaluations.jsonl").open("w") as file:
    for step, share in ((0, 0.0), (5, 0.5), (10, 1.0))[:: 2 if settings.get("few") else 1]:
        for split, shift in (("test", 0.0), ("hard", -0.1)):
            accuracy = 0.1 + (value - 0.1) * share + shift
            record = {"step": step, "tag": "during", "split": split, "n": 9}
            record[settings.get("metric_name", "accuracy/greedy")] = accuracy
            if trouble == "silent":
                del record["accuracy/greedy"]
            file.write(json.dumps(record) + "\\n")
steps = [{"step": step, "reward/mean": step * seed, "policy/entropy": 1.0 + seed} for step in (1, 5, 10)]
(run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in steps))
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


class Lab:
    """An experiment file, the fake runner and its results."""

    def __init__(self, folder):
        self.folder, self.output, self.lines, self.started = folder, folder / "out", [], []
        (folder / "runner.py").write_text(RUNNER)
        (folder / "base.yaml").write_text("recipe: papo\n")

    def command(self, plan, resume):
        command = train_command(plan, resume)
        return [sys.executable, str(self.folder / "runner.py"), *command[4:]]

    def edit(self, old, new):
        file = self.folder / "runner.py"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    def write(self, **changes):
        content = {key: value for key, value in {**EXPERIMENT, **changes}.items() if value is not None}
        if "evidence" in content:
            content.setdefault("margin", 0.01)
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
