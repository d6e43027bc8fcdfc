"""Settings in tabs: change some, leave the others, and save."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from mmrl.gui.toy.tasks.case import Case, Move, View, click, pick

TABS: dict[str, dict[str, tuple[str, ...]]] = {
    "Display": {"Night mode": (), "Large print": (), "Theme": ("Light", "Dark", "System")},
    "Sound": {"Key sounds": (), "Volume": ("Low", "Medium", "High"), "Alarm": ()},
    "Privacy": {"Location": (), "History": ("Keep", "Clear", "Never"), "Crash reports": ()},
    "Network": {"Proxy": (), "Speed": ("Slow", "Fast", "Unlimited"), "Metered": ()},
}


def make(draw: Random, sub_goals: int, distractors: int) -> Case:
    """A case; distractors are further tabs."""
    return _make(draw, sub_goals, distractors, TABS)


def make_switches(draw: Random, sub_goals: int, distractors: int) -> Case:
    """A case whose options are all switches, two in each tab."""
    switches = {tab: {name: () for name, values in options.items() if not values} for tab, options in TABS.items()}
    return _make(draw, sub_goals, distractors, switches)


def _make(
    draw: Random, sub_goals: int, distractors: int, all_tabs: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> Case:
    names = draw.sample(sorted(all_tabs), min(len(all_tabs), 1 + distractors))
    tabs: list[dict[str, Any]] = [
        {"name": name, "options": [_option(draw, *entry) for entry in all_tabs[name].items()]} for name in names
    ]
    options = [(tab["name"], option) for tab in tabs for option in tab["options"]]
    chosen = draw.sample(options, min(sub_goals, len(options)))
    wanted = [{"id": option["id"], "value": _other(draw, option)} for _, option in chosen]
    texts = [
        f"{'turn' if option['kind'] == 'switch' else 'set'} {option['name']} ({tab}) "
        f"{want['value'] if option['kind'] == 'switch' else 'to ' + want['value']}"
        for (tab, option), want in zip(chosen, wanted, strict=True)
    ]
    text = ", ".join(texts)
    return Case(f"{text[0].upper()}{text[1:]}, then save.", {"title": "Settings", "tabs": tabs, "wanted": wanted})


def _option(draw: Random, name: str, choices: tuple[str, ...]) -> dict[str, Any]:
    values = choices or ("on", "off")
    kind = "select" if choices else "switch"
    key = name.lower().replace(" ", "-")
    return {"id": key, "name": name, "kind": kind, "choices": list(choices), "value": draw.choice(values)}


def _other(draw: Random, option: dict[str, Any]) -> str:
    values = option["choices"] or ["on", "off"]
    return draw.choice([value for value in values if value != option["value"]])


def expert(case: Case, view: View) -> Move:
    """The next move."""
    wanted = {want["id"]: want["value"] for want in case.config["wanted"]}
    for index, tab in enumerate(case.config["tabs"]):
        for option in tab["options"]:
            value = wanted.get(option["id"], option["value"])
            if view.state["values"][option["id"]] == value:
                continue
            if view.state["tab"] != index:
                return click(view, f"tab{index}")
            if option["kind"] == "switch":
                return click(view, option["id"])
            return pick(view, option["id"], value) or ("wait", {})
    return click(view, "save")
