"""Rewards of robots that have no success signal: a classifier of images, and a simulator that it judges.

`success_classifier` is the network, `success_recipe` its training (`robot_success`), `lerobot_classifier` a classifier
of LeRobot, and `judged_sim` lets one of them decide about the episodes of a run.
"""
