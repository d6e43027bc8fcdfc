"""Seeded damage: unusual values, and trees, texts and bytes with a few faults each."""

import copy
import random
from collections.abc import Callable
from typing import Any

__all__ = ["damage_bytes", "damage_text", "damage_tree", "strange_value"]

STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, -7, 2**31, -(2**31), 2**63, 10**12, 10**30, 0.0, -0.0, 0.5, -0.5, 1.5, 1e-30),
    *(
        1e30,
        1e308,
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        " ",
        "\n",
        "0",
        "1",
        "-1",
        "1e3",
        "nan",
        "inf",
        "null",
    ),
    *(
        "true",
        "no",
        "None",
        "???",
        "${oc.env:HOME}",
        "${nope}",
        "${",
        "${a.b}",
        "a.b",
        "a b",
        "a,b",
        "[1",
        "{a: 1}",
        "/",
    ),
    *(".", "..", "../..", "/dev/null", "/dev/zero", "/proc/self/mem", "~", "nowhere", "x.jsonl", "os:system", "a:b:c"),
    *(
        "tests.faults:nothing",
        "json:loads",
        ":",
        "::",
        "\x00",
        "a\x00b",
        "\ud800",
        "é漢字🙂",
        "‮abc",
        "A" * 300,
        "B" * 70000,
    ),
    *([], [1], ["a"], [None], [[1]], [[]], [{}], [1, "a", None], list(range(1000)), [float("nan")], ["\ud800"]),
    *(
        {},
        {"a": 1},
        {"": ""},
        {"1": 1},
        {"path": "x"},
        {"name": "x"},
        {"kind": "x"},
        {"a": {"b": {"c": [1, {"d": 2}]}}},
    ),
)
"""Values that a field may hold by mistake."""


def strange_value(rng: random.Random, largest: float = float("inf")) -> Any:
    """A value of any type, nested at times, a number up to `largest`."""
    value = copy.deepcopy(rng.choice(STRANGE))
    if isinstance(value, int | float) and largest < value < float("inf"):
        value = 3
    return [value] if rng.random() < 0.05 else {"x": value} if rng.random() < 0.05 else value


def damage_tree(
    rng: random.Random, tree: Any, keys: tuple[str, ...] = ("extra",), largest: float = float("inf")
) -> Any:
    """A copy of nested lists and dictionaries with one to three faults.

    Args:
        rng: what to do where.
        tree: anything that JSON can hold.
        keys: names that an added or renamed key may get.
        largest: of the finite numbers that are put in.
    """
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return strange_value(rng, largest)
        holder, key = rng.choice(places)
        rng.choice(_TREE_FAULTS)(rng, holder, key, places, keys, largest)
    return tree


def damage_text(rng: random.Random, text: str) -> str:
    """A text with one to three of its characters, lines or halves changed."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        text = rng.choice(_TEXT_FAULTS)(rng, text)
    return text


def damage_bytes(rng: random.Random, data: bytes, head: int = 64) -> bytes:
    """A file's content with flipped, cut, doubled, zeroed or inserted bytes, often near its head.

    Args:
        rng: what to do where.
        data: the sound content.
        head: bytes at the start that are hit as often as all others together.
    """
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 10))):
        if not content:
            break
        place = rng.randrange(min(head, len(content)) if rng.random() < 0.5 else len(content))
        rng.choice(_BYTE_FAULTS)(rng, content, place)
    return bytes(content)


def _places(tree: Any) -> Any:
    """Every (container, key or index) of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def _replace(rng: random.Random, holder: Any, key: Any, places: Any, keys: Any, largest: float) -> None:
    holder[key] = strange_value(rng, largest)


def _remove(rng: random.Random, holder: Any, key: Any, places: Any, keys: Any, largest: float) -> None:
    if key in holder if isinstance(holder, dict) else key < len(holder):
        del holder[key]


def _rename(rng: random.Random, holder: Any, key: Any, places: Any, keys: Any, largest: float) -> None:
    if isinstance(holder, dict) and key in holder:
        name = rng.choice([*keys, damage_text(rng, str(key)), str(key).upper(), "", " "])
        holder[name] = holder.pop(key)


def _add(rng: random.Random, holder: Any, key: Any, places: Any, keys: Any, largest: float) -> None:
    if isinstance(holder, dict):
        holder[rng.choice([*keys, "x", "", "a.b", "__class__", "0"])] = strange_value(rng, largest)
    else:
        holder.insert(rng.randint(0, len(holder)), strange_value(rng, largest))


def _swap(rng: random.Random, holder: Any, key: Any, places: Any, keys: Any, largest: float) -> None:
    other, other_key = rng.choice(places)
    holder[key] = copy.deepcopy(other[other_key])


def _deepen(rng: random.Random, holder: Any, key: Any, places: Any, keys: Any, largest: float) -> None:
    depth = rng.choice((1, 1, 2, 50))
    for _ in range(depth):
        holder[key] = [holder[key]] if rng.random() < 0.5 else {rng.choice(("a", "path", "0")): holder[key]}


_TREE_FAULTS: tuple[Callable[..., None], ...] = (_replace, _replace, _replace, _remove, _rename, _add, _swap, _deepen)


def _change_character(rng: random.Random, text: str) -> str:
    place = rng.randint(0, len(text))
    new = rng.choice(
        ("", "x", '"', "'", "{", "}", "[", ":", ",", "\\", "\n", "\t", "\x00", "\ud800", "é", "#", "&", "*")
    )
    return text[:place] + new + text[place + rng.randint(0, 2) :]


def _cut(rng: random.Random, text: str) -> str:
    return text[: rng.randint(0, len(text))]


def _drop_line(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    del lines[rng.randrange(len(lines))]
    return "\n".join(lines)


def _double_line(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    place = rng.randrange(len(lines))
    return "\n".join([*lines[: place + 1], *lines[place:]])


def _indent(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    place = rng.randrange(len(lines))
    lines[place] = rng.choice((" ", "  ", "\t", "- ")) + lines[place]
    return "\n".join(lines)


_TEXT_FAULTS = (_change_character, _change_character, _change_character, _cut, _drop_line, _double_line, _indent)


def _flip(rng: random.Random, content: bytearray, place: int) -> None:
    content[place] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, content: bytearray, place: int) -> None:
    content[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _truncate(rng: random.Random, content: bytearray, place: int) -> None:
    del content[place:]


def _remove_bytes(rng: random.Random, content: bytearray, place: int) -> None:
    del content[place : place + rng.choice((1, 4, 100))]


def _insert(rng: random.Random, content: bytearray, place: int) -> None:
    content[place:place] = rng.choice((b"\0", b"\xff" * 4, rng.randbytes(rng.choice((1, 8, 500)))))


def _blank(rng: random.Random, content: bytearray, place: int) -> None:
    length = min(rng.choice((4, 16, 256, 4096)), len(content) - place)
    content[place : place + length] = bytes(length) if rng.random() < 0.5 else b"\xff" * length


def _number(rng: random.Random, content: bytearray, place: int) -> None:
    width = rng.choice((2, 4, 8))
    value = rng.choice((0, 1, 2**15, 2 ** (8 * width - 1) - 1, 2 ** (8 * width) - 1, 65535)) % 2 ** (8 * width)
    found = value.to_bytes(width, rng.choice(("little", "big")))
    content[place : place + width] = found[: max(0, len(content) - place)]


_BYTE_FAULTS = (_flip, _flip, _flip, _set, _truncate, _remove_bytes, _insert, _blank, _number)
