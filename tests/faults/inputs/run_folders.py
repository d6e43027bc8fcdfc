"""Damaged run folders: checkpoints to resume and to evaluate, metrics to report, experiments to compare."""

import contextlib
import io
import json
import random
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from mmrl.cli import main
from tests.charts import draw_no_charts
from tests.faults.batches import Kind, Verdict, of_command
from tests.faults.children import Nursery
from tests.faults.damage import damage_bytes, damage_text, damage_tree
from tests.faults.sameness import differences
from tests.faults.tiny import STEPS, write_run

__all__ = ["KINDS"]

EXPERIMENTS = Path(__file__).parents[3] / "configs" / "experiments"
LOGS = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "result.json",
    "config.yaml",
    "samples/step-000002/eval.jsonl",
    "outcomes/step-000002/held_out.jsonl",
)


@dataclass
class _Lab:
    config: Path
    run: Path
    resumed: Path
    """The same run, resumed from sound files for one more step."""
    older: Path
    """The same run, resumed from the checkpoint before the newest."""


def _prepare(recipe: str) -> Callable[[Path], _Lab]:
    def prepare(folder: Path) -> _Lab:
        lab = _Lab(write_run(recipe, folder), folder / "run", folder / "resumed", folder / "older")
        nursery = Nursery()

        def go(*words: str) -> None:
            ending = nursery.run(lambda child: _main("train", lab.config, *words), limit_s=120)
            assert ending.code == 0, ending.output

        go(f"output_dir={lab.run}")
        for copy in (lab.resumed, lab.older):
            shutil.copytree(lab.run, copy)
        shutil.rmtree(lab.older / f"checkpoints/step-{STEPS:06d}")
        for copy in (lab.resumed, lab.older):
            go(f"output_dir={copy}", f"trainer.steps={STEPS + 1}", "--resume")
        return lab

    return prepare


def _main(*words: object) -> int:
    draw_no_charts()
    return main([str(word) for word in words])


def _damaged_checkpoint(lab: _Lab, rng: random.Random, folder: Path) -> Path:
    """A copy of the run in which a file of its newest checkpoint, or best.json, is damaged."""
    run = folder / "run"
    shutil.copytree(lab.run, run)
    files = [path for path in (run / f"checkpoints/step-{STEPS:06d}").rglob("*") if path.is_file()]
    file = rng.choice(sorted([*files, *files, run / "checkpoints/best.json"]))
    if rng.random() < 0.1:
        file.unlink()
    elif file.suffix == ".json" and rng.random() < 0.6:
        content = file.read_text()
        file.write_text(json.dumps(damage_tree(rng, json.loads(content))) if rng.random() < 0.7 else content[:-3])
    else:
        file.write_bytes(damage_bytes(rng, file.read_bytes()))
    return run


def _resume(lab: _Lab, rng: random.Random, folder: Path) -> Verdict:
    """A run resumed from a damaged checkpoint ends bit for bit like an undamaged one, or is refused."""
    run = _damaged_checkpoint(lab, rng, folder)
    draw_no_charts()
    words = ["--resume", "--from-last-good"] if rng.random() < 0.4 else ["--resume"]
    verdict = of_command("train", lab.config, f"output_dir={run}", f"trainer.steps={STEPS + 1}", *words)
    name = f"checkpoints/step-{STEPS + 1:06d}"
    if verdict.outcome != "done":
        return verdict
    sound = [lab.resumed, lab.older] if "--from-last-good" in words else [lab.resumed]
    found = [differences(one / name, run / name) for one in sound]
    return verdict if [] in found else Verdict("silent damage", f"{words}: {found[0][:5]}")


def _evaluate(lab: _Lab, rng: random.Random, folder: Path) -> Verdict:
    run = _damaged_checkpoint(lab, rng, folder)
    return of_command("evaluate", run)


def _doctor(lab: _Lab, rng: random.Random, folder: Path) -> Verdict:
    """`mmrl doctor RUN` reports the faults of any folder; none of its checks fails itself."""
    run = _damaged_checkpoint(lab, rng, folder)
    if rng.random() < 0.5:
        _damage_log(rng, run / rng.choice([name for name in LOGS if (run / name).exists()]))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(["doctor", str(run)])
    except BaseException:
        return Verdict("traceback", traceback.format_exc()[-3000:])
    text = " ".join(said.getvalue().split())
    if code not in (0, 1) or "the check itself failed" in text or "mmrl-crash" in text:
        return Verdict(f"exit {code}", text[-3000:])
    return Verdict("done" if code == 0 else "failed", "")


