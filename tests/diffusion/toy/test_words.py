import json

import numpy as np
import pytest

from diffusion.data.captioned_images import ImageDataConfig, load_images
from diffusion.toy import words
from diffusion.toy.words import CAPTIONS, WORDS, build_images, build_prompts, draw_words, word_match
from mmrl.errors import UserError


def test_every_word_fits_into_its_picture_in_every_font():
    for font in words.FONTS:
        for word in WORDS:
            picture = words.draw_word(word, font)
            assert picture.shape == (16, 32, 3)
            # shifts move it by a pixel, so the outermost ones stay empty
            inside = picture[1:-1, 1:-1]
            assert inside.sum(dtype=np.int64) == picture.sum(dtype=np.int64), (word, font)


def test_a_drawing_matches_its_own_word_best():
    images = [words.draw_word(word, words.FONTS[0], (1, -1)) for word in WORDS]
    table = np.array([word_match([caption] * len(WORDS), images) for caption in CAPTIONS])
    assert table.diagonal() == pytest.approx(1.0)
    assert (table - np.eye(len(WORDS))).max() < 0.9
    assert table.min() >= 0.0
    blank, noise = np.zeros((16, 32, 3), np.uint8), np.random.default_rng(0).integers(0, 256, (16, 32, 3), np.uint8)
    assert word_match(['the word "cat"'], [blank]) == [0.0]
    assert word_match(['the word "cat"'], [noise])[0] < 0.4


def test_a_prompt_without_a_word_is_refused():
    with pytest.raises(UserError, match="'the word' has no word in double quotes"):
        word_match(["the word"], [draw_words()[0]])


def test_prompts_and_pictures_are_written_with_each_word_as_often(tmp_path):
    rows = [json.loads(line) for line in build_prompts(str(tmp_path / "p.jsonl")).read_text().splitlines()]
    assert [row["prompt"] for row in rows] == list(CAPTIONS)
    images = load_images(ImageDataConfig(path=str(build_images(str(tmp_path / "i.npz")))))
    assert sorted(image.caption for image in images) == sorted(CAPTIONS * len(words.FONTS))
    assert min(word_match([image.caption for image in images], [image.read() for image in images])) > 0.999
