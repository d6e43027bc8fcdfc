"""Jumps at the seams of a policy's chunks and its success, with a simulated inference delay, and a picture of them.

python -m benchmarks.robotics.seams RUN/checkpoints/step-000640/model --episodes 50 --taken 4 --svg docs/seams.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmrl.report.charts import COLOURS, INK, draw_legend, save_svg, style_axes
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.episodes.handover import DelaySettings, action_jumps
from robotics.policies.base.action_policy import open_policy
from robotics.scenes.control import ACTION_NAMES
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim

DELAYS = (0, 2, 4)
MODES = ("naive", "rtc", "blend")
SHOWN, ENTRY = 40, 0
"""Control steps of the picture, and the entry of the action that it shows."""


def measure(policy: Any, sim: Any, count: int, taken: int, delay: DelaySettings) -> tuple[dict[str, float], Any]:
    """Success and jumps over `count` held-out layouts, and the actions of the first episode."""
    task, instruction = next(iter(sim.tasks().items()))
    episodes = [EpisodeSpec(task, instruction, layout, "held_out", None) for layout in range(count)]
    settings = ActingSettings(n_action_steps=taken, scale="bounds_q99" if policy.statistics else "none")
    found = run_episodes(policy, sim, episodes, settings, range(100, 100 + count), greedy=True, delay=delay)
    seams, inside = action_jumps(found.actions, taken, delay.steps)
    success = float(found.payload.success.float().mean())
    return {"success": success, "at_seams": float(seams.mean()), "inside": float(inside.mean())}, found.actions[0]


def draw(actions: dict[str, NDArray[np.float32]], taken: int, delay: int, path: Path) -> None:
    """One entry of the executed actions of the same start, with lines at the seams."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes)
    for colour, (mode, values) in zip(COLOURS, actions.items(), strict=False):
        axes.plot(values[:SHOWN, ENTRY], label=mode, color=colour, linewidth=1.4)
    for seam in range(taken + delay, SHOWN, taken):
        axes.axvline(seam - 0.5, color=INK, linewidth=0.5, linestyle=":")
    axes.set_xlabel("control step", color=INK, fontsize=9)
    axes.set_ylabel(ACTION_NAMES[ENTRY], color=INK, fontsize=9)
    draw_legend(axes)
    save_svg(figure, path)


def main() -> None:
    """Measure every mode at every delay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help="folder of a policy of the task push, from states")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--taken", type=int, default=4, help="control steps between two observations")
    parser.add_argument("--svg", type=Path, help="picture of the last delay")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = open_policy(arguments.policy).eval()
    sim = open_sim(SimConfig(kind="tabletop", tasks=["push"], state="full", image_size=0))
    shown: dict[str, NDArray[np.float32]] = {}
    for delay in DELAYS:
        for mode in MODES:
            found, shown[mode] = measure(policy, sim, arguments.episodes, arguments.taken, DelaySettings(delay, mode))
            sys.stdout.write(json.dumps({"delay": delay, "mode": mode, **found}) + "\n")
    if arguments.svg is not None:
        draw({mode: shown[mode] for mode in ("naive", "rtc")}, arguments.taken, DELAYS[-1], arguments.svg)


if __name__ == "__main__":
    main()
