"""Home screens: tiles of constant colours in any order, worked answers and listings, the same pixels side by side."""

import json
import random
from itertools import combinations

import numpy as np
import pytest

from mmrl.errors import ConfigError, UserError
from mmrl.gui.browser.page_env import settings_from
from mmrl.gui.grounding.samples import AnyOf
from mmrl.gui.toy.pages.composer import SPLITS
from mmrl.gui.toy.pages.launcher import COLORS, LauncherSettings, app_name, build_model, compose_launcher
from mmrl.gui.toy.pages.screens import SHEET_WH, ScreenSettings, WebScreens
from mmrl.gui.toy.pages.vocabulary import LANGUAGES, THEMES, functions
from tests.gui.screens import SMALL

SMALL_SCREEN = {"layout": "launcher", "width_px": 128, "height_px": 96, "scales": [1.0], "languages": ["en"]}


def launcher(browser, **options):
    return WebScreens(settings_from(ScreenSettings, SMALL_SCREEN | options), browser)


def rgb(color):
    return np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)])


def test_colors_differ_from_each_other_and_from_every_background():
    backgrounds = [theme.background for themes in THEMES.values() for theme in themes]
    pairs = [*combinations(COLORS.values(), 2), *((one, other) for one in COLORS.values() for other in backgrounds)]
    assert min(np.abs(rgb(one) - rgb(other)).sum() for one, other in pairs) >= 80


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("words", ["train", "test"])
def test_every_tile_has_its_own_name_and_another_of_its_family(words, language):
    known = functions(words, language)
    assert len({app_name(known[name]) for name in COLORS}) == len(COLORS)
    families = [known[name].family for name in COLORS]
    assert all(families.count(family) == 2 for family in families)


def test_order_and_look_differ_from_page_to_page():
    pages = [
        compose_launcher(random.Random(seed), *SPLITS["train"], (160, 128), "en", LauncherSettings())
        for seed in range(20)
    ]
    places = {page.cells.index(next(tile for tile in page.cells if tile)) for page in pages}
    orders = {tuple(tile.function for tile in page.cells if tile) for page in pages}
    assert len(orders) == 20
    assert len(places) > 1
    assert {sum(tile is not None for tile in page.cells) for page in pages} == {12}
    assert len({page.tile_px for page in pages}) == 3
    assert len({page.theme.name for page in pages}) > 2


def test_functions_and_tiles_can_be_chosen():
    names = ("home", "play", "save")
    page = compose_launcher(random.Random(0), "test", "train", (64, 64), "en", LauncherSettings(names, tiles=9))
    assert sorted(tile.function for tile in page.cells if tile) == sorted(names)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="4 x 2 cells of 32, too few for 12 tiles"):
        WebScreens(ScreenSettings(layout="launcher", width_px=128, height_px=64, scales=(1.0,)))
    with pytest.raises(UserError, match="only relation"):
        WebScreens(ScreenSettings(layout="launcher", kinds=("relation",)))
    with pytest.raises(UserError, match=r"screens\.launcher is set, but it has no effect while screens\.layout is"):
        WebScreens(ScreenSettings(launcher=LauncherSettings(tiles=4)))
    with pytest.raises(UserError, match="at least 160 x 120"):
        WebScreens(ScreenSettings(width_px=128))
    with pytest.raises(ConfigError, match=r"launcher\.functions"):
        WebScreens(ScreenSettings(layout="launcher", launcher=LauncherSettings(("calendar",))))


