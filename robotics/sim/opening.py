"""A simulator from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.workers.loading import names_function
from mmrl.workers.memory import usable_cores
from robotics.sim.episodes import RobotSim, views_of
from robotics.sim.films import film_size
from robotics.sim.randomization import RandomizationConfig


@dataclass
class SimConfig:
    """Where episodes run."""

    kind: str = choice("tabletop", lambda: SIMULATORS, or_function=True)
    """tabletop, gymnasium, libero, metaworld, robosuite, gymnasium_robotics, or module:function that returns a
    `RobotSim`."""
    tasks: list[str] = field(default_factory=list)
    """Tasks that the simulator offers; empty = reach (tabletop), all of them (libero, metaworld), Lift (robosuite),
    FetchReach-v4 (gymnasium_robotics); the last two run one task."""
    image_size: int = bounded(64, at_least=0)
    """Side of the images in pixels; 0 = none. Those of gymnasium are resized by averaging areas."""
    camera: str = rare("")
    """Camera of the images; empty = front (tabletop), the suite's usual one. gymnasium, gymnasium_robotics: none."""
    views: list[str] = rare(field(default_factory=list))
    """Further cameras, in the order in which the policy sees them, such as [wrist] (tabletop) or [robot0_eye_in_hand]
    (libero); their images have the same size. gymnasium: entries of the observation that are images, or cameras of an
    environment with a method `policy_image(camera)`, such as those of the tabletop. gymnasium_robotics: none."""
    horizon: int = bounded(0, at_least=0)
    """Control steps after which an episode is truncated; 0 = the task's own horizon."""
    workers: int = bounded(0, at_least=0)
    """Threads (tabletop) or processes; 0 = one for each usable core."""
    arm: str = rare("panda")
    """tabletop: panda or ur5e."""
    state: str = rare("proprio")
    """tabletop: proprio, the robot's own state, or full, with the poses of all pieces."""
    physics: str = rare(choice("mujoco", ("mujoco", "warp")))
    """tabletop: mujoco, in threads on the CPU, or warp, all episodes of a task together on a GPU."""
    env: str = rare("")
    """gymnasium: id of a registered environment, with a prefix `module:` for the module that registers it, or
    module:function or file.py:function that returns an environment."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the simulator, such as suite, held_out_states and shadows; gymnasium: arguments of the
    environment, with those of its adapter under `adapter`. Time limits and the like of the processes are `settings`."""
    randomization: RandomizationConfig = rare(field(default_factory=RandomizationConfig))
    """Domain randomisation of tabletop, and of gymnasium where the environment takes an argument `randomization`, as
    those of the tabletop do (robotics.sim.registration:mmrl/Push-v0)."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        if (self.kind == "gymnasium") != bool(self.env):
            raise ValueError(f"sim.env is '{self.env}' with sim.kind {self.kind}; gymnasium needs it, others have none")
        if self.camera and self.kind in WITHOUT_CAMERAS:
            raise ValueError(f"sim.camera is '{self.camera}', but {self.kind} has no choice of cameras; leave it empty")
        self._check_views()
        if self.kind in SUITES and self.randomization.active():
            raise ValueError(
                f"sim.randomization has {', '.join(self.randomization.active())} with sim.kind {self.kind}; there is "
                "domain randomisation for tabletop and gymnasium"
            )
        if self.physics != "mujoco" and self.kind != "tabletop":
            raise ValueError(f"sim.physics is {self.physics} with sim.kind {self.kind}; only tabletop has a choice")
        doubled = sorted({"size", "horizon", "tasks", "camera", "views"} & set(self.options))
        doubled = doubled if self.kind in SUITES else []
        if doubled:
            raise ValueError(
                f"sim.options has {', '.join(doubled)}; set {', '.join(OWN_FIELDS.get(k, f'sim.{k}') for k in doubled)}"
            )

    def _check_views(self) -> None:
        if not self.views:
            return
        named = ", ".join(self.views)
        if not self.image_size:
            raise ValueError(f"sim.views is [{named}] with sim.image_size 0, which is no images; set a size")
        if self.kind in WITHOUT_VIEWS:
            raise ValueError(f"sim.views is [{named}], but {self.kind} has one camera; leave it empty")
        doubled = [name for name in self.views if [self.camera, *self.views].count(name) > 1 or not name]
        if doubled:
            raise ValueError(
                f"sim.views is [{named}] with sim.camera '{self.camera}'; name each camera once, "
                f"'{doubled[0]}' is there twice or empty"
            )


def open_sim(config: SimConfig) -> RobotSim:
    """Start a simulator.

    Args:
        config: kind of simulator and its options.

    Returns:
        The simulator; the caller closes it.

    Raises:
        UserError: a part of the configuration does not exist, or an option is unknown.
        RunError: it cannot be started.
    """
    if config.kind in SIMULATORS:
        return SIMULATORS[config.kind](config)
    from mmrl.rewards.loading import load_function

    sim: RobotSim = load_function(config.kind, what="sim.kind")(config)
    if views_of(sim) != tuple(config.views):
        sim.close()
        raise UserError(
            f"sim.views is [{', '.join(config.views)}], but the simulator of {config.kind} observes "
            f"[{', '.join(views_of(sim))}]; its attribute `views` names them"
        )
    return sim


def open_film_sim(config: SimConfig, height: int) -> RobotSim:
    """Start a simulator for films: the same episodes, drawn for people where the simulator has a look for them.

    Args:
        config: of the simulator.
        height: pixels of the films; the side of square images where the simulator has no such look.
    """
    if config.kind == "tabletop":
        return _open_tabletop(replace(config, workers=1, views=[]), film_size(height))
    return open_sim(replace(config, image_size=height, workers=1, views=[]))


def _open_tabletop(config: SimConfig, film: tuple[int, int] | None = None) -> RobotSim:
    from robotics.sim.batch import BatchSettings, TabletopBatch

    settings = BatchSettings(
        image_size=film or ((config.image_size, config.image_size) if config.image_size else None),
        look="film" if film else "policy",
        camera=config.camera or "front",
        views=tuple(config.views),
        state=config.state,
        reward="dense",  # `success` is a flag of its own
        horizon=config.horizon or None,
        randomization=config.randomization,
        physics="mujoco" if film else config.physics,
    )
    known = _known("sim.options", config.options, ())
    return TabletopBatch(config.tasks or ["reach"], config.arm, settings, workers=config.workers or None, **known)


def _open_gymnasium(config: SimConfig) -> RobotSim:
    from robotics.sim.subprocess_settings import SubprocessSettings
    from robotics.sim.subprocess_sim import SubprocessSim

    options = dict(config.options)
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
    if config.randomization.active():  # what is drawn depends on the layout, which reset has to be told
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
    from robotics.sim.subprocess_sim import SubprocessSim
    from robotics.sim.suite_setup import suite_settings

    options = dict(config.options)
    settings = _known("sim.options.settings", dict(options.pop("settings", {})), POOL_SETTINGS)
    chosen = {"horizon": config.horizon, "size": config.image_size, "tasks": config.tasks, "camera": config.camera}
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


POOL_SETTINGS = (
    "python",
    "renderer",
    "environment",
    "end_at_success",
    "start_timeout_s",
    "reset_timeout_s",
    "call_timeout_s",
    "heartbeat_timeout_s",
    "memory_mb",
    "reset_retries",
    "max_restarts",
)

SUITES = ("libero", "metaworld", "robosuite", "gymnasium_robotics")
WITHOUT_CAMERAS = ("gymnasium", "gymnasium_robotics")
WITHOUT_VIEWS = ("gymnasium_robotics",)
OWN_FIELDS = {"size": "sim.image_size"}

SIMULATORS: dict[str, Callable[[SimConfig], RobotSim]] = {
    "tabletop": _open_tabletop,
    "gymnasium": _open_gymnasium,
    **dict.fromkeys(SUITES, _open_suite),
}
