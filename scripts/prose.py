"""Check the English of README.md, docs/ and the packages: `python scripts/prose.py` lists what to rewrite.

Each pattern is one that translated English has and edited English does not.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("mmrl", "diffusion", "robotics", "benchmarks", "examples")
LONGEST = 35
"""Words of a sentence in prose."""
PHRASES = {
    r"\bbeside\b": "next to, alongside",
    r"\bin place of\b": "instead of",
    r"\banew\b": "again",
    r"\b[Ss]hares? of\b": "fraction of, percentage of",
    r"\bof (?:your|my) own(?=\s*[.,;:)|]|$)": "your own X",
    r"\ball the same\b": "anyway, still",
    r"\blearnt\b": "learned",
    r"\bof one's own\b": "your own",
    r"(?<=\d) %(?!\w)": "no space before %",
    r"\bwhere (?:there (?:is|are)|none|nothing|no)\b": "if",
}
"""Pattern to what to write instead."""
PROSE_ONLY = {r"\brefused\b": "rejected, not supported, raises an error", r"\blanes?\b": "backend"}
FENCE = re.compile(r"^```.*?^```$|<!-- generated:.*?<!-- end -->", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Print each finding as file:line; 1 if there is any."""
    found = [*in_pages(), *in_code()]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


def in_pages() -> Iterator[str]:
    """Findings in README.md and the pages of docs/."""
    for path in (PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))):
        # blank what is no prose, and keep its lines, so that numbers of lines stay right
        text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), path.read_text(encoding="utf-8"))
        text = re.sub(r"!\[[^]]*\]|`[^`]*`", lambda match: "X" + "\n" * match[0].count("\n"), text)
        name = path.relative_to(PROJECT)
        yield from (f"{name}:{line}: {said}" for line, said in phrases(text, PHRASES | PROSE_ONLY))
        yield from (f"{name}:{line}: {said}" for line, said in long_sentences(text))


def in_code() -> Iterator[str]:
    """Findings in the docstrings and messages of the packages."""
    for path in (path for package in PACKAGES for path in sorted((PROJECT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for line, said in phrases(node.value, PHRASES):
                    yield f"{path.relative_to(PROJECT)}:{node.lineno + line - 1}: {said}"


def phrases(text: str, table: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Line and advice of each phrase of a table; a phrase may continue on the next line."""
    for pattern, instead in table.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text):
            yield text.count("\n", 0, match.start()) + 1, f"'{match[0].strip()}': {instead}"


def long_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Line and beginning of each sentence of a paragraph or list that has too many words; tables have none."""
    lines = ["" if re.match(r"\s*[|#!<]", line) else line for line in text.split("\n")]
    start = 0
    for number, line in enumerate([*lines, ""]):
        if line.strip() and not re.match(r"\s*(?:[-*]|\d+\.)\s", line):
            continue
        paragraph = re.sub(r"\]\([^)]*\)", "]", " ".join(lines[start:number]))
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split())):
            words = [word for word in sentence.split() if re.search(r"\w\w|\ba\b|\bI\b", word)]
            if len(words) > LONGEST:
                yield start + 1, f"{len(words)} words: {' '.join(sentence.split()[:8])} ..."
        start = number


if __name__ == "__main__":
    sys.exit(main())
