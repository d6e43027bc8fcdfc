"""robotics/flow3d/methods."""
