"""The text demo: a pretrained language model learns to write JSON from a reward that parses its responses."""

from __future__ import annotations

from pathlib import Path

from mmrl.report.folder import read_run
from mmrl.report.gallery import before_after
from mmrl.report.page import write_report
from mmrl.report.report_tables import headline, part_lines
from mmrl.training.run import finish_run

CONFIG = Path("configs/text/people_grpo.yaml")
SHOWN = 3
"""Number of held-out sentences whose responses are printed."""


def run(output_dir: Path, seed: int = 0) -> list[str]:
    """Train SmolLM2 on sentences about people, and report; a finished run is kept.

    Args:
        output_dir: folder for data and run.
        seed: of the run; its data is the same.

    Returns:
        Lines to print: the fraction of held-out sentences whose answer is right before and after, sampled and greedy,
        whole and by sentence form; answers to the same sentences side by side; and the path of the report.

    Raises:
        UserError: the configuration is missing, or the model is not set up.
        RunError: the run failed.
    """
    data = output_dir / "data"
    overrides = [f"seed={seed}", f"data.path={data}/train.jsonl", f"eval_data.heldout.path={data}/heldout.jsonl"]
    trained = finish_run(CONFIG, output_dir / "grpo", overrides)
    return [
        "held-out sentences with names, cities and sentence forms not used in training: JSON with all values correct",
        *_headline_lines(trained),
        *part_lines([trained], "accuracy/sampled"),
        *part_lines([trained], "accuracy/greedy"),
        *_answer_lines(trained),
        f"report: {write_report(trained)}",
    ]


def _headline_lines(trained: Path) -> list[str]:
    """Both protocols before and after, with 95% intervals; sampled first, since that is what the reward trains."""
    lines = []
    for table in headline([read_run(trained)]):
        for place, protocol in enumerate(table["protocols"]):
            before, after = (row["cells"][place] for row in (table["rows"][0], table["rows"][-1]))
            ends = " to ".join(f"{cell['value']} {cell['interval']}" for cell in (before, after))
            lines.append(f"{protocol}: {ends}, change {after['change']} {after['change_interval']}")
    return lines


def _answer_lines(trained: Path) -> list[str]:
    """Greedy answers to the first held-out sentences, before and after."""
    found = before_after([("", trained)])
    lines = []
    for task in found["tasks"][:SHOWN] if found else ():
        lines.append(task["question"].splitlines()[0])
        for when, side in zip(("before", "after"), task["sides"], strict=True):
            lines.append(f"  {when:<6}  {side['remark']}  {' '.join(side['response'].split())}")
    return lines
