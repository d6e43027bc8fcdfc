"""LeRobot policies, served from a separate Python environment."""
