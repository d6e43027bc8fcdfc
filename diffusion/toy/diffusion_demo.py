"""The diffusion demonstration: a tiny flow model learns to draw digits, AWM improves it, and a figure shows both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmrl.report.folder import read_run
from mmrl.report.gallery import save_image_grid
from mmrl.report.page import write_report
from mmrl.report.report_tables import score_tables
from mmrl.training.run import finish_run, last_model, read_result

CONFIGS = Path("configs/diffusion")
SPLIT = "digits"
OPTIMISED = "score/class_prob"
HELD_OUT = "heldout/class_prob_judge"
GRID_FILE = "images.png"


def run(output_dir: Path, seed: int = 0) -> list[str]:
    """Pre-train by flow matching, improve with AWM, and report both; stages that are already finished are kept.

    Args:
        output_dir: folder for images, models and the two runs.
        seed: of every stage; its data is the same.

    Returns:
        Lines to print: optimised and held-out reward before pre-training, before AWM and after it, and the paths of the
        image and the report.

    Raises:
        UserError: a configuration is missing.
        RunError: a stage failed.
    """
    prompts, seeded = output_dir / "prompts.jsonl", f"seed={seed}"
    held_out = f"eval_data.{SPLIT}.path={prompts}"
    pretrain = finish_run(
        CONFIGS / "demo_pretrain.yaml",
        output_dir / "pretrain",
        [held_out, seeded, f"model.path={output_dir}/pipeline", f"images.path={output_dir}/images.npz"],
    )
    awm = finish_run(
        CONFIGS / "demo_awm.yaml",
        output_dir / "awm",
        [held_out, seeded, f"model.path={last_model(pretrain)}", f"data.path={prompts}"],
    )
    grid = save_image_grid([(awm.name, awm)], output_dir / GRID_FILE)
    report = write_report(awm, chain=[pretrain])
    return [
        *_table(pretrain, awm),
        _change_line(awm),
        *([f"before and after: {grid}"] if grid else []),
        f"report: {report}",
    ]


def _table(pretrain: Path, awm: Path) -> list[str]:
    rows = [
        ("untrained", read_result(pretrain)["first_evaluation"][SPLIT]),
        ("before AWM", read_result(awm)["first_evaluation"][SPLIT]),
        ("after AWM", read_result(awm)["last_evaluation"][SPLIT]),
    ]
    lines = [f"mean reward over the images of {int(rows[0][1]['n'])} prompts (95% interval), from the same seeds"]
    return lines + [
        f"  {name:<11} optimised {_cell(row, OPTIMISED)}   held out {_cell(row, HELD_OUT)}" for name, row in rows
    ]


def _change_line(awm: Path) -> str:
    (table,) = score_tables([read_run(awm)])
    rows = [row for group in table["groups"] for row in group["rows"] if row["label"].startswith("class_prob")]
    cells = [f"{row['label']} {row['cells'][-1]['change']} {row['cells'][-1]['change_interval']}" for row in rows]
    return f"change from AWM, paired over prompts: {', '.join(cells)}"


def _cell(row: dict[str, Any], name: str) -> str:
    value, low, high = (row[f"{name}{end}"] for end in ("", "/low", "/high"))
    return f"{value:.3f} ({low:.3f} to {high:.3f})"
