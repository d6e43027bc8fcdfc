"""Controls of real pages: frames, shadow roots, editors, listeners, image maps, and what only looks clickable."""

import pytest

from mmrl.gui.browser.actions import PageCommand, execute_command
from mmrl.gui.browser.page import GuardedPage, read_elements

STYLE = "<!doctype html><style>body{margin:0;font:16px sans-serif}</style>"
PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw=="


@pytest.fixture(scope="module", params=[1.0, 2.0])
def page(browser, request):
    opened = GuardedPage(browser, 400, 300, scale=request.param)
    yield opened
    opened.close()


def read(page, html):
    page.load_html(STYLE + html)
    return {item.name or item.tag: item for item in read_elements(page)}


def press(page, element):
    """Click the center of an element; returns what the page noted."""
    execute_command(PageCommand("click", (element.center,)), page)
    page.settle()
    return page.evaluate("() => window.pressed || ''")


def test_frames_and_frames_in_frames(page):
    deepest = "<button onclick=\\'top.pressed=&amp;quot;deep&amp;quot;\\'>Deep</button>"
    inner = (
        "<body style=margin:0><button style=position:absolute;left:10px;top:20px onclick=top.pressed='framed'>Framed"
        "</button><button style=position:absolute;left:10px;top:400px>Below</button>"
        f"<iframe style=position:absolute;left:10px;top:60px;width:150px;height:60px srcdoc='{deepest}'></iframe>"
    )
    inner = inner.replace("\\'", "&quot;").replace("&amp;quot;", "&amp;#39;")
    found = read(
        page,
        f'<button>Outer</button><iframe srcdoc="{inner}" style="position:absolute;left:50px;top:40px;width:200px;'
        'height:150px;border:5px solid;padding:3px"></iframe>',
    )
    assert {"Outer", "Framed", "Below", "Deep"} <= set(found)
    framed = found["Framed"]
    assert framed.visible
    assert framed.box.x1 == pytest.approx((50 + 5 + 3 + 10) * page.scale)
    assert framed.box.y1 == pytest.approx((40 + 5 + 3 + 20) * page.scale)
    assert press(page, framed) == "framed"
    assert press(page, found["Deep"]) == "deep"
    assert found["Below"].hidden == "outside"


def test_a_covered_hidden_or_inert_frame_hides_its_controls(page):
    frame = "<iframe srcdoc='<button>In</button>' style='width:200px;height:80px;border:0;{}' {}></iframe>"
    cover = "<div style='position:absolute;left:0;top:0;width:300px;height:200px;background:white'></div>"
    for style, more, after, why in (
        ("visibility:hidden", "", "", "style"),
        ("", "inert", "", "inert"),
        ("pointer-events:none", "", "", "inert"),
        ("", "", cover, "covered"),
        ("", "", "", ""),
    ):
        assert read(page, frame.format(style, more) + after)["In"].hidden == why


def test_shadow_roots_with_slots_and_their_labels(page):
    found = read(
        page,
        """<my-box><span slot=a>Slotted <a href="#x" onclick="top.pressed='slotted'">link</a></span></my-box><script>
        const root = document.querySelector('my-box').attachShadow({mode: 'open'});
        root.innerHTML = `<button onclick="top.pressed='shadow'">In shadow</button><span id=l>Own label</span>
          <input aria-labelledby=l><slot name=a></slot><my-inner></my-inner>`;
        root.querySelector('my-inner').attachShadow({mode: 'open'}).innerHTML = '<input type=radio aria-label=Nested>';
        </script>""",
    )
    assert {"In shadow", "Own label", "link", "Nested"} <= set(found)
    assert all(found[name].visible for name in ("In shadow", "Own label", "link", "Nested"))
    assert press(page, found["In shadow"]) == "shadow"
    assert press(page, found["link"]) == "slotted"


def test_editors(page):
    found = read(
        page,
        "<div contenteditable aria-label=Rich>Some <b>bold</b> text</div><p contenteditable=false>no</p>"
        "<p contenteditable=plaintext-only>Plain</p>"
        "<div contenteditable=true aria-label=Outer><i contenteditable>x</i></div>",
    )
    assert set(found) == {"Rich", "Plain", "Outer"}
    rich = found["Rich"]
    assert (rich.role, rich.tag, rich.value, rich.visible) == ("textbox", "div", "Some bold text", True)
    press(page, rich)
    assert {item.name: item.focused for item in read_elements(page)} == {"Rich": True, "Plain": False, "Outer": False}


