"""`robot_sac` against the SAC of Stable-Baselines3: the same environment, sizes and number of control steps.

    python -m benchmarks.robotics.sac_peers pendulum --steps 10000 --seeds 5 --peer PYTHON --out build/sac_pendulum.json

PYTHON is an interpreter with stable_baselines3 2.9 and this suite's packages, such as that of a separate
environment. Stable-Baselines3 is no dependency of the suite. Both sides act greedily in the same number of held-out
episodes after every `--every` control steps. What is compared is the mean return over the evaluations, the area under
the learning curve: its difference, with a 95% interval of Welch's t test over the seeds, and the same for the last
evaluation. The sides are equal within noise if the interval of the area contains 0.

Both have two critics of two hidden layers of 256, batches of 256, one update per control step, 1,000 steps of random
actions, and the other defaults of Stable-Baselines3. `reach` is the tabletop task from its full state, rewarded by the
increase of the task's dense reward. Differences in the method are listed in `robotics.offpolicy.sac`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WARMUP, EVALUATIONS = 1000, 20
REACH_STEPS = 100
"""Horizon of `reach_sac.yaml`."""
OWN, PEER = "robot_sac", "stable_baselines3"
METRICS = {"pendulum": "episode/return/greedy", "reach": "success/greedy"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds of both sides, and print and write the comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robotics.sac_peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("env", choices=METRICS)
    parser.add_argument("--steps", type=int, default=10_000, help="control steps of a run")
    parser.add_argument("--every", type=int, default=2_000, help="control steps between evaluations")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=11, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, of one thread each")
    parser.add_argument("--peer", default="", help="interpreter with stable_baselines3")
    parser.add_argument("--out", type=Path, help="file for the curves and the comparison")
    parser.add_argument("--side", choices=(OWN, PEER), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.side:
        make = own_curve if given.side == OWN else peer_curve
        _say(json.dumps(make(given.env, given.steps, given.every, given.first)))
        return 0
    if given.seeds < (2 if given.peer else 1):
        parser.error(f"--seeds is {given.seeds}; an interval needs at least 2")
    seeds = range(given.first, given.first + given.seeds)
    sides = {**({PEER: given.peer} if given.peer else {}), OWN: sys.executable}
    work = [(side, python, seed) for seed in seeds for side, python in sides.items()]
    with ThreadPoolExecutor(given.jobs) as pool:
        curves = list(pool.map(lambda one: run(given, *one), work))
    found: dict[str, Any] = {"env": given.env, "steps": given.steps, "every": given.every, "seeds": list(seeds)}
    for side in sides:
        found[side] = [curve for (own, *_), curve in zip(work, curves, strict=True) if own == side]
    if given.peer:
        found |= compared(found[OWN], found[PEER])
    _say(json.dumps({name: value for name, value in found.items() if not isinstance(value, list)}, indent=1))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def run(given: Any, side: str, python: str, seed: int) -> list[list[float]]:
    """Control steps and means of the evaluations of one run, in a process of one thread."""
    command = [python, "-m", "benchmarks.robotics.sac_peers", given.env, "--side", side, "--first", str(seed)]
    command += ["--steps", str(given.steps), "--every", str(given.every)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed with seed {seed}:\n{done.stderr[-2000:]}")
    curve: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    after = os.times()
    minutes = (after.children_user + after.children_system - before.children_user - before.children_system) / 60
    _say(f"{side}, seed {seed}: {curve[-1][1]:.4g} after {curve[-1][0]} steps; {minutes:.1f} CPU minutes of all jobs")
    return curve


def own_curve(env: str, steps: int, every: int, seed: int) -> list[list[float]]:
    """Train whole episodes until there are enough control steps, and evaluate greedily."""
    from mmrl.config import load_run
    from mmrl.training.processes import make_accelerator, seed_everything
    from mmrl.training.trainer import Trainer

    curve: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"output_dir={folder}", f"seed={seed}", f"trainer.steps={steps}", "tracking.quiet=true"]
        changes.append(f"eval_data.held_out.layouts={EVALUATIONS}")
        entry, config = load_run(ROOT / f"configs/robotics/{env}_sac.yaml", changes)
        seed_everything(seed)
        recipe = entry.load_recipe_class()(config)
        trainer = Trainer(recipe, config, Path(config.output_dir), make_accelerator(), None)
        while recipe.replay.control_steps < steps:
            trainer.train_step()
            if recipe.replay.control_steps >= every * (len(curve) + 1):
                trainer.evaluate("during")
                curve.append([recipe.replay.control_steps, trainer.log.evaluations[-1][METRICS[env]]])
        recipe.close()
    return curve


def peer_curve(env: str, steps: int, every: int, seed: int) -> list[list[float]]:
    """Train with Stable-Baselines3, and evaluate greedily."""
    import torch
    from stable_baselines3 import SAC  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    made, held_out = _peer_env(env, "train"), _peer_env(env, "held_out")
    model = SAC("MlpPolicy", made, learning_starts=WARMUP, seed=seed, device="cpu")
    curve = []
    for done in range(every, steps + 1, every):
        model.learn(every, reset_num_timesteps=done == every)
        returns, successes = [], []
        for episode in range(EVALUATIONS):
            seen, _ = held_out.reset(seed=10_000 + episode)
            total, success, over = 0.0, False, False
            while not over:
                action, _ = model.predict(seen, deterministic=True)
                seen, reward, terminated, truncated, info = held_out.step(action)
                total, success, over = (
                    total + float(reward),
                    success or bool(info.get("success")),
                    terminated or truncated,
                )
            returns.append(total)
            successes.append(success)
        curve.append([done, statistics.fmean(successes if env == "reach" else returns)])
    return curve


def _peer_env(env: str, split: str) -> Any:
    """Pendulum, or reach as a flat state with the increase of its dense reward."""
    import gymnasium

    if env == "pendulum":
        return gymnasium.make("Pendulum-v1")
    made = gymnasium.make(
        "robotics.scenes.registration:mmrl/Reach-v0",
        observation=("state",),
        reward="dense",
        split=split,
        horizon=REACH_STEPS,
    )

    class Gain(gymnasium.Wrapper):  # type: ignore[misc, type-arg]
        """The reward is what a step adds to the dense one; 0 for the first, before which there is none."""

        before: float | None = None

        def reset(self, **options: Any) -> Any:
            self.before = None
            return self.env.reset(**options)

        def step(self, action: Any) -> Any:
            seen, reward, terminated, truncated, info = self.env.step(action)
            before, self.before = self.before, float(reward)
            gain = 0.0 if before is None else self.before - before
            return seen, gain, terminated, truncated, info

    return Gain(gymnasium.wrappers.FlattenObservation(made))


def compared(own: list[list[list[float]]], peer: list[list[list[float]]]) -> dict[str, Any]:
    """Differences of robot_sac to the peer over the seeds, with intervals."""
    area = [[statistics.fmean(value for _, value in curve) for curve in side] for side in (own, peer)]
    last = [[curve[-1][1] for curve in side] for side in (own, peer)]
    found = {"area": _difference(*area), "last": _difference(*last)}
    low, high = found["area"]["interval"]
    return found | {"equal_within_noise": low <= 0 <= high}


def _difference(own: list[float], peer: list[float]) -> dict[str, Any]:
    """Difference of means with Welch's 95% interval."""
    from scipy.stats import t

    apart = statistics.fmean(own) - statistics.fmean(peer)
    parts = [statistics.variance(side) / len(side) if len(side) > 1 else math.nan for side in (own, peer)]
    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (own, peer), strict=True))
    width = float(t.ppf(0.975, freedom)) * error if error else 0.0
    return {
        "robot_sac": statistics.fmean(own),
        "stable_baselines3": statistics.fmean(peer),
        "difference": apart,
        "interval": [apart - width, apart + width],
    }


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