def _export(lab: _Lab, rng: random.Random, folder: Path) -> Verdict:
    return of_command("export", _damaged_checkpoint(lab, rng, folder), "--output", folder / "export")


def _report(lab: _Lab, rng: random.Random, folder: Path) -> Verdict:
    run = folder / "run"
    shutil.copytree(lab.run, run, ignore=shutil.ignore_patterns("checkpoints", "reference"))
    for name in rng.sample(LOGS, rng.choice((1, 1, 2))):
        if (run / name).exists():
            _damage_log(rng, run / name)
    pictures = sorted((run / "samples").rglob("*.png"))
    if pictures and rng.random() < 0.2:
        rng.choice(pictures).write_bytes(damage_bytes(rng, pictures[0].read_bytes()))
    draw_no_charts()
    return of_command("report", *rng.choice(((run,), (lab.run, run))))


def _damage_log(rng: random.Random, path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".jsonl" and rng.random() < 0.7:
        rows: list[Any] = [json.loads(line) for line in text.splitlines()]
        for _ in range(rng.choice((1, 1, 3))):
            place = rng.randrange(len(rows))
            rows[place] = damage_tree(rng, rows[place], ("step", "split", "reward/mean", "images", "terms"))
        text = "".join(json.dumps(row) + "\n" for row in rows)
    elif path.suffix == ".json" and rng.random() < 0.7:
        text = json.dumps(damage_tree(rng, json.loads(text)))
    else:
        text = damage_text(rng, text)
    path.write_bytes(text.encode(errors="surrogatepass"))


def _experiments(_: None, rng: random.Random, folder: Path) -> Verdict:
    """An experiment file, and the records of its finished runs, up to where runs would start."""
    sound = rng.choice(sorted(EXPERIMENTS.glob("*.yaml")))
    tree = yaml.safe_load(sound.read_text())
    text = json.dumps(damage_tree(rng, tree, ("arms", "base", "seeds", "metric", "sweep")))
    if rng.random() < 0.3:
        text = damage_text(rng, sound.read_text())
    path = folder / "experiment.yaml"
    path.write_bytes(text.replace("../", f"{EXPERIMENTS.parent}/").encode(errors="surrogatepass"))
    with mock.patch("mmrl.comparison.run.run_jobs"):
        return of_command("compare", path, "--output", folder / "compared", may_fail=True)


def _records(_: None, rng: random.Random, folder: Path) -> Verdict:
    """Results of an experiment's finished runs when it is summarised."""
    from mmrl.comparison import plans as run_status
    from mmrl.comparison.experiment import load_experiment
    from mmrl.comparison.summary import plan_comparison

    (folder / "base.yaml").write_text("recipe: papo\n")
    content = {"name": "ab", "base": "base.yaml", "baseline": "a", "seeds": [1, 2], "metric": "score"}
    (folder / "ab.yaml").write_text(yaml.safe_dump(content | {"arms": {"a": None, "b": {"overrides": {"seed_": 1}}}}))
    plans = [
        plan
        for by_seed in plan_comparison(load_experiment(folder / "ab.yaml"), folder / "out").values()
        for plan in by_seed.values()
    ]
    for number, plan in enumerate(plans):
        run_status.mark(plan)
        rows = [{"step": step, "tag": "during", "split": "test", "score": 0.1 * step + number} for step in range(3)]
        (plan.run_dir / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (plan.run_dir / "result.json").write_text('{"status": "done", "seconds": 1.0}')
    files = sorted(path for path in plans[0].run_dir.rglob("*") if path.is_file())
    _damage_log(rng, rng.choice(files))
    words = ("compare", folder / "ab.yaml", "--output", folder / "out", "--only-report")
    with mock.patch("mmrl.comparison.run.draw"):
        return of_command(*words, may_fail=True)


KINDS = (
    Kind("checkpoints, resume", _prepare("robot_grpo"), _resume, share=0.5, limit_s=30),
    Kind("checkpoints, resume an adapter", _prepare("awm"), _resume, share=0.1, limit_s=60),
    Kind("checkpoints, evaluate", _prepare("robot_clone"), _evaluate, share=0.5, limit_s=30),
    Kind("checkpoints, export", _prepare("robot_clone"), _export, share=0.2, limit_s=30),
    Kind("run folders, doctor", _prepare("robot_grpo"), _doctor, share=0.5, limit_s=30),
    Kind("logs, report", _prepare("robot_grpo"), _report, share=1, limit_s=30),
    Kind("experiments", lambda folder: None, _experiments, share=1),
    Kind("records of experiments", lambda folder: None, _records, share=1),
)
