"""Search and choose: find entries by name across pages of results, and choose each requested one."""

from __future__ import annotations

from random import Random

from mmrl.gui.toy.tasks.case import Case, Move, View, click, fill

NAMES = ("Lamp", "Chair", "Kettle", "Blanket", "Mirror", "Basket", "Clock", "Carpet")
DETAILS = ("red", "blue", "green", "black", "white", "yellow", "grey", "brown")
PER_PAGE = 4


def make(draw: Random, sub_goals: int, distractors: int) -> Case:
    """A case; distractors are entries of the same name in other colours."""
    names = draw.sample(NAMES, len(NAMES))
    entries = []
    for index, name in enumerate(names):
        colours = 1 + distractors if index < sub_goals else 1
        entries += [(name, colour) for colour in draw.sample(DETAILS, min(colours, len(DETAILS)))]
    wanted = [next(entry for entry in entries if entry[0] == name) for name in names[:sub_goals]]
    draw.shuffle(entries)
    items = [{"id": f"i{index}", "name": name, "detail": detail} for index, (name, detail) in enumerate(entries)]
    ids = [item["id"] for want in wanted for item in items if (item["name"], item["detail"]) == want]
    asked = " and ".join(f"the {detail} {name.lower()}" for name, detail in wanted)
    return Case(f"Find and choose {asked}.", {"title": "Shop", "items": items, "wanted": ids})


def expert(case: Case, view: View) -> Move:
    """The next move."""
    state, items = view.state, {item["id"]: item for item in case.config["items"]}
    wrong = [item for item in state["chosen"] if item not in case.config["wanted"]]
    missing = [item for item in case.config["wanted"] if item not in state["chosen"]]
    if not wrong and not missing:
        return "finish", {}
    target = (wrong or missing)[0]
    if f"choose-{target}" in view.elements:
        return click(view, f"choose-{target}")
    found = [item["id"] for item in state["found"] or []]
    if target not in found:
        return fill(view, "query", items[target]["name"].lower()) or click(view, "find")
    return click(view, "next" if found.index(target) // PER_PAGE > state["page"] else "previous")
