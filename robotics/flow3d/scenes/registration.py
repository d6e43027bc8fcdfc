"""The flow scenes' names for `gymnasium.make`; `robotics.sim.registration` registers them."""

import robotics.sim.registration  # noqa: F401
