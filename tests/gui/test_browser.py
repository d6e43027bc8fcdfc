"""A page in Chromium: reproducible images, no escape from the page, and replacement of a browser that dies or hangs."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.gui.browser.browser import ARGUMENTS, Browser, BrowserFailure
from mmrl.gui.browser.page import GuardedPage
from mmrl.workers.family import descendants

HTML = """<!doctype html><html><head><style>@keyframes turn {{ to {{ margin-left: 90px }} }}
  #moving {{ animation: turn .1s infinite; width: 20px; height: 20px; background: red }}</style></head>
<body><div id="moving"></div><input id="text" autofocus> {}</body></html>"""


@pytest.fixture
def page(browser, closing):
    if not browser.is_alive():
        browser.restart(after_failure=False)
    return closing(GuardedPage(browser, 240, 160))


def test_a_focused_moving_page_gives_one_image(page):
    pictures = []
    for _ in range(3):
        page.load_html(HTML.format(""))
        pictures += [page.screenshot(), page.screenshot()]
    assert pictures[0].shape == (160, 240, 3)
    assert pictures[0].std() > 0
    assert all(np.array_equal(picture, pictures[0]) for picture in pictures)


def test_scale_multiplies_the_image_not_the_page(browser, closing):
    page = closing(GuardedPage(browser, 120, 80, scale=2))
    page.load_html(HTML.format(""))
    assert page.screenshot().shape == (160, 240, 3)
    assert page.evaluate("() => [innerWidth, innerHeight]") == [120, 80]


@pytest.mark.parametrize(
    ("element", "event"),
    [
        ("<button id=x onclick=\"alert('Really?')\">x</button>", "dialog: Really?"),
        ('<a id=x download="a.zip" href="data:text/plain,hello">x</a>', "download: a.zip"),
        ('<a id=x target=_blank href="https://example.org/">x</a>', "window"),
        ('<a id=x href="https://example.org/">x</a>', "navigation: https://example.org/"),
        ('<form action="/submit"><button id=x>x</button></form>', "navigation: http://page.invalid/submit?"),
        ("<button id=x onclick='location.reload()'>x</button>", "navigation: http://page.invalid/"),
    ],
)
def test_what_a_page_tries_is_refused_and_reported(page, element, event):
    page.load_html(HTML.format(element))
    page.page.click("#x")
    events = []
    for _ in range(50):  # a window is reported when the browser has opened it
        page.settle()
        events += page.take_events()
        if events:
            break
    assert events == [event]
    assert page.evaluate("() => document.querySelector('#x').textContent") == "x"


def test_a_page_that_leaves_without_a_request_is_reported(page):
    page.load_html(HTML.format("<button id=x onclick=\"location = 'about:blank'\">x</button>"))
    page.page.click("#x")
    page.settle()
    assert page.take_events() == ["left the page: about:blank"]
    page.load_html(HTML.format("again"))
    assert "again" in page.evaluate("() => document.body.textContent")


def test_a_killed_browser_is_started_again_and_counted(browser, page, closing):
    page.load_html(HTML.format(""))
    before, restarts = page.screenshot(), browser.restarts
    browser.kill()
    with pytest.raises(BrowserFailure, match="closed"):
        page.screenshot()
    assert not page.is_open()
    browser.restart()
    assert browser.restarts == restarts + 1
    again = closing(GuardedPage(browser, 240, 160))
    again.load_html(HTML.format(""))
    assert np.array_equal(again.screenshot(), before)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the driver's process in /proc")
def test_a_killed_driver_is_started_again_too(browser, page, closing):
    page.load_html(HTML.format(""))
    drivers = [pid for pid in descendants(os.getpid()) if b"/driver/node" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in drivers:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(BrowserFailure):
        page.screenshot()
    browser.restart()
    again = closing(GuardedPage(browser, 240, 160))
    again.load_html(HTML.format(""))
    assert drivers
    assert again.screenshot().std() > 0


def test_a_script_that_never_returns_costs_the_browser(browser, page):
    page.load_html(HTML.format(""))
    usual_s = browser.settings.timeout_s
    object.__setattr__(browser.settings, "timeout_s", 0.5)
    try:
        with pytest.raises(BrowserFailure, match="a script in the page failed"):
            page.evaluate("() => { while (true); }")
    finally:
        object.__setattr__(browser.settings, "timeout_s", usual_s)
    assert not browser.is_alive()


def test_a_page_that_never_loads(browser, page):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        page.load_html(HTML.format(f'<img src="{address}">'))  # offline: refused at once
    page.page.set_default_timeout(500)
    with pytest.raises(BrowserFailure, match=r"loading the page failed: .*Timeout"):
        page.load_html("<script>while (true);</script>")


def test_old_browsers_are_replaced_when_no_other_page_is_open(browser):
    first, second = GuardedPage(browser, 120, 80), GuardedPage(browser, 120, 80)
    browser.pages = browser.settings.pages_per_start
    assert not browser.is_old()
    second.close()
    assert browser.is_old()
    restarts, generation = browser.restarts, browser.generation
    browser.restart(after_failure=False)
    assert (browser.restarts, browser.generation, browser.pages) == (restarts, generation + 1, 0)
    assert not first.is_open()


def test_a_browser_belongs_to_its_thread_and_to_no_asyncio_loop(browser):
    refused = []

    def elsewhere():
        try:
            browser.open_context(10, 10)
        except UserError as error:
            refused.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "belongs to the thread that started it" in refused[0]


def test_starting_inside_a_loop_says_what_to_do(browser):
    async def start():
        Browser()

    browser.close()
    with pytest.raises(UserError, match="run it in a separate process"):
        asyncio.run(start())
    browser.restart(after_failure=False)


def test_a_browser_leaves_no_temporary_files(browser):
    with tempfile.TemporaryDirectory() as folder:  # short: Chromium's socket lies there, and its path is limited
        code = "from mmrl.gui.browser.browser import Browser; b = Browser();"
        code += "b.open_context(64, 64); b.restart(); b.close()"
        environment = {**os.environ, "TMPDIR": folder}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
        left = [path.name for path in Path(folder).iterdir() if "hromium" in path.name or "mmrl" in path.name]
    assert left == []


CHANNELS = {
    "WebTransport": """async port => {
      const made = new WebTransport(`https://127.0.0.1:${port}/`);
      await Promise.race([made.ready.catch(() => null), new Promise(done => setTimeout(done, 600))]);
    }""",
    "WebRTC": """async port => {
      const [one, two] = [new RTCPeerConnection(), new RTCPeerConnection()];
      one.createDataChannel('x');
      await one.setLocalDescription(await one.createOffer());
      await two.setRemoteDescription(one.localDescription);
      await two.setLocalDescription(await two.createAnswer());
      await one.setRemoteDescription(two.localDescription);
      const candidate = `candidate:1 1 udp 2113937151 127.0.0.1 ${port} typ host`;
      await one.addIceCandidate({ candidate, sdpMid: '0', sdpMLineIndex: 0 });
      await new Promise(done => setTimeout(done, 600));
    }""",
}
"""Ways to send datagrams to a port of this machine."""


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_local_page_sends_no_datagram_to_this_machine(browser, tmp_path, monkeypatch, channel):
    file = tmp_path / "page.html"
    file.write_text("<p>hello</p>")

    def arrives() -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
            listener.bind(("127.0.0.1", 0))
            page = GuardedPage(browser, 200, 100)
            page.load_file(file)
            page.page.context.set_offline(False)  # which is one of two bars to some of them
            page.evaluate(CHANNELS[channel], listener.getsockname()[1])
            page.close()
            return bool(select.select([listener], [], [], 0)[0])

    assert not arrives()
    with monkeypatch.context() as patched:
        allowed = [one for one in ARGUMENTS if "--host-resolver" not in one and "webrtc" not in one]
        patched.setattr("mmrl.gui.browser.browser.ARGUMENTS", allowed)
        browser.restart(after_failure=False)
        assert arrives(), "a browser that allows it does send them"
    browser.restart(after_failure=False)


def test_a_local_page_reads_the_files_of_its_folder_alone(browser, tmp_path, closing):
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "secret.js").write_text("window.secret = 'read';")
    (tmp_path / "secret.txt").write_text("the secret")
    (own / "own.js").write_text("window.own = 'read';")
    (own / "linked.js").symlink_to(tmp_path / "secret.js")
    (own / "page.html").write_text(
        "<script src='own.js'></script><script src='../secret.js'></script><script src='linked.js'></script>"
        "<iframe src='../secret.txt'></iframe>"
    )
    page = closing(GuardedPage(browser, 200, 100))
    page.load_file(own / "page.html")
    assert page.evaluate("() => [window.own, window.secret ?? null]") == ["read", None]
    assert all("secret" not in frame.content() for frame in page.page.frames[1:])
    page.evaluate(
        "url => { document.body.append(Object.assign(new Image(), { src: url })); }", tmp_path.as_uri() + "/b.png"
    )
    page.settle()
    assert page.take_events() == [f"file: {tmp_path.as_uri()}/b.png"]
    page.load_file(own / "page.html", tmp_path)
    assert page.evaluate("() => window.secret") == "read", "a wider folder can be allowed"
