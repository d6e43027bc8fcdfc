"""Task pages in the processes that training uses: a browser killed there costs one episode, and the next one runs."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.agents.environments.environment import Action
from mmrl.workers.family import descendants

TASK = AgentTask("todo/3", {"name": "todo", "seed": 3}, seed=1)


def browsers(pid):
    """Chromium's main processes below a process; those that it starts itself have a type."""
    found = {}
    for each in descendants(pid):
        words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
        if b"--headless" in words and not any(word.startswith(b"--type=") for word in words):
            found[each] = words[0]
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the browser's process in /proc")
def test_a_browser_killed_in_a_worker(browser):
    browser.close()  # in this process
    kwargs = {"tasks": ["todo"], "width_px": 240, "height_px": 180}
    with EnvPool(EnvironmentConfig("mmrl.gui.toy.web_env:web_tasks", kwargs=kwargs, workers=1)) as pool:
        assert "click" in pool.actions
        first = pool.reset({0: TASK})[0]
        assert first.observation.images[0].shape == (180, 240, 3)
        outside = pool.step({0: Action("click", {"x": 999, "y": 0})})[0]
        assert (outside.failure, outside.info["action_error"]) == (None, "out_of_bounds")
        for pid in browsers(pool.processes()[0]):
            os.kill(pid, signal.SIGKILL)
        killed = pool.step({0: Action("wait")})[0]
        assert killed.failure is not None
        assert "BrowserFailure" in killed.failure.reason
        again = pool.reset({0: TASK})[0]
        assert again.failure is None
        assert np.array_equal(again.observation.images[0], first.observation.images[0])
        left = browsers(pool.processes()[0])
        assert left
    for _ in range(50):  # no browser outlives its pool
        left = {pid: name for pid, name in left.items() if Path(f"/proc/{pid}/exe").exists()}
        if not left:
            break
        time.sleep(0.1)
    assert not left
    browser.restart(after_failure=False)
