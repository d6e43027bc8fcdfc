"""Scenes of an arm at a table with a few pieces on it, and their sensors.

The table's top is at z = 0 and the arm's base at the origin; x points away from the base. Cubes (5 cm) are free bodies;
places (zone, plate, cabinet) are set down at the start of an episode and do not move.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

import numpy as np

from robotics.scenes.arms import ASSETS

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.scenes.arms import ArmModel

Layout = Mapping[str, tuple[float, float, float]]
"""x, y (m) and yaw (rad) of each piece, by name."""
CUBE_HALF_M = 0.025
PLACE_RADIUS_M = 0.06
PHYSICS_STEPS = 25
"""Number of physics steps of 4 ms per control step, which gives 10 Hz."""
CONTROL_HZ = 10
"""Control steps per second."""
PROPRIO_NAMES = (
    *("grip_x", "grip_y", "grip_z", "grip_yaw", "grip_opening"),
    *("command_x", "command_y", "command_z", "command_yaw", "command_gripper"),
)
"""Leading entries of the state: those of the robot."""
PROPRIO_SIZE = len(PROPRIO_NAMES)
STATE_NAMES = (
    *PROPRIO_NAMES,
    *("first_x", "first_y", "first_z", "first_yaw", "second_x", "second_y", "second_z", "second_yaw"),
    *("goal_x", "goal_y", "goal_z", "drawer_open"),
)
"""Entries of `SceneSensors.state`."""
STATE_SIZE = len(STATE_NAMES)


@dataclass(frozen=True)
class Piece:
    """Something on the table."""

    kind: str  # cube: a free body; place: a flat disc without contacts, or a plate; drawer: the cabinet
    body: str
    handle: str  # site at the point that is measured
    rgba: tuple[float, float, float, float]
    height_m: float  # of that point above the table while the piece is at rest


@dataclass(frozen=True)
class Roles:
    """Pieces by their part in the task."""

    first: str  # acted on
    second: str | None = None  # a distractor, or the one below
    goal: str | None = None  # where to bring it


@dataclass(frozen=True)
class SceneReading:
    """Named sensor values with any leading shape; world frame, metres, seconds; zeros for roles that are absent."""

    grip: NDArray[np.float64]  # (..., 3) between the fingertips
    yaw: NDArray[np.float64]  # (...) of the grip, rad
    opening: NDArray[np.float64]  # (...) between the fingers beyond the closed position
    first: NDArray[np.float64]  # (..., 3) centre of the cube, or the drawer's handle
    first_yaw: NDArray[np.float64]  # (...) rad
    first_speed: NDArray[np.float64]  # (...) m/s
    second: NDArray[np.float64]  # (..., 3)
    second_yaw: NDArray[np.float64]  # (...) rad
    goal: NDArray[np.float64]  # (..., 3)
    drawer: NDArray[np.float64]  # (...) how far the drawer is open


class SceneSensors:
    """Finds the named sensors of a scene in its `sensordata`."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self._columns: dict[str, slice] = {}
        for number in range(model.nsensor):
            start, size = int(model.sensor_adr[number]), int(model.sensor_dim[number])
            self._columns[model.sensor(number).name] = slice(start, start + size)

    def read(self, sensordata: NDArray[np.float64]) -> SceneReading:
        """Name the sensor values."""
        values = {name: sensordata[..., columns] for name, columns in self._columns.items()}
        leading = sensordata.shape[:-1]
        nowhere, upright = np.zeros((*leading, 3)), np.broadcast_to([1.0, 0.0, 0.0], (*leading, 3))
        return SceneReading(
            grip=values["grip_pos"],
            yaw=heading(values["grip_axis"]),
            opening=values["left_finger"][..., 0] + values["right_finger"][..., 0],
            first=values["first_pos"],
            first_yaw=heading(values["first_axis"]),
            first_speed=_length(values["first_velocity"]),
            second=values.get("second_pos", nowhere),
            second_yaw=heading(values.get("second_axis", upright)),
            goal=values.get("goal_pos", nowhere),
            drawer=values["drawer"][..., 0] if "drawer" in values else np.zeros(leading),
        )

    def state(self, sensordata: NDArray[np.float64], commands: NDArray[np.float64]) -> NDArray[np.float32]:
        """State (R, 22) of a policy, from sensor values (R, nsensordata) and the controller's commands (R, 5).

        Grip x y z, yaw, gripper opening; commanded x y z, yaw, gripper (1 closed, -1 open), the last of the robot's
        own; then the first piece (x y z yaw), the second (x y z yaw), the goal (x y z) and how far the drawer is
        open. Metres and radians; the yaw of pieces is that of a square, within 45 degrees to either side.
        """
        found = self.read(sensordata)
        parts = [
            *(found.grip, found.yaw, found.opening, commands),
            *(found.first, _square_yaw(found.first_yaw), found.second, _square_yaw(found.second_yaw)),
            *(found.goal, found.drawer),
        ]
        columns = [part if part.ndim == 2 else part[:, None] for part in parts]
        return np.concatenate(columns, axis=1).astype(np.float32)


