"""Checkout in three pages: cart, delivery, payment; then place the order."""

from __future__ import annotations

from random import Random
from typing import Any

from mmrl.gui.toy.tasks.case import Case, Move, View, click, fill, pick

ITEMS = ("Teapot", "Notebook", "Umbrella", "Candle", "Scarf", "Puzzle")
CITIES = ("Berlin", "Madrid", "Oslo", "Lyon", "Kyoto", "Boston")
SHIPPINGS = ("Standard", "Express", "Pickup")
MOST_ITEMS = 4


def make(draw: Random, sub_goals: int, distractors: int) -> Case:
    """A case; distractors are further things in the cart."""
    names = draw.sample(ITEMS, min(MOST_ITEMS, 1 + distractors))
    items = [{"id": f"p{index}", "name": name} for index, name in enumerate(names)]
    counted = draw.choice(items)
    possible: dict[str, tuple[Any, str]] = {
        "count": ({"id": counted["id"], "count": 2}, f"buy 2 of {counted['name']}"),
        "shipping": (shipping := draw.choice(SHIPPINGS[1:]), f"ship by {shipping}"),
        "code": (code := f"SAVE{draw.randint(10, 99)}", f"use the voucher {code}"),
        "gift": (True, "have it gift wrapped"),
    }
    city = draw.choice(CITIES)
    chosen = draw.sample(sorted(possible), min(sub_goals - 1, len(possible)))
    wanted = [["city", city], *([kind, possible[kind][0]] for kind in chosen)]
    text = ", ".join([f"Order to {city}", *(possible[kind][1] for kind in chosen)])
    config = {"title": "Checkout", "items": items, "shippings": list(SHIPPINGS), "wanted": wanted}
    return Case(f"{text}.", config)


def expert(case: Case, view: View) -> Move:
    """The next move."""
    asked, state = dict(case.config["wanted"]), view.state
    counts = {item["id"]: 1 for item in case.config["items"]}
    if "count" in asked:
        counts[asked["count"]["id"]] = asked["count"]["count"]
    wrong = [item for item, count in counts.items() if state["counts"][item] != count]
    stage = state["stage"]
    if wrong and stage == 0:
        return click(view, f"{'more' if state['counts'][wrong[0]] < counts[wrong[0]] else 'less'}-{wrong[0]}")
    if wrong:
        return click(view, "back")
    if stage == 1:
        move = fill(view, "city", asked["city"])
        return move or pick(view, "shipping", asked.get("shipping", SHIPPINGS[0])) or click(view, "continue")
    if stage == 2:
        return _pay(asked, view)
    return click(view, "continue")


def _pay(asked: dict[str, Any], view: View) -> Move:
    if str(view.state["city"]).strip() != asked["city"] or view.state["shipping"] != asked.get(
        "shipping", SHIPPINGS[0]
    ):
        return click(view, "back")
    move = fill(view, "code", asked["code"]) if "code" in asked else None
    if move:
        return move
    return click(view, "gift" if view.state["gift"] != asked.get("gift", False) else "order")
