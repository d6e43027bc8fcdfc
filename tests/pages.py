"""README and docs as data: pages, code blocks, links, tables."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
FIRST_LINE = re.compile(r"# (\S+\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    language: str
    """Language after the backticks; `python notest` is not run."""
    text: str
    file: str | None
    """Name of the file that it shows, from a comment above it or in its first line."""


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def prose(self) -> str:
        """The text without its code blocks."""
        return FENCE.sub("", self.text)

    @property
    def blocks(self) -> list[Block]:
        found = []
        for match in FENCE.finditer(self.text):
            first = FIRST_LINE.match(match["text"])
            found.append(Block(match["language"], match["text"], match["file"] or (first[1] if first else None)))
        return found

    @property
    def links(self) -> list[str]:
        """Targets of links and images, without those to other sites."""
        targets = re.findall(r"\]\(([^)\s]+)\)", self.prose)
        return [target for target in targets if not re.match(r"[a-z]+://", target)]

    @property
    def code(self) -> list[str]:
        """Texts in backticks."""
        return re.findall(r"`([^`]+)`", self.prose)

    @property
    def anchors(self) -> set[str]:
        """Valid anchors of `page.md#...`, as GitHub derives them from the headings."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def shown(self, language: str) -> list[Block]:
        """Blocks of a language."""
        return [block for block in self.blocks if block.language == language]

    def section(self, title: str) -> str:
        """Text below a heading, up to the next heading of any level."""
        found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", self.text, re.M | re.S)
        assert found is not None, title
        return found[1]

    def table(self, title: str) -> list[list[str]]:
        """Cells of the rows of a section's table."""
        rows = [line.strip("| \n").split(" | ") for line in self.section(title).splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in row] for row in rows[1:]]

    @property
    def shell_lines(self) -> list[str]:
        """Commands of the shell blocks, without comments."""
        lines = [line.partition("#")[0].strip() for block in self.shown("bash") for line in block.text.splitlines()]
        return [line for line in lines if line]


def read_page(name: str) -> Page:
    """A page by its path from the root of the checkout."""
    return Page(ROOT / name, (ROOT / name).read_text(encoding="utf-8"))


README = read_page("README.md")
PAGES = [README, *(read_page(str(path.relative_to(ROOT))) for path in sorted((ROOT / "docs").rglob("*.md")))]
