"""Redraw the figures of docs/results whose runs are gone, from the numbers in `figure.stored` of their experiments.

`python scripts/figures.py` draws all of them, `python scripts/figures.py papo_noisy critic` these.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mmrl.comparison.experiment import load_experiment
from mmrl.comparison.figures import stored_figure
from mmrl.report.charts import save_svg

PROJECT = Path(__file__).resolve().parent.parent


def main(names: Sequence[str]) -> None:
    """Draw the named experiments, or all."""
    for path in sorted((PROJECT / "configs/experiments").glob("*.yaml")):
        if not names or path.stem in names:
            experiment = load_experiment(path)
            if experiment.figure.stored is not None and experiment.evidence is not None:
                save_svg(stored_figure(experiment), PROJECT / f"docs/results/{experiment.evidence.page}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
