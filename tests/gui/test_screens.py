"""Generated screens: true boxes and names, instructions for one control, equal pixels, splits that share nothing."""

import random

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.gui.browser.page import Element, GuardedPage, read_elements
from mmrl.gui.grounding.coords import Box
from mmrl.gui.grounding.samples import AnyOf
from mmrl.gui.toy.pages.composer import LAYOUTS, SPLITS, compose, render
from mmrl.gui.toy.pages.instructions import KINDS, SENTENCES, instructions_for
from mmrl.gui.toy.pages.screens import ScreenSettings, WebScreens
from mmrl.gui.toy.pages.vocabulary import CONTENT, FIELDS, LANGUAGES, THEMES, functions

SEEDS = range(12)


def button(name, x, y, width=40, height=10, **options):
    return Element("", "button", "button", name, name, Box(x, y, x + width, y + height), **options)


def written(elements, **options):
    found = instructions_for(elements, {}, "en", "train", random.Random(0), **options)
    return {(item.kind, tuple(target.name for target in item.targets)): item.text for item in found}


def test_a_name_that_two_controls_share_is_left_out_or_has_both_boxes():
    twice = [button("Save", 0, 0), button("save", 0, 90), button("Undo", 200, 0)]
    assert [key for key in written(twice) if key[0] == "name"] == [("name", ("Undo",))]
    assert ("name", ("Save", "save")) in written(twice, all_boxes=True)


def test_hidden_and_disabled_controls_are_no_targets_and_no_rivals():
    hidden = [button("Save", 0, 0), button("Save", 0, 90, hidden="covered"), button("Save", 0, 50, disabled=True)]
    assert [key for key in written(hidden) if key[0] == "name"] == [("name", ("Save",))]


def test_what_is_cut_off_is_no_target_but_a_rival():
    assert ("name", ("Save",)) not in written([button("Save", 0, 0, visible_share=0.2)])
    assert written([button("Save", 0, 0), button("Save", 0, 90, visible_share=0.2)]) == {}


def test_relations_name_the_neighbour_that_leaves_no_doubt():
    row = [button("A", 0, 0), button("B", 50, 0), button("C", 100, 0)]
    found = written(row)
    assert found["relation", ("C",)] == 'Click what stands directly right of "B".'
    stacked = [button("A", 0, 0, height=40), button("B", 50, 0), button("C", 50, 20)]  # both are right of A
    assert ("relation", ("B",)) not in {key for key, text in written(stacked).items() if "right of" in text}


def test_relation_in_a_row():
    rows = [button("Open", 0, y, row=name) for y, name in ((0, "Anna"), (20, "Paul"))]
    found = instructions_for(rows, {}, "en", "train", random.Random(0))
    assert [item.text for item in found] == ['In the row of Anna, click "Open".', 'In the row of Paul, click "Open".']


@pytest.mark.parametrize("language", LANGUAGES)
def test_splits_share_no_words(language):
    def words(split):
        texts = [text for f in functions(split, language).values() for text in (*f.labels, *f.phrases, f.icon)]
        texts += [text for entry in SENTENCES[split][language].values() for text in entry]
        texts += [text for entry in CONTENT[split].values() for text in entry]
        return {text.casefold() for text in (*texts, *FIELDS[split][language])}

    assert not words("train") & words("test")
    assert len(words("train")) > 150


def test_splits_share_no_templates_and_no_themes():
    assert not set(LAYOUTS["train"]) & set(LAYOUTS["test"])
    assert not {theme.name for theme in THEMES["train"]} & {theme.name for theme in THEMES["test"]}
    assert SPLITS["layouts"] == (SPLITS["test"][0], SPLITS["train"][1])


def test_no_phrase_names_its_function():
    for split in ("train", "test"):
        for language in LANGUAGES:
            for function in functions(split, language).values():
                for phrase in function.phrases:
                    assert not any(label.casefold() in phrase.casefold().split() for label in function.labels), phrase


def test_distractors_come_from_the_targets_family():
    for seed in SEEDS:
        page = compose(random.Random(seed), "train", 448)
        known = functions("train", page.language)
        families = [known[control.function].family for control in (*page.toolbar, *page.navigation, *page.actions)]
        assert min(families.count(family) for family in families) >= 2


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"screens\.split is 'tests'; did you mean 'test'"):
        WebScreens(ScreenSettings(split="tests"))
    with pytest.raises(ConfigError, match=r"screens\.languages"):
        WebScreens(ScreenSettings(languages=("fr",)))


@pytest.fixture(scope="module")
def screens(browser):
    return {split: WebScreens(ScreenSettings(split=split), browser) for split in SPLITS}


def test_the_same_seed_gives_the_same_pixels_and_samples(browser, screens, closing):
    first = [screens["train"].screen(seed) for seed in range(3)]
    again = closing(WebScreens(ScreenSettings(), browser))
    again.screen(77)  # what was drawn before must not matter
    for screen in first:
        other = again.screen(screen.seed)
        assert np.array_equal(screen.image, other.image)
        assert screen.elements == other.elements
        assert screen.instructions == other.instructions
    assert not np.array_equal(first[0].image, first[1].image)


