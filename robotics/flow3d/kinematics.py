"""Robot interfaces, and inverse kinematics with mink for any arm that MuJoCo can load.

Pitfalls: a step must be integrated over the time it was solved for, or it violates the limits. A quadratic program
without a solution ends the search, not the run. Finger joints are frozen. The search keeps a distance from joint
limits, because a joint exactly at its limit can make the next program infeasible.

Source: kevinzakka/mink, examples/arm_ik.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.clip import Observation
from robotics.flow3d.geometry import BoolArray, FloatArray, angle_rad

if TYPE_CHECKING:
    import mujoco


DT_S = 1.0
"""Time over which a step is solved and integrated; with one second, velocities are steps."""
SOLVER = "daqp"
PATIENCE, PROGRESS = 8, 0.01
"""The search ends after PATIENCE steps without a relative improvement of PROGRESS."""
ITERATIONS, RESTARTS = 50, 4
"""Maximum number of steps per pose, and of random restarts for the first pose of a path if the given start fails."""
POSITION_TOLERANCE_M, ANGLE_TOLERANCE_RAD = 0.003, 0.03
"""Maximum errors at which a pose counts as reached."""
ORIENTATION_COST_M, POSTURE_COST = 0.3, 1e-3
"""Weight of one radian of error, and of the pull towards the home posture in the null space; weights as in mink's
examples, where the pull is smaller by orders of magnitude than the task."""
STEP_RAD, JUMP_RAD = 0.5, 0.6
"""Maximum change of a joint in one step of the search, and between neighbouring poses of a path."""
LIMIT_DISTANCE = 0.005
"""Distance kept from joint limits, rad or m."""


@dataclass(frozen=True)
class IkSolution:
    """Result of the search for one pose."""

    joint_rad: FloatArray
    """(J,)."""
    reached: bool
    """Whether both errors are within the tolerances."""
    position_error_m: float
    angle_error_rad: float


@dataclass(frozen=True)
class JointPath:
    """Angles along a path of poses."""

    joint_rad: FloatArray
    """(M, J)."""
    reached: BoolArray
    """(M,) whether the pose was reached without a jump from the previous one."""

    @property
    def complete(self) -> bool:
        """Whether every pose was reached."""
        return bool(self.reached.all())

    @property
    def length_rad(self) -> float:
        """Length of the path in joint space."""
        return float(np.linalg.norm(np.diff(self.joint_rad, axis=0), axis=-1).sum())


class ArmIk:
    """Kinematics of one arm."""

    def __init__(self, arm: FlowArm) -> None:
        try:
            import mink
        except ImportError:
            raise UserError("inverse kinematics needs mink, which is not installed; pip install mink") from None
        self.arm = arm
        model = self.model = arm.load()
        self._columns, self._site = _find_names(model, arm)
        ranges = _ranges(model)
        # joints that are not the arm's, such as fingers, rest in the middle of their range
        self._middle = ranges.mean(-1)
        self.low_rad, self.high_rad = ranges[self._columns].T
        self.home_rad: FloatArray = np.array(arm.home_rad, dtype=np.float64)
        # a pull to home in the null space keeps the elbow where the robot starts
        posture = self._posture(self.home_rad)
        self._configuration = mink.Configuration(model, posture)
        self._frame = mink.FrameTask(
            arm.grip_site, "site", position_cost=1.0, orientation_cost=ORIENTATION_COST_M, lm_damping=1e-3
        )
        # far cheaper than the frame task: it only decides what that leaves open
        home = mink.PostureTask(model, cost=POSTURE_COST)
        home.set_target(posture)
        spans = model.jnt_range[model.jnt_limited.astype(bool)]
        # at most a quarter of the narrowest range: margins that meet would leave no angle
        distance = min([LIMIT_DISTANCE, *(np.diff(spans) / 4).ravel()])
        self._limits = [
            mink.ConfigurationLimit(model, min_distance_from_limits=distance),
            # mink limits speeds; over DT_S this one is the largest step
            mink.VelocityLimit(model, dict.fromkeys(arm.joints, STEP_RAD / DT_S)),
        ]
        # fingers have no influence on the grip, but the solver would move them all the same
        others = [dof for dof in range(model.nv) if dof not in set(self._columns)]
        self._still = [mink.DofFreezingTask(model, others)] if others else None
        self._tasks = [self._frame, home]
        # read from the kinematics at home, so only once the configuration exists
        self._base_m, self._reach_m = self._span()

    def beyond(self, T_world_grip: FloatArray) -> bool:
        """Whether any of the poses (..., 4, 4) is farther from the first joint than the stretched arm reaches."""
        # a necessary condition only: it rejects poses without a search, and passes some that the search will miss
        away = np.linalg.norm(T_world_grip[..., :3, 3] - self._base_m, axis=-1)
        return bool((away > self._reach_m + POSITION_TOLERANCE_M).any())

    def pose(self, joint_rad: FloatArray) -> FloatArray:
        """(4, 4) T_world_grip at angles (J,)."""
        self._configuration.update(self._posture(joint_rad))
        T: FloatArray = self._configuration.get_transform_frame_to_world(self.arm.grip_site, "site").as_matrix()
        return T

    def solve(self, T_world_grip: FloatArray, start_rad: FloatArray, *, restarts: int = 0) -> IkSolution:
        """Search for angles that bring the grip to a pose (4, 4), from `start_rad` (J,), moved inside the limits."""
        rng = np.random.default_rng(0)
        # the same restarts for every pose: a plan must not depend on the searches before it
        best = self._descend(T_world_grip, start_rad)
        for _ in range(restarts):
            if best.reached:
                break
            found = self._descend(T_world_grip, rng.uniform(self.low_rad, self.high_rad))
            if found.reached or _error(found) < _error(best):
                best = found
        return best

    def follow(self, T_world_grip: FloatArray, start_rad: FloatArray, *, stop_early: bool = True) -> JointPath:
        """Angles along poses (M, 4, 4), each starting from the previous solution; the first one may be far away."""
        joint_rad = np.tile(np.asarray(start_rad, dtype=np.float64), (len(T_world_grip), 1))
        reached = np.zeros(len(T_world_grip), dtype=np.bool_)
        before = joint_rad[0]
        for number, pose in enumerate(T_world_grip):
            # only the first pose may restart: a random start later would jump to another branch of solutions
            found = self.solve(pose, before, restarts=0 if number else RESTARTS)
            # the first pose may be far from the start; later ones must be neighbours in joint space
            jump = float(np.abs(found.joint_rad - before).max()) if number else 0.0
            reached[number] = found.reached and jump <= JUMP_RAD
            # a pose that failed is a bad start for the next one; the first has no better alternative
            if reached[number] or not number:
                before = found.joint_rad
            # if the loop stops here, the remaining rows hold the last angles that were reached
            joint_rad[number:] = before
            if stop_early and not reached[number]:
                break
        return JointPath(joint_rad, reached)

    def _descend(self, T_world_grip: FloatArray, start_rad: FloatArray) -> IkSolution:
        import mink

        configuration, margin = self._configuration, LIMIT_DISTANCE
        # the configuration is shared by all calls, so each search sets its own start
        configuration.update(self._posture(np.clip(start_rad, self.low_rad + margin, self.high_rad - margin)))
        self._frame.set_target(mink.SE3.from_matrix(T_world_grip))
        errors, steps = self._errors(T_world_grip), 0
        best, improved = np.inf, 0
        while steps < ITERATIONS and steps - improved < PATIENCE:
            steps += 1
            try:
                speed = mink.solve_ik(
                    configuration, self._tasks, DT_S, SOLVER, limits=self._limits, constraints=self._still
                )
            # not an error: the angles so far still count if they are close enough
            except mink.NoSolutionFound:
                break
            # with the time of `solve_ik`: another one would step over the limits, and the next QP had no solution
            configuration.integrate_inplace(speed, DT_S)
            errors = self._errors(T_world_grip)
            # well within the tolerances: neighbours on the path start from here and inherit the rest
            near = errors[0] < POSITION_TOLERANCE_M / 4 and errors[1] < ANGLE_TOLERANCE_RAD / 4
            # joints that no longer move are at a minimum, whether or not it is the pose
            if near or float(np.abs(speed).max()) * DT_S < 1e-5:
                break
            # the same weighting as the task that is minimised
            total = errors[0] + ORIENTATION_COST_M * errors[1]
            if total < (1 - PROGRESS) * best:
                best, improved = total, steps
        reached = errors[0] <= POSITION_TOLERANCE_M and errors[1] <= ANGLE_TOLERANCE_RAD
        # indexing with a list copies; the configuration itself moves on
        return IkSolution(configuration.q[self._columns], reached, *errors)

    def _errors(self, T_world_grip: FloatArray) -> tuple[float, float]:
        data = self._configuration.data
        position, rotation = data.site_xpos[self._site], data.site_xmat[self._site].reshape(3, 3)
        away = float(np.linalg.norm(position - T_world_grip[:3, 3]))
        return away, float(angle_rad(rotation, T_world_grip[:3, :3]))

    def _span(self) -> tuple[FloatArray, float]:
        """Position (3,) of the first joint, and the stretched length from there to the grip; infinite with slides."""
        import mujoco

        data, joints = self._configuration.data, [self.model.joint(name) for name in self.arm.joints]
        anchors = [data.xanchor[joint.id].copy() for joint in joints] + [data.site_xpos[self._site].copy()]
        hinges = all(joint.type[0] == mujoco.mjtJoint.mjJNT_HINGE for joint in joints)
        lengths = np.linalg.norm(np.diff(anchors, axis=0), axis=-1)
        # a slide adds its travel to the length, so no bound is known
        return anchors[0], float(lengths.sum()) if hinges else np.inf

    def _posture(self, joint_rad: FloatArray) -> FloatArray:
        posture = self._middle.copy()
        posture[self._columns] = joint_rad
        return posture


def _find_names(model: mujoco.MjModel, arm: FlowArm) -> tuple[list[int], int]:
    """Indices of the joints in the posture, which are also those of their velocities, and of the site."""
    # with a free joint, indices of positions and of velocities would differ
    if model.nq != model.nv:
        raise UserError(
            f"the model of {arm.name} has free or ball joints; use a model of the arm alone, without objects"
        )
    try:
        columns = [int(model.joint(name).qposadr[0]) for name in arm.joints]
        site = int(model.site(arm.grip_site).id)
    except KeyError as error:
        raise UserError(f"the model of {arm.name} lacks an element that the arm refers to: {error.args[0]}") from None
    if len(arm.home_rad) != len(columns):
        raise UserError(f"{arm.name} has {len(columns)} joints and {len(arm.home_rad)} angles of home_rad")
    return columns, site


def _ranges(model: mujoco.MjModel) -> FloatArray:
    """(nq, 2) limits of all joints; half a turn to either side for joints without limits."""
    ranges = np.tile([-np.pi, np.pi], (model.nq, 1))
    limited = np.flatnonzero(model.jnt_limited)
    ranges[model.jnt_qposadr[limited]] = model.jnt_range[limited]
    return ranges


def _error(solution: IkSolution) -> float:
    return solution.position_error_m + ORIENTATION_COST_M * solution.angle_error_rad


class FlowArm(Protocol):
    """An arm without its surroundings; its base is at the origin of the world frame.

    The frame of the grip site has z along the fingers, towards the object, and y along the closing direction.
    """

    @property
    def name(self) -> str:
        """Name in reports."""

    @property
    def joints(self) -> tuple[str, ...]:
        """Joints from base to hand: hinges, or slides in metres instead of radians."""

    @property
    def home_rad(self) -> tuple[float, ...]:
        """Angles at the start of an episode."""

    @property
    def grip_site(self) -> str:
        """Site between the fingertips."""

    @property
    def max_opening_m(self) -> float:
        """Maximum width between the fingers."""

    def load(self) -> mujoco.MjModel:
        """The arm alone, without table and objects, for kinematics."""


class FlowRobot(Protocol):
    """An arm in a scene."""

    @property
    def arm(self) -> FlowArm:
        """The arm."""

    def observe(self) -> Observation:
        """Current image, depth, camera and instruction."""

    def joint_rad(self) -> FloatArray:
        """(J,) current angles."""

    def move(self, joint_rad: FloatArray) -> bool:
        """Follow angles (M, J) with the fingers unchanged; returns whether the last ones were reached."""

    def close_gripper(self) -> bool:
        """Close the fingers; returns whether they hold something."""

    def open_gripper(self) -> None:
        """Open the fingers."""
