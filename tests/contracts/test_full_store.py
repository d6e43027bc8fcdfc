"""Rows that the object store of Ray does not hold end the run by name; what is finished stays, and the run goes on."""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mmrl.core.payload import per_row
from mmrl.entries import RecipeEntry
from mmrl.errors import RunError
from mmrl.training.processes import make_accelerator, seed_everything
from mmrl.training.settings import CheckpointConfig, RollersConfig, TrainerConfig
from mmrl.training.trainer import Trainer
from tests.contracts.test_rollers import own_signals
from tests.training.toy import Actions, ToyConfig, ToyRecipe

pytestmark = pytest.mark.slow
STORE, ROWS = 80 << 20, 120 << 20
"""Bytes of the store, of which Ray takes no less, and of the rows of a unit in step 3."""


@dataclass
class Heavy(Actions):
    ballast: torch.Tensor = per_row()


class HeavyRecipe(ToyRecipe):
    """Has rows in step 3 that carry more than the store holds."""

    def rollout(self, policy: Any, tasks: Any, streams: Any, step: Any) -> Any:
        found = super().rollout(policy, tasks, streams, step)
        width = ROWS // 4 // found.num_rows if step.number == 2 else 1
        ballast = torch.zeros(found.num_rows, width)
        return found.replace(payload=Heavy(found.payload.tasks, found.payload.ids, ballast))


ENTRY = RecipeEntry("toy", "tests.contracts.test_full_store:HeavyRecipe:ToyConfig", "", "")


def trainer(folder: Any, engine: str) -> Trainer:
    options = TrainerConfig(steps=4, tasks_per_step=3, samples_per_task=4, learning_rate=0.1)
    config = ToyConfig(trainer=options, checkpoint=CheckpointConfig(every=1), poison_step=-2)
    config.rollers = RollersConfig(engine, **({"workers": 1} if engine == "ray" else {"unit": 1}))
    config.validate()
    seed_everything(config.seed)
    return Trainer(HeavyRecipe(config), config, folder, make_accelerator(), None, entry=ENTRY)


def test_a_full_store_names_what_to_enlarge_and_loses_nothing(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setitem(os.environ, "RAY_memory_monitor_refresh_ms", "0")
    full = {"local_fs_capacity_threshold": 0.001}  # the disk that it spills to counts as full
    with own_signals():
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=STORE, _system_config=full)
    stopped = trainer(tmp_path / "run", "ray")
    try:
        with pytest.raises(RunError, match=r"object store is full .*`ray start --head --object-store-memory=BYTES`"):
            stopped.run()
    finally:
        stopped.rollers.close()
        ray.shutdown()
    assert stopped.step == 2
    whole, resumed = trainer(tmp_path / "whole", "local"), trainer(tmp_path / "run", "local")
    whole.run()
    resumed.resume()
    assert resumed.step == 2
    resumed.run()
    assert torch.equal(resumed.policy.table, whole.policy.table)
