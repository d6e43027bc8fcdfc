"""Draw docs/architecture.svg from the imports: one box a package, one arrow to each package that it builds on.

`python scripts/architecture.py` rewrites the drawing, as `make docs` does. An import that a chain of other arrows
implies has no arrow of its own.
"""

from __future__ import annotations

import ast
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
DRAWING = PROJECT / "docs/architecture.svg"
ROWS = (  # from the top, in three columns: each row imports from those below it
    ("mmrl.contrib", "mmrl.gui", "mmrl.cli"),
    ("robotics", "mmrl.agents", "mmrl.masked"),
    ("diffusion", "mmrl.vlm", "mmrl.comparison"),
    (None, "mmrl.training", "mmrl.report"),
    ("mmrl.hub", None, "mmrl.runs"),
    (None, "mmrl.rewards", None),
    (None, "mmrl.workers", "mmrl.core"),
)
ABOUT = {
    "mmrl.contrib": "methods of single papers",
    "robotics": "policies, simulation, SRPO, 3D flow",
    "diffusion": "AWM, Flow-GRPO and relatives",
    "mmrl.gui": "screens, grounding, AEPO",
    "mmrl.cli": "commands, doctor, watch",
    "mmrl.agents": "several turns, ARPO",
    "mmrl.masked": "masked diffusion, BGPO, IGPO",
    "mmrl.vlm": "PAPO, APO, TSPO",
    "mmrl.hub": "tables, images, video",
    "mmrl.comparison": "experiments, paired seeds",
    "mmrl.report": "report.html and figures",
    "mmrl.training": "recipe, trainer, update",
    "mmrl.runs": "checkpoints, metrics, resume",
    "mmrl.rewards": "verifiable rewards",
    "mmrl.workers": "the pool of processes",
    "mmrl.core": "objectives on tensors",
}
WIDTH, BOX, HEIGHT, GAP = 760, 220, 42, 38


def draw() -> str:
    """Return the drawing as SVG text."""
    places = {
        package: (WIDTH * (2 * column + 1) // (2 * len(packages)), GAP // 2 + row * (HEIGHT + GAP))
        for row, packages in enumerate(ROWS)
        for column, package in enumerate(packages)
        if package
    }
    height = len(ROWS) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
        ' font-size="13">',
        "<title>Packages of the suite; imports run downwards</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#5a7fa8"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for user, used in sorted(_direct(_imports(tuple(places)))):
        (x1, y1), (x2, y2) = places[user], places[used]
        parts.append(
            f'<path d="M{x1} {y1 + HEIGHT} L{x2} {y2}" stroke="#5a7fa8" stroke-width="1.5" marker-end="url(#head)"/>'
        )
    for package, (x, y) in places.items():
        parts.append(
            f'<rect x="{x - BOX // 2}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="6" fill="#f2f6fb" stroke="#27405e"/>'
            f'<text x="{x}" y="{y + 17}" text-anchor="middle" font-weight="bold">{package}</text>'
            f'<text x="{x}" y="{y + 34}" text-anchor="middle" fill="#333">{ABOUT[package]}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _imports(packages: tuple[str, ...]) -> set[tuple[str, str]]:
    """Pairs of packages of which the first imports the second."""
    found = set()
    for path in sorted(path for top in ("mmrl", "diffusion", "robotics") for path in (PROJECT / top).rglob("*.py")):
        user = _package(".".join(path.relative_to(PROJECT).with_suffix("").parts), packages)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            used = _package(node.module, packages) if isinstance(node, ast.ImportFrom) and node.module else None
            if user and used and user != used:
                found.add((user, used))
    return found


def _package(module: str, packages: tuple[str, ...]) -> str | None:
    return next((name for name in packages if module == name or module.startswith(f"{name}.")), None)


def _direct(imports: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Leave out what a chain of other imports implies."""
    below: dict[str, set[str]] = {}
    for package in [package for packages in reversed(ROWS) for package in packages if package]:
        used = {b for a, b in imports if a == package}
        below[package] = used.union(*(below.get(other, set()) for other in used))
    return {(a, b) for a, b in imports if not any(b in below.get(c, set()) for x, c in imports if x == a and c != b)}


if __name__ == "__main__":
    DRAWING.write_text(draw(), encoding="utf-8")
