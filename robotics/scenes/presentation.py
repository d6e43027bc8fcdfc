"""A tabletop scene as people see it: a second model with its own look, which copies the poses of the first.

The simulated model, which also renders the policies' observations, is not touched. So videos and windows change neither
physics nor observations, and meshes may replace the collision shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from robotics.scenes.looks import FILM, RING, dress
from robotics.scenes.menagerie import add_meshes, menagerie_folder
from robotics.scenes.tabletop import PIECES, scene_spec
from robotics.sim.rendering import Outcome, update_poses

if TYPE_CHECKING:
    import mujoco

    from robotics.scenes.tabletop_tasks import TabletopScene


class PresentedScene:
    """The scene of videos and windows, with the arm's meshes if `MUJOCO_MENAGERIE` is their folder."""

    def __init__(self, scene: TabletopScene) -> None:
        import mujoco

        spec = scene_spec(scene.arm, tuple(scene.task.areas), scene.task.roles, FILM)
        meshes = menagerie_folder()
        if meshes is not None:
            add_meshes(spec, scene.arm, meshes)
        dress(spec)
        self.model: mujoco.MjModel = spec.compile()
        """Model with the camera `film`, for drawing only."""
        self.data: mujoco.MjData = mujoco.MjData(self.model)
        roles = scene.task.roles
        self._target = self.model.site(PIECES[roles.goal or roles.first].handle).id
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
        self.model.geom_rgba[self._ring_geom] = [*COLOURS[outcome], float(bool(outcome))]
        if outcome:
            # the goal's place is only known once the poses are up to date, hence the second update
            self.data.mocap_pos[self._ring] = self.data.site_xpos[self._target] * [1.0, 1.0, 0.0]
            update_poses(self.model, self.data)


COLOURS: dict[Outcome, tuple[float, float, float]] = {
    "": (0.0, 0.0, 0.0),
    "success": (0.10, 0.78, 0.25),
    "failure": (0.88, 0.15, 0.12),
}
