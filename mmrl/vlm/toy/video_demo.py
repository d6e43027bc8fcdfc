"""The video demo: a model learns to read frames, then an agent learns which frames to show it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.report.page import write_report
from mmrl.runs.records import read_jsonl
from mmrl.runs.statistics import wilson_interval
from mmrl.runs.tracking import read_evaluations
from mmrl.training.run import finish_run, last_model
from mmrl.vlm.toy.demo import fit_blind

CONFIGS = Path("configs/vlm")
SPLIT = "heldout"
NOTHING = "ignores the video: most frequent answer"
ROWS = (
    ("evenly spaced frames", "uniform", -1),
    ("frames most similar to the question (CLIP)", "clip_topk", -1),
    ("the agent's frames, before training", "agent", 0),
    ("the agent's frames, after training", "agent", -1),
    ("the needle's own frames (ceiling)", "needle", -1),
)
"""Label of each row, its strategy, and the index of its evaluation."""


def run(output_dir: Path, seed: int = 0) -> list[str]:
    """Teach a model to read frames, train the agent with its answers, and report; finished stages are kept.

    Args:
        output_dir: folder for clips, CLIP, model and the two runs.
        seed: of every stage; its data is the same.

    Returns:
        Lines to print: accuracy and fraction of the needle's frames picked on held-out clips, for the agent before and
        after training and for the baselines, and the paths of the reports.

    Raises:
        UserError: a configuration is missing.
        RunError: a stage failed.
    """
    data, seeded = output_dir / "data", f"seed={seed}"
    reader = finish_run(
        CONFIGS / "needle_sft.yaml",
        output_dir / "reader",
        [
            seeded,
            f"data.path={data}/readings.jsonl",
            f"eval_data.readings.path={data}/readings_heldout.jsonl",
            f"model.path={output_dir}/tiny-qwen2_5_vl",
        ],
    )
    agent = finish_run(
        CONFIGS / "needle_tspo_vlm.yaml",
        output_dir / "agent",
        [
            seeded,
            f"data.path={data}/train.jsonl",
            f"eval_data.{SPLIT}.path={data}/heldout.jsonl",
            f"features.path={output_dir}/clip",
            f"features.cache={output_dir}/features",
            f"answerer.model.path={last_model(reader)}",
        ],
    )
    report = write_report(agent)
    return [
        *_table(agent, data),
        f"report of the reader: {reader / 'report.html'}",
        f"report: {report}",
    ]


def _table(agent: Path, data: Path) -> list[str]:
    evaluations = [found for found in read_evaluations(agent) if found["split"] == SPLIT]
    held_out = read_jsonl(data / f"{SPLIT}.jsonl")
    rows = [(f"{len(held_out)} held-out clips, 95% intervals", "accuracy", "needle recall")]
    rows.append((NOTHING, _blind(read_jsonl(data / "train.jsonl"), held_out), "–"))
    for words, strategy, place in ROWS:
        found = evaluations[place]
        rows.append((words, _share(found, f"accuracy/{strategy}"), _share(found, f"recall/{strategy}")))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"{row[0]:<{widths[0]}}   {row[1]:>{widths[1]}}   {row[2]:>{widths[2]}}" for row in rows]


def _blind(train: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy from the question alone: its usual answer among the training questions."""

    def as_text(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        return [{"kind": row["query"], "hint_text": "", "answer": row["answer"]} for row in rows]

    share = fit_blind(as_text(train)).share(as_text(held_out))
    return _percent(share, *wilson_interval(share * len(held_out), len(held_out)))


def _share(found: Mapping[str, Any], name: str) -> str:
    values = [float(found.get(f"{name}{end}", math.nan)) for end in ("", "/low", "/high")]
    return "–" if math.isnan(values[0]) else _percent(*values)


def _percent(value: float, low: float, high: float) -> str:
    return f"{100 * value:5.1f}% [{100 * low:5.1f}, {100 * high:5.1f}]"
