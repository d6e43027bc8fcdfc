"""Explanations of objectives and recipes for `mmrl explain` and the tables of the documentation."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmrl.cli.listings import configurations
from mmrl.cli.papers import OMITTED, PAPERS, called, papers_of, spelled, status_of
from mmrl.core.block import Block
from mmrl.core.blocks.preference import DecisionScore
from mmrl.core.catalogue import all_objectives, all_preferences, contrib_objectives, contrib_preferences
from mmrl.core.objectives.objective import Objective
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.entries import Omitted, Paper, RecipeEntry, load_target
from mmrl.errors import UserError
from mmrl.files import CONFIGS
from mmrl.recipes import all_recipes, contrib_recipes
from mmrl.training.objectives import SCORES

if TYPE_CHECKING:
    from mmrl.comparison.evidence import FindingConfig

Row = Objective | PreferenceObjective
ROWS: dict[str, Row] = {**all_objectives(), **all_preferences()}


GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
"""Golden numbers; a checkout has them, an installed wheel does not."""
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
    "robot_hg_dagger": ("act",),
    "robot_sac": ("sac",),
    "robot_residual": ("sac",),
    "robot_dsrl": ("sac",),
    "robot_rlpd": ("sac",),
    "robot_rlif": ("sac",),
    "adaptive_temperature": ("hapo",),
    "flow_ppo": ("ppo",),
    "tgpo": ("stl",),
    "vl_dac_repo": ("vl_dac",),
    "flow3d_awm": ("awm",),
}
"""Golden files whose names differ from their rows and recipes."""
COVERED = ("advantage", "loss", "gradient")
"""Numbers that golden files of most rows have."""
NO_NUMBERS = {
    "program",
    "calls",
    "inputs",
    "relative",
    "because",
    "settings",
    "changes",
    "options",
    "case",
    "labels",
    "names",
    "file",
}
"""Keys of a peer in a golden file that describe how its numbers were made."""
ARXIV_IDS = re.compile(r"\d{4}\.\d{4,5}")
ARXIV = re.compile(
    r"(?:(?:https?://)?arxiv\.org/(?:abs|pdf)/|arxiv[: ]\s*)?(\d{4}\.\d{4,5})(?:v\d+)?(?:\.pdf)?", re.IGNORECASE
)
"""An arXiv id, or a link to it."""
NEWLINE = "\n" + 14 * " "
"""Separator between the lines of one entry."""


class Domain(NamedTuple):
    """One kind of policy and data, with the recipes that take any objective."""

    name: str
    trains: str
    """The kind of model that the recipes train, as shown in tables and messages."""
    recipes: dict[str, str]
    """Recipe to the `module:name` of the log-probabilities that its policies compute, the simplest first."""


DOMAINS = (
    Domain(
        "language", "vision-language, text", {"vlm": "mmrl.vlm.entries:SCORES", "masked": "mmrl.masked.entries:SCORES"}
    ),
    Domain("agents", "agents", {"agent": "mmrl.agents.entries:SCORES"}),
    Domain("images", "images, videos", {"flow_grpo": "diffusion.entries:SCORES"}),
    Domain("robots", "robots", {"robot_grpo": "robotics.methods:SCORES", "robot_ppo": "robotics.methods:PPO_SCORES"}),
)
"""Text with or without images, agents and screens, images and videos, robots."""


class Place(NamedTuple):
    """Whether an objective can be used in a domain."""

    domain: str
    recipe: str
    """The recipe that accepts it; empty if none does."""
    lacks: str
    """Reason why the domain cannot use the objective."""


def find_name(name: str) -> str | Paper | Omitted:
    """Look up an objective, a recipe or a paper by one of its names, the beginning of one, or its arXiv id.

    Raises:
        UserError: Nothing, or several things, are called like this.
    """
    known = list(dict.fromkeys((*ROWS, *all_recipes())))
    whole = [other for other in known if spelled(other) == spelled(name)]
    if name in known or whole:
        return name if name in known else whole[0]
    papers: list[Paper | Omitted] = [*PAPERS, *OMITTED]
    found: list[str | Paper | Omitted] = [paper for paper in papers if spelled(name) in called(paper)]
    # DR-PO and DRPO are compared alike
    found = [paper for paper in papers if paper.name.lower() == name.lower()] or found
    found = found or [other for other in known if other.startswith(name)]
    found = found or [paper for paper in papers if any(other.startswith(spelled(name)) for other in called(paper))]
    found = found or _cited(name)
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"'{name}' is ambiguous: {', '.join(map(_introduced, found))}")
    raise UserError(f"unknown objective, recipe or paper '{name}'; {_suggested(name)}`mmrl list` shows all")


def _cited(name: str) -> list[str | Paper | Omitted]:
    """Objectives that implement the paper with an arXiv id or link, else its recipes or the paper itself."""
    wanted = ARXIV.fullmatch(name)
    if wanted is None:
        return []
    entries = {**all_recipes(), **ROWS}
    # further ids of a citation are of papers that it builds on
    own = [other for other, entry in entries.items() if ARXIV_IDS.findall(entry.citation)[:1] == [wanted[1]]]
    found = [row for row in own if row in ROWS] or own
    # of flow_grpo and flow_grpo_fast, the first is the paper
    found = [row for row in found if all(other.startswith(row) for other in found)] or found
    return [*found] or [paper for paper in PAPERS if wanted[1] in paper.source]


def _introduced(found: str | Paper | Omitted) -> str:
    """A name that `find_name` takes, and the paper behind it."""
    if isinstance(found, str):
        return found
    return f"{found.found[0]} ({found.name})" if isinstance(found, Paper) and found.found else f"'{found.name}'"


def _suggested(name: str) -> str:
    """The closest name, or the rows whose citation has the word."""
    names = {spelled(other): other for other in (*ROWS, *all_recipes())}
    names = {other: paper.name for paper in (*PAPERS, *OMITTED) for other in called(paper)} | names
    # names of four letters that end alike are close at the usual 0.6
    close = difflib.get_close_matches(spelled(name), names, n=1, cutoff=0.75)
    if close:
        return f"did you mean '{names[close[0]]}'? "
    cited = [row for row, entry in ROWS.items() if len(name) > 3 and name.lower() in entry.citation.lower()]
    return f"cited by {', '.join(cited)}; " if cited else ""


def places(row: Row) -> list[Place]:
    """Tell for each domain which recipe accepts an objective, or what is missing."""
    if isinstance(row, PreferenceObjective):
        apart = isinstance(row.score, DecisionScore)
        lacks = "it compares noisy versions of images one by one; set score: {kind: sum}" if apart else ""
        no_pairs = "no recipe of this domain learns from pairs"
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
        missing = sorted((row.needs & SCORES.keys()) - set(load_target(target)))
        if not missing:
            return Place(domain.name, recipe, "")
        lacking = lacking or missing
    fits = row.kl is not None and bool(_place(row.replace(kl=None), domain).recipe)
    return Place(domain.name, "", f"it needs {SCORES[lacking[0]]}{'; without it: kl: {kind: none}' if fits else ''}")


def explained(name: str) -> str:
    """Explain an objective, a recipe, or both if they share a name; or what the suite implements of a paper."""
    found, recipes = find_name(name), all_recipes()
    if isinstance(found, Omitted):
        return f"{found.name}: {found.about}\n  left out: {found.reason}; docs/methods/papers.md lists the others"
    if isinstance(found, Paper):
        parts = [_paper_explained(found), *([explained(found.found[0])] if found.found else [])]
        return "\n\n".join(parts)
    parts = [_row_explained(ROWS[found])] if found in ROWS else []
    parts += [_recipe_explained(recipes[found])] if found in recipes else []
    if found in {**contrib_objectives(), **contrib_preferences(), **contrib_recipes()}:
        parts[0] = f"contrib: {'; '.join(verdicts_of(found)) or 'not measured'}\n{parts[0]}"
    return "\n\n".join(parts)


def _paper_explained(paper: Paper) -> str:
    """Write where the suite has a paper, and what is lacking."""
    lines = [f"paper {paper.name}{f': {paper.source}' if paper.source else ''}"]
    lines += [f"  {_documented(_docstring(paper.code))[0]}"] if paper.code else []
    shown = {
        "also known as": ", ".join(paper.names),
        "objectives": ", ".join(name for name in paper.found if name in ROWS),
        "recipes": ", ".join(name for name in paper.found if name in all_recipes()),
        "code": paper.code,
        "page": f"docs/{paper.page}" if paper.page else "",
        "status": f"partial: lacks {paper.lacking}" if paper.lacking else "",
    }
    return "\n".join([*lines, "", *(f"{key:<14}{text}" for key, text in shown.items() if text)])


def _papers_lines(name: str) -> list[str]:
    """Write by which papers' names a row or recipe is found, and what it lacks of them."""
    names = (name_ for paper in papers_of(name) for name_ in (paper.name, *paper.names))
    also = dict.fromkeys(other for other in names if spelled(other) != spelled(name))
    alike = [paper for paper in PAPERS if spelled(name) in called(paper) and name not in paper.found]
    lines = [f"also known as {', '.join(also)}"] if also else []
    lines += [f"same name     {', '.join(map(_introduced, alike))}"] if alike else []
    return lines + ([f"status        {status_of(name).replace('*', '')}"] if status_of(name) else [])


