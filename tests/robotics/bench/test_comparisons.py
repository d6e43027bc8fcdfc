import importlib

import pytest

from benchmarks.harness import BenchOptions
from benchmarks.robotics import comparisons as sim
from mmrl.errors import UserError

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")


@pytest.fixture
def here(monkeypatch):
    """Arms that run in this process, once each."""

    def run_arms(title, arms, options):
        found = {}
        for arm in arms:
            module, _, name = arm.function.partition(":")
            measured = getattr(importlib.import_module(module), name)(arm.options | {"repetitions": 1})
            found[arm.name] = {key: measured.get(key, {}) for key in ("cpu_s", "wall_s", "counts", "checks")}
            found[arm.name]["blocks"] = [measured]
        return found

    monkeypatch.setattr(sim, "run_arms", run_arms)


@pytest.mark.usefixtures("here", "backend")
@pytest.mark.slow
def test_images_equal_the_loops_in_content_and_number():
    (found,) = sim.compare(BenchOptions(quick=True, only=["images-64"])).values()
    counts = {name: run["counts"] for name, run in found["arms"].items()}
    assert counts[sim.ONE] == counts[sim.TWO] == counts[sim.LOOP]
    assert counts[sim.LOOP]["images"] == 4
    assert counts[sim.CHUNKS] == counts[sim.LOOP] | {"images": 2, "bytes": 2 * 64 * 64 * 3}
    assert len(found["checks"]) == 5
    assert not found["failed"]
    assert found["ratios"]["image for image"]["median"] > 1.0


@pytest.mark.usefixtures("here", "backend")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["image-64", "physics"])
def test_the_parts_are_measured_alone(name):
    (found,) = sim.compare(BenchOptions(quick=True, only=[name])).values()
    assert not found["failed"]
    assert all(entry["median"] > 0 for entry in found["ratios"].values())
    assert "renderer: " in found["notes"][-1]


def test_what_does_not_exist_is_refused():
    with pytest.raises(UserError, match="available: images-64, images-128"):
        sim.compare(BenchOptions(only=["images"]))
    with pytest.raises(UserError, match="compare with mujoco, and only with it"):
        sim.compare(BenchOptions(against="trl"))
