"""The first-run demonstration: a tiny Qwen2.5-VL learns to answer questions about real handwritten digits."""

from __future__ import annotations

from pathlib import Path

from mmrl.report.page import write_report
from mmrl.report.report_tables import part_lines
from mmrl.runs.records import read_jsonl
from mmrl.training.run import finish_run, last_model
from mmrl.vlm.toy.blind import fit_blind

CONFIGS = Path("configs/vlm")
SPLITS = ("heldout", "no_hint")
"""Held-out questions, and the same ones without their hints."""


def run(output_dir: Path, seed: int = 0) -> list[str]:
    """Warm up with SFT, improve with PAPO, and report both; stages that are already finished are kept.

    Args:
        output_dir: folder for data, model and the two runs.
        seed: of every stage; its data is the same.

    Returns:
        Lines to print: held-out accuracy before SFT, after SFT and after RL, whole, by hint, by kind of question and on
        the same questions without hints; how often the digits are read right; what a strategy reaches that never
        looks; and the path of the report.

    Raises:
        UserError: a configuration is missing.
        RunError: a stage failed.
    """
    data, seeded = output_dir / "data", f"seed={seed}"
    held_out = [f"eval_data.{split}.path={data}/{split}.jsonl" for split in SPLITS]
    sft = finish_run(
        CONFIGS / "digits_sft.yaml",
        output_dir / "sft",
        [*held_out, seeded, f"data.path={data}/sft.jsonl", f"model.path={output_dir}/tiny-qwen2_5_vl"],
    )
    papo = finish_run(
        CONFIGS / "digits_papo.yaml",
        output_dir / "papo",
        [*held_out, seeded, f"data.path={data}/train.jsonl", f"model.path={last_model(sft)}"],
    )
    report = write_report(papo, chain=[sft])
    return [
        "held-out accuracy in per cent; no_hint asks the same questions without their hints",
        *part_lines([sft, papo]),
        _blind_line(data),
        f"report: {report}",
    ]


def _blind_line(data: Path) -> str:
    """Accuracy from the text of the questions alone, learnt from those of the reinforcement learning."""
    strategy = fit_blind(read_jsonl(data / "train.jsonl"))
    shares = [f"{100 * strategy.share(read_jsonl(data / f'{split}.jsonl')):.1f} % on {split}" for split in SPLITS]
    return f"a strategy that reads the text and never looks: {', '.join(shares)}"
