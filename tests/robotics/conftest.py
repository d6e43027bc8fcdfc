import importlib.util
import os
from pathlib import Path

import pytest

from robotics.sim import RenderSettings, find_backend
from robotics.toy.arm_cubes import load_arm_cubes

os.environ.pop("MUJOCO_MENAGERIE", None)  # tests that want meshes bring their own
# MuJoCo's own renderer, which the tests compare with, reads MUJOCO_GL when mujoco is imported.
BACKEND = find_backend() if importlib.util.find_spec("mujoco") else None


@pytest.fixture(scope="session")
def backend() -> str:
    """Name of a renderer that works here."""
    if BACKEND is None:
        pytest.skip("no OpenGL renders without a screen here: sudo apt-get install libegl1 libosmesa6")
    return BACKEND.name


@pytest.fixture
def model():
    """The arm with two cubes; each test gets its own, with shadows that take less time than the default's."""
    loaded = load_arm_cubes()
    loaded.vis.quality.shadowsize = 512
    return loaded


@pytest.fixture
def small() -> RenderSettings:
    return RenderSettings(48, 40, "front")


@pytest.fixture(scope="session")
def lerobot() -> str:
    """Interpreter of an environment with lerobot."""
    python = os.environ.get("MMRL_LEROBOT_PYTHON")
    if not python:
        pytest.skip("needs MMRL_LEROBOT_PYTHON, the interpreter of an environment with lerobot 0.6.1 and its extras")
    return python


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies of lerobot are answered by a service that needs no lerobot."""
    service = Path(__file__).with_name("fake_lerobot.py")
    monkeypatch.setattr("robotics.policies.lerobot.lerobot_server.SERVICE", service)
