"""Results of a benchmark as JSON and as a Markdown table, with everything that the numbers depend on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.files import write_atomically
from mmrl.gui.benchmarks.layout import Benchmark
from mmrl.gui.benchmarks.metrics import Share, Table, TableRow
from mmrl.training.loop.breakdown import part_metric
from mmrl.training.record.jsonlines import finite_or_none

LONGEST_TEXT = 200


def metrics_of(benchmark: Benchmark, table: Table) -> dict[str, float]:
    """The numbers of a table as metrics of an evaluation: all samples, and each value of the main columns."""
    found = _share("accuracy/first", table.all.first) | _share("accuracy/any", table.all.any)
    if table.macro is not None:
        found |= dict(zip(("accuracy/macro", "accuracy/macro/low", "accuracy/macro/high"), table.macro, strict=True))
    found |= {"answers/mean": table.all.answers, "answers/wrong_format": table.all.wrong_format.value}
    for column in benchmark.columns:
        for row in table.cells(column):
            found[part_metric("n", column, row.values[0])] = float(row.first.n)
            found |= _share(part_metric("accuracy/first", column, row.values[0]), row.first)
    return found


def write_results(folder: Path, split: str, benchmark: Benchmark, table: Table, setting: Mapping[str, Any]) -> Path:
    """Write `<split>.json` and `<split>.md`.

    Args:
        folder: where they go.
        split: name of the evaluated split.
        benchmark: which one it is.
        table: its results.
        setting: what the numbers depend on: model, prompt, coordinate space, pixel budget and so on.
    """
    content = {
        "benchmark": benchmark.name,
        "title": benchmark.title,
        "source": benchmark.source,
        "samples": table.all.first.n,
        "published_samples": benchmark.size,
        "macro": None if table.macro is None else _macro(benchmark, table.macro),
        "table": [_as_json(row) for row in table.rows],
        "setting": dict(setting),
    }
    text = json.dumps(finite_or_none(content), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    write_atomically(folder / f"{split}.json", text + "\n")
    path = folder / f"{split}.md"
    write_atomically(path, results_markdown(benchmark, table, setting))
    return path


def results_markdown(benchmark: Benchmark, table: Table, setting: Mapping[str, Any]) -> str:
    """The table as Markdown, with the setting where there is one; detailed columns are in the JSON only."""
    lines = [f"# {benchmark.title}", "", _summary(benchmark, table), ""]
    lines += ["| group | n | first point | 95 % | any point | unreadable | points |", "|---|---|---|---|---|---|---|"]
    shown = {(), *((column,) for column in benchmark.columns), *benchmark.crosses}
    lines += [_line(row) for row in table.rows if row.columns in shown]
    if setting:
        lines += ["", "Setting:", "", *(f"- {name}: {_shown(value)}" for name, value in setting.items())]
    return "\n".join(lines) + "\n"


def _summary(benchmark: Benchmark, table: Table) -> str:
    low, high = table.all.first.interval
    parts = [f"First point in the target: {_percent(table.all.first.value)} % [{_percent(low)}, {_percent(high)}]"]
    if table.macro is not None:
        mean, low, high = table.macro
        cells = " x ".join(benchmark.macro)
        parts.append(f"mean over {cells}, as published: {_percent(mean)} % [{_percent(low)}, {_percent(high)}]")
    count = f"{table.all.first.n} samples"
    if benchmark.size is not None and benchmark.size != table.all.first.n:
        count += f" of {benchmark.size}: not comparable with published numbers"
    return f"{'; '.join(parts)}; {count}."


def _line(row: TableRow) -> str:
    low, high = row.first.interval
    name = " / ".join(row.values) if row.columns else "all"
    cells = [
        name.replace("|", "\\|"),
        str(row.first.n),
        _percent(row.first.value),
        f"{_percent(low)} to {_percent(high)}",
        _percent(row.any.value),
        _percent(row.wrong_format.value),
        "–" if math.isnan(row.answers) else f"{row.answers:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _as_json(row: TableRow) -> dict[str, Any]:
    low, high = row.first.interval
    return {
        "group": dict(zip(row.columns, row.values, strict=True)),
        "n": row.first.n,
        "first": row.first.value,
        "low": low,
        "high": high,
        "any": row.any.value,
        "wrong_format": row.wrong_format.value,
        "answers": row.answers,
    }


def _macro(benchmark: Benchmark, macro: Sequence[float]) -> dict[str, Any]:
    return {"over": list(benchmark.macro), **dict(zip(("mean", "low", "high"), macro, strict=True))}


def _share(name: str, share: Share) -> dict[str, float]:
    return dict(zip((name, f"{name}/low", f"{name}/high"), (share.value, *share.interval), strict=True))


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f}"


def _shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}... (whole in the JSON)"
