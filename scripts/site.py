"""mkdocs hook: pages of methods and public packages, and links that leave docs/."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))

import methods

FACES = (
    "mmrl",
    "mmrl.core",
    "mmrl.rewards",
    "mmrl.workers",
    "mmrl.training",
    "mmrl.vlm",
    "mmrl.agents",
    "mmrl.gui",
    "diffusion",
    "robotics",
    "robotics.scenes",
)
MANY = 25
"""Members above which a class has its own page."""
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!docs/)([^)]*)\)")


def on_config(config: Any) -> Any:
    """Put the pages of methods, results and packages into the navigation."""
    sections = {title: pages for entry in config["nav"] for title, pages in entry.items()}
    sections["Methods"].append({"One by one": [{name: f"methods/{name}.md"} for name in sorted(methods.LIBRARY)]})
    for path in sorted((Path(config["docs_dir"]) / "results").glob("*.md")):
        if path.stem != "index":
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            sections["Results"].append({title: f"results/{path.name}"})
    for face in FACES:
        pages = [{page: f"reference/{face}/{page}.md"} for page in _pages(face)]
        sections["Reference"].append({face: [f"reference/{face}/index.md", *pages]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each method, one for each module whose names a package exports, and an index of them."""
    for name, text in methods.pages():
        files.append(File.generated(config, f"methods/{name}.md", content=text))
    index = "# Python reference\n\nThe public names, by package and module. Import them from the package.\n\n"
    for face in FACES:
        summary = (importlib.import_module(face).__doc__ or "").strip().splitlines()[0]
        index += f"- [`{face}`]({face}/index.md): {summary}\n"
        listed = f"# {face}\n\n{summary}\n\n"
        for page, (module, names) in _pages(face).items():
            about = (importlib.import_module(module).__doc__ or "").strip().splitlines()[0]
            entries = "\n\n".join(f"::: {module}.{name}" for name in names)
            # guides come before reference pages in the search
            text = f"---\nsearch: {{boost: 0.2}}\n---\n\n# {module}\n\n{about}\n\n{entries}\n"
            files.append(File.generated(config, f"reference/{face}/{page}.md", content=text))
            listed += f"- [{', '.join(f'`{name}`' for name in names)}]({page}.md): {about}\n"
        files.append(File.generated(config, f"reference/{face}/index.md", content=listed))
    files.append(File.generated(config, "reference/index.md", content=index))
    return files


@cache
def _modules(face: str) -> dict[str, list[str]]:
    """Public names of a package by the module that defines them; a name of two packages is that of the first."""
    package = importlib.import_module(face)
    homes = getattr(package, "_HOMES", None) or {
        name: module for module, names in getattr(package, "_NAMES", {}).items() for name in names
    }
    earlier = {
        (module, name)
        for other in FACES[: FACES.index(face)]
        for module, names in _modules(other).items()
        for name in names
    }
    found: dict[str, list[str]] = {}
    for name in sorted(getattr(package, "__all__", homes)):
        module = homes.get(name) or getattr(getattr(package, name), "__module__", face)
        if (module, name) not in earlier:
            found.setdefault(module, []).append(name)
    return found


def _pages(face: str) -> dict[str, tuple[str, list[str]]]:
    """Module and names of each page of a package; a class with many members has a page of its own."""
    found = {}
    for module, names in _modules(face).items():
        large = [name for name in names if len(names) > 1 and _members(module, name) > MANY]
        found[_short(module, face)] = module, [name for name in names if name not in large]
        found |= {f"{_short(module, face)}.{name}": (module, [name]) for name in large}
    return {page: (module, names) for page, (module, names) in found.items() if names}


def _members(module: str, name: str) -> int:
    """Number of the public members that a class defines; 0 for anything else."""
    found = getattr(importlib.import_module(module), name)
    return sum(not member.startswith("_") for member in vars(found)) if isinstance(found, type) else 0


def _short(module: str, face: str) -> str:
    """Name of a module's page: without the package it is listed under."""
    return module.removeprefix(f"{face}.").removeprefix("mmrl.")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Describe the page, link methods to their pages, and make fences of code plain.

    Links out of docs/ become paths. Guides come before single results in the search.
    """
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("search", {"boost": 0.2})
    if "description" not in page.meta:
        prose = (part for part in markdown.split("\n\n")[1:] if re.match(r"[A-Z]", part))
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", " ".join(next(prose, "").split()))
        page.meta["description"] = re.match(r".{0,160}(?=\s|$)", words)[0] or None
    markdown = re.sub(r"^(\s*```\w+) .+$", r"\1", markdown, flags=re.MULTILINE)
    # GitHub needs the backslash in a table's code, and Python-Markdown would show it
    markdown = re.sub(r"`[^`\n]*`", lambda found: found[0].replace("\\|", "|"), markdown)
    depth = page.file.src_uri.count("/")
    base = "" if page.file.src_uri.startswith("methods/") else "../" * depth + "methods/"
    markdown = re.sub(
        r"\]\((?:(?:\.\./)*methods/index\.md|(?:index\.md)?)#(\w+)\)",
        lambda found: (
            f"]({base}{found[1]}.md)" if found[1] in methods.LIBRARY and _to_methods(found[0], page) else found[0]
        ),
        markdown,
    )
    return OUTSIDE.sub(lambda m: m[0] if m[0].count("../") <= depth else f"{m[1]} (`{m[2]}`)", markdown)


def _to_methods(link: str, page: Any) -> bool:
    """Whether a link leads to the table of methods, whose own links have no file."""
    return "methods/index.md" in link or page.file.src_uri == "methods/index.md"