def _recipe_explained(entry: RecipeEntry) -> str:
    """Write what a recipe does, its source, code, configurations and results."""
    target, _, config = entry.target.rpartition(":")
    first = _documented(_docstring(target))[0].partition("; see ")[0]
    lines = [
        f"recipe {entry.name}: {entry.citation}",
        f"  {entry.summary}",
        f"  {first}",
        "",
        f"code          {target}",
        f"options       {target.partition(':')[0]}:{config}; `mmrl options {entry.name}`",
        f"learns from   {'reference answers' if entry.supervised else 'rewards'}",
    ]
    preset = _preset(entry)
    lines += [f"objective     {preset}; `objective.preset` takes another"] if preset else []
    if entry.name not in ROWS:
        lines += [f"verified      {NEWLINE.join(golden_sources(entry.name)) or 'no golden numbers'}"]
        lines += _papers_lines(entry.name)
        lines += ["", "results", *(list(results_of(entry.name)) or ["  not measured"])]
    files = configurations()[entry.name]
    return "\n".join([*lines, "", "use it", *(f"  mmrl train {file}" for file in files[:6])])


def _preset(entry: RecipeEntry) -> str:
    """The row that a recipe takes by default: that of its name, for which no room is imported; empty without one."""
    if entry.name in ROWS:
        return "" if entry.name == "sft" else entry.name
    return getattr(getattr(entry.default_config(), "objective", None), "preset", "")


