"""BrowserGym: its observations and actions, with stand-ins of its modules, and with the package if it is installed."""

import base64
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.agents.environments.environment import Action
from mmrl.agents.environments.separate_python import environment_python
from mmrl.errors import UserError
from mmrl.gui.browser import browsergym
from mmrl.gui.browser.browser import find_chromium
from mmrl.gui.browser.browsergym import BrowserGymEnvironment

PAGE = """<title>Shop</title><button onclick="document.title = 'bought'">Buy</button>"""
TASK = {"name": "browsergym/openended", "goal": "Buy it.", "start_url": "http://shop"}
SCREEN = np.zeros((2, 3, 3), np.uint8)


class FakeActions:
    """As `browsergym.core.action.highlevel.HighLevelActionSet`."""

    def __init__(self, subsets=("bid",), multiaction=True):
        if "fly" in subsets:
            raise ValueError("Unknown high-level action subspace: fly")
        assert not multiaction
        self.action_set = {"click": SimpleNamespace(signature="click(bid: str)", description="Click an element.")}

    def to_tool_description(self, api):
        parameters = {"type": "object", "properties": {"bid": {"type": "string"}}, "required": ["bid"]}
        return [{"name": "click", "description": "Click.", "parameters": parameters, "type": "function"}]

    def to_python_code(self, action):
        return action


class FakeEnv:
    """As `browsergym.core.env.BrowserEnv`."""

    made = []  # noqa: RUF012
    goal = ({"type": "text", "text": "Buy it."},)

    def __init__(self, id, **options):
        self.id, self.options, self.written, self.open = id, options, [], True
        FakeEnv.made.append(self)

    def reset(self, seed):
        self.seed = seed
        return self._seen(""), {"task_info": {}}

    def step(self, written):
        self.written.append(written)
        done = written in ("click('5')", "click(bid='5')")
        return self._seen("" if done else "ValueError: no such element"), float(done), done, False, {"time": 3.0}

    def close(self):
        self.open = False

    def _seen(self, error):
        pages = {"open_pages_titles": ("Shop", "Help"), "open_pages_urls": ("http://shop", "http://help")}
        page = {"axtree_object": "[5] button 'Buy'", "extra_element_properties": {}, "screenshot": SCREEN}
        index = {"active_page_index": np.asarray([1]), "elapsed_time": np.asarray([0.3])}
        return {"goal_object": self.goal, "last_action_error": error, **pages, **page, **index}


@pytest.fixture
def fake(monkeypatch):
    """The modules of BrowserGym and Gymnasium that the adapter reads."""
    modules = {name: ModuleType(name) for name in ("browsergym", "browsergym.core", "browsergym.utils", "gymnasium")}
    modules["browsergym.core.action"] = ModuleType("browsergym.core.action")
    highlevel = modules["browsergym.core.action.highlevel"] = ModuleType("highlevel")
    highlevel.HighLevelActionSet, highlevel.ACTION_SUBSETS = FakeActions, {"bid": [], "nav": []}
    obs = modules["browsergym.utils.obs"] = ModuleType("obs")
    obs.IGNORED_AXTREE_ROLES = ["LineBreak"]
    obs.flatten_axtree_to_str = lambda tree, extra_properties, filter_visible_only, ignored_roles: tree
    modules["gymnasium"].registry = {
        "browsergym/openended": None,
        "browsergym/miniwob.click": None,
        "CartPole-v1": None,
    }
    modules["gymnasium"].make = lambda id, disable_env_checker, **options: FakeEnv(id, **options)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(browsergym, "_start_playwright", lambda executable: None)
    monkeypatch.setattr(FakeEnv, "made", [])
    monkeypatch.setattr(FakeEnv, "goal", FakeEnv.goal)
    return modules


def test_an_agent_sees_goal_tabs_page_and_screenshot(fake):
    env = BrowserGymEnvironment(options={"slow_mo": 0})
    assert env.actions == {"click": "click(bid: str). Click an element."}
    assert env.tools[0]["function"]["parameters"]["required"] == ["bid"]
    seen = env.reset(TASK, 7)
    page = "Tabs:\n0: Shop, http://shop\n1 (active): Help, http://help\nPage:\n[5] button 'Buy'"
    assert seen["text"] == f"Goal: Buy it.\n{page}"
    assert seen["images"][0] is SCREEN
    made = FakeEnv.made[0]
    assert made.options["task_kwargs"] == {"goal": "Buy it.", "start_url": "http://shop"}
    assert (made.seed, made.options["slow_mo"]) == (7, 0)
    seen, reward, terminated, truncated, info = env.step(Action("click", {"bid": "9"}))
    assert seen["text"] == f"{page}\nError of the last action: ValueError: no such element"
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"action_error": "ValueError: no such element"})
    assert env.step(Action("click", {"bid": "5"}))[1:3] == (1.0, True)
    env.show_images = False
    assert env.reset(TASK, 8)["images"] == []
    assert len(FakeEnv.made) == 1, "the same task needs no new environment"
    env.reset({"name": "miniwob.click"}, 8)
    assert [one.open for one in FakeEnv.made] == [False, True]
    assert "task_kwargs" not in FakeEnv.made[1].options
    env.close()
    assert not FakeEnv.made[1].open


