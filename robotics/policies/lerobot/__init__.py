"""robotics/policies/lerobot."""
