"""Tables of docs/evidence.md: where each objective and recipe stands in the code, what proves it, what was measured."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

from mmrl.cli.explain import ROWS, domains_of, golden_sources
from mmrl.cli.listings import markdown_table
from mmrl.compare.evidence import VERDICTS, FindingConfig
from mmrl.compare.experiment import ExperimentConfig
from mmrl.compare.reproduce import evidence_of, findings_by_subject, measured
from mmrl.core.catalogue import HEADINGS
from mmrl.entries import RecipeEntry
from mmrl.recipes import RECIPES, all_recipes

PROJECT = Path(__file__).resolve().parent.parent


def table(part: str) -> str:
    """Write a table of the page: counts, findings, objectives or recipes."""
    return {"counts": counts, "findings": findings, "objectives": objectives, "recipes": recipes}[part]()


def counts() -> str:
    """How many objectives and recipes have which verdict."""
    known = _verdicts()
    best = Counter(verdict for name in {**ROWS, **RECIPES} for verdict in known.get(name, ["not measured"]))
    said = ", ".join(f"{verdict} {best[verdict]}" for verdict in (*VERDICTS, "not measured"))
    return f"{len(ROWS)} objectives and {len(RECIPES)} recipes; one may have several verdicts: {said}.\n"


def findings() -> str:
    """Each difference that was measured, beside what the paper reports."""
    known = measured()
    subjects = findings_by_subject(known)
    rows = []
    for name in dict.fromkeys((*ROWS, *all_recipes())):
        for stem, found in subjects.get(name, {}).items():
            rows += [_finding(name, stem, known[stem], finding) for finding in found]
    columns = ("method", "setting", "result", "the paper reports", "verdict", "again")
    return markdown_table(columns, rows)


def _finding(name: str, stem: str, experiment: ExperimentConfig, found: FindingConfig) -> tuple[str, ...]:
    evidence = evidence_of(experiment)
    metric = found.metric or experiment.metric
    pair = f"`{found.arm}` against `{found.against or experiment.baseline}`, `{metric}`, {len(experiment.seeds)} seeds"
    result = f"[{found.shown}](results/{evidence.page}.md): {pair}{f'; {found.note}' if found.note else ''}"
    return f"`{name}`", evidence.setting, result, found.paper, found.verdict, f"`mmrl reproduce {stem}`"


def objectives() -> str:
    """Every row of the catalogue, by family: promise, code, source of the numbers, rooms and verdict."""
    columns = ("objective", "paper", "promise", "code", "numbers from", "trains in", "measured here")
    verdicts, sizes, own = _verdicts(links=True), _row_lines(), _own_lines()
    text = ""
    for heading in dict.fromkeys(HEADINGS.values()):
        rows = []
        for name, row in ROWS.items():
            if HEADINGS[name] == heading:
                file, lines = sizes[name]
                code = f"[{file.name}](../{file}) {lines}{f' + {own[name]}' if own[name] else ''}"
                here = "; ".join(verdicts.get(name, ["not measured"]))
                rows.append((f"`{name}`", _paper(row.citation), row.claim, code, row.verified, domains_of(row), here))
        text += f"### {heading}\n\n{markdown_table(columns, rows)}\n"
    return text


def recipes() -> str:
    """Every recipe: what it does, code, source of the numbers and verdict."""
    columns = ("recipe", "paper", "what it does", "code", "numbers from", "measured here")
    verdicts = _verdicts(links=True)
    rows = [
        (
            f"`{name}`",
            _paper(entry.citation),
            entry.summary,
            _recipe_code(entry),
            ", ".join(golden_sources(name)) or "none of its own",
            "; ".join(verdicts.get(name, ["not measured"])),
        )
        for name, entry in RECIPES.items()
    ]
    return markdown_table(columns, rows)


def _verdicts(links: bool = False) -> dict[str, list[str]]:
    """The different verdicts on each name, as links to their pages if wanted."""
    known, found = measured(), {}
    for name, by_experiment in findings_by_subject(known).items():
        pages: dict[str, str] = {}
        for stem, items in by_experiment.items():
            for item in items:
                pages.setdefault(item.verdict, evidence_of(known[stem]).page)
        found[name] = [f"[{verdict}](results/{page}.md)" if links else verdict for verdict, page in pages.items()]
    return found


def _paper(citation: str) -> str:
    """A citation up to its first arXiv number."""
    found = re.match(r".*?arXiv \d{4}\.\d{5}", citation)
    return found[0] if found else citation.partition(";")[0]


def _row_lines() -> dict[str, tuple[Path, int]]:
    """File of each row, from the project's folder, and its number of lines."""
    found = {}
    for path in (PROJECT / "mmrl" / "core" / "catalogue").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Objective", "PreferenceObjective"):
                name = node.args[0]
                if isinstance(name, ast.Constant) and isinstance(name.value, str) and node.end_lineno is not None:
                    found[name.value] = (path.relative_to(PROJECT), node.end_lineno - node.lineno + 1)
    return found


def _own_lines() -> dict[str, int]:
    """Lines of the blocks that a row shares with no other."""
    blocks = {name: {type(block) for block in row.blocks.values()} for name, row in ROWS.items()}
    users = Counter(block for own in blocks.values() for block in own)
    return {name: sum(_lines(block) for block in own if users[block] == 1) for name, own in blocks.items()}


def _recipe_code(entry: RecipeEntry) -> str:
    """File of a recipe and the lines of its class and of its configuration."""
    recipe, config = entry.load_recipe_class(), entry.load_config_class()
    file = Path(inspect.getfile(recipe)).resolve().relative_to(PROJECT)
    return f"[{file.parent.name}/{file.name}](../{file}) {_lines(recipe)} + {_lines(config)}"


def _lines(thing: type) -> int:
    return len(inspect.getsourcelines(thing)[0])
