"""Seconds of a step with rollout workers and overlap, with rewards that wait and environments that sleep.

    python -m benchmarks.rollers [--steps 4] [--case 'environments that sleep'] [--out FILE]

Two tiny runs on this machine, each in one process, with two workers, and with two workers next to the update: answers
to questions whose reward waits as a judge on another machine does, and agents whose every turn sleeps as a slow
environment does, in four environments of each process or worker. The ways take turns in one process; the model and the
first two steps do not count.
"""

from __future__ import annotations

import itertools
import json
import statistics
import string
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import print_each
from mmrl.config import load_run
from mmrl.runs.tracking import Tracker
from mmrl.training.processes import make_accelerator, seed_everything
from mmrl.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
WARMING, TURNS = 2, 4
WAIT_S, SLEEP_S = 0.02, 0.1
WAYS = {
    "one process": [],
    "two workers": ["rollers.engine=ray", "rollers.workers=2", "rollers.unit=4"],
    "two workers next to the update": [
        *("rollers.engine=ray", "rollers.workers=2", "rollers.unit=4", "rollers.overlap=true"),
    ],
}


def waits(completions: list[str], **columns: Any) -> list[float]:
    """The fraction of digits in each response, after a wait for each response."""
    time.sleep(WAIT_S * len(completions))
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


class SlowRoom:
    """Sleeps for every response, an action whose reward is its fraction of digits; the fourth one is the last."""

    def reset(self, task: str, seed: int) -> dict[str, Any]:
        """Begin an episode."""
        self._turns = 0
        return self._look()

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool]:
        """Observation, reward, and whether the episode is over."""
        time.sleep(SLEEP_S)
        self._turns += 1
        text = action.arguments.get("text", "")
        return self._look(), sum(map(str.isdigit, text)) / max(len(text), 1), self._turns == TURNS

    def close(self) -> None:
        """Nothing to close."""

    def _look(self) -> dict[str, Any]:
        return {"image": np.full((56, 56, 3), 60 * self._turns, np.uint8), "text": f"turn {self._turns}"}


def overrides(case: str, folder: Path) -> tuple[Path, list[str]]:
    """File and settings of a case."""
    common = [f"output_dir={folder}/run", "trainer.threads=1", "tracking.quiet=true", "evaluation.at_start=false"]
    common += [
        "evaluation.at_end=false",
        "evaluation.every=0",
        "eval_data={}",
        "trainer.tasks_per_step=8",
        "trainer.epochs=3",
    ]
    built = "hidden: 64, layers: 2, vision_hidden: 64, vision_depth: 1"
    if case == "rewards that wait":
        return ROOT / "configs/vlm/digits_grpo.yaml", [
            *common,
            f"model.path={folder}/model",
            "model.build=mmrl.vlm.toy.digits:build_model",
            f"model.build_options={{{built}, min_pixels: 3136, max_pixels: 12544}}",
            f"data.path={folder}/train.jsonl",
            "data.build_options.count=200",
            "rewards=[{name: waits, function: 'benchmarks.rollers:waits', isolate: false}]",
            "accuracy_reward=waits",
        ]
    path = folder / "agents.yaml"
    path.write_text("recipe: agent\n", encoding="utf-8")
    return path, [
        *common,
        f"model.path={folder}/model",
        "model.build=mmrl.agents.toy.build:build_model",
        f"model.build_options={{family: qwen3_vl, patch_size: 14, {built}, min_pixels: 3136, max_pixels: 50176}}",
        "environment.factory=benchmarks.rollers:SlowRoom",
        "environment.workers=4",
        "actions.format=text",
        "data.seeds=400",
        # an untrained model seldom ends an answer, and answers that are cut off are not executed
        "sampler.max_new_tokens=8",
        f"sampler.stop={[*string.ascii_lowercase, *string.digits]}",
        "actions.on_parse_error=noop",
        "trainer.samples_per_task=2",
    ]


def measure(case: str, way: str, steps: int, folder: Path) -> dict[str, float]:
    """Median seconds of a step."""
    path, settings = overrides(case, folder)
    entry, config = load_run(path, [*settings, f"trainer.steps={steps + WARMING}", *WAYS[way]])
    seed_everything(config.seed)
    recipe = entry.load_recipe_class()(config)
    run_dir = folder / way.replace(" ", "-")
    run_dir.mkdir()
    tracker = Tracker(run_dir)
    trainer = Trainer(recipe, config, run_dir, make_accelerator(), tracker, entry=entry)
    ends = [time.perf_counter()]
    try:
        for _ in range(steps + WARMING):
            trainer.train_step()
            ends.append(time.perf_counter())
    finally:
        trainer.rollers.close()
        tracker.close()
        recipe.close()
    if case != "rewards that wait":
        _check_turns(run_dir)
    taken = [after - before for before, after in itertools.pairwise(ends)][WARMING:]
    return {"step_s": statistics.median(taken)}


def _check_turns(run_dir: Path) -> None:
    """Raise RuntimeError if episodes took no turns in which the environment sleeps."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [record["episode/turns"] for record in map(json.loads, lines) if "episode/turns" in record]
    cut = [record["episode/cut"] for record in map(json.loads, lines) if "episode/cut" in record]
    if not turns or min(turns) < TURNS or max(cut) > 0.2:
        raise RuntimeError(f"episodes took {turns} turns, of which {cut} were cut off, instead of {TURNS}")


def compare(case: str, steps: int) -> dict[str, Any]:
    """Seconds of a step with each method, and the speed-up over one process."""
    with tempfile.TemporaryDirectory() as folder:
        found = {way: measure(case, way, steps, Path(folder)) for way in WAYS}
    base = found["one process"]["step_s"]
    return {way: values | {"faster": base / values["step_s"]} for way, values in found.items()}


if __name__ == "__main__":
    print_each(compare, ("rewards that wait", "environments that sleep"), steps=4)
