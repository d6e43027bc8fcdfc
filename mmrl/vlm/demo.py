"""The first-run demonstration: a tiny Qwen2.5-VL learns to answer questions about real handwritten digits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.training.report.page import write_report
from mmrl.training.stages import finish_run, last_model, read_result

__all__ = ["run"]

CONFIGS = Path("configs/vlm")
SPLIT = "heldout"


def run(output_dir: Path) -> list[str]:
    """Warm up with SFT, improve with PAPO, and report both; stages that are already finished are kept.

    Args:
        output_dir: folder for data, model and the two runs.

    Returns:
        Lines to print: held-out accuracy before SFT, after SFT and after RL, and the path of the report.

    Raises:
        UserError: not called from the root of a checkout.
        RunError: a stage failed.
    """
    if not CONFIGS.is_dir():
        raise UserError(f"{CONFIGS} not found; run the demo from the root of a checkout")
    started = time.perf_counter()
    common = [
        f"data.path={output_dir}/data/{{}}.jsonl",
        f"eval_data.{SPLIT}.path={output_dir}/data/test.jsonl",
    ]
    sft = _stage("digits_sft.yaml", output_dir / "sft", "sft", [*common, f"model.path={output_dir}/tiny-qwen2_5_vl"])
    papo = _stage("digits_papo.yaml", output_dir / "papo", "train", [*common, f"model.path={last_model(sft)}"])
    report = write_report(papo, chain=[sft])
    minutes = (time.perf_counter() - started) / 60
    return [*_table(sft, papo), f"time of this call: {minutes:.1f} minutes", f"report: {report}"]


def _stage(config: str, run_dir: Path, data: str, overrides: list[str]) -> Path:
    return finish_run(CONFIGS / config, run_dir, [override.format(data) for override in overrides])


def _table(sft: Path, papo: Path) -> list[str]:
    rows = [
        ("before SFT", read_result(sft)["first_evaluation"][SPLIT]),
        ("after SFT", read_result(papo)["first_evaluation"][SPLIT]),
        ("after RL (PAPO)", read_result(papo)["last_evaluation"][SPLIT]),
    ]
    lines = [f"held-out accuracy, {int(rows[0][1]['n'])} questions (95 % interval)"]
    lines += [
        f"  {name:<16} greedy {_cell(row, 'greedy')}   sampled, T=1 {_cell(row, 'sampled')}" for name, row in rows
    ]
    return lines


def _cell(row: dict[str, Any], mode: str) -> str:
    value, low, high = (100 * row[f"accuracy/{mode}{end}"] for end in ("", "/low", "/high"))
    return f"{value:5.1f} % ({low:4.1f} to {high:4.1f})"
