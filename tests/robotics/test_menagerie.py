"""Meshes of the arms in videos, from folders laid out like mujoco_menagerie's."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.scenes.arms import ARMS
from robotics.scenes.envs import TabletopEnv
from robotics.scenes.presentation import FILES, VARIABLE, PresentedScene
from robotics.scenes.tabletop_tasks import TASKS, TabletopScene

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")

REAL = os.environ.get("MMRL_REAL_MENAGERIE", "")
"""A clone of mujoco_menagerie, for the test of its own files."""

# Positions and orientations of the links of mujoco_menagerie's franka_emika_panda/panda.xml and
# universal_robots_ur5e/ur5e.xml, whose bases are turned differently from ours in the second.
PANDA = {
    "link0": ("0 0 0", "1 0 0 0"),
    "link1": ("0 0 0.333", "1 0 0 0"),
    "link2": ("0 0 0", "1 -1 0 0"),
    "link3": ("0 -0.316 0", "1 1 0 0"),
    "link4": ("0.0825 0 0", "1 1 0 0"),
    "link5": ("-0.0825 0.384 0", "1 -1 0 0"),
    "link6": ("0 0 0", "1 1 0 0"),
    "link7": ("0.088 0 0", "1 1 0 0"),
    "hand": ("0 0 0.107", "0.9238795 0 0 -0.3826834"),
}
UR5E = {
    "base": ("0 0 0", "0 0 0 -1"),
    "shoulder_link": ("0 0 0.163", "1 0 0 0"),
    "upper_arm_link": ("0 0.138 0", "1 0 1 0"),
    "forearm_link": ("0 -0.131 0.425", "1 0 0 0"),
    "wrist_1_link": ("0 0 0.392", "1 0 1 0"),
    "wrist_2_link": ("0 0.127 0", "1 0 0 0"),
    "wrist_3_link": ("0 0 0.1", "1 0 0 0"),
}
LINKS = {"panda": PANDA, "ur5e": UR5E}
CORNERS = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)]) * 0.05
FACES = np.array(
    [
        [0, 1, 3], [0, 3, 2], [4, 6, 7], [4, 7, 5], [0, 4, 5], [0, 5, 1],
        [2, 3, 7], [2, 7, 6], [0, 2, 6], [0, 6, 4], [1, 5, 7], [1, 7, 3],
    ]
)  # fmt: skip


def write_obj(path):
    vertices = "".join(f"v {x} {y} {z}\n" for x, y, z in CORNERS)
    path.write_text(vertices + "".join(f"f {a + 1} {b + 1} {c + 1}\n" for a, b, c in FACES))


def write_stl(path):
    triangles = b"".join(struct.pack("<12fH", 0, 0, 0, *CORNERS[face].ravel(), 0) for face in FACES)
    path.write_bytes(bytes(80) + struct.pack("<I", len(FACES)) + triangles)


def make_menagerie(folder, arm, links=None):
    """A folder with the layout of mujoco_menagerie: a model of the arm, and a visual and a collision mesh per link."""
    links = links or LINKS[arm]
    path = folder / FILES[arm]
    (path.parent / "assets").mkdir(parents=True)
    meshes, bodies = "", ""
    for name, (place, turn) in links.items():
        write_obj(path.parent / f"assets/{name}_0.obj")
        write_stl(path.parent / f"assets/{name}.stl")
        meshes += f'<mesh name="{name}_c" file="{name}.stl"/><mesh file="{name}_0.obj"/>'
        bodies += (
            f'<body name="{name}" pos="{place}" quat="{turn}"><geom mesh="{name}_0" material="white" class="visual"/>'
        )
        bodies += f'<geom mesh="{name}_c" class="collision"/>'
    for side, turn in (("left", "1 0 0 0"), ("right", "0 0 0 1")) if arm == "panda" else ():
        bodies += (
            f'<body name="{side}_finger" pos="0 0 0.0584" quat="{turn}"><geom mesh="hand_0" class="visual"/></body>'
        )
    path.write_text(
        f"""<mujoco model="{arm}"><compiler angle="radian" meshdir="assets" autolimits="true"/>
        <default><default class="{arm}"><material specular="0.5" shininess="0.25"/>
        <default class="visual"><geom type="mesh" contype="0" conaffinity="0" group="2"/></default>
        <default class="collision"><geom type="mesh" group="3"/></default></default></default>
        <asset><material class="{arm}" name="white" rgba="1 0.9 0.8 1"/>{meshes}</asset>
        <worldbody>{bodies}{"</body>" * len(links)}</worldbody></mujoco>"""
    )
    return folder


def presented(arm="panda", task="stack"):
    return PresentedScene(TabletopScene(TASKS[task], ARMS[arm]))


def geoms_of(model, body):
    number = model.body(body).id
    return [geom for geom in range(model.ngeom) if model.geom_bodyid[geom] == number]


@pytest.mark.parametrize("arm", ARMS)
def test_links_have_the_meshes_of_the_folder(arm, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(make_menagerie(tmp_path, arm)))
    model = presented(arm).model
    for link in LINKS[arm]:
        (geom,) = geoms_of(model, link)
        assert model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH
        assert model.mesh(model.geom_dataid[geom]).name == f"menagerie_{link}_0"
        material = model.mat(model.geom_matid[geom])
        np.testing.assert_allclose(material.rgba, [1, 0.9, 0.8, 1])
        assert material.specular == 0.5
    fingers = {model.geom_type[geom] for geom in geoms_of(model, "left_finger")}
    assert fingers == {int(mujoco.mjtGeom.mjGEOM_MESH if arm == "panda" else mujoco.mjtGeom.mjGEOM_BOX)}
    monkeypatch.setenv(VARIABLE, "")
    assert presented(arm).model.nmesh == 0


@pytest.mark.usefixtures("backend")
def test_meshes_appear_in_videos_and_change_nothing_else(tmp_path, monkeypatch):
    options = {"observation": ("state", "rgb"), "render_mode": "rgb_array", "render_size": (48, 64)}
    envs = []
    for folder in ("", str(make_menagerie(tmp_path, "panda"))):
        monkeypatch.setenv(VARIABLE, folder)
        env = TabletopEnv("push", **options)
        seen = [env.reset(options={"layout": 1})[0]]
        film = env.render()
        seen += [env.step(np.full(5, 0.5))[0] for _ in range(3)]
        envs.append((env, seen, film))
    (plain, without, film), (meshed, with_meshes, mesh_film) = envs
    assert not np.array_equal(film, mesh_film)
    assert np.array_equal(meshed.data.qpos, plain.data.qpos)
    for one, other in zip(without, with_meshes, strict=True):
        assert all(np.array_equal(one[kind], other[kind]) for kind in one)
    plain.close()
    meshed.close()


def test_a_folder_that_is_not_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(
        UserError, match=r"MUJOCO_MENAGERIE is .* has no franka_emika_panda/panda.xml; set it to a clone"
    ):
        presented()


def test_a_model_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(make_menagerie(tmp_path, "panda")))
    (tmp_path / FILES["panda"]).write_text("<mujoco>")
    with pytest.raises(UserError, match=r"panda.xml cannot be read"):
        presented()
    (tmp_path / FILES["panda"]).write_text("<mujoco><worldbody/></mujoco>")
    with pytest.raises(UserError, match=r"has no meshes for the links of panda, such as link0"):
        presented()


def test_a_missing_mesh_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(make_menagerie(tmp_path, "panda")))
    (tmp_path / "franka_emika_panda/assets/link3_0.obj").unlink()
    with pytest.raises(UserError, match=r"mesh .*link3_0.obj is missing"):
        presented()


def test_an_arm_with_other_frames_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(make_menagerie(tmp_path, "panda", PANDA | {"link4": ("0.09 0 0", "1 1 0 0")})))
    with pytest.raises(UserError, match=r"link link4 of .*panda.xml is at a different position .*by 0.0075"):
        presented()


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="needs a clone of mujoco_menagerie, named by MMRL_REAL_MENAGERIE")
@pytest.mark.parametrize("arm", ARMS)
def test_the_real_folder_fits(arm, monkeypatch):
    if not (Path(REAL) / FILES[arm]).is_file():
        pytest.skip(f"{REAL} has no {FILES[arm]}")
    monkeypatch.setenv(VARIABLE, REAL)
    assert presented(arm).model.nmesh >= len(LINKS[arm])
