"""A Ray cluster of three nodes of which one goes away while it samples."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from mmrl.training.ray_rollers import RayCrew
from mmrl.training.settings import RollersConfig
from tests.contracts.test_rollers import SHARED_WORK, Watched, own_signals, shares_work
from tests.contracts.test_two_processes import make

pytestmark = pytest.mark.slow
NODE = {"num_cpus": 1, "object_store_memory": 200 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes on this machine, one of which a test adds; each says that it has one core."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - Ray's spelling
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    with own_signals():
        found = Cluster(initialize_head=True, head_node_args=NODE)
        found.add_node(**NODE)
        ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.mark.parametrize("name", ["robot_ppo", "papo", "awm", "arpo"])
def test_a_machine_is_lost_in_the_middle_of_a_step(name, tmp_path, cluster):
    """Its tasks go to the others, which are then fewer: nothing has room for another worker."""
    with own_signals():
        third = cluster.add_node(**NODE)

    def remove(crew: RayCrew, worker: int) -> None:
        cluster.remove_node(third, allow_graceful=False)

    here = Watched(make(name, tmp_path), tmp_path / "here", RollersConfig(unit=1))
    spread = Watched(make(name, tmp_path), tmp_path / "ray", RollersConfig(engine="ray", workers=3), remove)
    assert spread.again >= 1
    assert spread.differs(here) <= (SHARED_WORK if shares_work(name) else 0.0)