def golden_sources(name: str) -> list[str]:
    """Programs that made golden numbers for a row or recipe, and what they computed; none in an installed wheel."""
    entries: dict[str, list[dict[str, Any]]] = {}
    for path in (GOLDEN / f"{stem}.json" for stem in GOLDEN_OF.get(name, (name,))):
        for peer in json.loads(path.read_text(encoding="utf-8"))["peers"] if path.is_file() else ():
            program = peer["program"].removeprefix("github.com/")
            by_hand = f" ({', '.join(peer['calls'])})" if program == "hand computation" else ""
            entries.setdefault(program + by_hand, []).append(peer | {"file": path.stem})
    return [f"{program}: {_covered(name, peers)}" for program, peers in entries.items()]


def _covered(name: str, peers: list[dict[str, Any]]) -> str:
    """Which numbers a program computed, and whether with the constants of the row."""
    keys = dict.fromkeys(key for peer in peers for key in sorted(peer.keys() - NO_NUMBERS))
    parts = [part for part in COVERED if any(part in key for key in keys)]
    parts += [key for key in keys if not any(part in key for part in COVERED)]
    if name not in ROWS:
        return ", ".join(parts)
    own = any(peer["file"] == name and _unchanged(ROWS[name], peer) for peer in peers)
    return f"{', '.join(parts)} ({'its own' if own else 'other'} constants)"


