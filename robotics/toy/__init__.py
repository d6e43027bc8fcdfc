"""Demos and the data they generate."""

DEMOS = {
    "robot": ("robotics.toy.robot_demo", "runs/robot-demo"),
    "intervene": ("robotics.toy.intervene_demo", "runs/intervene-demo"),
    "flow": ("robotics.toy.flow_demo", "runs/flow-demo"),
}
"""Module and run folder of each demo of `mmrl demo`."""
DEMONSTRATIONS = {"tabletop": "robotics.toy.tabletop_demos:build_demonstrations"}
"""Functions that build demonstrations, by kind of simulator."""
