"""A dialogue about a price, in which each turn needs a strategy that suits the seller. Text only.

A proud seller leaves after a second firm word and gives way to warm ones; a tired one gives way to firm words alone.
The first line shows which seller it is. The agent writes the strategy, `reply` turns it into a line, and `is_critical`
rewards the turn in which the price falls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.agents.environments.environment import Action
from mmrl.agents.environments.strategy import StrategyEnvironment

LINES = {"firm": "That is too much. Lower it.", "warm": "I like it. Can you help me?", "quick": "Fine, I take it."}
"""Strategies and what the actor says."""
MOODS = {"proud": "My work is the best.", "tired": "It was a long day."}
PRICE, STEP, ROUNDS = 80, 20, 4


class Seller:
    """The partner of the dialogue; the reward at the end is the fraction of the price that was saved."""

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Ask for the price."""
        self.mood = sorted(MOODS)[seed % 2]
        self.price, self.firm, self.rounds = PRICE, 0, 0
        return f"{MOODS[self.mood]} {self.price}?"

    def step(self, action: Action) -> tuple[str, float, bool]:
        """Answer a line."""
        said = next((name for name, line in LINES.items() if line == action.arguments["text"]), "")
        self.rounds += 1
        self.firm += said == "firm"
        if said == "quick":
            return "Sold.", (PRICE - self.price) / PRICE, True
        if self.mood == "proud" and self.firm == 2:
            return "Then go.", 0.0, True
        if said == {"proud": "warm", "tired": "firm"}[self.mood]:
            self.price = max(self.price - STEP, STEP)
        return f"{MOODS[self.mood]} {self.price}?", 0.0, self.rounds == ROUNDS

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def reply(seen: str, strategy: str) -> str:
    """The actor: a line that follows the strategy, or a meaningless word."""
    return LINES.get(strategy.strip(), "Well.")


def is_critical(before: str, strategy: str, after: str) -> float:
    """The judge: 1 for a turn in which the price falls."""
    prices = [re.findall(r"\d+", text) for text in (before, after)]
    return float(all(prices) and int(prices[1][-1]) < int(prices[0][-1]))


def _sell(messages: Sequence[Mapping[str, str]], seed: int) -> tuple[str, float, bool]:
    """The seller's last line, the fraction of the price that was saved, and whether the dialogue is over."""
    seller = Seller()
    found: tuple[str, float, bool] = (seller.reset({}, seed), 0.0, False)
    for message in messages:
        if message["role"] == "assistant" and not found[2]:
            name = next((name for name in LINES if name in message["content"]), "")
            found = seller.step(Action("say", {"text": reply("", name)}))
    return found


def seller_turn(*, messages: Sequence[Mapping[str, str]], seed: int, **about: Any) -> str | None:
    """The seller as a simulated user: the next line, None after the end."""
    line, _, over = _sell(messages, seed)
    return None if over else line


def saved_share(*, messages: Sequence[Mapping[str, str]], seed: int, **about: Any) -> float:
    """Score of a dialogue with the seller: the fraction of the price that was saved, 0 before the sale."""
    return _sell(messages, seed)[1]


BEATS = {("firm", "warm"), ("warm", "quick"), ("quick", "firm")}


def stance_payoff(first: str, second: str) -> float:
    """Payoff of a game of stances, firm before warm before quick before firm; any other word loses to all."""
    pair = tuple(next((name for name in LINES if name in text), "") for text in (first, second))
    if not all(pair):
        return float(bool(pair[0])) - float(bool(pair[1]))
    return float(pair in BEATS) - float(pair[::-1] in BEATS)


class Haggle(StrategyEnvironment):
    """The dialogue, with an expert for a warm start by cloning."""

    actions = tuple(LINES)

    def __init__(self) -> None:
        super().__init__(f"{__name__}:Seller", f"{__name__}:reply", f"{__name__}:is_critical")

    def expert(self) -> Action:
        """An offer that suits the seller, until nothing more can be gained or one round is left."""
        seller: Seller = self._env
        good = {"proud": "warm", "tired": "firm"}[seller.mood]
        strategy = "quick" if seller.price == STEP or seller.rounds == ROUNDS - 1 else good
        return Action(strategy)


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random Qwen3 that writes a strategy in three tokens; options of `build_tiny_generic`."""
    from mmrl.vlm.toy.tiny_generic import build_tiny_generic

    corpus = [f"{mood} 80?" for mood in MOODS.values()] + ["Then go. Sold. Choose: firm, warm or quick."]
    return build_tiny_generic(path, corpus=corpus * 20, tokens=("<action>", "</action>", *LINES), **options)
