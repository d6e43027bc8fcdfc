"""What a screenshot shows of an open list or picker, and what a click there does, agree."""

import numpy as np
import pytest

from mmrl.gui.browser.actions import ActionError, Viewpoint, execute_command, read_action
from mmrl.gui.browser.page import GuardedPage, read_elements
from mmrl.gui.grounding.coords import CoordinateSpace

STYLE = "<style>body{margin:0} select,input,button,iframe{position:absolute;left:20px;width:140px;height:24px}</style>"
SELECT = (
    "<select id=s style='top:20px'><option>Rome<optgroup label=North><option>Oslo<option disabled>Bergen</optgroup>"
    "<hr><option>Lima</select>"
)
DELETE = "<button style='top:46px;height:170px' onclick='window.deleted=1'>Delete all</button>"
LOG = """<script>window.log = [];
for (const type of ['input', 'change']) document.addEventListener(type, () => log.push(type))</script>"""
WIDTH, HEIGHT = 320, 240


@pytest.fixture(scope="module", params=[1.0, 1.5])
def page(browser, request):
    opened = GuardedPage(browser, WIDTH, HEIGHT, scale=request.param)
    yield opened
    opened.close()


def act(page, name, **arguments):
    image_wh = round(WIDTH * page.scale), round(HEIGHT * page.scale)
    viewpoint = Viewpoint(CoordinateSpace.REL1, image_wh, None, page.scale)
    for key, whole in {"x": WIDTH, "y": HEIGHT}.items():
        if key in arguments:
            arguments[key] /= whole
    execute_command(read_action(name, arguments, viewpoint), page)
    page.settle()


def shown_option(page, name):
    """Center of an option of an open list in CSS pixels."""
    (element,) = (item for item in read_elements(page) if item.tag == "option" and item.name == name)
    assert element.visible
    return {"x": element.center[0] / page.scale, "y": element.center[1] / page.scale}


def look(page):
    return page.evaluate("() => [document.querySelector('#s').value, window.deleted || 0, window.log]")


def test_a_click_on_a_shown_option_chooses_it(page):
    page.load_html(STYLE + SELECT + DELETE + LOG)
    closed = page.screenshot()
    act(page, "click", x=90, y=32)
    assert (page.screenshot() != closed).any(-1).sum() > 3000 * page.scale**2
    act(page, "click", **shown_option(page, "Oslo"))
    assert look(page) == ["Oslo", 0, ["input", "change"]]
    act(page, "click", x=90, y=32)
    act(page, "click", **shown_option(page, "Rome"))
    assert look(page)[:2] == ["Rome", 0]
    act(page, "click", x=300, y=200)  # away from the list
    assert np.abs(page.screenshot()[:40, :20].astype(int) - closed[:40, :20]).max() == 0
    assert page.evaluate("() => [s.hasAttribute('mmrl-picker'), s.getAttribute('style')]") == [False, "top:20px"]


def test_entries_that_cannot_be_chosen_press_nothing(page):
    page.load_html(STYLE + SELECT + DELETE + LOG)
    act(page, "click", x=90, y=32)
    act(page, "click", **shown_option(page, "Bergen"))
    assert look(page) == ["Rome", 0, []]
    act(page, "double_click", **shown_option(page, "Lima"))
    assert look(page)[0] == "Lima"


def test_a_click_beside_the_list_closes_it_and_reaches_the_page(page):
    page.load_html(STYLE + SELECT + "<button style='left:200px;top:60px' onclick='window.other=1'>x</button>" + LOG)
    act(page, "click", x=90, y=32)
    act(page, "click", x=230, y=70)
    assert page.evaluate("() => [s.matches(':open'), s.value, window.other]") == [False, "Rome", 1]


def test_a_long_list_is_scrolled_by_the_wheel(page):
    options = "".join(f"<option>City {number}" for number in range(60))
    page.load_html(f"{STYLE}<select id=s style='top:20px'>{options}</select>{DELETE}{LOG}")
    act(page, "click", x=90, y=32)
    act(page, "scroll", direction="down", amount=600, x=60, y=120)
    act(page, "click", **shown_option(page, "City 30"))
    assert look(page)[:2] == ["City 30", 0]


