"""The robot demonstration: scripted demonstrations, cloning to about half success, SRPO, videos and a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.training.report.page import write_report
from mmrl.training.stages import finish_run, last_model, read_result

__all__ = ["run"]

CONFIGS = Path("configs/robotics")
SPLIT = "held_out"


def run(output_dir: Path) -> list[str]:
    """Clone demonstrations, improve with SRPO, and report both; stages that are already finished are kept.

    Args:
        output_dir: folder for demonstrations, video encoder and the two runs.

    Returns:
        Lines to print: held-out success before and after, and where report and videos lie.

    Raises:
        UserError: not called from the root of a checkout, or no renderer.
        RunError: a stage failed.
    """
    if not CONFIGS.is_dir():
        raise UserError(f"{CONFIGS} not found; run the demo from the root of a checkout")
    started = time.perf_counter()
    demonstrations = f"{output_dir}/demonstrations"
    shown = ["evaluation.greedy=true", "evaluation.videos=2", "evaluation.video_size=256"]
    clone = finish_run(
        CONFIGS / "tabletop_clone.yaml",
        output_dir / "clone",
        [f"demonstrations.path={demonstrations}", "evaluation.every=0"],
    )
    latent = [f"latent.path={output_dir}/video_encoder", f"latent.build_options.data={demonstrations}"]
    srpo = finish_run(
        CONFIGS / "tabletop_srpo.yaml", output_dir / "srpo", [f"model.path={last_model(clone)}", *latent, *shown]
    )
    report = write_report(srpo, chain=[clone])
    videos = sorted((srpo / "videos").glob("*.mp4"))
    minutes = (time.perf_counter() - started) / 60
    return [
        *_table(clone, srpo),
        f"time of this call: {minutes:.1f} minutes",
        f"videos: {srpo / 'videos'} ({len(videos)} files)",
        f"report: {report}",
    ]


def _table(clone: Path, srpo: Path) -> list[str]:
    rows = [
        ("before", read_result(clone)["first_evaluation"][SPLIT]),
        ("after cloning", read_result(srpo)["first_evaluation"][SPLIT]),
        ("after SRPO", read_result(srpo)["last_evaluation"][SPLIT]),
    ]
    lines = [f"success on {int(rows[0][1]['n'])} held-out initial states (95 % interval)"]
    return lines + [f"  {name:<14} {_cells(row)}" for name, row in rows]


def _cells(row: dict[str, Any]) -> str:
    shown = []
    for protocol in ("greedy", "sampled"):
        name = f"success/{protocol}"
        if name in row:
            value, low, high = (100 * row[f"{name}{end}"] for end in ("", "/low", "/high"))
            shown.append(f"{protocol} {value:5.1f} % ({low:4.1f} to {high:4.1f})")
    return "   ".join(shown)
