"""A list of things to do: add an entry, tick one off, delete one."""

from __future__ import annotations

from random import Random

from mmrl.gui.toy.tasks.case import Case, Move, View, click, fill

ENTRIES = ("Buy bread", "Call Maria", "Water plants", "Pay rent", "Book train", "Clean desk", "Send form", "Fix bike")
NEW = ("Feed the cat", "Return books", "Wash car", "Order ink")
WISHES = {"add": 'add "{}"', "done": 'tick off "{}"', "delete": 'delete "{}"'}


def make(draw: Random, sub_goals: int, distractors: int) -> Case:
    """A case; distractors are entries that have to stay as they are."""
    kinds = [draw.choice(sorted(WISHES)) for _ in range(sub_goals)]
    old, new = draw.sample(ENTRIES, len(ENTRIES)), draw.sample(NEW, len(NEW))
    wanted = [{"kind": kind, "name": (new if kind == "add" else old).pop()} for kind in kinds]
    names = [want["name"] for want in wanted if want["kind"] != "add"] + old[:distractors]
    draw.shuffle(names)
    items = [{"id": f"e{index}", "name": name, "done": False} for index, name in enumerate(names)]
    text = ", ".join(WISHES[want["kind"]].format(want["name"]) for want in wanted)
    return Case(f"{text[0].upper()}{text[1:]}.", {"title": "To do", "items": items, "wanted": wanted})


def expert(case: Case, view: View) -> Move:
    """The next move."""
    now = {item["name"]: item for item in view.state["items"]}
    for want in case.config["wanted"]:
        item = now.get(want["name"])
        if want["kind"] == "add" and item is None:
            return fill(view, "draft", want["name"]) or click(view, "add")
        if want["kind"] == "delete" and item is not None:
            return click(view, f"delete-{item['id']}")
        if want["kind"] == "done" and item is not None and not item["done"]:
            return click(view, f"done-{item['id']}")
    return "finish", {}
