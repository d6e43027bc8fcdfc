"""Jumps at the seams of a policy's chunks and its success, with a simulated inference delay, and a picture.

python -m benchmarks.robotics.seams RUN/checkpoints/step-000640/model --episodes 50 --taken 4 --svg docs/seams.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.report.charts import COLOURS, INK, draw_legend, save_svg, style_axes
from mmrl.runs.statistics import paired_difference
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.episodes.handover import DelaySettings, action_jumps
from robotics.policies.base.action_policy import open_policy
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim

DELAYS = (0, 2, 4)
MODES = ("naive", "rtc", "blend")


def measure(policy: Any, sim: Any, count: int, taken: int, delay: DelaySettings) -> dict[str, Any]:
    """Success and jumps of each of `count` held-out layouts."""
    task, instruction = next(iter(sim.tasks().items()))
    episodes = [EpisodeSpec(task, instruction, layout, "held_out", None) for layout in range(count)]
    settings = ActingSettings(n_action_steps=taken, scale="bounds_q99" if policy.statistics else "none")
    found = run_episodes(policy, sim, episodes, settings, range(100, 100 + count), greedy=True, delay=delay)
    both = [[part.mean() for part in action_jumps([one], taken, delay.steps)] for one in found.actions]
    seams, inside = np.array(both).T
    return {"success": found.payload.success.float().numpy(), "at_seams": seams, "inside": inside}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Jumps and success of each mode over the delay."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    panels = (("at_seams", "change of actions at seams"), ("success", "success, %"))
    for axes, (name, label) in zip(figure.subplots(1, 2), panels, strict=True):
        style_axes(axes)
        scale = 100 if name == "success" else 1
        for colour, mode in zip(COLOURS, MODES, strict=False):
            own = [row for row in rows if row["mode"] == mode]
            axes.plot([row["delay"] for row in own], [scale * row[name] for row in own], "o-", label=mode, color=colour)
        axes.set_xticks(DELAYS)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("delay, control steps", color=INK, fontsize=9)
        axes.set_ylabel(label, color=INK, fontsize=9)
    draw_legend(axes)
    save_svg(figure, path)


def main() -> None:
    """Measure every mode at every delay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help="folder of a policy of the task push, from states")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--taken", type=int, default=4, help="control steps between two observations")
    parser.add_argument("--svg", type=Path, help="picture of jumps and success")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = open_policy(arguments.policy).eval()
    sim = open_sim(SimConfig(kind="tabletop", tasks=["push"], state="full", image_size=0))
    rows: list[dict[str, Any]] = []
    for delay in DELAYS:
        naive: dict[str, Any] = {}
        for mode in MODES:
            found = measure(policy, sim, arguments.episodes, arguments.taken, DelaySettings(delay, mode))
            naive = naive or found
            row: dict[str, Any] = {"delay": delay, "mode": mode}
            for name, values in found.items():
                row[name] = round(float(np.nanmean(values)), 3)
                # episodes that end within the first chunk have no seam
                both = np.isfinite(values) & np.isfinite(naive[name])
                apart = paired_difference(values[both], naive[name][both])
                row[f"{name}_over_naive"] = [round(number, 3) for number in (apart.mean, apart.low, apart.high)]
            rows.append(row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    if arguments.svg is not None:
        draw(rows, arguments.svg)


if __name__ == "__main__":
    main()
