"""Every recipe of the table has the tiny run that kills and damage are tried on, and its metrics are its package's."""

import pytest

from mmrl.cli import main
from mmrl.recipes import RECIPES
from tests.contracts.domains import domain_of
from tests.faults.tiny import write_run

QUICK = ("papo", "aepo", "tspo", "arpo", "awm", "robot_ppo", "flow3d")
"""One of each domain; tests/contracts/test_recipes.py trains the others."""


@pytest.mark.parametrize(
    "recipe", [recipe if recipe in QUICK else pytest.param(recipe, marks=pytest.mark.slow) for recipe in RECIPES]
)
def test_a_tiny_run_trains_is_evaluated_and_logs_metrics_of_its_package(recipe, tmp_path):
    for module in domain_of(recipe).needs:
        pytest.importorskip(module)
    config = write_run(recipe, tmp_path)
    assert main(["train", str(config), f"output_dir={tmp_path / 'run'}", "tracking.strict=true"]) == 0
    assert (tmp_path / "run/evaluations.jsonl").is_file()
