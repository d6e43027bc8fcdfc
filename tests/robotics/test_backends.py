import subprocess
import sys

import pytest

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.errors import UserError
from mmrl.workers import PoolVectorEnv, loading
from robotics.sim import backends


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No renderer chosen before the test or after it."""
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY", "WAYLAND_DISPLAY", loading.GUESSED):
        monkeypatch.setenv(name, "")  # restored after the test, also where the code sets it
        monkeypatch.delenv(name)
    monkeypatch.setattr(backends.platform, "system", lambda: "Linux")
    backends.probe_backend.cache_clear()
    yield
    backends.probe_backend.cache_clear()


def test_a_found_backend_has_rendered_and_names_its_device(backend):
    found = backends.find_backend(backend)
    assert found.name == backend
    assert any(character.isdigit() for character in found.device)  # at least a version


def test_the_first_one_that_draws_is_taken_and_handed_on_to_child_processes(monkeypatch):
    program = "import os; assert os.environ['MUJOCO_GL'] == 'osmesa', 'no display'; print('device: test 1.0')"
    monkeypatch.setattr(backends, "PROBE", program)
    assert backends.find_backend() == backends.Backend("osmesa", "test 1.0")
    assert backends.os.environ["MUJOCO_GL"] == "osmesa"
    assert backends.probe_backend("egl") == (None, "AssertionError: no display")


def test_a_guess_is_one_renderer_among_others_and_the_found_one_replaces_it(monkeypatch):
    monkeypatch.setattr(loading.ctypes.util, "find_library", lambda name: name)
    loading.choose_renderer()
    assert loading.os.environ["MUJOCO_GL"] == "egl"
    monkeypatch.setattr(backends, "PROBE", "import os; assert os.environ['MUJOCO_GL'] == 'osmesa'; print('device: x')")
    assert backends.find_backend().name == "osmesa"
    loading.choose_renderer()
    assert loading.os.environ["MUJOCO_GL"] == "osmesa"
    assert loading.GUESSED not in loading.os.environ


@pytest.mark.parametrize("name", ["DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"])
def test_nothing_is_guessed_with_a_screen_or_against_the_users_choice(monkeypatch, name):
    monkeypatch.setenv(name, "off")
    loading.choose_renderer()
    assert loading.os.environ.get("MUJOCO_GL") == ("off" if name == "MUJOCO_GL" else None)


DRAWS = """
import os
import gymnasium, numpy as np


class Draws(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(0, 255, (2, 2, 3), np.uint8), gymnasium.spaces.Discrete(2)
    gl = os.environ.get("MUJOCO_GL")  # what MuJoCo reads when it is imported

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 2, 3), np.uint8), {"gl": self.gl}
"""


@pytest.mark.parametrize("pool", ["vector", "agents"])
def test_every_process_of_environments_chooses(tmp_path, monkeypatch, pool):
    pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")
    libraries = [name for name, library in loading.RENDERERS if loading.ctypes.util.find_library(library)]
    if not libraries:
        pytest.skip("no OpenGL library here")
    (tmp_path / "draws.py").write_text(DRAWS)
    factory = f"{tmp_path / 'draws.py'}:Draws"
    if pool == "vector":
        envs = PoolVectorEnv(factory, 1)
        seen = envs.get_attr("gl")[0]
        envs.close()
    else:
        with EnvPool(EnvironmentConfig(factory, workers=1)) as envs:
            seen = envs.reset({0: AgentTask("draw/0", {}, 0)})[0].info["gl"]
    assert seen == libraries[0]


def test_the_choice_of_the_user_is_the_only_one_tried(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "EGL")
    monkeypatch.setattr(backends, "PROBE", "import os; assert os.environ['MUJOCO_GL'] == 'osmesa'; print('device: x')")
    assert backends.find_backend() is None


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.abort()", "crashed with SIGABRT"),
        ("import time; time.sleep(60)", "hung for 1 s"),
        ("raise SystemExit(3)", "exited with code 3 without an image"),
        ("import os; print('device: x', flush=True); os._exit(5)", "exited with code 5"),
    ],
)
def test_a_broken_driver_does_not_take_the_process_with_it(monkeypatch, program, reason):
    monkeypatch.setattr(backends, "PROBE", program)
    monkeypatch.setattr(backends, "PROBE_SECONDS", 1.0)
    found, why = backends.probe_backend("egl")
    assert found is None
    assert why.startswith(reason)


def test_the_error_lists_what_was_tried_and_what_to_install(monkeypatch):
    monkeypatch.setattr(backends, "PROBE", "raise OSError('library not found')")
    with pytest.raises(UserError) as caught:
        backends.require_backend()
    for part in ("egl: OSError: library not found", "osmesa: OSError", "libegl1", "libosmesa6", "MUJOCO_GL is not set"):
        assert part in str(caught.value)


def test_rendering_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "off")
    assert backends.find_backend() is None
    with pytest.raises(UserError, match="MUJOCO_GL=off"):
        backends.require_backend()


def test_an_unknown_backend_is_refused():
    with pytest.raises(UserError, match="unknown renderer 'vulkan'; available: egl, osmesa"):
        backends.find_backend("vulkan")


def test_importing_the_room_does_not_import_mujoco():
    program = "import sys, robotics.sim; print([name for name in ('mujoco', 'OpenGL', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_child_takes_over_what_its_parent_has_probed(monkeypatch):
    monkeypatch.setenv(backends.PROBED, "osmesa|llvmpipe")
    monkeypatch.setattr(backends.subprocess, "run", lambda *a, **k: pytest.fail("probed again"))
    assert backends.probe_backend("osmesa") == (backends.Backend("osmesa", "llvmpipe"), "")