@pytest.mark.parametrize("split", list(SPLITS))
def test_samples_of_every_split(screens, split):
    found = list(screens[split].samples(20, seed=3))
    assert len(found) == 20
    assert len({sample.meta["id"] for sample in found}) == 20
    assert {sample.meta["kind"] for sample in found} == set(KINDS)
    assert len({sample.meta["scale"] for sample in found}) > 1
    for sample in found:
        assert sample.image.size == sample.original_wh
        assert sample.target.contains(sample.target.center)
        assert 0 <= sample.target.x1 < sample.target.x2 <= sample.original_wh[0]
        assert 0 <= sample.target.y1 < sample.target.y2 <= sample.original_wh[1]
    assert {sample.meta["layout"] for sample in found} <= set(LAYOUTS[SPLITS[split][0]])


def test_a_click_on_a_box_reaches_its_control(browser, closing):
    page = closing(GuardedPage(browser, 448, 336))
    for seed in SEEDS:
        page.load_html(render(compose(random.Random(seed), "layouts", 448)), new_document=False)
        page.evaluate("() => { window.hit = []; document.onclick = event => hit.push(event.target) }")
        targets = [element for element in read_elements(page) if element.visible and element.tag in ("button", "a")]
        assert targets
        for target in targets[:4]:
            page.page.mouse.click(*target.center)
            name = page.evaluate("() => { const e = hit.pop().closest('.button'); return e && e.dataset.function }")
            assert name == target.data["function"]


def test_all_boxes_keeps_ambiguous_instructions(browser, closing):
    screens = closing(WebScreens(ScreenSettings(all_boxes=True, per_screen=10), browser))
    targets = [sample.target for sample in screens.samples(60, seed=5)]
    several = [target for target in targets if isinstance(target, AnyOf)]
    assert several
    assert all(len(set(target.targets)) > 1 for target in several)


VISIBILITY = """<!doctype html><body style="margin:0;height:100px;overflow:hidden">
<button data-key="seen">a</button><button data-key="none" style="display:none">b</button>
<button data-key="invisible" style="visibility:hidden">c</button><button data-key="clear" style="opacity:0">d</button>
<button data-key="away" style="position:absolute;left:5000px">e</button>
<button data-key="tiny" style="position:absolute;left:90px;width:1px;height:1px;padding:0;border:0"></button>
<button data-key="under" style="position:absolute;left:150px;top:0">f</button>
<div style="position:absolute;left:140px;top:0;width:60px;height:40px;background:red"></div>
<div style="position:absolute;top:50px;width:100px;height:20px;overflow:hidden">
  <button data-key="cut" style="position:absolute;top:10px;height:40px;width:50px">g</button>
  <button data-key="scrolled" style="position:absolute;top:60px">h</button></div>
<p style="position:absolute;left:110px;top:50px;width:120px">some words
  <a data-key="wrapped" href="#">a link that goes on</a></p>
"""


def test_visibility(browser, closing):
    page = closing(GuardedPage(browser, 240, 120))
    page.load_html(VISIBILITY)
    found = {element.key: element for element in read_elements(page) if element.key}
    assert {key: element.hidden for key, element in found.items()} == {
        "seen": "",
        "none": "style",
        "invisible": "style",
        "clear": "style",
        "away": "outside",
        "tiny": "outside",
        "under": "covered",
        "cut": "",
        "scrolled": "outside",
        "wrapped": "",
    }
    assert found["cut"].box == Box(0, 60, 50, 70)
    assert found["cut"].visible_share == 0.25
    page.evaluate("() => { document.onclick = event => { window.hit = event.target.dataset.key } }")
    page.page.mouse.click(*found["wrapped"].center)  # the middle of the union of its lines is outside of it
    assert page.evaluate("() => hit") == "wrapped"


NAMES = """<!doctype html><span id="far">Far <b>label</b></span><label for="i1">Own label</label><input id="i1">
<label>Around <select><option>x</option></select></label><input aria-labelledby="far" aria-label="no">
<input placeholder="Hint"><input type="submit" value="Go"><button title="Tip"><svg aria-hidden="true"></svg></button>
<button aria-label="Close"><svg aria-hidden="true"></svg>x</button><a href="#"><img alt="Logo" src="data:,"> text</a>
<button>two <span style="display:none">hidden</span><span>parts</span></button><input type="checkbox" id="c">
<label for="c">Tick</label><div role="tab" tabindex="0">Tab <i aria-hidden="true">!</i></div>
<textarea title="T"></textarea>
"""


def test_names_and_roles_are_those_of_chromiums_accessibility_tree(browser, closing):
    page = closing(GuardedPage(browser, 448, 336))
    pages = [NAMES, *(render(compose(random.Random(seed), "train", 448)) for seed in SEEDS)]
    compared = 0
    for html in pages:
        page.load_html(html)
        ours = {(element.role, element.name) for element in read_elements(page) if element.hidden != "style"}
        tree = page.page.context.new_cdp_session(page.page).send("Accessibility.getFullAXTree")["nodes"]
        theirs = {
            (node["role"]["value"].replace("comboBoxSelect", "combobox").lower(), node["name"]["value"].strip())
            for node in tree
            if "name" in node and not node["ignored"]
        }
        assert ours <= theirs
        compared += len(ours)
    assert compared > 100
