"""The digest of a data set and its sensitivity to changes."""

from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.runs.fingerprint import content_digest


@dataclass
class Task:
    id: str = "data.jsonl line 1"
    prompt: str = "How many?"
    images: list[Any] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)


class Stored:
    """An image inside a table."""

    def __init__(self, data):
        self.data = data

    def read(self):
        return self.data


VALUES = [
    "a",
    "b",
    "",
    None,
    0,
    1,
    1.5,
    float("nan"),
    True,
    b"a",
    b"b",
    ["a"],
    [["a"]],
    {"a": 1},
    {"a": "1"},
    {"b": 1},
    np.zeros(3),
    np.zeros((3, 1)),
    np.zeros(3, np.float32),
    np.ones(3),
    torch.zeros(3),
    torch.ones(3),
    torch.ones(3, dtype=torch.bfloat16),
    Image.new("RGB", (2, 3)),
    Image.new("RGB", (3, 2)),
    Image.new("RGB", (2, 3), (0, 0, 1)),
    "\ud800",
    Decimal("1.0"),
    Decimal("2.0"),
    Fraction(1, 2),
    date(2026, 1, 1),
    date(2026, 1, 2),
    timedelta(1),
    np.array([["a"], ["b"]], object),
]


def test_each_difference_changes_the_digest_and_nothing_else_does():
    digests = [content_digest([Task(columns={"answer": value})]) for value in VALUES]
    assert len(set(digests)) == len(VALUES)
    assert digests == [content_digest([Task(columns={"answer": value})]) for value in VALUES]


def test_order_and_number_of_tasks_count():
    one, two = Task(prompt="one"), Task(prompt="two")
    assert len({content_digest(tasks) for tasks in ([], [one], [one, two], [two, one], [one, one])}) == 5


def test_a_moved_or_renamed_file_is_the_same_data_another_image_is_not(tmp_path):
    def tasks(folder, colour, name="0.png"):
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), colour).save(folder / name)
        return [Task(id=f"{folder} line 1", images=[str(folder / name)])]

    first = content_digest(tasks(tmp_path / "a", "red"))
    assert content_digest(tasks(tmp_path / "b", "red")) == first
    assert content_digest(tasks(tmp_path / "c", "blue")) != first
    assert content_digest(tasks(tmp_path / "d", "red", name="1.png")) != first


def test_images_that_are_read_when_needed_count():
    base = Task(images=[Stored(b"one")])
    assert content_digest([base]) == content_digest([replace(base, images=[Stored(b"one")])])
    assert content_digest([base]) != content_digest([replace(base, images=[Stored(b"two")])])


@pytest.mark.parametrize("count", [255, 256, 257, 1000])
def test_only_some_of_many_images_are_read(count):
    class Counted(Stored):
        def read(self):
            reads.append(self.data)
            return super().read()

    reads = []
    content_digest([Task(images=[Counted(bytes([number % 256]))]) for number in range(count)])
    assert min(count, 129) <= len(reads) <= 256


def test_an_unreadable_image_is_left_to_the_run(tmp_path):
    assert content_digest([Task(images=[str(tmp_path / "missing.png")])])


def test_a_moved_video_is_the_same_data_another_one_is_not(tmp_path, monkeypatch):
    from mmrl import files
    from mmrl.vlm.data.task import VideoClip

    def digest(folder, content):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.mp4").write_bytes(content)
        return content_digest([VideoClip(str(tmp_path / folder / "a.mp4"))])

    assert digest("here", b"one") == digest("there", b"one") != digest("there", b"two")
    monkeypatch.setattr(files, "READ_WHOLE", 8)
    monkeypatch.setattr(files, "READ_END", 2)
    same = digest("here", b"ab......yz")
    assert same == digest("there", b"ab..,,..yz"), "of a large file the ends are read"
    assert same != digest("there", b"ab......yx")
    assert same != digest("there", b"ab.......yz")


def test_an_object_may_say_what_a_run_depends_on():
    @dataclass
    class Question:
        path: str

        def contents(self):
            return {"question": "How many?"}

    assert content_digest([Question("/here")]) == content_digest([Question("/there")])
