"""robotics/policies/openvla."""
