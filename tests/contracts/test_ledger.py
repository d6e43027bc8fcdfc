"""Every recipe's evaluation writes a ledger whose rows are the same when they are run again, one by one."""

import dataclasses
import json

import pytest

from mmrl.comparison.verify import verify
from mmrl.recipes import RECIPES
from mmrl.runs.ledger import COLUMNS
from mmrl.training.run import evaluate
from tests.contracts.test_two_processes import make

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", list(RECIPES))
def test_rows_of_an_evaluation_can_be_repeated(name, tmp_path):
    config = make(name, tmp_path)
    config.recipe = name
    if not config.eval_data and not hasattr(config, "data"):
        pytest.skip("the tiny run has no evaluation")
    config.eval_data = config.eval_data or {"held_out": config.data}
    if hasattr(getattr(config, "data", None), "seen"):
        config.eval_data = {"held_out": dataclasses.replace(config.data, seen=True)}
    if hasattr(config, "grounding"):
        config.grounding.seen = ["held_out"]
    metrics = evaluate(RECIPES[name], config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").open()]
    assert {tuple(row) for row in rows} == {COLUMNS}
    protocol = json.loads((tmp_path / "run" / "protocol.json").read_text())["protocol"]
    assert str(tmp_path) not in json.dumps(protocol)  # nor does the hash depend on a folder
    assert metrics[f"{rows[0]['split']}/n"] <= len(rows)
    assert verify(tmp_path / "run", print, min(6, len(rows)), (), ()) == 0
