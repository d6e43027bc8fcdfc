"""Prices that only a search reveals, for TAPO with a tiny language model: "plum?" and then a tag in three tokens."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mmrl.agents.environments.environment import Action
from mmrl.contrib.agents.tapo import ENDS, TaggedTools

FRUIT = ("plum", "pear", "fig", "lime", "kiwi", "date", "apple", "grape", "melon", "peach", "mango", "lemon")
DIGITS = "0123456789"


def search(query: str) -> str:
    """Price of a fruit, a digit; nothing for another query."""
    return DIGITS[blake2b(query.encode()).digest()[0] % 10] if query in FRUIT else ""


class Lookup(TaggedTools):
    """The price of a fruit, with an expert that guesses half the time instead of searching."""

    def __init__(self, calls: int = 2) -> None:
        super().__init__(f"{__name__}:search", code=False, calls=calls)

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Ask for a price."""
        self.fruit, self.seed = FRUIT[seed % len(FRUIT)], seed
        return super().reset({"question": f"{self.fruit}?", "answer": search(self.fruit)}, seed)

    def expert(self) -> Action:
        """Search, then answer; or guess, by the seed."""
        guesses = (self.seed // len(FRUIT)) % 2
        if self._turns or guesses:
            price = DIGITS[self.seed % 10] if guesses else search(self.fruit)
            return Action("say", {"text": f"<answer>{price}</answer>"})
        return Action("say", {"text": f"<search>{self.fruit}</search>"})


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random Qwen3 that writes a tag in three tokens; options of `build_tiny_generic`."""
    from mmrl.vlm.toy.tiny_generic import build_tiny_generic

    tags = [tag for end in ("</response>", *ENDS) for tag in (end.replace("/", ""), end)]
    corpus = [f"{fruit}? Nothing was found." for fruit in FRUIT]
    return build_tiny_generic(path, corpus=corpus * 20, tokens=(*tags, *FRUIT, *DIGITS), **options)
