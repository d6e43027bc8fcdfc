"""People in the loop: devices, overseers that take over from a policy, recording, and HG-DAgger."""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "robotics.interventions.devices": ("Device", "DeviceInput", "GamepadDevice", "KeyboardDevice", "SpaceMouseDevice"),
    "robotics.interventions.hg_dagger": ("HgDaggerConfig", "HgDaggerRecipe"),
    "robotics.interventions.overseers": ("Overseer", "OverseerConfig", "Person", "ScriptedOverseer"),
    "robotics.episodes.pacing": ("ControlRate", "Pacer"),
    "robotics.interventions.record": ("InterventionRecord",),
    "robotics.interventions.session": ("intervene",),
    "robotics.interventions.watched": ("WatchedEpisode", "intervention_rewards", "run_watched"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
