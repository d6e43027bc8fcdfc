"""The screens demo: home screens drawn by a browser, a supervised warm start, AEPO, and an agent with videos."""

from __future__ import annotations

from pathlib import Path

from mmrl.report.page import write_report
from mmrl.report.report_tables import part_lines
from mmrl.training.run import finish_run, last_model

CONFIGS = Path("configs/gui")


def run(output_dir: Path, seed: int = 0) -> list[str]:
    """Draw screens, warm up, improve with AEPO, train an agent in the browser, and report; finished stages are kept.

    Returns lines to print: held-out accuracy by kind of instruction after the supervised start and after AEPO, the
    agent's success, and the paths of reports and videos.
    """
    data, seeded = output_dir / "data", f"seed={seed}"
    held_out = f"eval_data.heldout.path={data}/heldout.jsonl"
    sft = finish_run(
        CONFIGS / "launcher_sft.yaml",
        output_dir / "sft",
        [held_out, seeded, f"data.path={data}/sft.jsonl", f"model.path={output_dir}/tiny-qwen3_vl"],
    )
    aepo = finish_run(
        CONFIGS / "launcher_aepo.yaml",
        output_dir / "aepo",
        [held_out, seeded, f"data.path={data}/train.jsonl", f"model.path={last_model(sft)}"],
    )
    start = f"model.path={last_model(aepo)}"
    agent = finish_run(CONFIGS / "launcher_clone.yaml", output_dir / "agent", [start, seeded])
    report = write_report(aepo, chain=[sft])
    return [
        "accuracy on held-out screens in percent, by kind of instruction",
        *part_lines([sft, aepo]),
        "an agent on live screens, success on held-out tasks",
        *part_lines([agent]),
        f"videos: {agent / 'videos'} ({len(list((agent / 'videos').glob('*.mp4')))} files)",
        f"report: {report}",
        f"report of the agent: {write_report(agent)}",
    ]
