import pytest

from benchmarks.harness import BenchOptions
from benchmarks.robotics import comparisons, light_steps


@pytest.mark.slow
@pytest.mark.parametrize("name", light_steps.LIGHT)
def test_every_method_returns_the_observations_of_single_environments(name):
    assert f"light-{name}" in comparisons.NAMES
    found = light_steps.compare_light_steps(BenchOptions(quick=True), name)
    assert not [arm for arm in found["arms"].values() if "error" in arm]
    assert len(found["checks"]) == 2 * (4 if name == "pendulum" else 3)
    assert all(entry["passed"] for entry in found["checks"].values())
    assert all(entry["median"] > 0 for entry in found["ratios"].values())
