"""A task at a table that an arm can do, in physics: the suite's own `FlowRobot`.

    with FlowTabletop(task="pour", actor="ur5e") as robot:
        robot.reset(seed=3)
        observation = robot.observe()
        ...
        robot.move(joint_rad), robot.close_gripper(), robot.move(more)
        print(robot.success().failed)

Grasps are not simulated by friction: once a finger touches a movable body between the fingers, a weld holds it to the
hand until the gripper opens. So what counts is where objects are brought, not how well they are gripped.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import RunError, UserError
from robotics.flow3d.geometry import inverse_pose
from robotics.flow3d.objects.criteria import CriteriaOutcome
from robotics.flow3d.objects.scene import FLOW_ARMS, FlowScene, SceneConfig, find_flow_arm
from robotics.scenes.arms import start_arm
from robotics.sim.rendering import update_poses

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from robotics.scenes.arms import ArmModel

STEPS = 5
"""Physics steps of 4 ms between two targets."""
SPEED_RAD_S, SPEED_M_S = 1.2, 0.4
"""Speed of the fastest hinge or slide along a path."""
ARRIVED_RAD, REACHED_RAD = 0.004, 0.02
"""Maximum joint error at which the arm need not wait any longer, and at which the end of a path is reached."""
TIP_OFFSETS_M = (0.0, -0.008, 0.008)
"""Offsets along the fingers, from the middle of their tips, at which an object may be between them."""
SETTLE_S = 0.8
"""Maximum wait for the arm to arrive, and for the fingers to close or open."""


class FlowTabletop(FlowScene):
    """A scene with an arm that moves by its servos, with contacts and gravity.

    Args:
        config: settings of the scene, with the arm as `actor`; None for the defaults.
        changes: fields of the configuration by name.

    Raises:
        UserError: the actor is not an arm, or a field is out of range.
    """

    arm: ArmModel

    def __init__(self, config: SceneConfig | None = None, **changes: object) -> None:
        self.on_frame: Callable[[FlowTabletop], None] | None = None
        """Called every 20 ms of simulated time, for instance to record a video."""
        chosen = dataclasses.replace(config or SceneConfig(), **changes)  # type: ignore[arg-type]
        if find_flow_arm(chosen.actor) is None:
            raise UserError(f"actor is {chosen.actor!r}; physics needs an arm: {', '.join(FLOW_ARMS)}")
        super().__init__(chosen)

    def reset(self, seed: int) -> None:
        """See `FlowScene.reset`."""
        self._held: str | None = None
        self._done = self._lost = False
        self._names()
        super().reset(seed)

    def give(self, task: str) -> None:
        """See `FlowScene.give`."""
        super().give(task)
        self._done = False

    def joint_rad(self) -> NDArray[np.float64]:
        """(J,) current angles."""
        return self.data.qpos[self._joints].copy()

    def move(self, joint_rad: NDArray[np.float64]) -> bool:
        """Follow a path with the fingers as they are, straight in joint space between its points.

        Args:
            joint_rad: (M, J) angles, one after the other.

        Returns:
            Whether the last ones were reached, to 0.02 rad (0.02 m for slides).

        Raises:
            UserError: the shape does not fit, or an angle is not finite.
            RunError: the simulation diverged.
        """
        path = np.asarray(joint_rad, dtype=np.float64)
        if path.ndim != 2 or path.shape[1] != len(self._joints) or not len(path) or not np.isfinite(path).all():
            raise UserError(
                f"the path has the shape {path.shape}; expected (M, {len(self._joints)}) finite angles, M at least 1"
            )
        path = np.clip(path, *self.model.actuator_ctrlrange[self._servos].T)
        for goal in path:
            here = self.data.ctrl[self._servos].copy()
            # the slowest joint sets the time, so all joints arrive together on a straight line
            seconds = float((np.abs(goal - here) / self.speeds).max())
            count = max(1, math.ceil(seconds / self._tick_s))
            for number in range(1, count + 1):
                self.data.ctrl[self._servos] = here + (goal - here) * number / count
                self._step()
        # the servos lag behind their targets
        self._settle(lambda: self._error(path[-1]) < ARRIVED_RAD)
        return self._error(path[-1]) < REACHED_RAD

    def close_gripper(self) -> bool:
        """Close the fingers, and weld the body between them to the hand; returns whether something is held."""
        if self._held is None:
            self.data.ctrl[self._gripper] = self.arm.closed_and_open[0]
            self._settle(self._grasp)
        return self._held is not None

    def open_gripper(self) -> None:
        """Let go, open the fingers and wait until the object has come to rest."""
        self._let_go()
        for _ in range(math.ceil(SETTLE_S / self._tick_s)):
            self._step()

    def drive(self, joint_rad: NDArray[np.float64], close: bool, ticks: int = 5) -> bool:
        """Move the servos' targets for a short time, without waiting for the arm, as a controller does.

        Args:
            joint_rad: (J,) targets at its end; limited to the servos' ranges.
            close: close the fingers, which grasp what they touch, rather than open them.
            ticks: number of ticks of 20 ms.

        Returns:
            Whether something is held. Raises RunError if the simulation diverged.
        """
        here = self.data.ctrl[self._servos].copy()
        goal = np.clip(joint_rad, *self.model.actuator_ctrlrange[self._servos].T)
        if not close:
            self._let_go()
        elif self._held is None:
            self.data.ctrl[self._gripper] = self.arm.closed_and_open[0]
        for number in range(1, ticks + 1):
            if close and self._held is None:
                self._grasp()
            self.data.ctrl[self._servos] = here + (goal - here) * number / ticks
            self._step()
        return self._held is not None

    def holds(self) -> bool:
        """Whether the gripper holds something."""
        return self._held is not None

    def target_rad(self) -> NDArray[np.float64]:
        """(J,) targets of the servos."""
        return self.data.ctrl[self._servos].copy()

    def released(self) -> bool:
        """Whether the gripper does not hold the object."""
        return self._held != self.task.moved

    def success(self, T_world_object: NDArray[np.float64] | None = None) -> CriteriaOutcome:
        """Judge the criteria, now or at another pose (4, 4); a momentary task stays solved once it was."""
        now = super().success(T_world_object)
        if T_world_object is None and self._done:
            return CriteriaOutcome(dict.fromkeys(now.errors, 0.0))
        return now

    def _let_go(self) -> None:
        if self._held is not None:
            self.data.eq_active[int(self.model.equality(f"hold_{self._held}").id)] = 0
            self._held = None
        self.data.ctrl[self._gripper] = self.arm.closed_and_open[1]

    def _pose_actor(self) -> None:
        start_arm(self.model, self.data, self.arm)

    def _names(self) -> None:
        model, arm = self.model, self.arm
        self._joints = [int(model.joint(name).qposadr[0]) for name in arm.joints]
        *self._servos, self._gripper = arm.actuators(model)
        slides = [model.joint(name).type[0] == self._lib.mjtJoint.mjJNT_SLIDE for name in arm.joints]
        self.speeds: NDArray[np.float64] = np.where(slides, SPEED_M_S, SPEED_RAD_S)
        """(J,) maximum speed of each joint along a path in rad/s, or m/s for slides."""
        self._tick_s = STEPS * float(model.opt.timestep)
        self._fingers = [int(model.joint(name).bodyid[0]) for name in arm.fingers]
        self._movable = {int(model.body(name).id): name for name in self.task.furniture.movable}
        self._hand = int(model.site_bodyid[int(model.site(arm.grip_site).id)])

    def _step(self) -> None:
        self._lib.mj_step(self.model, self.data, STEPS)
        update_poses(self.model, self.data)  # grasps and success are judged by the state that was reached
        if self.data.warning.number.any():
            kinds = [self._lib.mjtWarning(int(number)).name for number in np.flatnonzero(self.data.warning.number)]
            raise RunError(f"the simulation of {self.task.name} with {self.arm.name} failed: {', '.join(kinds)}")
        # a pour counts at the moment it succeeds; the vessel may be set down afterwards
        if self.task.momentary and not self._done:
            self._done = super().success().success
        self._lose()
        if self.on_frame is not None:
            self.on_frame(self)

    def _lose(self) -> None:
        """Drop the held object once it has moved far enough, if the scene's settings say so."""
        if self._lost or not self.config.lose_after_m or self._held is None:
            return
        here = self.body_pose(self._held)[:3, 3]
        if np.linalg.norm(here - self._held_from) > self.config.lose_after_m:
            self._lost = True
            self._let_go()

    def _error(self, goal_rad: NDArray[np.float64]) -> float:
        return float(np.abs(self.joint_rad() - goal_rad).max())

    def _settle(self, arrived: Callable[[], bool]) -> bool:
        for _ in range(math.ceil(SETTLE_S / self._tick_s)):
            if arrived():
                return True
            self._step()
        return arrived()

    def _grasp(self) -> bool:
        """Weld the body between the fingers to the hand, once one of them touches it."""
        touched = self._touched()
        between = self._between()
        # both: a body may be touched from outside, or be between open fingers that do not touch it
        if between is None or between not in touched:
            return False
        name = self._movable[between]
        weld = int(self.model.equality(f"hold_{name}").id)
        T_hand_held = inverse_pose(self._pose_of(self._hand)) @ self._pose_of(between)
        # Anchor on the held body, then that body's pose in the frame of the hand.
        self.model.eq_data[weld, :3] = 0.0
        self.model.eq_data[weld, 3:10] = self._pose_numbers(T_hand_held)
        self.data.eq_active[weld] = 1
        self._held = name
        self._held_from = self._pose_of(between)[:3, 3].copy()
        # The fingers stay where they are; further closing would pull against the weld.
        finger_m = float(self.data.qpos[int(self.model.joint(self.arm.fingers[0]).qposadr[0])])
        closed, opened = self.arm.closed_and_open
        self.data.ctrl[self._gripper] = closed + (opened - closed) * finger_m / self.arm.opening_m
        return True

    def _touched(self) -> set[int]:
        bodies = self.model.geom_bodyid[self.data.contact.geom]
        pairs = {(int(one), int(other)) for one, other in bodies} | {(int(b), int(a)) for a, b in bodies}
        return {other for one, other in pairs if one in self._fingers and other in self._movable}

    def _between(self) -> int | None:
        """The movable body that lines from one fingertip to the other meet first, at several heights of the tips."""
        grip = self.data.site(self.arm.grip_site)
        along = grip.xmat.reshape(3, 3)[:, 2]
        inside = [self.data.geom_xpos[int(self.model.body_geomadr[body])] for body in self._fingers]
        start, end = (place + along * (along @ (grip.xpos - place)) for place in inside)
        hit = np.full(1, -1, np.int32)
        options: tuple[Any, ...] = (None, 1, self._fingers[0], hit)
        for offset in TIP_OFFSETS_M:
            distance = self._lib.mj_ray(self.model, self.data, start + offset * along, end - start, *options)
            body = int(self.model.geom_bodyid[hit[0]]) if hit[0] >= 0 and distance <= 1.0 else -1
            if body in self._movable:
                return body
        return None

    def _pose_of(self, body: int) -> NDArray[np.float64]:
        return self.body_pose(self.model.body(body).name)
