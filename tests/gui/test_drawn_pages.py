"""Pages drawn by Pillow: repeatable, split by words, appearance and templates, with true and unambiguous boxes."""

import random

import numpy as np
import pytest

from mmrl.gui.grounding.samples import AnyOf
from mmrl.gui.toy.drawn_pages import TEMPLATES, build_pages, draw_page, page_samples
from mmrl.gui.toy.pages.composer import SPLITS, compose
from mmrl.gui.toy.pages.instructions import KINDS


def pages(split, count=30):
    for seed in range(count):
        page = compose(random.Random(seed), split, 448, "en")
        yield page, *draw_page(page, (448, 336))


def test_the_same_seed_draws_the_same_pixels():
    first, again, other = (list(page_samples(4, seed=seed)) for seed in (1, 1, 2))
    for one, two in zip(first, again, strict=True):
        assert (np.asarray(one.image) == np.asarray(two.image)).all()
        assert (one.instruction, one.target, one.meta) == (two.instruction, two.target, two.meta)
    assert [sample.instruction for sample in first] != [sample.instruction for sample in other]


def test_train_and_test_share_no_word_look_or_template():
    seen = {}
    for split in ("train", "test"):
        samples = list(page_samples(60, seed=3, split=split))
        seen[split] = {f"{key}={sample.meta[key]}" for sample in samples for key in ("theme", "layout", "name")}
        seen[split] |= {sample.instruction for sample in samples}
        assert {sample.meta["kind"] for sample in samples} == set(KINDS)
    assert not seen["train"] & seen["test"]
    assert not {*TEMPLATES["train"]} & {*TEMPLATES["test"]}


@pytest.mark.parametrize("split", SPLITS)
def test_controls_lie_inside_and_apart(split):
    for _, image, elements in pages(split):
        assert len(elements) >= 4
        assert all(0 <= e.box.x1 < e.box.x2 < image.width and 0 <= e.box.y1 < e.box.y2 < image.height for e in elements)
        for i, one in enumerate(elements):
            for two in elements[:i]:
                apart = one.box.x2 < two.box.x1 or two.box.x2 < one.box.x1
                assert apart or one.box.y2 < two.box.y1 or two.box.y2 < one.box.y1, (one.name, two.name)


def test_something_is_drawn_in_every_box():
    for _, image, elements in pages("test", 10):
        pixels = np.asarray(image)
        for element in elements:
            x1, y1, x2, y2 = (int(number) for number in element.box)
            assert len(np.unique(pixels[y1 : y2 + 1, x1 : x2 + 1].reshape(-1, 3), axis=0)) > 2, element.name


def test_an_instruction_that_several_fit_is_left_out_or_has_all_boxes():
    alone = list(page_samples(60, seed=4))
    assert not any(isinstance(sample.target, AnyOf) for sample in alone)
    several = [s for s in page_samples(60, seed=4, all_boxes=True) if isinstance(s.target, AnyOf)]
    assert several
    assert all(len(sample.target.targets) > 1 for sample in several)


def test_pages_are_written_as_a_table(tmp_path):
    path = build_pages(tmp_path / "pages.jsonl", count=3, seed=1, split="layouts", size=(280, 280), language="de")
    assert len(path.read_text().splitlines()) == 3
