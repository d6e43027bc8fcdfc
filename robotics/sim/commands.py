"""What `mmrl sim` does: install simulator suites, and check simulators with their scripted experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mmrl.errors import UserError

__all__ = ["experts", "setup"]

Say = Callable[[str], object]


def setup(name: str, folder: Path | None, say: Say) -> None:
    """Install a suite into a Python environment of its own.

    Args:
        name: libero, metaworld, robosuite or gymnasium_robotics.
        folder: where; MMRL_SUITES or the user's cache when None.
        say: takes lines to print.

    Raises:
        UserError: there is no such suite.
        RunError: the installation failed.
    """
    from robotics.sim.suite_setup import setup_suite

    setup_suite(name, folder, say=say)


def experts(name: str, episodes: int, options: Sequence[str], say: Say) -> bool:
    """Run the experts of all tasks and print how often they succeed.

    Args:
        name: tabletop, metaworld, or another simulator with experts.
        episodes: of each task.
        options: `field=value` of `SimConfig`.
        say: takes lines to print.

    Returns:
        Whether no environment failed.

    Raises:
        UserError: an unknown simulator or option, or it has no experts.
    """
    from mmrl.config import fill
    from robotics.sim.expert_check import check_experts, summary_lines
    from robotics.sim.opening import SimConfig, open_sim
    from robotics.sim.tasks import TASKS

    base = SimConfig(kind=name, image_size=0, tasks=list(TASKS) if name == "tabletop" else [])
    config: SimConfig = fill(base, options, "mmrl sim")
    if episodes < 1:
        raise UserError(f"--episodes is {episodes}; must be at least 1")
    sim = open_sim(config)
    rows = []
    try:
        say(", ".join(f"{key} {value}" for key, value in sim.describe().items() if not isinstance(value, dict)))
        for task, done, count, failed in check_experts(sim, episodes):
            rows.append((task, done, count, failed))
            say(f"{task:<28} {done:>3} of {count:<3}" + (f"  {failed} environments failed" if failed else ""))
    finally:
        sim.close()
    for line in summary_lines(rows):
        say(line)
    return not any(failed for *_, failed in rows)
