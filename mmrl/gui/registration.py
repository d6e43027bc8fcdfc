"""Names under which `gymnasium.make` finds the browser environments, registered by importing this module.

env = gymnasium.make("mmrl.gui.registration:mmrl/WebLogin-v0", sub_goals=1, width_px=320)
env = gymnasium.make("mmrl.gui.registration:mmrl/MiniWob-v0", tasks=["click-test"])
"""

from __future__ import annotations

from typing import Any

from mmrl.gui.plain_settings import settings_from
from mmrl.gui.tasks.catalogue import TASKS


def make_web(render_mode: str | None = None, **settings: Any) -> Any:
    """A `WebTaskEnv`; arguments are fields of `WebTaskSettings` as plain data."""
    from mmrl.gui.web_env import WebTaskEnv, WebTaskSettings

    return WebTaskEnv(settings_from(WebTaskSettings, settings, "gymnasium.make"))


def make_miniwob(render_mode: str | None = None, **settings: Any) -> Any:
    """A `MiniWobEnv`; arguments are fields of `MiniWobSettings` as plain data."""
    from mmrl.gui.miniwob import MiniWobEnv, MiniWobSettings

    return MiniWobEnv(settings_from(MiniWobSettings, settings, "gymnasium.make"))


def register() -> None:
    """Tell Gymnasium of the environments in `ENVIRONMENT_IDS`; a second call changes nothing.

    They truncate themselves, so no time limit is wrapped around them.
    """
    import gymnasium

    for name, (entry_point, arguments) in ENVIRONMENT_IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry_point, kwargs=arguments)


ENVIRONMENT_IDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mmrl/WebTasks-v0": ("mmrl.gui.registration:make_web", {}),
    **{f"mmrl/Web{name.title()}-v0": ("mmrl.gui.registration:make_web", {"tasks": [name]}) for name in TASKS},
    "mmrl/MiniWob-v0": ("mmrl.gui.registration:make_miniwob", {}),
}
"""Id to the function that makes it and its arguments."""

register()