def include_files(name: str, files: Sequence[Path]) -> mujoco.MjSpec:
    """Spec of a scene made of the suite's own MJCF files."""
    import mujoco

    parts = "".join(f"<include file={quoteattr(str(file))}/>" for file in files)
    return mujoco.MjSpec.from_string(f"<mujoco model={quoteattr(name)}>{parts}</mujoco>")


def add_model(spec: Any, other: Any) -> None:
    """Add all of another spec to a spec, with the names that it has; each keeps its own compiler settings."""
    remove_keys(other)
    with _without_prefix_warning():
        spec.attach(other, frame=spec.worldbody.add_frame(), prefix="")


def remove_keys(spec: Any) -> None:
    """Remove the keyframes, whose numbers would be too few for a larger scene."""
    for key in list(spec.keys):
        spec.delete(key)


def compile_scene(spec: Any) -> mujoco.MjModel:
    """Compile a spec that others were added to."""
    with _without_prefix_warning():
        return spec.compile()  # type: ignore[no-any-return]


@contextmanager
def _without_prefix_warning() -> Iterator[None]:
    """Hide MuJoCo's warning that a spec attached without a prefix may not be saved as XML, which no scene is."""
    import mujoco

    # MuJoCo before 4.0 has no such handler
    handle = getattr(mujoco, "set_mju_user_warning", lambda _: None)
    handle(lambda _: None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Attach")  # nor do options of the other spec count
            yield
    finally:
        handle(None)


def scene_spec(arm: ArmModel, pieces: Sequence[str], roles: Roles, *more: Path) -> mujoco.MjSpec:
    """An arm and some pieces at the table, with the contents of more files; not compiled yet."""
    import mujoco

    spec = include_files(f"tabletop_{arm.name}", [ASSETS / "tabletop.xml", *more])
    # attached and not included: an arm of somebody else's may have other units and folders than the table
    add_model(spec, arm.spec())
    for _ in [name for name in pieces if name == "drawer"]:
        add_model(spec, mujoco.MjSpec.from_file(str(ASSETS / "drawer.xml")))
    for name in pieces:
        piece = PIECES[name]
        if piece.kind == "cube":
            _add_cube(spec, name, piece)
        elif piece.kind == "place":
            _add_place(spec, name, piece)
    _add_sensors(spec, arm, roles)
    return spec


def place_body(
    model: mujoco.MjModel, data: mujoco.MjData, body: str, position: Sequence[float], quaternion: Sequence[float]
) -> None:
    """Place a free or a mocap body."""
    found = model.body(body)
    if found.mocapid[0] >= 0:
        data.mocap_pos[found.mocapid[0]], data.mocap_quat[found.mocapid[0]] = position, quaternion
    else:
        start = int(model.jnt_qposadr[int(found.jntadr[0])])
        data.qpos[start : start + 7] = *position, *quaternion


def place_pieces(model: mujoco.MjModel, data: mujoco.MjData, layout: Layout) -> None:
    """Place the pieces, at rest."""
    for name, (x, y, yaw) in layout.items():
        piece = PIECES[name]
        # a cube's frame is at its center, that of the other pieces on the table
        height = piece.height_m if piece.kind == "cube" else 0.0
        place_body(model, data, piece.body, (x, y, height), (np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)))


