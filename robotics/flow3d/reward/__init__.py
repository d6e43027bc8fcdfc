"""robotics/flow3d/reward."""
