"""Page environments of one's own: HTML, and a site on this machine that is the only host that pages may reach."""

import http.server
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mmrl.agents.environments.environment import Action, as_outcome, as_start, parse_answer
from mmrl.errors import UserError
from mmrl.gui import CoordinateSpace, PageEnv, PageEnvSettings, PageVerdict, Resize, WebAgentEnv
from mmrl.gui.browser.browser import NO_HOSTS, Browser, BrowserFailure, BrowserSettings
from mmrl.gui.browser.page import GuardedPage

HOME = """<!doctype html><title>Home</title><a id=next href="/next">next</a> <a id=slow href="/slow">slow</a>
<a id=away href="http://localhost:{port}/next">away</a> <a id=hop href="/hop">hop</a> <a id=none href="/none">none</a>
<form method=post action="/login"><button id=login>log in</button></form><p id=who>{who}</p>
<img src="http://localhost:{port}/pixel"><script>fetch('http://localhost:{port}/data').catch(() => 0)</script>"""


class Site(http.server.BaseHTTPRequestHandler):
    """A site with a log-in, which answers under every name of this machine."""

    def do_GET(self):
        self.server.seen.append((self.headers["Host"].partition(":")[0], self.path))
        if self.path == "/slow":
            time.sleep(0.4)
        if self.path == "/hop":
            self.answer(302, Location=f"http://localhost:{self.server.server_port}/next")
        elif self.path == "/none":
            self.answer(204)
        elif self.path == "/":
            who = self.headers.get("Cookie", "nobody")
            self.answer(200, HOME.format(port=self.server.server_port, who=who))
        elif self.path in ("/next", "/slow"):
            self.answer(200, f"<title>{self.path}</title><input autofocus>")
        else:
            self.answer(404, "<title>missing</title>")

    def do_POST(self):
        self.answer(302, Location="/", **{"Set-Cookie": "user=ada"})

    def answer(self, status, text="", **headers):
        self.send_response(status)
        for name, value in ({"Content-Type": "text/html"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(chromium):
    """One browser that may reach 127.0.0.1, but not localhost."""
    running = Browser(BrowserSettings(timeout_s=60, allow_hosts=("127.0.0.1",)))
    yield running
    running.close()


SETTINGS = PageEnvSettings(width_px=320, height_px=120, browser=BrowserSettings(allow_hosts=("127.0.0.1",)))


class SiteEnv(PageEnv):
    """Open a page of the site by its links."""

    address = ""

    def begin(self, page, task, seed):
        page.load_url(self.address + task.get("start", "/"))
        return f"Open {task['title']}."

    def verdict(self, page):
        title = page.evaluate("() => document.title")
        return PageVerdict(float(title == self.title), title == self.title, False, {"title": title})

    def make_task(self, options, seed):
        self.title = options["title"]
        return super().make_task(options, seed)


@pytest.fixture
def env(browser, site, closing):
    made = closing(SiteEnv(SETTINGS, browser))
    made.address = f"http://127.0.0.1:{site.server_port}"
    return made


def press(env, name):
    """Click an element by its id."""
    box = env.page.evaluate("id => { const b = document.getElementById(id).getBoundingClientRect();"
                            "return [b.left + b.width / 2, b.top + b.height / 2] }", name)  # fmt: skip
    return env.step({"name": "click", "arguments": {"point": box}})


@pytest.mark.parametrize("link", ["next", "slow"])
def test_links_of_an_allowed_host_open_and_are_judged_when_they_have_loaded(env, link):
    env.reset(seed=0, options={"title": f"/{link}"})
    observation, reward, terminated, _, info = press(env, link)
    assert (reward, terminated, info["title"], info["events"]) == (1.0, True, f"/{link}", [])
    # prepared like a page that was loaded: no caret blinks
    assert np.array_equal(observation["image"], env.page.screenshot())
    assert env.page.evaluate("() => getComputedStyle(document.querySelector('input')).caretColor") == "rgba(0, 0, 0, 0)"


def test_other_hosts_are_blocked_and_counted(env, site):
    del site.seen[:]
    env.reset(seed=0, options={"title": "/next"})
    *_, info = env.step({"name": "wait", "arguments": {}})
    assert info["blocked_requests"] == 2, "the image and the script's request"
    *_, info = press(env, "away")
    assert info["events"] == [f"navigation: http://localhost:{site.server_port}/next"]
    assert (info["title"], info["blocked_requests"]) == ("Home", 3)
    assert env.page.blocked == {"localhost": 3}
    # the server answers under this name, but no request arrives
    assert {host for host, _ in site.seen} == {"127.0.0.1"}
    env.reset(seed=0, options={"title": "/next", "start": "/next"})
    *_, info = env.step({"name": "wait", "arguments": {}})
    assert info["blocked_requests"] == 0, "of this episode alone"


def test_a_redirect_to_another_host_is_blocked_and_counted(env, site):
    del site.seen[:]
    env.reset(seed=0, options={"title": "/next"})
    *_, terminated, _, info = press(env, "hop")
    assert not terminated
    assert info["blocked_requests"] == 3
    assert [event for event in info["events"] if event.startswith("left the page: chrome-error:")]
    assert {host for host, _ in site.seen} == {"127.0.0.1"}


def test_an_answer_without_content_keeps_the_page(env):
    env.reset(seed=0, options={"title": "/next"})
    *_, info = press(env, "none")
    assert info["title"] == "Home"


def test_a_login_with_a_redirect_lasts_an_episode(env):
    who = "() => document.getElementById('who').textContent"
    for _ in range(2):
        env.reset(seed=0, options={"title": "/next"})
        assert env.page.evaluate(who) == "nobody"
        press(env, "login")
        assert env.page.evaluate(who) == "user=ada"
        env.page.page.reload()


def test_the_way_back_of_a_phone(browser, site, closing):
    phone = closing(
        SiteEnv(PageEnvSettings(width_px=320, height_px=120, mobile=True, browser=SETTINGS.browser), browser)
    )
    phone.address = f"http://127.0.0.1:{site.server_port}"
    phone.reset(seed=0, options={"title": "none"})
    *_, info = phone.step({"name": "press_back", "arguments": {}})
    assert (info["action_error"], info["title"]) == ("not_possible", "Home"), "there is nothing before the first page"
    assert press(phone, "next")[-1]["title"] == "/next"
    *_, info = phone.step({"name": "press_back", "arguments": {}})
    assert (info["action_error"], info["title"]) == (None, "Home")


def test_addresses_that_cannot_be_shown(browser, site, env, closing):
    page = closing(GuardedPage(browser, 200, 100))
    for url in (f"http://localhost:{site.server_port}/", "file:///etc/passwd", "data:text/html,x"):
        with pytest.raises(UserError, match=r"is not of an allowed host; browser.allow_hosts has: 127\.0\.0\.1"):
            page.load_url(url)
    with pytest.raises(BrowserFailure, match="/missing answered with status 404"):
        page.load_url(f"{env.address}/missing")
    assert page.allow_hosts == {"127.0.0.1"}


@pytest.mark.parametrize("host", ["http://a.test", "a.test:80", "A.test", "a.test , EXCLUDE b.test", "*", "", "a b", 3])
def test_names_that_are_no_hosts_are_refused(host):
    with pytest.raises(UserError, match="allow_hosts has"):
        PageEnvSettings(browser=BrowserSettings(allow_hosts=(host,))).validate()
    with pytest.raises(UserError, match="expected a list of hosts"):
        BrowserSettings(allow_hosts="a.test").validate()


def test_an_environment_and_its_browser_agree(browser):
    other = PageEnvSettings(browser=BrowserSettings(allow_hosts=("127.0.0.1", "shop.test")))
    with pytest.raises(UserError, match=r"127\.0\.0\.1, shop\.test, but its browser was started with 127\.0\.0\.1$"):
        SiteEnv(other, browser)


def test_without_hosts_the_command_line_resolves_none(browser, monkeypatch):
    (rule,) = [each for each in browser._arguments() if each.startswith(NO_HOSTS)]
    assert rule == f"{NO_HOSTS} , EXCLUDE 127.0.0.1"
    monkeypatch.setattr(browser, "settings", BrowserSettings())
    assert NO_HOSTS in browser._arguments()


class Phone(PageEnv):
    """A screen that writes down what reaches it."""

    HTML = """<body style="height: 3000px; margin: 0"><script>
      const said = [];
      for (const name of ['press_home', 'open_app']) addEventListener(`mmrl:${name}`, event => {
        said.push(name + (event.detail.app || '')); event.preventDefault(); });
      let start;
      addEventListener('mousedown', () => { start = performance.now(); });
      addEventListener('mouseup', () => { said.push(performance.now() - start > 500 ? 'long' : 'short'); });
    </script>"""

    def begin(self, page, task, seed):
        page.load_html(self.HTML)
        return "Do as you like."

    def verdict(self, page):
        page.settle()
        said, top = page.evaluate("() => [said, scrollY]")
        return PageVerdict(0.0, False, False, {"said": said, "top": top})


@pytest.fixture
def phone(browser, closing):
    return closing(Phone(PageEnvSettings(width_px=100, height_px=200, mobile=True), browser))


def test_actions_of_a_phone_reach_the_page(phone):
    _, info = phone.reset(seed=0)
    assert info["task"] == {"seed": 0}
    point = {"point": [50, 50]}
    for action, said in (
        (("click", point), ["short"]),
        (("long_press", point), ["short", "long"]),
        (("press_home", {}), ["short", "long", "press_home"]),
        (("open_app", {"app_name": "Maps"}), ["short", "long", "press_home", "open_appMaps"]),
    ):
        *_, info = phone.step(Action(*action))
        assert (info["said"], info["action_error"]) == (said, None)
    tops = [phone.step(Action("swipe", {"direction": way}))[-1]["top"] for way in ("up", "up", "down")]
    assert tops == [100, 200, 100], "half a screen, with the finger"
    *_, info = phone.step(Action("swipe", {"direction": "up", "amount": 30, "x": 50, "y": 150}))
    assert info["top"] == 130


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("press_back", {}, "not_possible"),
        ("right_click", {"point": [1, 2]}, "unknown_action"),
        ("click", {"point": [1, 2], "button": "middle"}, "wrong_arguments"),
        ("open_app", {}, "wrong_arguments"),
        ("open_app", {"app_name": ""}, "wrong_arguments"),
        ("swipe", {"direction": "in"}, "wrong_arguments"),
        ("swipe", {"direction": "up", "unit": "clicks"}, "wrong_arguments"),
        ("swipe", {"direction": "up", "speed": 3}, "wrong_arguments"),
        ("long_press", {"point": [1, 900]}, "out_of_bounds"),
        ("press_home", {"times": 2}, "wrong_arguments"),
    ],
)
def test_wrong_actions_of_a_phone_are_named(phone, name, arguments, code):
    phone.reset(seed=0)
    *_, info = phone.step(Action(name, arguments))
    assert info["action_error"] == code
    assert not phone.action_space.contains({"name": name, "arguments": arguments}) or code == "not_possible"


