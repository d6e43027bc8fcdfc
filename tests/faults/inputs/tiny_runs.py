"""Damaged configurations that are run: a step of every recipe, on tiny models."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

from mmrl.recipes import RECIPES
from tests.charts import draw_no_charts
from tests.faults.batches import Kind, Verdict, of_command
from tests.faults.damage import damage_tree
from tests.faults.tiny import write_run

__all__ = ["KINDS"]

LARGEST = 9
"""Largest inserted number: a run of 10^12 samples is not a fault, but takes too long."""
SMALL = ("trainer.steps=1", "evaluation.every=0", "evaluation.at_start=false", "tracking.quiet=true")


def _prepare(folder: Path) -> list[dict[str, Any]]:
    found = []
    for recipe in RECIPES:
        (folder / recipe).mkdir()
        found.append(yaml.safe_load(write_run(recipe, folder / recipe).read_text()))
    return found


def _run(configs: list[dict[str, Any]], rng: random.Random, folder: Path) -> Verdict:
    tree = damage_tree(rng, rng.choice(configs), ("extra", "kind", "path", "name"), LARGEST)
    (folder / "run.yaml").write_text(json.dumps(tree), encoding="utf-8", errors="surrogatepass")
    draw_no_charts()
    own = (f"output_dir={folder / 'run'}", *SMALL) if isinstance(tree, dict) else ()
    return of_command("train", folder / "run.yaml", *own, may_fail=True)


KINDS = (Kind("damaged runs", _prepare, _run, share=0.4, limit_s=60),)
