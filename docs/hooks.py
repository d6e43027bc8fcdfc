"""mkdocs hook: reference pages from the faces of the packages, and links that leave docs/."""

from __future__ import annotations

import importlib
import re
from typing import Any

from mkdocs.structure.files import File, Files

FACES = (
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
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!docs/)([^)]*)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add `reference/<package>.md` with one entry a public name; two faces may share one, the first has it."""
    shown: dict[str, str] = {}
    for face in FACES:
        package = importlib.import_module(face)
        homes = getattr(package, "_NAMES", {})
        home = {name: module for module, names in homes.items() for name in names}
        text = f"# {face}\n\n{package.__doc__}\n\n"
        for name in sorted(getattr(package, "__all__", ())):
            module = home.get(name) or getattr(getattr(package, name), "__module__", face)
            first = shown.setdefault(f"{module}.{name}", face)
            text += f"::: {module}.{name}\n\n" if first == face else f"`{name}`: see [{first}]({first}.md)\n\n"
        files.append(File.generated(config, f"reference/{face}.md", content=text))
    listed = "\n".join(f"- [{face}]({face}.md)" for face in FACES)
    files.append(File.generated(config, "reference/index.md", content=f"# Reference\n\n{listed}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write links to files outside of docs/, which the site does not hold, as their paths; plain fences of code."""
    markdown = re.sub(r"^(\s*```\w+) .+$", r"\1", markdown, flags=re.MULTILINE)
    depth = page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda m: m[0] if m[0].count("../") <= depth else f"{m[1]} (`{m[2]}`)", markdown)