def test_pixels_and_boxes_are_the_same_alone_and_side_by_side(browser, closing):
    screens = closing(launcher(browser))
    assert screens.settings.sheet == (SHEET_WH[0] // 128, SHEET_WH[1] // 96)
    together = screens.screens(range(70))  # more than one window holds
    for seed in (1, 5, 37, 53, 64, 69):
        alone = screens.screen(seed)
        assert np.array_equal(alone.image, together[seed].image)
        assert alone.instructions == together[seed].instructions
        assert alone.elements == together[seed].elements


def test_a_box_holds_the_color_and_the_name_of_its_function(browser, closing):
    screens = closing(launcher(browser, split="layouts"))
    known = functions("train", "en")
    for screen in screens.screens(range(5)):
        assert screen.image.shape == (96, 128, 3)
        assert len(screen.elements) == 12
        for element in screen.elements:
            function = element.data["function"]
            x1, y1, x2, _ = (round(edge) for edge in element.box)
            assert element.visible
            assert element.name == app_name(known[function])
            assert 24 <= x2 - x1 <= 28
            assert np.array_equal(screen.image[y1 + 1, (x1 + x2) // 2], rgb(COLORS[function]))


def test_worked_answers_and_listings(browser, closing):
    screens = closing(launcher(browser, worked={"listings": 0.6}, kinds=["name"]))
    rows = list(screens.samples(300, seed=1))
    listings = [row for row in rows if row.meta["kind"] == "listing"]
    assert abs(len(listings) - 180) < 4 * (300 * 0.6 * 0.4) ** 0.5
    assert {row.meta["kind"] for row in rows} == {"listing", "name"}
    for row in rows:
        targets = row.target.targets if isinstance(row.target, AnyOf) else (row.target,)
        assert row.meta["answers"] == [list(box.center) for box in targets]
    for row in listings:
        assert len(row.meta["labels"]) == len(set(row.meta["labels"])) == 12
        assert row.meta["labels"] == sorted(row.meta["labels"])
    assert all(row.meta["labels"] == [row.meta["name"]] for row in rows if row not in listings)


def test_worked_answers_may_be_several_and_mistaken(browser, closing):
    screens = closing(launcher(browser, worked={"most_answers": 3, "mistaken": 0.9}, kinds=["name", "function"]))
    known, right, family, counts = functions("train", "en"), {"name": [], "function": []}, [], set()
    by_name = {app_name(known[name]): known[name] for name in COLORS}
    for row in screens.samples(300, seed=2):
        first = row.meta["labels"][0]
        right[row.meta["kind"]].append(first == row.meta["name"])
        counts.add(len(row.meta["labels"]))
        assert len(set(row.meta["labels"])) == len(row.meta["labels"]) == len(row.meta["answers"])
        assert row.target.contains(row.meta["answers"][0]) == (first == row.meta["name"])
        if first != row.meta["name"]:
            family.append(by_name[first].family == by_name[row.meta["name"]].family)
    assert counts == {1, 2, 3}
    assert all(right["name"])
    assert abs(np.mean(right["function"]) - 0.1) < 4 * (0.09 / len(right["function"])) ** 0.5
    assert 0.4 < np.mean(family) < 1, "12 of 16 tiles are shown, so the other one of a family is there in 11 of 15"


def test_aligned_pages_have_every_tile_in_the_middle_of_its_cell_and_may_have_few(browser, closing):
    screens = closing(launcher(browser, launcher=LauncherSettings(aligned=True, fewest_tiles=1)))
    pages = screens.screens(range(40))
    counts = {len(page.elements) for page in pages}
    assert min(counts) < 4
    assert max(counts) > 9
    for page in pages:
        assert all(x % 32 == 16 and y % 32 == 16 for x, y in (element.box.center for element in page.elements))


def test_the_tiny_tokenizer_has_one_token_a_name(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build_model(tmp_path / "model", family="qwen3_vl", **SMALL))
    known = functions("train", "en")
    names = [app_name(known[name]) for name in COLORS]
    assert len(tokenizer.encode(f'Click "{names[0]}".')) <= 5
    question = f"{known['play'].phrases[0].capitalize()}."
    assert len(tokenizer.encode(question)) <= len(question.split()) + 1
    listing = json.dumps([{"label": name, "point_2d": [125, 875]} for name in names[:2]])
    assert tokenizer.decode(tokenizer.encode(listing)) == listing
    assert len(tokenizer.encode(listing)) == 1 + 2 * 5
