"""What the runs of tests/contracts in two processes leave out: tasks that a step has twice, and replayed episodes."""

import pytest

from tests.contracts.options import with_changes
from tests.contracts.test_two_processes import (
    assert_same,
    assert_same_metrics,
    make,
    read_rows,
    train_in_double,
    train_in_two,
)

CASES = {
    "agent": {"data.seeds": 3},  # of 4 tasks in the step
    "arpo": {"data.seeds": 4, "replay.threshold": 0.0, "replay.max_std": 10.0, "replay.max_mean": 10.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_play_and_replay_what_one_does(name, tmp_path):
    """The second group of a task is sampled by the other process, which also has the trajectories of the first."""
    config = with_changes(make(name, tmp_path), CASES[name])
    whole = train_in_double(config, tmp_path / "one")
    assert_same(train_in_two(config, tmp_path / "two", run=train_in_double), whole)
    assert_same_metrics(tmp_path / "two", tmp_path / "one")
    injected = [row.get("replay/injected", 0) for row in read_rows(tmp_path / "one/metrics.jsonl")]
    assert (sum(injected) > 2) == (name == "arpo")