def _add_cube(spec: Any, name: str, piece: Piece) -> None:
    import mujoco

    body = spec.worldbody.add_body(name=piece.body, pos=[0.5, 0.0, piece.height_m])
    body.add_freejoint(name=name)
    body.add_geom(
        name=name,
        type=mujoco.mjtGeom.mjGEOM_BOX,
        size=[CUBE_HALF_M] * 3,
        rgba=piece.rgba,
        density=400,
        friction=[1.0, 0.01, 0.001],
        condim=4,
        contype=1,
        conaffinity=3,
    )
    body.add_site(name=piece.handle, size=[0.004] * 3, rgba=[0, 0, 0, 0])


def _add_place(spec: Any, name: str, piece: Piece) -> None:
    """Add a disc: painted on the table if it has no height, else a plate that carries things."""
    import mujoco

    body = spec.worldbody.add_body(name=piece.body, mocap=True)
    half = max(piece.height_m / 2, 0.001)
    solid = piece.height_m > 0
    body.add_geom(
        name=name,
        type=mujoco.mjtGeom.mjGEOM_CYLINDER,
        size=[PLACE_RADIUS_M, half, 0.0],
        pos=[0.0, 0.0, half],
        rgba=piece.rgba,
        contype=int(solid),
        conaffinity=3 * int(solid),
        friction=[1.0, 0.01, 0.001],
    )
    body.add_site(name=piece.handle, pos=[0.0, 0.0, piece.height_m], size=[0.004] * 3, rgba=[0, 0, 0, 0])


def _add_sensors(spec: Any, arm: ArmModel, roles: Roles) -> None:
    import mujoco

    kinds = mujoco.mjtSensor
    site = mujoco.mjtObj.mjOBJ_SITE
    joint = mujoco.mjtObj.mjOBJ_JOINT
    wanted = [("grip_pos", kinds.mjSENS_FRAMEPOS, site, arm.grip_site)]
    wanted += [("grip_axis", kinds.mjSENS_FRAMEXAXIS, site, arm.grip_site)]
    for label, finger in zip(("left_finger", "right_finger"), arm.fingers, strict=True):
        wanted += [(label, kinds.mjSENS_JOINTPOS, joint, finger)]
    for role, name in (("first", roles.first), ("second", roles.second), ("goal", roles.goal)):
        if name is None:
            continue
        handle = PIECES[name].handle
        wanted += [(f"{role}_pos", kinds.mjSENS_FRAMEPOS, site, handle)]
        if role != "goal":
            wanted += [(f"{role}_axis", kinds.mjSENS_FRAMEXAXIS, site, handle)]
        if role == "first":
            wanted += [("first_velocity", kinds.mjSENS_FRAMELINVEL, site, handle)]
        if PIECES[name].kind == "drawer":
            wanted += [("drawer", kinds.mjSENS_JOINTPOS, joint, "drawer")]
    for label, kind, objtype, target in wanted:
        spec.add_sensor(name=label, type=kind, objtype=objtype, objname=target)


def heading(axis: NDArray[np.float64]) -> NDArray[np.float64]:
    """Yaw (...) of axes (..., 3), in radians."""
    return np.arctan2(axis[..., 1], axis[..., 0])


def _square_yaw(yaw: NDArray[np.float64]) -> NDArray[np.float64]:
    quarter = np.pi / 2
    # a cube looks the same after a quarter turn, and a gripper can use any of its sides
    return yaw - quarter * np.round(yaw / quarter)


def _length(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt(vector[..., 0] ** 2 + vector[..., 1] ** 2 + vector[..., 2] ** 2)


PIECES: dict[str, Piece] = {
    "red_cube": Piece("cube", "red_cube", "red_cube", (0.9, 0.1, 0.1, 1.0), CUBE_HALF_M),
    "green_cube": Piece("cube", "green_cube", "green_cube", (0.1, 0.75, 0.2, 1.0), CUBE_HALF_M),
    "blue_zone": Piece("place", "blue_zone", "blue_zone", (0.1, 0.3, 0.95, 1.0), 0.0),
    "yellow_plate": Piece("place", "yellow_plate", "yellow_plate", (0.98, 0.85, 0.1, 1.0), 0.01),
    "drawer": Piece("drawer", "cabinet", "handle", (1.0, 0.55, 0.05, 1.0), 0.05),
}
