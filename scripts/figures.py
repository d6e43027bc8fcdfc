"""Redraw the figures of docs/results whose runs are gone, from the numbers in `figure.stored` of their experiments.

`python scripts/figures.py` draws all of them, `python scripts/figures.py papo_noisy critic` these. After a comparison,
`python scripts/figures.py --store papo_noisy runs/papo_noisy` prints the numbers to store.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mmrl.comparison.experiment import load_experiment
from mmrl.comparison.figures import learning_curves, stored_figure
from mmrl.comparison.summary import summarise
from mmrl.report.charts import save_svg

PROJECT = Path(__file__).resolve().parent.parent


def stored(name: str, folder: Path) -> str:
    """The numbers of a finished comparison as `figure.stored` in YAML, in percent if its metric is a fraction."""
    experiment = load_experiment(PROJECT / f"configs/experiments/{name}.yaml")
    comparison = summarise(experiment, folder)
    curves, title = learning_curves(experiment, folder)
    factor, digits = (100, 1) if "%" in experiment.figure.unit else (1, 3)
    lines = ["  stored:", *([f'    curves_title: "{title}"'] if curves else []), "    arms:"]
    for arm, entry in comparison.arms.items():
        if entry.mean is None:
            sys.exit(f"{arm} has no finished runs of this configuration in {folder}")
        seeds = [round(factor * value, digits) for value in entry.values.values() if value is not None]
        lines += [f"      {arm}:", f"        value: {round(factor * entry.mean, digits)}"]
        if found := comparison.differences.get(arm):
            ends = [round(factor * end, digits) for end in (found.mean, found.low, found.high) if end is not None]
            lines.append(f"        difference: {ends}")
        lines.append(f"        seeds: {seeds}")
        if arm in curves:
            points = zip(
                *(getattr(curves[arm], part).tolist() for part in ("places", "mean", "low", "high")), strict=True
            )
            shown = ", ".join(f"[{step:g}, {mean:.3g}, {low:.3g}, {high:.3g}]" for step, mean, low, high in points)
            lines.append(f"        curve: [{shown}]")
    return "\n".join(lines)


def main(names: Sequence[str]) -> None:
    """Draw the named experiments, or all."""
    for path in sorted((PROJECT / "configs/experiments").glob("*.yaml")):
        if not names or path.stem in names:
            experiment = load_experiment(path)
            if experiment.figure.stored is not None and experiment.evidence is not None:
                save_svg(stored_figure(experiment), PROJECT / f"docs/results/{experiment.evidence.page}.svg")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--store"]:
        sys.stdout.write(f"{stored(sys.argv[2], Path(sys.argv[3]))}\n")
    else:
        main(sys.argv[1:])