def test_a_response_is_read_as_browsergym_reads_it(fake):
    env = BrowserGymEnvironment()
    env.reset(TASK, 7)
    for text in ("click('5')", "Not click('4').\n```click('5')```", "```\nclick('4')\n```\n```python\nclick('5')```"):
        env.step(Action("say", {"text": text}))
    assert [written.strip() for written in FakeEnv.made[0].written] == ["click('5')"] * 3


def test_images_of_a_goal_are_shown(fake):
    content = io.BytesIO()
    Image.new("RGB", (3, 2)).save(content, "PNG")
    data = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    FakeEnv.goal = (
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "text", "text": "Find it."},
        {"type": "image_url", "image_url": "http://shop/1.png"},
    )
    env = BrowserGymEnvironment(screenshot=False)
    seen = env.reset(TASK, 7)
    assert seen["text"].startswith("Goal: Find it.\n[an image that cannot be shown: it is not part of the task]\n")
    assert [image.size for image in seen["images"]] == [(3, 2)]
    env.show_images = False
    assert env.reset(TASK, 7)["images"] == []


def test_long_pages_are_cut(fake, monkeypatch):
    monkeypatch.setattr(browsergym, "MAX_PAGE_CHARS", 5)
    assert BrowserGymEnvironment().reset(TASK, 7)["text"].endswith("Page:\n[5] b ... (16 characters)")


def test_mistakes_of_the_user_are_named(fake, monkeypatch):
    with pytest.raises(UserError, match="actions: Unknown high-level action subspace: fly; there are: bid, nav"):
        BrowserGymEnvironment(actions=["fly"])
    with pytest.raises(UserError, match="axtree and screenshot are both false"):
        BrowserGymEnvironment(axtree=False, screenshot=False)
    env = BrowserGymEnvironment(axtree=False)
    env.show_images = False
    with pytest.raises(UserError, match="axtree is false and the model sees no images"):
        env.reset(TASK, 7)
    env = BrowserGymEnvironment()
    with pytest.raises(UserError, match="needs the id of its environment as name"):
        env.reset({}, 7)
    with pytest.raises(UserError, match=r"webarena\.1 needs browsergym\.webarena; install browsergym-webarena"):
        env.reset({"name": "webarena.1"}, 7)
    with pytest.raises(UserError, match="no task 'browsergym/open'; it has: browsergym/openended, browsergym/min"):
        env.reset({"name": "open"}, 7)
    monkeypatch.setitem(sys.modules, "browsergym.core.action.highlevel", None)
    with pytest.raises(UserError, match="which is not installed in this Python; run `mmrl setup browsergym`"):
        BrowserGymEnvironment()


def _installed():
    try:
        return environment_python("browsergym") and find_chromium() is not None
    except UserError:
        return False


def browsers_of(pid):
    """Ids of the processes of Chromium below a process."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,comm"], capture_output=True, text=True, check=True).stdout
    table = [line.split(None, 2) for line in found.splitlines()[1:]]
    below = {str(pid)}
    for _ in table:
        below |= {child for child, parent, _ in table if parent in below}
    return [int(child) for child, _, name in table if child in below and "chrom" in name]


@pytest.mark.slow
@pytest.mark.skipif(not _installed(), reason="BrowserGym is not installed with `mmrl setup browsergym`, or no Chromium")
def test_the_package_in_its_own_python(tmp_path):
    page = Path(tmp_path) / "shop.html"
    page.write_text(PAGE)
    options = {"slow_mo": 0, "pre_observation_delay": 0.1}
    factory = "mmrl.gui.browser.browsergym:BrowserGymEnvironment"
    config = EnvironmentConfig(factory, {"options": options}, workers=1, python="browsergym")
    task = AgentTask("shop", {"name": "openended", "goal": "Buy it.", "start_url": page.as_uri()}, 3)
    with EnvPool(config, tmp_path) as pool:
        assert pool.actions["click"].startswith("click(bid: str")
        begun = pool.reset({0: task})[0].observation
        assert begun.text.startswith(
            f"Goal: Buy it.\nTabs:\n0 (active): Shop, {page.as_uri()}\nPage:\nRootWebArea 'Shop'"
        )
        assert begun.images[0].shape == (720, 1280, 3)
        (bid,) = [line.split("]")[0].strip().lstrip("[") for line in begun.text.splitlines() if "button 'Buy'" in line]
        missing = pool.step({0: Action("click", {"bid": "999"})})[0]
        assert 'Could not find element with bid "999"' in missing.info["action_error"]
        assert "bought" in pool.step({0: Action("say", {"text": f"click('{bid}')"})})[0].observation.text
        for browser in browsers_of(pool.processes()[0]):
            try:
                os.kill(browser, signal.SIGKILL)
            except ProcessLookupError:
                continue
        assert pool.step({0: Action("noop")})[0].failure is not None
        assert pool.reset({0: task})[0].failure is None
