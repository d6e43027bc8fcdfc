"""robotics/toy."""
