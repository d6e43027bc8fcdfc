"""robotics/flow3d/plan."""
