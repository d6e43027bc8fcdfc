"""A policy behind a websocket that responds to observations with chunks of actions, in openpi's client protocol.

`mmrl serve RUN` opens a run or a policy folder and answers until Ctrl-C. Importing the package loads none of its
modules: `from robotics.serving import PolicyServer, ServeConfig, open_served_policy`.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "robotics.serving.opening": ("ServedPolicy", "open_served_policy"),
    "robotics.serving.server": ("PolicyServer",),
    "robotics.serving.observations": ("ServeConfig",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
