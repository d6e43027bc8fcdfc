"""Explanations of objectives for `mmrl explain` and the table of the catalogue: parts, their sources, and rooms."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from mmrl.core.block import Block, unknown_name
from mmrl.core.blocks.preference import DecisionScore
from mmrl.core.catalogue import CATALOGUE, PREFERENCES
from mmrl.core.objectives.objective import Objective
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.entries import load_target
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.training.objectives import SCORES

if TYPE_CHECKING:
    from mmrl.compare.experiment import ExperimentConfig

Row = Objective | PreferenceObjective


class Room(NamedTuple):
    """One kind of policy and data, with the recipes that take any objective."""

    name: str
    recipes: dict[str, str]
    """Recipe to the `module:name` of what its policies score, the simplest first."""


ROOMS = (
    Room("language", {"vlm": "mmrl.vlm.config:SCORES", "masked": "mmrl.masked.config:SCORES"}),
    Room("agents", {"agent": "mmrl.agents.recipe:SCORES"}),
    Room("images", {"flow_grpo": "diffusion.config:SCORES"}),
    Room(
        "robots",
        {
            "robot_grpo": "robotics.methods.recipe:SCORES",
            "robot_ppo": "robotics.methods.ppo:RobotPpoConfig.scored_outputs",
        },
    ),
)
"""Text with or without images, agents and screens, images and videos, robots."""


class Place(NamedTuple):
    """Whether an objective can be used in a room."""

    room: str
    recipe: str
    """The recipe that takes it; empty where none does."""
    lacks: str
    """Reason why the room cannot use the objective."""


def find_row(name: str) -> Row:
    """Look an objective up by its name, or by the beginning of one.

    Raises:
        UserError: No objective, or several, begin like this.
    """
    rows: dict[str, Row] = {**CATALOGUE, **PREFERENCES}
    if name in rows:
        return rows[name]
    found = [known for known in rows if known.startswith(name)]
    if len(found) == 1:
        return rows[found[0]]
    raise UserError(
        f"'{name}' may be {', '.join(found)}" if found else unknown_name(name, rows, "objective").removesuffix(".")
    )


def places(row: Row) -> list[Place]:
    """Say for each room which recipe takes an objective, or what is missing."""
    if isinstance(row, PreferenceObjective):
        apart = isinstance(row.score, DecisionScore)
        lacks = "it compares noisy versions of images one by one; set score: {kind: sum}" if apart else ""
        no_pairs = "no recipe of the room learns from pairs"
        more = sorted(row.needs & SCORES.keys() - {"logp_ref"})
        online = row.needs & {"logp_previous", "own_answers"}
        return [
            Place("language", "" if apart else "online_preference" if online else "preference", lacks),
            Place("agents", "", no_pairs),
            Place("images", "", f"it needs {SCORES[more[0]]}") if more else Place("images", "diffusion_dpo", ""),
            Place("robots", "", no_pairs),
        ]
    return [_place(row, room) for room in ROOMS]


def _place(row: Objective, room: Room) -> Place:
    lacking: list[str] = []
    for recipe, target in room.recipes.items():
        module, _, path = target.partition(":")
        name, _, attribute = path.partition(".")
        scores = load_target(f"{module}:{name}")
        scores = getattr(scores, attribute) if attribute else scores
        missing = sorted((row.needs & SCORES.keys()) - set(scores))
        if not missing:
            return Place(room.name, recipe, "")
        lacking = lacking or missing
    fits = row.kl is not None and bool(_place(row.replace(kl=None), room).recipe)
    return Place(room.name, "", f"it needs {SCORES[lacking[0]]}{'; without it: kl: {kind: none}' if fits else ''}")


def explained(name: str) -> str:
    """Write the formula of an objective, the source of each part, its rooms, its proof and how to use it."""
    row = find_row(name)
    lines = [row.describe(), "", "parts"]
    lines += [f"  {key:<12}{block.kind:<22}{_source(block)}" for key, block in row.blocks.items() if block.formula()]
    lines += ["", f"promise       {row.claim}", f"verified      {row.verified or 'not yet'}"]
    lines += [f"differs       {row.differs}"] if row.differs else []
    lines += ["", "rooms"]
    for place in places(row):
        lines += [f"  {place.room:<12}{f'recipe: {place.recipe}' if place.recipe else f'no: {place.lacks}'}"]
    lines += ["", "results", *(list(results_of(row.name)) or ["  not measured"])]
    return "\n".join([*lines, "", "use it", *(f"  {line}" for line in usage(row))])


def usage(row: Row) -> list[str]:
    """Write the lines of a configuration that name the objective."""
    recipe = row.name if row.name in RECIPES else next((place.recipe for place in places(row) if place.recipe), "vlm")
    lines = [f"recipe: {recipe}", f"objective: {{preset: {row.name}}}"]
    if "values" in row.needs:
        return [*lines, "model: {value_head: true}"] if recipe in ("vlm", "agent") else lines
    return [*lines, "trainer: {samples_per_task: 8}"] if "samples" in row.needs else lines


def results_of(name: str) -> Iterator[str]:
    """Write each measured difference about an objective, with its verdict and page."""
    from mmrl.compare.reproduce import evidence_of, findings_by_subject

    known = _measured()
    for stem, findings in findings_by_subject(known).get(name, {}).items():
        page = f"docs/results/{evidence_of(known[stem]).page}.md"
        yield from (f"  {found.shown}: {found.verdict}, {page}" for found in findings)


@cache
def _measured() -> dict[str, ExperimentConfig]:
    """Experiments with evidence; none in an installed wheel."""
    from mmrl.compare.reproduce import EXPERIMENTS, measured

    return measured() if EXPERIMENTS.is_dir() else {}


def rooms_of(row: Row) -> str:
    """Write the rooms that an objective can be used in."""
    return ", ".join(place.room for place in places(row) if place.recipe)


def _source(block: Block) -> str:
    """Source in a block's docstring, or in that of the function it refers to; without one, its first sentence."""
    first, sources = _documented(block)
    reference = re.search(r"; see `([\w.]+)`", first)
    if not sources and reference is not None:
        module, _, name = reference[1].rpartition(".")
        sources = _documented(getattr(sys.modules[module or type(block).__module__], name))[1]
    return sources or re.sub(r"; see `.*", "", first)


def _documented(thing: object) -> tuple[str, str]:
    """First paragraph and source of a docstring, without their full stops."""
    text = inspect.cleandoc(thing.__doc__ or "")
    source = re.search(r"^Source: (.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    parts = (text.partition("\n\n")[0], source[1] if source else "")
    first, found = (" ".join(part.split()).removesuffix(".") for part in parts)
    return first, found
