"""A tabletop scene for human viewers: a second model with its own look, which copies the poses of the first.

The simulated model, which also renders the policies' observations, is not touched. So videos and windows change neither
physics nor observations, and meshes may replace the collision shapes.

The makers' meshes of an arm, from a user's folder of google-deepmind/mujoco_menagerie.

They are for people only (`robotics.scenes.presentation`): joints, inertias, contacts and policies' images stay those of
`robotics.scenes.arms`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from robotics.scenes.arms import transform
from robotics.scenes.looks import RING, light_up
from robotics.scenes.tabletop import compile_scene
from robotics.sim.rendering import Outcome, update_poses

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.scenes.arms import ArmModel
    from robotics.scenes.scene import Scene


VARIABLE = "MUJOCO_MENAGERIE"
"""Environment variable with the folder."""
FILES = {"panda": "franka_emika_panda/panda.xml", "ur5e": "universal_robots_ur5e/ur5e.xml"}
SAME_M = 1e-3
"""Maximum distance between the frames of equal links; in radians for their orientations."""


def menagerie_folder() -> Path | None:
    """Folder in the variable MUJOCO_MENAGERIE; None if it is unset or empty."""
    given = os.environ.get(VARIABLE, "")
    return Path(given).expanduser() if given else None


def add_meshes(spec: Any, arm: ArmModel, folder: Path) -> None:
    """Show the links of an arm with the makers' meshes; links without meshes keep their shapes."""
    import mujoco

    path = folder / FILES[arm.name]
    if not path.is_file():
        raise UserError(
            f"{VARIABLE} is {folder}, which has no {FILES[arm.name]}; set it to a clone of "
            "https://github.com/google-deepmind/mujoco_menagerie, or unset it"
        )
    try:
        theirs = mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    meshes = path.parent / theirs.meshdir
    own, given = _frames(spec), _frames(theirs)
    shown = [name for name, (body, _) in given.items() if name in own and any(map(_is_visual, body.geoms))]
    if not shown:
        raise UserError(f"{path} has no meshes for the links of {arm.name}, such as {next(iter(own))}")
    _check_frames(path, shown, own, given)
    for name in shown:
        # a list, because deleting changes the geoms that are walked through
        for geom in list(own[name][0].geoms):
            spec.delete(geom)
        for geom in filter(_is_visual, given[name][0].geoms):
            _add_geom(spec, own[name][0], theirs, geom, meshes)


def _frames(spec: Any) -> dict[str, tuple[Any, NDArray[np.float64]]]:
    """Bodies by name with T_world_body at zero joint positions."""
    found: dict[str, tuple[Any, NDArray[np.float64]]] = {}
    waiting = [(body, np.eye(4)) for body in spec.worldbody.bodies]
    while waiting:
        body, parent = waiting.pop(0)
        quaternion = np.array(body.quat, np.float64)
        pose = parent @ transform(body.pos, quaternion / np.linalg.norm(quaternion))
        found[body.name] = body, pose
        waiting += [(child, pose) for child in body.bodies]
    return found


def _check_frames(path: Path, names: list[str], own: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise UserError unless the links have the same relative poses as here; the base may be turned."""
    base = names[0]
    for name in names:
        # relative to the base, which the two models may place differently
        here, there = (np.linalg.inv(frames[base][1]) @ frames[name][1] for frames in (own, given))
        apart = float(np.abs(here - there).max())
        if apart > SAME_M:
            raise UserError(
                f"the link {name} of {path} is at a different position than in the built-in arm (by {apart:.3g}, at "
                "zero joint positions), so its meshes would not fit. Use mujoco_menagerie's own file"
            )


def _is_visual(geom: Any) -> bool:
    import mujoco

    return bool(geom.type == mujoco.mjtGeom.mjGEOM_MESH and geom.contype == 0 and geom.conaffinity == 0)


def _add_geom(spec: Any, body: Any, theirs: Any, geom: Any, folder: Path) -> None:
    import mujoco

    body.add_geom(
        type=mujoco.mjtGeom.mjGEOM_MESH,
        meshname=_mesh(spec, theirs, geom.meshname, folder),
        material=_material(spec, theirs, geom.material),
        pos=geom.pos,
        quat=geom.quat,
        rgba=geom.rgba,
        contype=0,
        conaffinity=0,
    )


def _mesh(spec: Any, theirs: Any, name: str, folder: Path) -> str:
    """Name of a mesh in our model, added if missing."""
    new = f"menagerie_{name}"
    if any(mesh.name == new for mesh in spec.meshes):
        return new
    mesh = next(mesh for mesh in theirs.meshes if (mesh.name or Path(mesh.file).stem) == name)
    file = folder / mesh.file
    if not file.is_file():
        raise UserError(f"the mesh {file} is missing; is the clone of mujoco_menagerie complete?")
    spec.add_mesh(name=new, file=str(file.resolve()), scale=mesh.scale, refpos=mesh.refpos, refquat=mesh.refquat)
    return new


def _material(spec: Any, theirs: Any, name: str) -> str:
    if not name:
        return ""
    new = f"menagerie_{name}"
    if not any(material.name == new for material in spec.materials):
        given = theirs.material(name)
        spec.add_material(name=new, rgba=given.rgba, specular=given.specular, shininess=given.shininess)
    return new


class PresentedScene:
    """The scene of videos and windows, with the arm's meshes if `MUJOCO_MENAGERIE` is their folder."""

    def __init__(self, scene: Scene) -> None:
        import mujoco

        spec, target = scene.film_spec()
        meshes = menagerie_folder()
        if meshes is not None and scene.arm is not None and scene.arm.name in FILES:
            add_meshes(spec, scene.arm, meshes)
        light_up(spec)
        self.model: mujoco.MjModel = compile_scene(spec)
        """Model with the camera `film`, for drawing only."""
        self.data: mujoco.MjData = mujoco.MjData(self.model)
        self._target = int(self.model.site(target).id) if target else None
        self._ring_rises = scene.ring_rises
        self._ring = int(self.model.body(RING).mocapid[0])
        self._ring_geom = int(self.model.geom(RING).id)

    def show(self, data: mujoco.MjData, outcome: Outcome = "") -> None:
        """Copy the poses of a state."""
        # the presented model has one mocap body more, the ring, which comes last
        mocaps = len(data.mocap_pos)
        self.data.time = data.time
        self.data.qpos[:] = data.qpos
        self.data.mocap_pos[:mocaps] = data.mocap_pos
        self.data.mocap_quat[:mocaps] = data.mocap_quat
        update_poses(self.model, self.data)
        self.model.geom_rgba[self._ring_geom] = [*COLOURS[outcome], float(bool(outcome) and self._target is not None)]
        if outcome and self._target is not None:
            # the goal's place is only known once the poses are up to date, hence the second update
            self.data.mocap_pos[self._ring] = self.data.site_xpos[self._target] * [1.0, 1.0, self._ring_rises]
            update_poses(self.model, self.data)


COLOURS: dict[Outcome, tuple[float, float, float]] = {
    "": (0.0, 0.0, 0.0),
    "success": (0.10, 0.78, 0.25),
    "failure": (0.88, 0.15, 0.12),
}
