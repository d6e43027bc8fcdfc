"""A policy behind a websocket that responds to observations with chunks of actions, in openpi's client protocol.

`mmrl serve RUN` opens a run or a policy folder and answers until Ctrl-C. Importing the package loads none of its
modules: `from robotics.serving import PolicyServer, ServeConfig, open_served_policy`. `PolicyClient`,
`RealTimeController` and `drive` are the robot's side.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "robotics.serving.opening": ("ServedPolicy", "open_served_policy"),
    "robotics.serving.server": ("PolicyServer",),
    "robotics.serving.observations": ("ServeConfig",),
    "robotics.serving.realtime": ("PolicyClient", "RealTimeController", "RealTimeSettings", "drive"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