def _unchanged(row: Row, peer: dict[str, Any]) -> bool:
    """Whether a peer's numbers were computed with the constants of a row."""
    own = [vars(block) | {"kind": block.kind} for block in row.blocks.values()]
    given = peer.get("options", {}).items()
    return not peer.get("changes") and all(any(block.get(key) == value for block in own) for key, value in given)


def _row_explained(row: Row) -> str:
    """Write the formula of an objective, the source of each part, its domains, its proof and how to use it."""
    lines = [row.describe(), "", "parts"]
    lines += [f"  {key:<12}{kind:<22}{source}" for key, kind, source in part_sources(row)]
    # an installed wheel has no golden numbers, only the programs' names
    proof = golden_sources(row.name) or [row.verified]
    lines += ["", f"claim         {row.claim}", f"verified      {NEWLINE.join(proof)}"]
    lines += [f"differs       {row.differs}"] if row.differs else []
    lines += _papers_lines(row.name)
    lines += ["", "domains"]
    for place in places(row):
        lines += [f"  {place.domain:<12}{f'recipe: {place.recipe}' if place.recipe else f'no: {place.lacks}'}"]
    lines += ["", "results", *(list(results_of(row.name)) or ["  not measured"])]
    return "\n".join([*lines, "", "use it", *(f"  {line}" for line in usage(row))])


def part_sources(row: Row) -> list[tuple[str, str, str]]:
    """Each part of an objective that its formula shows, with the kind of its block and the block's source."""
    return [(key, block.kind, _source(block)) for key, block in row.blocks.items() if block.formula()]


def usage(row: Row) -> list[str]:
    """Write the lines of a configuration that select the objective."""
    recipe = (
        row.name if row.name in all_recipes() else next((place.recipe for place in places(row) if place.recipe), "vlm")
    )
    lines = [f"recipe: {recipe}", f"objective: {{preset: {row.name}}}"]
    if "values" in row.needs:
        return [*lines, "model: {value_head: true}"] if recipe in ("vlm", "agent") else lines
    return [*lines, "trainer: {samples_per_task: 8}"] if "samples" in row.needs else lines


def results_of(name: str) -> Iterator[str]:
    """Write each measured difference for an objective, with its verdict and page."""
    for found, page in _findings(name):
        pair = f"{found.arm} against {found.against}, {found.metric}"
        yield f"  {pair}: {found.shown}, {found.verdict}; docs/results/{page}.md"


def verdicts_of(name: str) -> list[str]:
    """The different verdicts on an objective or a recipe."""
    return list(dict.fromkeys(found.verdict for found, _ in _findings(name)))


def _findings(name: str) -> Iterator[tuple[FindingConfig, str]]:
    """Each measured difference about a name, with its page; none in an installed wheel."""
    from mmrl.comparison.evidence import findings_about

    return findings_about(name, CONFIGS / "experiments")


def _source(block: Block) -> str:
    """Source in a block's docstring, or in that of the function it refers to; without one, its first sentence."""
    first, sources = _documented(inspect.getdoc(block) or "")
    reference = re.search(r"; see `([\w.]+)`", first)
    if not sources and reference is not None:
        module, _, name = reference[1].rpartition(".")
        sources = _documented(inspect.getdoc(getattr(sys.modules[module or type(block).__module__], name)) or "")[1]
    return sources or re.sub(r"; see `.*", "", first)


def _docstring(target: str) -> str:
    """Docstring of a `module:name`, read from its file: importing a room takes seconds."""
    module, _, name = target.partition(":")
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    assert spec is not None
    path = Path(next(iter(spec.submodule_search_locations or ()))).joinpath(*rest).with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
    return ast.get_docstring(found[0]) or ""


def _documented(text: str) -> tuple[str, str]:
    """First paragraph and source of a docstring, without their full stops."""
    source = re.search(r"^Source: (.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    parts = (text.partition("\n\n")[0], source[1] if source else "")
    first, found = (" ".join(part.split()).removesuffix(".") for part in parts)
    return first, found
