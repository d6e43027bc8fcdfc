"""Rewards of robots that have no success signal: a classifier of images, and a simulator that it judges.

`success_classifier` is the network, `success_recipe` its training (`robot_success`), `attempts` records episodes with
their success, and `judged_sim` lets a classifier decide about the episodes of a run.
"""