def test_the_actions_of_ui_tars_on_a_phone(phone):
    agent = WebAgentEnv(phone)
    assert {"swipe", "press_back", "open_app", "finish"} <= {*agent.actions}
    assert "right_click" not in agent.actions
    as_start(agent.reset({}, 0))
    calls = ["long_press(point='<point>50 50</point>')", "open_app(app_name='Maps')", "press_home()"]
    for call in calls:
        (action,) = parse_answer(f"Action: {call}", "ui_tars").actions
        outcome = as_outcome(agent.step(action))
        assert "action_error" not in outcome.info
    assert outcome.info["said"] == ["long", "open_appMaps", "press_home"]
    (action,) = parse_answer("Action: finished(content='42')", "ui_tars").actions
    outcome = as_outcome(agent.step(action))
    assert (outcome.terminated, outcome.info["answer"], agent.env.answer) == (True, "42", "42")


def test_the_page_of_the_docs_counts_clicks(browser, closing, tmp_path):
    text = (Path(__file__).parents[2] / "docs/gui.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python notest\n(# my_page\.py\n.*?)```", text, re.DOTALL)
    names = {}
    exec(compile(code, "my_page.py", "exec"), names)
    env = closing(names["Counter"](names["PageEnvSettings"](width_px=320, height_px=240), browser))
    observation, _ = env.reset(seed=0, options={"task": {"clicks": 2}})
    assert observation["instruction"] == "Click the button 2 times."
    (button,) = [element for element in env.elements() if element.tag == "button"]
    ends = [env.step({"name": "click", "arguments": {"point": button.center}})[1:3] for _ in range(2)]
    assert ends == [(0.0, False), (1.0, True)]
    assert PageEnvSettings() == Counting().settings


def test_settings_of_a_factory_are_plain_data():
    plain = {"space": "rel1000", "resize": {"factor": 32}, "browser": {"allow_hosts": ["127.0.0.1"]}}
    settings = PageEnvSettings(**plain)
    assert (settings.space, settings.resize) == (CoordinateSpace.REL1000, Resize(factor=32))
    assert settings.browser == BrowserSettings(allow_hosts=("127.0.0.1",))
    assert WebAgentEnv(Counting(settings)).env.viewpoint.model_wh == (320, 256)
    with pytest.raises(UserError, match=r"environment\.resize has no entry 'factors'; it has: factor, min_pixels"):
        PageEnvSettings(resize={"factors": 32})


class Counting(Phone):
    """An environment with the default settings."""
