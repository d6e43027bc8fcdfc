"""robotics/policies/base."""
