"""Two training processes that divide rollout workers between them, with whole weights and in parts."""

import pytest

from mmrl.training.settings import RollersConfig
from tests.contracts.options import with_changes
from tests.contracts.test_two_processes import assert_same, make, train, train_in_two

pytestmark = pytest.mark.slow
SHARDING = {"none": {}, "fsdp2": {"trainer.sharding": "fsdp2"}}


@pytest.mark.parametrize("sharding", SHARDING)
@pytest.mark.parametrize("name", ["robot_ppo", "papo"])
def test_two_processes_with_workers_learn_what_one_without_does(name, sharding, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    config = make(name, tmp_path)
    whole = train(config, tmp_path / "one")
    config.rollers = RollersConfig(engine="ray", workers=2)
    assert_same(train_in_two(with_changes(config, SHARDING[sharding]), tmp_path / "two"), whole)
