"""robotics/policies."""
