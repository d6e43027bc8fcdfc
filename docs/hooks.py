"""mkdocs hook: pages of methods and of the public packages, links that leave docs/, and words that search lacks."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

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
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!docs/)([^)]*)\)")


def on_config(config: Any) -> Any:
    """Put the pages of methods, results and packages into the navigation."""
    sections = {title: pages for entry in config["nav"] for title, pages in entry.items()}
    sections["Methods"].append({"One by one": [{name: f"methods/{name}.md"} for name in sorted(methods.LIBRARY)]})
    for path in sorted((Path(config["docs_dir"]) / "results").glob("*.md")):
        if path.stem != "index":
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            sections["Results"].append({title: f"results/{path.name}"})
    sections["Reference"] += [{face: f"reference/{face}.md"} for face in FACES]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each method, and `reference/<package>.md` with one entry a public name.

    Two packages may export one name; the first has it.
    """
    for name, text in methods.pages():
        files.append(File.generated(config, f"methods/{name}.md", content=text))
    shown: dict[str, str] = {}
    listed = []
    for face in FACES:
        package = importlib.import_module(face)
        homes = getattr(package, "_NAMES", {})
        home = {name: module for module, names in homes.items() for name in names}
        text = f"---\nsearch: {{boost: 0.2}}\n---\n\n# {face}\n\n{package.__doc__}\n\n"
        for name in sorted(getattr(package, "__all__", ())):
            module = home.get(name) or getattr(getattr(package, name), "__module__", face)
            first = shown.setdefault(f"{module}.{name}", face)
            text += f"::: {module}.{name}\n\n" if first == face else f"`{name}`: see [{first}]({first}.md)\n\n"
        files.append(File.generated(config, f"reference/{face}.md", content=text))
        listed.append(f"- [`{face}`]({face}.md): {(package.__doc__ or '').strip().splitlines()[0]}")
    content = "# Python reference\n\nThe public names of each package.\n\n" + "\n".join(listed) + "\n"
    files.append(File.generated(config, "reference/index.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Describe the page, link methods to their pages, write links out of docs/ as paths, make fences of code plain."""
    if "description" not in page.meta:
        prose = (part for part in markdown.split("\n\n")[1:] if re.match(r"[A-Z]", part))
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", " ".join(next(prose, "").split()))
        page.meta["description"] = re.match(r".{0,160}(?=\s|$)", words)[0] or None
    markdown = re.sub(r"^(\s*```\w+) .+$", r"\1", markdown, flags=re.MULTILINE)
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
    """Whether a link with an anchor is one to the table of methods, on whose own page it has no file."""
    return "methods/index.md" in link or page.file.src_uri == "methods/index.md"
