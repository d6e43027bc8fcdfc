"""A shop whose prices a language model can only learn from a tool: a task for tool calls in any format.

environment: {factory: "mmrl.agents.toy.shop:Shop"}
conversation: {tools: true}
eval_data: {heldout: {options: {split: test}}}
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.environment import Action
from mmrl.agents.environments.tools import tool_error, unknown_tool
from mmrl.errors import UserError

ITEMS = {
    "train": (
        "apple", "ball", "book", "bottle", "bowl", "brush", "candle", "chair", "clock", "comb", "cup", "drum", "fork",
        "glove", "hammer", "jacket", "kite", "ladder", "map", "mirror", "needle", "pencil", "plate", "ring",
    ),
    "test": (
        "basket", "blanket", "button", "carpet", "kettle", "lamp", "pillow", "spoon", "table", "ticket", "vase",
        "wheel",
    ),
}  # fmt: skip
FORMS = {
    "train": ("How much do {n} {item}s cost?", "I want to buy {n} {item}s. What do I pay?", "Price of {n} {item}s?"),
    "test": ("What is the total for {n} {item}s?", "Tell me what {n} {item}s cost together."),
}


class Shop:
    """One question an episode: the price of several equal things, which changes from episode to episode.

    The agent has to look the price up and to multiply. Only the last number of its answer counts. A task is {"split":
    "train"} or {"split": "test"}, which have no item and no form of the question in common.
    """

    def __init__(self) -> None:
        self.tools = [
            _tool("price", "Look up the price of one item.", {"item": ("string", "the item, in the singular")}),
            _tool("multiply", "Multiply two numbers.", {"a": ("integer", "a number"), "b": ("integer", "a number")}),
        ]
        """JSON schemas, as chat templates take them."""
        self.actions = {tool["function"]["name"]: tool["function"]["description"] for tool in self.tools}
        self._item, self._count, self._price, self._known = "", 0, 0, 0

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Ask the question; raises UserError for another split."""
        split = task.get("split", "train")
        if split not in ITEMS:
            raise UserError(f"split is {split!r}; it must be {' or '.join(ITEMS)}")
        generator = random.Random(seed)
        self._item, self._count = generator.choice(ITEMS[split]), generator.randint(2, 9)
        self._price, self._known = generator.randint(11, 99), 0
        return generator.choice(FORMS[split]).format(n=self._count, item=self._item)

    def step(self, action: Action) -> tuple[Any, float, bool, dict[str, Any]]:
        """Call a tool, or judge the answer, which ends the episode."""
        if action.name == SAY:
            numbers = re.findall(r"\d+", str(action.arguments["text"]))
            right = numbers[-1:] == [str(self._count * self._price)]
            return "", float(right), True, {"success": right}
        if action.name == "price" and set(action.arguments) == {"item"}:
            if str(action.arguments["item"]).strip().lower() not in (self._item, f"{self._item}s"):
                return tool_error("no_such_item", f"There is no {action.arguments['item']!s:.40} in the shop.")
            self._known = max(self._known, 1)
            return f"{self._price}", 0.0, False, {}
        if action.name == "multiply" and set(action.arguments) == {"a", "b"}:
            try:
                product = int(action.arguments["a"]) * int(action.arguments["b"])
            except (TypeError, ValueError):
                return tool_error("bad_arguments", "a and b must be integers.")
            self._known = 2
            return f"{product}", 0.0, False, {}
        if action.name in self.actions:
            return tool_error("bad_arguments", f"{action.name} was called with other arguments than it has.")
        return unknown_tool(action.name, self.actions)

    def expert(self) -> Action:
        """Look up, multiply, answer."""
        if self._known == 0:
            return Action("price", {"item": self._item})
        if self._known == 1:
            return Action("multiply", {"a": self._count, "b": self._price})
        return Action(SAY, {"text": str(self._count * self._price)})

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def _tool(name: str, about: str, arguments: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}
