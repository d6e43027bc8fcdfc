"""Arms as the planner sees them."""

import pytest

from tests.robotics.flow3d.bench_arms import BenchArm


@pytest.fixture(params=["panda", "ur5e"])
def arm(request):
    return BenchArm(request.param)
