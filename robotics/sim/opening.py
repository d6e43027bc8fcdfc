"""A simulator from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mmrl.config import as_given
from mmrl.entries import load_target
from mmrl.errors import UserError
from mmrl.fields import bounded, choice, only_with, rare
from mmrl.recipes import world_table
from mmrl.workers.loading import names_function
from mmrl.workers.memory import usable_cores
from robotics.sim.episodes import RobotSim, views_of
from robotics.sim.randomization import RandomizationConfig
from robotics.sim.subprocess_sim import SubprocessSettings, SubprocessSim


@dataclass
class SimConfig:
    """The simulator that runs episodes."""

    kind: str = choice("tabletop", lambda: SIMULATORS, or_function=True)
    """tabletop, gymnasium, libero, metaworld, robosuite, gymnasium_robotics, or module:function that returns a
    `RobotSim`."""
    tasks: list[str] = field(default_factory=list)
    """Tasks of the simulator; empty = reach (tabletop), all tasks (libero, metaworld), Lift (robosuite), FetchReach-v4
    (gymnasium_robotics). robosuite and gymnasium_robotics run a single task. tabletop: also module:Class of your own
    `MjcfTask`."""
    image_size: int = bounded(64, at_least=0)
    """Side length of the images in pixels; 0 = no images. gymnasium: images are resized by area averaging; non-square
    images get black bars, or are stretched with `fit: stretch` in options.adapter."""
    camera: str = rare("")
    """Camera of the images; empty = front (tabletop) or the suite's usual camera. Not available for gymnasium and
    gymnasium_robotics."""
    views: list[str] = rare(field(default_factory=list))
    """Additional cameras in the order expected by the policy, such as [wrist] (tabletop) or [robot0_eye_in_hand]
    (libero), with the same image size. gymnasium: image entries of the observation, or cameras of an environment with a
    method `policy_image(camera)`, such as the tabletop's. Not available for gymnasium_robotics."""
    horizon: int = bounded(0, at_least=0)
    """Control steps after which an episode is truncated; 0 = the task's own horizon."""
    workers: int = bounded(0, at_least=0)
    """Number of threads (tabletop) or processes; 0 = one per usable core."""
    arm: str = rare("panda")
    """tabletop: panda, ur5e, or with the extra `arms` iiwa14, ur10e and fr3; or module:Class of your own `ArmModel`."""
    state: str = rare("proprio")
    """tabletop: proprio = the robot's own state; full = also the poses of all pieces."""
    physics: str = rare(only_with(choice("mujoco", ("mujoco", "warp")), kind="tabletop"))
    """tabletop: mujoco = in threads on the CPU; warp = all episodes of a task together on a GPU."""
    env: str = rare("")
    """gymnasium: id of a registered environment (prefixed with `module:` for the module that registers it), or
    module:function or file.py:function that returns an environment."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other options of the simulator, such as suite, held_out_states and shadows. tabletop: end_at_success. gymnasium:
    arguments of the environment, with the adapter's arguments under `adapter`. Settings of the processes, such as time
    limits, are under `settings`."""
    randomization: RandomizationConfig = rare(field(default_factory=RandomizationConfig))
    """Domain randomisation: for tabletop, and for gymnasium if the environment takes an argument `randomization`, as
    the tabletop's environments do (robotics.scenes.registration:mmrl/Push-v0)."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        kind, views = self.kind, f"sim.views is [{', '.join(self.views)}]"
        doubled = [name for name in self.views if [self.camera, *self.views].count(name) > 1 or not name]
        taken = sorted({"size", "horizon", "tasks", "camera", "views"} & set(self.options)) if kind in SUITES else []
        fields = ", ".join("sim.image_size" if name == "size" else f"sim.{name}" for name in taken)
        active = ", ".join(self.randomization.active()) if kind in SUITES else ""
        problems = (
            (
                (kind == "gymnasium") != bool(self.env),
                f"sim.env is '{self.env}' with sim.kind {kind}; sim.env is required for gymnasium and not used "
                "otherwise",
            ),
            (
                self.camera and kind in WITHOUT_CAMERAS,
                f"sim.camera is '{self.camera}', but {kind} has no choice of cameras; leave it empty",
            ),
            (self.views and not self.image_size, f"{views}, but sim.image_size is 0 (no images); set a size"),
            (
                self.views and kind == "gymnasium_robotics",
                f"{views}, but {kind} has only one camera; leave it empty",
            ),
            (
                doubled,
                f"{views} with sim.camera '{self.camera}'; list each camera once; '{''.join(doubled[:1])}' is "
                "repeated or empty",
            ),
            (
                active,
                f"sim.randomization has {active} with sim.kind {kind}; only tabletop and gymnasium support domain "
                "randomisation",
            ),
            (taken, f"sim.options has {', '.join(taken)}; set {fields} instead"),
        )
        for wrong, message in problems:
            if wrong:
                raise ValueError(message)


def open_sim(config: SimConfig) -> RobotSim:
    """Start a simulator, which the caller closes.

    Raises:
        UserError: a part of the configuration does not exist, or an option is unknown.
        RunError: it cannot be started.
    """
    if config.kind in SIMULATORS:
        return SIMULATORS[config.kind](config)
    from mmrl.rewards.reward_loading import load_function

    function = load_function(config.kind, what="sim.kind")
    try:
        sim: RobotSim = function(config)
    except TypeError as error:  # it passes the options on
        raise UserError(
            f"sim.kind {config.kind} with sim.options {as_given(config.options)} failed: {error}"
        ) from error
    # a function of the user's may ignore `views`; the policy would get other cameras than it says
    if views_of(sim) != tuple(config.views):
        sim.close()
        raise UserError(
            f"sim.views is [{', '.join(config.views)}], but the simulator of {config.kind} observes "
            f"[{', '.join(views_of(sim))}]; list them in its attribute `views`"
        )
    return sim


def open_video_sim(config: SimConfig, height: int) -> RobotSim:
    """Start a simulator of the same episodes for videos of a height in pixels, if possible in its presentation look."""
    # one episode at a time is filmed
    config = replace(config, workers=1, views=[])
    if config.kind in SCENES:
        return _open_scenes(config, height)
    return open_sim(replace(config, image_size=height))


def _open_scenes(config: SimConfig, height: int | None = None) -> RobotSim:
    sim: RobotSim = load_target(SCENES[config.kind])(config, height)
    return sim


def _open_gymnasium(config: SimConfig) -> RobotSim:

    options = dict(config.options)
    # adapter and settings are for this process, the rest for gymnasium.make
    adapter = dict(options.pop("adapter", {}))
    settings = dict(options.pop("settings", {}))
    by_id = not names_function(config.env)
    if by_id:
        options["id"] = config.env
    if config.horizon:
        adapter["horizon"] = config.horizon
        if by_id:  # the registered limit would end the episode earlier
            options.setdefault("max_episode_steps", config.horizon)
    if config.image_size:
        adapter.setdefault("size", config.image_size)
    if config.views:
        adapter["views"] = list(config.views)
    if config.randomization.active():  # a draw depends on the layout, so reset takes both
        options["randomization"] = asdict(config.randomization)
        adapter.setdefault("layout_options", True)
    return SubprocessSim(
        SubprocessSettings(
            factory="gymnasium:make" if by_id else config.env,
            kwargs=options,
            adapter=adapter,
            images=bool(config.image_size),
            workers=config.workers or usable_cores(),
            **_known("sim.options.settings", settings, POOL_SETTINGS),
        )
    )


def _open_suite(config: SimConfig) -> RobotSim:
    from robotics.sim.suite_setup import suite_settings

    options = dict(config.options)
    settings = _known("sim.options.settings", dict(options.pop("settings", {})), POOL_SETTINGS)
    chosen = {"horizon": config.horizon, "size": config.image_size, "tasks": config.tasks, "camera": config.camera}
    # defaults of the configuration must not override those of the suite
    options |= {name: value for name, value in (chosen | {"views": list(config.views)}).items() if value}
    found = suite_settings(
        config.kind, options, workers=config.workers or usable_cores(), images=bool(config.image_size)
    )
    return SubprocessSim(replace(found, **settings))


def _known(where: str, given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise UserError(f"{where} has {', '.join(unknown)}; allowed: {', '.join(names) or 'nothing'}")
    return given


SCENES: dict[str, str] = world_table("SIMULATORS")
"""Functions by name, since scenes build on this package."""
POOL_SETTINGS = (
    *("python", "renderer", "environment", "end_at_success", "memory_mb", "reset_retries", "max_restarts"),
    *("start_timeout_s", "reset_timeout_s", "call_timeout_s", "heartbeat_timeout_s"),
)
SUITES = ("libero", "metaworld", "robosuite", "gymnasium_robotics")
WITHOUT_CAMERAS = ("gymnasium", "gymnasium_robotics")

SIMULATORS: dict[str, Callable[[SimConfig], RobotSim]] = {
    **dict.fromkeys(SCENES, _open_scenes),
    "gymnasium": _open_gymnasium,
    **dict.fromkeys(SUITES, _open_suite),
}
