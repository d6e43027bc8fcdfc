"""Effects of each action in a page: events, scroll distance, value of a native select."""

import pytest

from mmrl.gui.browser.actions import Viewpoint, execute_command, read_action
from mmrl.gui.browser.page import GuardedPage
from mmrl.gui.grounding.coords import CoordinateSpace

HTML = """<!doctype html><body style="margin:0;height:3000px">
<div id="frame" style="position:absolute;left:100px;top:20px;width:100px;height:80px;overflow:auto">
  <div style="height:900px;width:900px">x</div></div>
<input id="text" style="position:absolute;left:10px;top:120px">
<select id="choice" style="position:absolute;left:10px;top:160px"><option>One<option>Two<option>Three</select>
<script>window.log = [];
for (const type of ['mousedown', 'mouseup', 'click', 'dblclick', 'contextmenu'])
  document.addEventListener(type, event => log.push([type, Math.round(event.clientX), Math.round(event.clientY)]));
</script>"""


@pytest.fixture(scope="module", params=[1.0, 1.5])
def shown(browser, request):
    page = GuardedPage(browser, 320, 240, scale=request.param)
    yield page
    page.close()


@pytest.fixture
def act(shown):
    shown.load_html(HTML)
    image_wh = round(320 * shown.scale), round(240 * shown.scale)
    viewpoint = Viewpoint(CoordinateSpace.REL1, image_wh, None, shown.scale)  # fractions are the same at any scale

    def run(name, question="() => window.log.splice(0)", **arguments):
        for key, whole in {"x": 320, "y": 240, "to_x": 320, "to_y": 240}.items():
            if key in arguments:
                arguments[key] /= whole
        execute_command(read_action(name, arguments, viewpoint), shown)
        shown.settle()
        return shown.evaluate(question)

    return run


def test_buttons_of_the_mouse(act):
    one = [["mousedown", 20, 30], ["mouseup", 20, 30], ["click", 20, 30]]
    assert act("click", x=20, y=30) == one
    assert act("double_click", x=20, y=30) == [*one, *one, ["dblclick", 20, 30]]
    assert act("right_click", x=20, y=30) == [["mousedown", 20, 30], ["contextmenu", 20, 30], ["mouseup", 20, 30]]


def test_a_drag_goes_from_one_point_to_the_other(act):
    assert act("drag", x=20, y=30, to_x=60, to_y=90)[:2] == [["mousedown", 20, 30], ["mouseup", 60, 90]]


def test_scrolling_moves_the_element_under_the_point_at_once(act):
    where = "() => [scrollY, frame.scrollTop, frame.scrollLeft]"
    assert act("scroll", where, direction="down", x=20, y=200) == [120, 0, 0]
    assert act("scroll", where, direction="up", amount=100, x=20, y=200) == [20, 0, 0]
    assert act("scroll", where, direction="down", amount=50, x=150, y=30) == [20, 50, 0]
    assert act("scroll", where, direction="right", amount=30, x=150, y=30) == [20, 50, 30]


def test_keys_and_text(act):
    act("click", x=30, y=130)
    assert act("type", "() => text.value", text="héllo ß") == "héllo ß"
    act("key", key="ctrl+a")
    assert act("type", "() => text.value", text="new") == "new"
    assert act("key", "() => text.value", key="Backspace") == "ne"


def test_clicks_of_the_wheel_lists_of_keys_and_waiting(act):
    assert act("scroll", "() => scrollY", direction="down", amount=3, unit="clicks", x=20, y=200) == 360
    act("scroll", direction="up", amount=3, unit="clicks", x=20, y=200)
    act("click", x=30, y=130)
    assert act("key", "() => text.value", key=["a", "b", "ArrowLeft", "c"]) == "acb"
    start = act("wait", "() => performance.now()")
    assert act("wait", "() => performance.now()", seconds=0.3) - start >= 300


def test_a_native_select_opens_in_the_image_and_is_set_by_keys(act, shown):
    closed = shown.screenshot()
    act("click", x=20, y=170)
    assert (shown.screenshot() != closed).any(-1).sum() > 300 * shown.scale**2
    act("key", key="ArrowDown")
    assert act("key", "() => choice.value", key="Enter") == "Two"
    act("click", x=20, y=170)
    assert act("type", "() => choice.value", text="Three\n") == "Three"
