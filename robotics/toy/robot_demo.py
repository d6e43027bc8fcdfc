"""The robot demo: scripted demonstrations, cloning to about 50% success, PPO, videos and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmrl.report.page import write_report
from mmrl.training.run import finish_run, last_model, read_result

CONFIGS = Path("configs/robotics")
SPLIT = "held_out"
TASKS = ("reach", "push")


def run(output_dir: Path, seed: int = 0) -> list[str]:
    """Clone demonstrations, improve with PPO, and report both; stages that are already finished are kept.

    Args:
        output_dir: folder for demonstrations and the two runs.
        seed: seed of every stage; the data does not depend on it.

    Returns:
        Lines to print: held-out success before and after, and the paths of report and videos.

    Raises:
        UserError: no renderer, or a configuration is missing.
        RunError: a stage failed.
    """
    common = [f"seed={seed}", "trainer.threads=0"]  # all cores: the demo has the machine for itself
    demonstrations = f"demonstrations.path={output_dir}/demonstrations"
    clone = finish_run(CONFIGS / "demo_robot_clone.yaml", output_dir / "clone", [demonstrations, *common])
    start = f"model.path={last_model(clone)}"
    ppo = finish_run(CONFIGS / "demo_robot_ppo.yaml", output_dir / "ppo", [start, *common])
    report = write_report(ppo, chain=[clone])
    videos = sorted((ppo / "videos").glob("*.mp4"))
    return [
        *_table(ppo),
        f"videos: {ppo / 'videos'} ({len(videos)} files)",
        f"report: {report}",
    ]


def _table(ppo: Path) -> list[str]:
    result = read_result(ppo)
    lines = [f"success on {int(result['first_evaluation'][SPLIT]['n'])} held-out initial states (95% interval)"]
    for name, when in (("after cloning", "first_evaluation"), ("after PPO", "last_evaluation")):
        row = result[when][SPLIT]
        lines += [
            f"  {name:<14} {task:<6} {_cells(row, task)}"
            for task in ("all", *TASKS)
            if task == "all" or f"success/greedy/{task}" in row
        ]
    return lines


def _cells(row: dict[str, Any], task: str) -> str:
    shown = []
    for protocol in ("greedy", "sampled"):
        name = f"success/{protocol}" + ("" if task == "all" else f"/{task}")
        if name in row:
            value, low, high = (100 * row[f"{name}{end}"] for end in ("", "/low", "/high"))
            shown.append(f"{protocol} {value:5.1f}% ({low:4.1f} to {high:4.1f})")
    return "   ".join(shown)
