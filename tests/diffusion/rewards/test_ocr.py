import itertools
import shutil
import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from diffusion.rewards.ocr import edit_distance, ocr, quoted_text, text_score
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum

BLANK = np.full((32, 32, 3), 255, dtype=np.uint8)


@pytest.fixture
def program(tmp_path):
    """Stands in for tesseract: checks the call and prints what `answer.txt` says, or fails without one."""
    source = f"""#!{sys.executable}
import io, pathlib, sys, time
from PIL import Image
assert sys.argv[1:] == ["stdin", "stdout", "-l", "eng", "--psm", "6"], sys.argv
picture = Image.open(io.BytesIO(sys.stdin.buffer.read()))
assert picture.format == "PNG" and min(picture.size) >= 256, picture.size
answer = pathlib.Path(__file__).with_name("answer.txt").read_text()
if answer == "sleep":
    time.sleep(60)
if answer == "fail":
    sys.exit("no language data")
print(answer)
"""
    path = tmp_path / "reader"
    path.write_text(source)
    path.chmod(0o755)

    def answering(answer):
        (tmp_path / "answer.txt").write_text(answer)
        return str(path)

    return answering


def slow_distance(one, other):
    """Edit distance by its recursive definition."""
    if not one or not other:
        return len(one) + len(other)
    return min(
        slow_distance(one[1:], other) + 1,
        slow_distance(one, other[1:]) + 1,
        slow_distance(one[1:], other[1:]) + (one[0] != other[0]),
    )


def test_edit_distance_is_that_of_the_definition():
    words = ["".join(letters) for count in range(4) for letters in itertools.product("ab", repeat=count)]
    for one, other in itertools.product(words, words):
        assert edit_distance(one, other) == slow_distance(one, other)
    assert edit_distance("kitten", "sitting") == 3


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("OPEN", 1.0),
        (" the shop is\no p e n today", 1.0),
        ("opan", 0.75),
        ("ope", 0.75),
        ("", 0.0),
        ("something else entirely", 0.0),
    ],
)
def test_text_score_by_hand(text, score):
    assert text_score(text, "Open") == pytest.approx(score)


def test_quoted_text_is_the_first_one():
    assert quoted_text('a sign "ABC" and "DEF"') == "ABC"
    assert quoted_text("a sign “ABC”") == "ABC"
    assert quoted_text("a sign ABC") is None
    assert quoted_text('a sign ""') is None


def test_what_the_program_reads_is_scored(program):
    prompts = ['a sign "OPEN"', 'a sign "OVEN"', "a sign"]
    assert ocr(prompts, [BLANK] * 3, program=program("Open\n")) == [1.0, 0.75, None]


def test_failures_are_errors_and_not_zeros(program):
    with pytest.raises(RuntimeError, match="ended with 1: no language data"):
        ocr(['a sign "OPEN"'], [BLANK], program=program("fail"))
    with pytest.raises(TimeoutError, match=r"longer than 0\.5 s"):
        ocr(['a sign "OPEN"'], [BLANK], program=program("sleep"), timeout_s=0.5)
    rewards = RewardSum([RewardConfig("ocr", options={"program": program("fail")})], functions={"ocr": ocr})
    result = rewards.score(['a sign "OPEN"'], [BLANK], {})
    assert np.isnan(result.total[0])
    assert result.errors == {"ocr/raised": 1}


def test_a_missing_program_is_named():
    with pytest.raises(UserError, match="needs the program 'no-such-reader'"):
        ocr([], [], program="no-such-reader")


@pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not installed")
def test_tesseract_reads_rendered_text():
    image = Image.new("RGB", (320, 96), "white")
    ImageDraw.Draw(image).text((40, 20), "OPEN", fill="black", font=ImageFont.load_default(56))
    values = ocr(['a sign "OPEN"', 'a sign "ZZZZ"'], [np.asarray(image)] * 2)
    assert values[0] == 1.0
    assert values[1] < 0.5