def test_listeners_and_pointing_hands(page):
    found = read(
        page,
        """<div onclick="top.pressed='div'">By attribute</div><span id=a>By property</span>
        <div style="cursor:pointer"><p>By cursor</p></div><p>Only text</p>
        <div style="cursor:pointer"><button>Inside</button></div><label style="cursor:pointer">Label</label>
        <script>document.querySelector('#a').onclick = () => { top.pressed = 'span'; }; document.body.onclick = () => 0;
        </script>""",
    )
    assert set(found) == {"By attribute", "By property", "By cursor", "Inside"}
    assert press(page, found["By attribute"]) == "div"
    assert press(page, found["By property"]) == "span"


def test_image_maps(page):
    found = read(
        page,
        f"""<img src="{PIXEL}" usemap="#m" style="width:200px;height:100px;border:4px solid;padding:6px"><map name=m>
        <area shape=rect coords="10,20,60,80" href="#" alt=Left onclick="top.pressed='left'">
        <area shape=circle coords="150,50,20" href="#" alt=Round onclick="top.pressed='round'">
        <area shape=poly coords="70,0,120,0,120,10,80,10,80,100,70,100" href="#" alt=Bent onclick="top.pressed='bent'">
        </map>""",
    )
    assert set(found) == {"Left", "Round", "Bent"}
    assert list(found["Left"].box) == [edge * page.scale for edge in (10, 20, 60, 80)]
    assert found["Round"].center == (150 * page.scale, 50 * page.scale)
    for name in found:
        assert (found[name].role, found[name].visible) == ("link", True)
        assert press(page, found[name]) == name.lower()


def test_what_takes_no_clicks_is_not_clickable(page):
    found = read(
        page,
        """<div inert><button onclick="top.pressed=1">Inert</button></div>
        <button style="pointer-events:none" onclick="top.pressed=1">Dead</button>
        <p style="pointer-events:none"><button>Dead too</button><button style="pointer-events:auto">Alive</button></p>
        <button><svg width=10 height=10 style="pointer-events:none"></svg>Icon</button>
        <label>Box <input type=checkbox style="pointer-events:none"></label>""",
    )
    hidden = {name: item.hidden for name, item in found.items()}
    assert hidden == {"Inert": "inert", "Dead": "inert", "Dead too": "inert", "Alive": "", "Icon": "", "Box": ""}
    assert press(page, found["Inert"]) == press(page, found["Dead"]) == ""
    press(page, found["Box"])
    assert next(item for item in read_elements(page) if item.name == "Box").checked


def test_behind_an_open_modal_dialog_nothing_is_clickable(page):
    found = read(
        page,
        "<button>Behind</button><dialog style='margin:100px 0 0 200px'><button>Ahead</button></dialog>"
        "<script>document.querySelector('dialog').showModal()</script>",
    )
    assert (found["Behind"].hidden, found["Ahead"].hidden) == ("inert", "")


def test_disabled_by_a_fieldset_or_by_aria(page):
    found = read(
        page,
        "<fieldset disabled><legend><button>Legend</button></legend><button>Off</button><input aria-label=Field>"
        "</fieldset><div role=button aria-disabled=true>Aria</div><button>On</button>",
    )
    disabled = {name: item.disabled for name, item in found.items()}
    assert disabled == {"Legend": False, "Off": True, "Field": True, "Aria": True, "On": False}


def test_a_frame_of_another_file_is_read_too(page, tmp_path):
    (tmp_path / "inner.html").write_text("<button onclick='document.title=1'>In file</button>")
    (tmp_path / "outer.html").write_text(f"{STYLE}<iframe src=inner.html style='margin:20px'></iframe>")
    page.load_file(tmp_path / "outer.html")
    (element,) = read_elements(page)
    assert (element.name, element.visible) == ("In file", True)
    assert element.box.x1 > 20 * page.scale
    press(page, element)
    assert page.page.frames[1].title() == "1"