def test_keys_work_in_an_open_list(page):
    page.load_html(STYLE + SELECT + DELETE + LOG)
    act(page, "click", x=90, y=32)
    act(page, "key", key="ArrowDown")
    act(page, "key", key="Enter")
    assert look(page)[:2] == ["Oslo", 0]
    act(page, "click", x=90, y=32)
    act(page, "type", text="Lima\n")
    assert look(page)[:2] == ["Lima", 0]


@pytest.mark.parametrize("where", ["frame", "shadow"])
def test_a_select_in_a_frame_or_shadow_root_is_chosen_by_clicks_too(page, where):
    inner = "<select id=s style='position:absolute;left:0;top:0'><option>Rome<option>Oslo</select>"
    host = {
        "frame": f'<iframe id=f style="top:20px;height:120px;border:0" srcdoc="<body style=margin:0>{inner}"></iframe>',
        "shadow": "<div id=h style='position:absolute;left:20px;top:20px'></div><script>"
        f'h.attachShadow({{mode: "open"}}).innerHTML = "{inner}"</script>',
    }[where]
    page.load_html(STYLE + host + DELETE.replace("46px", "160px"))
    act(page, "click", x=40, y=30)
    act(page, "click", **shown_option(page, "Oslo"))
    root = {"frame": "f.contentDocument", "shadow": "h.shadowRoot"}[where]
    assert page.evaluate(f"() => [{root}.querySelector('#s').value, window.deleted || 0]") == ["Oslo", 0]


@pytest.fixture(scope="module")
def plain_page(browser):
    """At scale 1; at others Chromium draws no popups into screenshots."""
    opened = GuardedPage(browser, WIDTH, HEIGHT)
    yield opened
    opened.close()


@pytest.mark.parametrize("type", ["date", "color", "time", "month"])
def test_a_picker_outside_of_the_page_is_closed_by_a_click_on_it_that_presses_nothing(plain_page, type):
    page = plain_page
    page.load_html(f"{STYLE}<input id=i type={type} style='top:20px'>{DELETE}")
    act(page, "click", x=148 if type != "color" else 90, y=32)
    assert page.evaluate("() => i.matches(':open')")
    with pytest.raises(ActionError, match=f"{type} picker was open") as caught:
        act(page, "click", x=60, y=100)
    assert caught.value.code == "native_popup"
    assert page.evaluate("() => [i.matches(':open'), window.deleted || 0]") == [False, 0]
    act(page, "click", x=60, y=100)  # nothing is in the way any more
    assert page.evaluate("() => window.deleted") == 1


def test_a_list_opened_by_keys_is_closed_by_a_click_on_it(plain_page):
    page = plain_page
    page.load_html(STYLE + SELECT + DELETE + LOG)
    page.evaluate("() => s.focus()")
    act(page, "key", key="Space")
    assert page.evaluate("() => s.matches(':open')")
    for name in ("right_click", "click"):
        with pytest.raises(ActionError, match="list of options was open"):
            act(page, name, x=60, y=80)
        assert look(page) == ["Rome", 0, []]
        act(page, "key", key="Space")
    act(page, "click", x=250, y=220)  # beside it: a click like any other
    assert page.evaluate("() => s.matches(':open')") is False


def test_a_picker_that_the_screenshot_does_not_show_takes_no_clicks(browser, closing):
    page = closing(GuardedPage(browser, WIDTH, HEIGHT, scale=1.5))
    page.load_html(f"{STYLE}<input id=i type=date style='top:20px'>{DELETE}")
    act(page, "click", x=148, y=32)
    shown = page.screenshot()
    page.evaluate("() => i.blur()")
    assert (page.screenshot()[100:] == shown[100:]).all()
    act(page, "click", x=60, y=100)
    assert page.evaluate("() => window.deleted") == 1
