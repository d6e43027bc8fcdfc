"""Scenes: an arm at a table with a few pieces on it, and what is measured in them.

The table's top is at z = 0 and the arm's base at the origin; x points away from the base. Pieces that are handled are
free bodies, 5 cm cubes; places (zone, plate, cabinet) are set down for an episode and do not move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

import numpy as np

from robotics.sim.arms import ASSETS
from robotics.sim.surfaces import add_blank_textures

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.sim.arms import ArmModel

Layout = Mapping[str, tuple[float, float, float]]
"""x, y (m) and yaw (rad) of each piece, by name."""
CUBE_HALF_M = 0.025
PHYSICS_STEPS = 25
"""Physics steps of 4 ms in a control step: 10 Hz."""
PROPRIO_SIZE = 10
"""Leading entries of the state that a robot knows of itself."""
STATE_SIZE = 22
"""See `SceneSensors.state`."""


@dataclass(frozen=True)
class Piece:
    """A thing on the table."""

    kind: str
    """cube: a free body; place: a flat disc without contacts or a plate, set down; drawer: the cabinet."""
    body: str
    """Body that a layout puts down."""
    handle: str
    """Site at the point that is measured."""
    rgba: tuple[float, float, float, float]
    """Colour."""
    height_m: float
    """Height of that point above the table while the piece lies there."""


@dataclass(frozen=True)
class Roles:
    """Which pieces of a scene play which part; None where there is none."""

    first: str
    """The piece that is acted on."""
    second: str | None = None
    """Another piece: a distractor or the one below."""
    goal: str | None = None
    """The place to bring it to."""


@dataclass(frozen=True)
class SceneReading:
    """What the sensors say, with any leading shape; world frame, metres, seconds; zeros for roles not taken."""

    grip: NDArray[np.float64]
    """(..., 3) between the fingertips."""
    yaw: NDArray[np.float64]
    """(...) of the grip, rad."""
    opening: NDArray[np.float64]
    """(...) between the fingers beyond the closed position."""
    first: NDArray[np.float64]
    """(..., 3) centre of the cube or of the drawer's handle."""
    first_yaw: NDArray[np.float64]
    """(...) rad."""
    first_speed: NDArray[np.float64]
    """(...) m/s."""
    second: NDArray[np.float64]
    """(..., 3)."""
    second_yaw: NDArray[np.float64]
    """(...) rad."""
    goal: NDArray[np.float64]
    """(..., 3)."""
    drawer: NDArray[np.float64]
    """(...) way that the drawer is open."""


