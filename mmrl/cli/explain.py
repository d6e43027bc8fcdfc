"""Explanations of objectives and recipes for `mmrl explain` and the tables of the documents."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmrl.cli.listings import configurations
from mmrl.core.block import Block, unknown_name
from mmrl.core.blocks.preference import DecisionScore
from mmrl.core.catalogue import all_objectives, all_preferences, contrib_objectives, contrib_preferences
from mmrl.core.objectives.objective import Objective
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.entries import RecipeEntry, load_target
from mmrl.errors import UserError
from mmrl.recipes import all_recipes, contrib_recipes
from mmrl.training.objectives import SCORES

if TYPE_CHECKING:
    from mmrl.compare.evidence import FindingConfig
    from mmrl.compare.experiment import ExperimentConfig

Row = Objective | PreferenceObjective
ROWS: dict[str, Row] = {**all_objectives(), **all_preferences()}


GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
"""Golden numbers; a checkout has them, an installed wheel has not."""
GOLDEN_OF = {
    "distil": ("gkd",),
    "segment": ("segment_chain", "segment_tree"),
    "truncated": ("tppo",),
    "contrastive": ("grace",),
    "masked": ("bgpo", "inpainting_guided", "masked_filling"),
    "preference": ("dpo",),
    "online_preference": ("xpo", "nash_md"),
    "agentic_branching": ("agentic_branching", "agentic_entropy_balanced"),
    "diffusion_nft": ("nft",),
    "orw_cfm_w2": ("orw_cfm",),
    "robot_clone": ("act",),
    "robot_ppo": ("ppo",),
    "robot_grpo": ("grpo",),
    "flow_grpo_fast": ("flow_grpo",),
    "vl_dac_repo": ("vl_dac",),
    "flow3d_awm": ("awm",),
}
"""Golden files of recipes that are not called like theirs."""


class Domain(NamedTuple):
    """One kind of policy and data, with the recipes that take any objective."""

    name: str
    recipes: dict[str, str]
    """Recipe to the `module:name` of what its policies score, the simplest first."""


DOMAINS = (
    Domain("language", {"vlm": "mmrl.vlm.vlm_config:SCORES", "masked": "mmrl.masked.masked_config:SCORES"}),
    Domain("agents", {"agent": "mmrl.agents.agent_recipe:SCORES"}),
    Domain("images", {"flow_grpo": "diffusion.diffusion_config:SCORES"}),
    Domain(
        "robots",
        {
            "robot_grpo": "robotics.methods.robot_recipe:SCORES",
            "robot_ppo": "robotics.methods.ppo:RobotPpoConfig.scored_outputs",
        },
    ),
)
"""Text with or without images, agents and screens, images and videos, robots."""


class Place(NamedTuple):
    """Whether an objective can be used in a domain."""

    domain: str
    recipe: str
    """The recipe that accepts it; empty if none does."""
    lacks: str
    """Reason why the domain cannot use the objective."""


def find_name(name: str) -> str:
    """Look an objective or a recipe up by its name, or by the beginning of one.

    Raises:
        UserError: No objective or recipe, or several, begin like this.
    """
    known = [*ROWS, *(recipe for recipe in all_recipes() if recipe not in ROWS)]
    if name in known:
        return name
    found = [other for other in known if other.startswith(name)]
    if len(found) == 1:
        return found[0]
    unknown = re.sub(r"[;?]? available: .*", "", unknown_name(name, known, "objective or recipe"))
    raise UserError(f"'{name}' may be {', '.join(found)}" if found else f"{unknown}; `mmrl list` has all")


def places(row: Row) -> list[Place]:
    """Say for each domain which recipe takes an objective, or what is missing."""
    if isinstance(row, PreferenceObjective):
        apart = isinstance(row.score, DecisionScore)
        lacks = "it compares noisy versions of images one by one; set score: {kind: sum}" if apart else ""
        no_pairs = "no recipe of the domain learns from pairs"
        more = sorted(row.needs & SCORES.keys() - {"logp_ref"})
        online = row.needs & {"logp_previous", "own_answers"}
        return [
            Place("language", "" if apart else "online_preference" if online else "preference", lacks),
            Place("agents", "", no_pairs),
            Place("images", "", f"it needs {SCORES[more[0]]}") if more else Place("images", "diffusion_dpo", ""),
            Place("robots", "", no_pairs),
        ]
    return [_place(row, domain) for domain in DOMAINS]


def _place(row: Objective, domain: Domain) -> Place:
    lacking: list[str] = []
    for recipe, target in domain.recipes.items():
        module, _, path = target.partition(":")
        name, _, attribute = path.partition(".")
        scores = load_target(f"{module}:{name}")
        scores = getattr(scores, attribute) if attribute else scores
        missing = sorted((row.needs & SCORES.keys()) - set(scores))
        if not missing:
            return Place(domain.name, recipe, "")
        lacking = lacking or missing
    fits = row.kl is not None and bool(_place(row.replace(kl=None), domain).recipe)
    return Place(domain.name, "", f"it needs {SCORES[lacking[0]]}{'; without it: kl: {kind: none}' if fits else ''}")


def explained(name: str) -> str:
    """Explain an objective, a recipe, or both if they share a name."""
    name, recipes = find_name(name), all_recipes()
    parts = [_row_explained(ROWS[name])] if name in ROWS else []
    parts += [_recipe_explained(recipes[name])] if name in recipes else []
    if name in {**contrib_objectives(), **contrib_preferences(), **contrib_recipes()}:
        parts[0] = f"contrib: {'; '.join(verdicts_of(name)) or 'not measured'}\n{parts[0]}"
    return "\n\n".join(parts)


def _recipe_explained(entry: RecipeEntry) -> str:
    """Write what a recipe does, its source, code, configurations and results."""
    recipe, config = entry.load_recipe_class(), entry.load_config_class()
    first = _documented(recipe)[0].partition("; see ")[0]
    lines = [
        f"recipe {entry.name}: {entry.citation}",
        f"  {entry.summary}",
        f"  {first}",
        "",
        f"code          {recipe.__module__}:{recipe.__name__}",
        f"options       {config.__module__}:{config.__name__}; `mmrl options {entry.name}`",
        f"learns from   {'given data' if entry.supervised else 'rewards'}",
    ]
    objective = getattr(getattr(entry.default_config(), "objective", None), "preset", "")
    lines += [f"objective     {objective}; `objective.preset` takes another"] if objective else []
    lines += [f"verified      {'; '.join(golden_sources(entry.name))}"] if golden_sources(entry.name) else []
    if entry.name not in ROWS:
        lines += ["", "results", *(list(results_of(entry.name)) or ["  not measured"])]
    files = configurations()[entry.name]
    return "\n".join([*lines, "", "use it", *(f"  mmrl train {file}" for file in files[:6])])


def golden_sources(name: str) -> list[str]:
    """Programs that made the golden numbers of a recipe; none in an installed wheel."""
    files = [GOLDEN / f"{stem}.json" for stem in GOLDEN_OF.get(name, (name,))]
    read = [json.loads(path.read_text(encoding="utf-8")) for path in files if path.is_file()]
    programs = (peer["program"].removeprefix("github.com/") for golden in read for peer in golden["peers"])
    return list(dict.fromkeys(programs))


def _row_explained(row: Row) -> str:
    """Write the formula of an objective, the source of each part, its domains, its proof and how to use it."""
    lines = [row.describe(), "", "parts"]
    lines += [f"  {key:<12}{block.kind:<22}{_source(block)}" for key, block in row.blocks.items() if block.formula()]
    lines += ["", f"promise       {row.claim}", f"verified      {row.verified or 'not yet'}"]
    lines += [f"differs       {row.differs}"] if row.differs else []
    lines += ["", "domains"]
    for place in places(row):
        lines += [f"  {place.domain:<12}{f'recipe: {place.recipe}' if place.recipe else f'no: {place.lacks}'}"]
    lines += ["", "results", *(list(results_of(row.name)) or ["  not measured"])]
    return "\n".join([*lines, "", "use it", *(f"  {line}" for line in usage(row))])


def usage(row: Row) -> list[str]:
    """Write the lines of a configuration that name the objective."""
    recipe = (
        row.name if row.name in all_recipes() else next((place.recipe for place in places(row) if place.recipe), "vlm")
    )
    lines = [f"recipe: {recipe}", f"objective: {{preset: {row.name}}}"]
    if "values" in row.needs:
        return [*lines, "model: {value_head: true}"] if recipe in ("vlm", "agent") else lines
    return [*lines, "trainer: {samples_per_task: 8}"] if "samples" in row.needs else lines


def results_of(name: str) -> Iterator[str]:
    """Write each measured difference about an objective, with its verdict and page."""
    yield from (f"  {found.shown}: {found.verdict}, docs/results/{page}.md" for found, page in _findings(name))


def verdicts_of(name: str) -> list[str]:
    """The different verdicts on an objective or a recipe."""
    return list(dict.fromkeys(found.verdict for found, _ in _findings(name)))


def _findings(name: str) -> Iterator[tuple[FindingConfig, str]]:
    """Each measured difference about a name, with its page."""
    from mmrl.compare.reproduce import evidence_of, findings_by_subject

    known = _measured()
    for stem, findings in findings_by_subject(known).get(name, {}).items():
        yield from ((found, evidence_of(known[stem]).page) for found in findings)


@cache
def _measured() -> dict[str, ExperimentConfig]:
    """Experiments with evidence; none in an installed wheel."""
    from mmrl.compare.reproduce import EXPERIMENTS, measured

    return measured() if EXPERIMENTS.is_dir() else {}


def domains_of(row: Row) -> str:
    """Write the domains that an objective can be used in."""
    return ", ".join(place.domain for place in places(row) if place.recipe)


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
