"""The first-run demonstration: a tiny Qwen2.5-VL learns to answer questions about real handwritten digits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.report.page import write_report
from mmrl.report.report_tables import part_lines
from mmrl.runs.records import read_jsonl
from mmrl.training.run import finish_run, last_model

SEEN_OFTEN = 5
"""Minimum number of times a hint must occur with a kind of question before its usual answer is used."""

Row = Mapping[str, Any]


@dataclass
class BlindStrategy:
    """Answers only from the kind of question and its hint."""

    usual: dict[str, str] = field(default_factory=dict)
    """Most frequent answer of each kind."""
    given_hint: dict[tuple[str, str], str] = field(default_factory=dict)
    """Most frequent answer of each kind with a certain hint, if that hint was seen often."""
    copies: dict[str, bool] = field(default_factory=dict)
    """Kinds for which copying the hint is correct more often than the usual answer."""

    def answer(self, row: Row) -> str:
        """The answer to one question."""
        kind, hint = str(row["kind"]), str(row["hint_text"])
        if (kind, hint) in self.given_hint:
            return self.given_hint[kind, hint]
        return hint if hint and self.copies.get(kind, False) else self.usual.get(kind, "")

    def share(self, rows: Sequence[Row]) -> float:
        """Fraction of questions that it answers correctly."""
        return sum(self.answer(row) == row["answer"] for row in rows) / max(len(rows), 1)


def fit_blind(rows: Sequence[Row]) -> BlindStrategy:
    """Learn the best answers from the text only."""
    strategy = BlindStrategy()
    for kind in sorted({str(row["kind"]) for row in rows}):
        own = [row for row in rows if row["kind"] == kind]
        strategy.usual[kind] = _most_frequent(own)
        hinted = [row for row in own if row["hint_text"]]
        copied = sum(row["hint_text"] == row["answer"] for row in hinted)
        strategy.copies[kind] = copied > sum(row["answer"] == strategy.usual[kind] for row in hinted)
        for hint in sorted({str(row["hint_text"]) for row in own}):
            same = [row for row in own if row["hint_text"] == hint]
            if len(same) >= SEEN_OFTEN:
                strategy.given_hint[kind, hint] = _most_frequent(same)
    return strategy


def _most_frequent(rows: Iterable[Row]) -> str:
    counts = Counter(str(row["answer"]) for row in rows)
    return max(sorted(counts), key=counts.__getitem__)


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
        "held-out accuracy in percent; no_hint asks the same questions without their hints",
        *part_lines([sft, papo]),
        _blind_line(data),
        f"report: {report}",
    ]


def _blind_line(data: Path) -> str:
    """Accuracy from the text of the questions alone, learned from those of the reinforcement learning."""
    strategy = fit_blind(read_jsonl(data / "train.jsonl"))
    shares = [f"{100 * strategy.share(read_jsonl(data / f'{split}.jsonl')):.1f}% on {split}" for split in SPLITS]
    return f"text-only strategy that ignores the image: {', '.join(shares)}"