class SceneSensors:
    """Finds the named sensors of a scene in its `sensordata`."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self._columns: dict[str, slice] = {}
        for number in range(model.nsensor):
            start, size = int(model.sensor_adr[number]), int(model.sensor_dim[number])
            self._columns[model.sensor(number).name] = slice(start, start + size)

    def read(self, sensordata: NDArray[np.float64]) -> SceneReading:
        """Give names to sensor values."""
        values = {name: sensordata[..., columns] for name, columns in self._columns.items()}
        leading = sensordata.shape[:-1]
        nowhere, upright = np.zeros((*leading, 3)), np.broadcast_to([1.0, 0.0, 0.0], (*leading, 3))
        return SceneReading(
            grip=values["grip_pos"],
            yaw=_heading(values["grip_axis"]),
            opening=values["left_finger"][..., 0] + values["right_finger"][..., 0],
            first=values["first_pos"],
            first_yaw=_heading(values["first_axis"]),
            first_speed=_length(values["first_velocity"]),
            second=values.get("second_pos", nowhere),
            second_yaw=_heading(values.get("second_axis", upright)),
            goal=values.get("goal_pos", nowhere),
            drawer=values["drawer"][..., 0] if "drawer" in values else np.zeros(leading),
        )

    def state(self, sensordata: NDArray[np.float64], commands: NDArray[np.float64]) -> NDArray[np.float32]:
        """What a policy may be given.

        Args:
            sensordata: (R, nsensordata).
            commands: (R, 5) of the controller.

        Returns:
            (R, 22): grip x y z, yaw, opening of the gripper; commanded x y z, yaw, gripper (1 closed, -1 open), which
            end what a robot knows of itself; then the piece that is acted on (x y z yaw), the second one (x y z yaw),
            the goal (x y z) and the way that the drawer is open. Metres and radians; the yaw of pieces is that of a
            square, within a turn of 45 degrees to either side.
        """
        found = self.read(sensordata)
        parts = [
            *(found.grip, found.yaw, found.opening, commands),
            *(found.first, _square_yaw(found.first_yaw), found.second, _square_yaw(found.second_yaw)),
            *(found.goal, found.drawer),
        ]
        columns = [part if part.ndim == 2 else part[:, None] for part in parts]
        return np.concatenate(columns, axis=1).astype(np.float32)


def build_scene(arm: ArmModel, pieces: Sequence[str], roles: Roles, textured: bool = False) -> mujoco.MjModel:
    """Put an arm and some pieces on the table."""
    spec = scene_spec(arm, pieces, roles)
    if textured:
        add_blank_textures(spec)
    return spec.compile()


def scene_spec(arm: ArmModel, pieces: Sequence[str], roles: Roles) -> mujoco.MjSpec:
    """The scene of `build_scene` before it is compiled, for whoever adds to it."""
    import mujoco

    # Included rather than attached: the names stay those of the files, without a prefix.
    files = [ASSETS / "tabletop.xml", arm.path, *(ASSETS / f"{name}.xml" for name in pieces if name in FILES)]
    parts = "".join(f"<include file={quoteattr(str(file))}/>" for file in files)
    spec = mujoco.MjSpec.from_string(f'<mujoco model="tabletop_{arm.name}">{parts}</mujoco>')
    for name in pieces:
        if name not in FILES:
            BUILDERS[PIECES[name].kind](spec, name, PIECES[name])
    _measure_grip(spec, arm)
    _measure_pieces(spec, roles)
    return spec


def place_pieces(model: mujoco.MjModel, data: mujoco.MjData, layout: Layout) -> None:
    """Put the pieces down, at rest."""
    for name, (x, y, yaw) in layout.items():
        piece = PIECES[name]
        body = model.body(piece.body)
        quaternion = np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)
        if piece.kind == "cube":
            start = int(model.jnt_qposadr[int(body.jntadr[0])])
            data.qpos[start : start + 7] = x, y, piece.height_m, *quaternion
        else:
            mocap = int(body.mocapid[0])
            data.mocap_pos[mocap] = x, y, 0.0
            data.mocap_quat[mocap] = quaternion


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
    """A disc: painted on the table where it has no height, else a plate that carries things."""
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


def _measure_grip(spec: Any, arm: ArmModel) -> None:
    import mujoco

    kinds, site, joint = mujoco.mjtSensor, mujoco.mjtObj.mjOBJ_SITE, mujoco.mjtObj.mjOBJ_JOINT
    spec.add_sensor(name="grip_pos", type=kinds.mjSENS_FRAMEPOS, objtype=site, objname=arm.grip_site)
    spec.add_sensor(name="grip_axis", type=kinds.mjSENS_FRAMEXAXIS, objtype=site, objname=arm.grip_site)
    for number, finger in enumerate(arm.fingers):
        name = ("left_finger", "right_finger")[number]
        spec.add_sensor(name=name, type=kinds.mjSENS_JOINTPOS, objtype=joint, objname=finger)


def _measure_pieces(spec: Any, roles: Roles) -> None:
    import mujoco

    kinds, site = mujoco.mjtSensor, mujoco.mjtObj.mjOBJ_SITE
    for role, name in (("first", roles.first), ("second", roles.second), ("goal", roles.goal)):
        if name is None:
            continue
        handle = PIECES[name].handle
        spec.add_sensor(name=f"{role}_pos", type=kinds.mjSENS_FRAMEPOS, objtype=site, objname=handle)
        if role != "goal":
            spec.add_sensor(name=f"{role}_axis", type=kinds.mjSENS_FRAMEXAXIS, objtype=site, objname=handle)
        if role == "first":
            spec.add_sensor(name="first_velocity", type=kinds.mjSENS_FRAMELINVEL, objtype=site, objname=handle)
        if PIECES[name].kind == "drawer":
            joint = mujoco.mjtObj.mjOBJ_JOINT
            spec.add_sensor(name="drawer", type=kinds.mjSENS_JOINTPOS, objtype=joint, objname="drawer")


def _heading(axis: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.arctan2(axis[..., 1], axis[..., 0])


def _square_yaw(yaw: NDArray[np.float64]) -> NDArray[np.float64]:
    quarter = np.pi / 2
    return yaw - quarter * np.round(yaw / quarter)


def _length(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt(vector[..., 0] ** 2 + vector[..., 1] ** 2 + vector[..., 2] ** 2)


PLACE_RADIUS_M = 0.06

PIECES: dict[str, Piece] = {
    "red_cube": Piece("cube", "red_cube", "red_cube", (0.9, 0.1, 0.1, 1.0), CUBE_HALF_M),
    "green_cube": Piece("cube", "green_cube", "green_cube", (0.1, 0.75, 0.2, 1.0), CUBE_HALF_M),
    "blue_zone": Piece("place", "blue_zone", "blue_zone", (0.1, 0.3, 0.95, 1.0), 0.0),
    "yellow_plate": Piece("place", "yellow_plate", "yellow_plate", (0.98, 0.85, 0.1, 1.0), 0.01),
    "drawer": Piece("drawer", "cabinet", "handle", (1.0, 0.55, 0.05, 1.0), 0.05),
}

BUILDERS: dict[str, Callable[[Any, str, Piece], None]] = {"cube": _add_cube, "place": _add_place}

FILES = ("drawer",)
"""Pieces that are a file of their own."""
