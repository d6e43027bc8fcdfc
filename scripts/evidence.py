"""Tables of docs/evidence.md: where each objective and recipe is in the code, what proves it, what was measured."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mmrl.cli.explain import ROWS, domains_of, golden_sources
from mmrl.cli.listings import markdown_table
from mmrl.cli.papers import status_of
from mmrl.comparison.evidence import VERDICTS, FindingConfig
from mmrl.comparison.experiment import ExperimentConfig
from mmrl.comparison.reproduce import evidence_of, findings_by_subject, measured
from mmrl.core.catalogue import CATALOGUE, PREFERENCES, all_headings
from mmrl.entries import RecipeEntry
from mmrl.recipes import RECIPES, all_recipes, contrib_recipes

PROJECT = Path(__file__).resolve().parent.parent


def table(part: str) -> str:
    """Write a table of the page: counts, findings, objectives or recipes."""
    return {"counts": counts, "findings": findings, "objectives": objectives, "recipes": recipes}[part]()


def counts() -> str:
    """How many objectives and recipes have which verdict."""
    known = _verdicts()
    library = {**CATALOGUE, **PREFERENCES, **RECIPES}
    lines = [_counted("In the library", len(CATALOGUE | PREFERENCES), len(RECIPES), known, list(library))]
    rest = [name for name in {**ROWS, **contrib_recipes()} if name not in library]
    lines += [_counted("In contrib", len(ROWS) - len(CATALOGUE | PREFERENCES), len(contrib_recipes()), known, rest)]
    return "".join(lines)


def _counted(where: str, rows: int, recipes: int, known: dict[str, list[str]], names: list[str]) -> str:
    best = Counter(verdict for name in names for verdict in known.get(name, ["not measured"]))
    said = ", ".join(f"{verdict} {best[verdict]}" for verdict in (*VERDICTS, "not measured"))
    return f"- {where}: {rows} objectives and {recipes} recipes; one may have several verdicts: {said}.\n"


def findings() -> str:
    """Each difference that was measured, next to what the paper reports."""
    known = measured()
    subjects = findings_by_subject(known)
    columns = ("method", "setting", "result", "the paper reports", "verdict", "again")

    def table_of(names: Iterable[str]) -> str:
        rows = []
        for name in names:
            for stem, found in subjects.get(name, {}).items():
                rows += [_finding(name, stem, known[stem], finding) for finding in found]
        return markdown_table(columns, rows)

    library = dict.fromkeys((*CATALOGUE, *PREFERENCES, *RECIPES))
    contrib = [name for name in {**ROWS, **contrib_recipes()} if name not in library]
    return f"{table_of(library)}\n### contrib\n\n{table_of(contrib)}"


def _finding(name: str, stem: str, experiment: ExperimentConfig, found: FindingConfig) -> tuple[str, ...]:
    evidence = evidence_of(experiment)
    metric = found.metric or experiment.metric
    pair = f"`{found.arm}` against `{found.against or experiment.baseline}`, `{metric}`, {len(experiment.seeds)} seeds"
    result = f"[{found.shown}](results/{evidence.page}.md): {pair}{f'; {found.note}' if found.note else ''}"
    return f"`{name}`", evidence.setting, result, found.paper, found.verdict, f"`mmrl reproduce {stem}`"


def objectives() -> str:
    """Every row of the catalogue, by family: promise, code, source of the numbers, rooms and verdict."""
    columns = ("objective", "paper", "promise", "code", "numbers from", "trains in", "status", "measured here")
    verdicts, sizes, own, headings = _verdicts(links=True), _row_lines(), _own_lines(), all_headings()
    text = ""
    for heading in dict.fromkeys(headings.values()):
        rows = []
        for name, row in ROWS.items():
            if headings[name] == heading:
                file, lines = sizes[name]
                code = f"[{file.name}](../{file}) {lines}{f' + {own[name]}' if own[name] else ''}"
                here = "; ".join(verdicts.get(name, ["not measured"]))
                proof = "; ".join(golden_sources(name)) or row.verified
                about = (f"`{name}`", _paper(row.citation), row.claim, code, proof)
                rows.append((*about, domains_of(row), status_of(name), here))
        text += f"### {heading}\n\n{markdown_table(columns, rows)}\n"
    return text


def recipes() -> str:
    """Every recipe: what it does, code, source of the numbers and verdict."""
    columns = ("recipe", "paper", "what it does", "code", "numbers from", "status", "measured here")
    verdicts = _verdicts(links=True)
    rows = {
        name: (
            f"`{name}`",
            _paper(entry.citation),
            entry.summary,
            _recipe_code(entry),
            "; ".join(golden_sources(name)) or "none",
            status_of(name),
            "; ".join(verdicts.get(name, ["not measured"])),
        )
        for name, entry in all_recipes().items()
    }
    library, contrib = ([rows[name] for name in table] for table in (RECIPES, contrib_recipes()))
    return f"{markdown_table(columns, library)}\n### contrib\n\n{markdown_table(columns, contrib)}"


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
    for path in (path for folder in ("core/catalogue", "contrib/rows") for path in PROJECT.glob(f"mmrl/{folder}/*.py")):
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
