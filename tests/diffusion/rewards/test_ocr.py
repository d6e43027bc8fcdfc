import itertools
import shutil
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from diffusion.rewards import load_image_rewards
from diffusion.rewards import ocr as module
from diffusion.rewards.ocr import edit_distance, ocr, quoted_text, text_score
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum
from tests.golden.numbers import load

BLANK = np.full((32, 32, 3), 255, dtype=np.uint8)
needs_weights = pytest.mark.skipif(
    find_spec("rapidocr") is None or find_spec("onnxruntime") is None, reason="the extra ocr is not installed"
)


@pytest.fixture
def engine(monkeypatch):
    """Stands in for PP-OCR: finds the lines of `found` in every image, keeps what it was given, or raises."""
    stand_in = SimpleNamespace(found=[], seen=[])

    def read(image):
        stand_in.seen.append(image)
        if isinstance(stand_in.found, Exception):
            raise stand_in.found
        # the engine leaves out lines that it is not certain of, and says None where nothing is left
        return SimpleNamespace(txts=tuple(text for text, sure in stand_in.found if sure > 0) or None)

    monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(module, "_engine", lambda whole_line, threads: read)
    return stand_in


def test_scores_are_those_of_flow_grpos_code(engine):
    golden = load("ocr")
    (peer,) = golden.peers
    for number, lines in enumerate(golden.inputs["lines"]):
        engine.found = lines
        values = ocr([f'a sign "{target}"' for target in peer["scores"]], [BLANK] * len(peer["scores"]))
        assert values == pytest.approx([scores[number] for scores in peer["scores"].values()], abs=1e-12), lines


def test_pages_are_enlarged_and_lines_are_not_and_both_are_passed_with_blue_first(engine):
    red = np.zeros((16, 32, 3), dtype=np.uint8)
    red[..., 0] = 255
    ocr(['"a"'], [red])
    ocr(['"a"'], [red], whole_line=True)
    page, line = engine.seen
    assert page.shape == (256, 512, 3)
    assert line.shape == red.shape
    assert line[..., 2].min() == 255
    assert line[..., :2].max() == 0


def test_a_failure_of_the_engine_is_counted_and_no_zero(engine):
    engine.found = RuntimeError("out of memory")
    result = RewardSum([RewardConfig("ocr")], functions={"ocr": ocr}).score(['"a"'], [BLANK], {})
    assert np.isnan(result.total[0])
    assert result.errors == {"ocr/raised": 1}
    engine.found = []
    result = RewardSum([RewardConfig("ocr")], functions={"ocr": ocr}).score(['"a"'], [BLANK], {})
    assert result.total == [0.0]
    assert result.errors == {}


def test_missing_packages_and_weights_are_named_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "rapidocr" else name)
    with pytest.raises(UserError, match=r"needs the package rapidocr; install it with pip install 'mmrl-suite\[ocr\]'"):
        load_image_rewards(["ocr"])
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    other = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))  # a release with other weights
    monkeypatch.setitem(sys.modules, "rapidocr", other)
    module._engine.cache_clear()
    with pytest.raises(UserError, match=r"PP-OCRv6_det_small\.onnx, which the installed rapidocr does not have"):
        load_image_rewards(["ocr"])


def rendered(text, size=56, shape=(320, 96)):
    image = Image.new("RGB", shape, "white")
    ImageDraw.Draw(image).text((40, 20), text, fill="black", font=ImageFont.load_default(size))
    return np.asarray(image)


@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize("whole_line", [False, True])
def test_pp_ocr_reads_rendered_text_without_a_network(whole_line, monkeypatch):
    import socket

    def refused(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    module._engine.cache_clear()
    images = [rendered("OPEN"), rendered("OPEN"), np.full((96, 320, 3), 255, dtype=np.uint8)]
    values = ocr(['a sign "OPEN"', 'a sign "ZZZZ"', 'a sign "OPEN"'], images, whole_line=whole_line)
    assert values == [1.0, 0.0, 0.0]


@pytest.mark.slow
@needs_weights
def test_an_image_that_pp_ocr_cannot_take_is_an_error_and_no_zero():
    rewards = RewardSum([RewardConfig("ocr")], functions={"ocr": ocr})
    broken = np.zeros((96, 320, 7), dtype=np.uint8)
    result = rewards.score(['"OPEN"'] * 2, [rendered("OPEN"), broken], {})
    assert result.total[0] == 1.0
    assert np.isnan(result.total[1])
    assert result.errors == {"ocr/raised": 1}


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
    with pytest.raises(RuntimeError, match="exited with code 1: no language data"):
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
    values = ocr(['a sign "OPEN"', 'a sign "ZZZZ"'], [rendered("OPEN")] * 2, program="tesseract")
    assert values[0] == 1.0
    assert values[1] < 0.5
