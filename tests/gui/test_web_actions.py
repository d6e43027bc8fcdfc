"""Actions are checked before a browser sees them; points are converted once, in the environment's own space."""

import math

import pytest

from mmrl.gui.browser.actions import ACTIONS, ActionError, Viewpoint, read_action
from mmrl.gui.grounding.coords import CoordinateSpace

PLAIN = Viewpoint(CoordinateSpace.ABS_ORIGINAL, (320, 240), None, 1.0)
SPACES = {
    CoordinateSpace.ABS_ORIGINAL: (80, 120),
    CoordinateSpace.ABS_RESIZED: (84, 126),
    CoordinateSpace.REL1000: (250, 500),
    CoordinateSpace.REL1: (0.25, 0.5),
    CoordinateSpace.REL1_YX: (0.5, 0.25),
}


@pytest.mark.parametrize("space", list(CoordinateSpace))
def test_points_of_every_space_mean_the_same_position(space):
    viewpoint = Viewpoint(space, (320, 240), (336, 252), 1.0)
    first, second = SPACES[space]
    for arguments in ({"x": first, "y": second}, {"point": [first, second]}):
        assert read_action("click", arguments, viewpoint).points == ((80.0, 120.0),)
    assert viewpoint.from_image((80, 120)) == SPACES[space]


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("press", {}, "unknown_action"),
        ("click", {}, "wrong_arguments"),
        ("click", {"x": 1}, "wrong_arguments"),
        ("click", {"x": "1", "y": 2}, "wrong_arguments"),
        ("click", {"x": True, "y": 2}, "wrong_arguments"),
        ("click", {"x": math.nan, "y": 2}, "wrong_arguments"),
        ("click", {"x": 10**400, "y": 2}, "wrong_arguments"),
        ("click", {"point": [1, 2, 3]}, "wrong_arguments"),
        ("click", {"point": {"x": 1}}, "wrong_arguments"),
        ("click", {"x": 1, "y": 2, "button": "left"}, "wrong_arguments"),
        ("click", {"x": -5, "y": -5}, "out_of_bounds"),
        ("click", {"x": 5000, "y": 10}, "out_of_bounds"),
        ("click", {"x": 1e9, "y": 1e9}, "out_of_bounds"),
        ("drag", {"x": 1, "y": 1, "to_x": 400, "to_y": 1}, "out_of_bounds"),
        ("drag", {"start": [1, 1]}, "wrong_arguments"),
        ("scroll", {}, "wrong_arguments"),
        ("scroll", {"direction": "sideways"}, "wrong_arguments"),
        ("scroll", {"direction": ["down"]}, "wrong_arguments"),
        ("scroll", {"direction": "down", "amount": 0}, "wrong_arguments"),
        ("scroll", {"direction": "down", "x": 900, "y": 1}, "out_of_bounds"),
        ("type", {}, "wrong_arguments"),
        ("type", {"text": ""}, "wrong_arguments"),
        ("type", {"text": "a" * 501}, "wrong_arguments"),
        ("type", {"text": "\ud800"}, "wrong_arguments"),
        ("type", {"text": "\x00"}, "wrong_arguments"),
        ("key", {"key": "Foo"}, "wrong_arguments"),
        ("key", {"key": "Control+"}, "wrong_arguments"),
        ("key", {"key": "a+b"}, "wrong_arguments"),
        ("key", {"key": "ctrl+control+a"}, "wrong_arguments"),
        ("key", {"key": 3}, "wrong_arguments"),
        ("key", {"key": []}, "wrong_arguments"),
        ("key", {"key": ["Enter", "Foo"]}, "wrong_arguments"),
        ("scroll", {"direction": "down", "amount": 42, "unit": "clicks"}, "wrong_arguments"),
        ("scroll", {"direction": "down", "amount": 2, "unit": "pages"}, "wrong_arguments"),
        ("wait", {"seconds": 60}, "wrong_arguments"),
        ("wait", {"seconds": None}, "wrong_arguments"),
        ("finish", {"answer": ["4"]}, "wrong_arguments"),
        ("long_press", {"point": [1, 2]}, "unknown_action"),
        ("press_home", {}, "unknown_action"),
    ],
)
def test_what_cannot_be_executed_is_named(name, arguments, code):
    with pytest.raises(ActionError) as caught:
        read_action(name, arguments, PLAIN)
    assert caught.value.code == code
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("Enter", "Enter"),
        ("ctrl+a", "Control+a"),
        ("ctrl shift T", "Control+Shift+T"),
        ("down", "ArrowDown"),
        ("arrow_left", "ArrowLeft"),
        ("page_down", "PageDown"),
        ("7", "7"),
        ("esc", "Escape"),
    ],
)
def test_names_of_keys(given, key):
    assert read_action("key", {"key": given}, PLAIN).text == key


def test_the_edge_belongs_to_the_image():
    assert read_action("click", {"x": 320, "y": 240}, PLAIN).points == ((319.5, 239.5),)
    assert read_action("click", {"x": 0, "y": 0}, PLAIN).points == ((0.0, 0.0),)


def test_the_manual_covers_every_action():
    assert all(kind.summary.startswith(f"{name}(") for name, kind in ACTIONS.items())


def test_amounts_have_their_unit_and_ends_an_answer():
    down = {"direction": "down"}
    assert read_action("scroll", down | {"amount": 5, "unit": "clicks"}, PLAIN).scroll_px == (0, 600)
    assert read_action("scroll", down | {"amount": 5}, PLAIN).scroll_px == (0, 5)
    assert read_action("scroll", down | {"unit": "clicks"}, PLAIN).scroll_px == (0, 120)
    assert read_action("key", {"key": ["tab", "ctrl+a"]}, PLAIN).text == "Tab Control+a"
    assert read_action("wait", {"seconds": 2}, PLAIN).seconds == 2
    assert read_action("finish", {"answer": "it is 4"}, PLAIN).text == "it is 4"
