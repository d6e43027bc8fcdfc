"""Generated tables of README.md and docs/: `python scripts/docs.py` rewrites them, `--check` only lists stale files.

A table stands between two marks, which name what is in it:

    <!-- generated: options papo trainer -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import methods  # next to this file

from mmrl.cli.listings import LISTINGS, markdown, markdown_table
from mmrl.cli.options import Option, options_of, select_options
from mmrl.cli.papers import OMITTED, PAPERS
from mmrl.core.block import Block
from mmrl.core.blocks import BLOCKS, PREFERENCE_BLOCKS, all_kinds
from mmrl.errors import UserError, did_you_mean
from mmrl.files import write_atomically
from mmrl.recipes import CONTRIB, PACKAGES, RECIPES, find_recipe, package_tables
from mmrl.runs.metrics import METRICS

PROJECT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(?P<head><!-- generated: (?P<name>[^>]*?) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the generated tables of the project, or list the files whose tables are stale."""
    parser = argparse.ArgumentParser(prog="python scripts/docs.py", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a table is stale")
    args = parser.parse_args(argv)
    stale = list(stale_files(PROJECT))
    for path, text in stale:
        sys.stdout.write(f"{path.relative_to(PROJECT)}: {'stale; run `make docs`' if args.check else 'rewritten'}\n")
        if not args.check:
            write_atomically(path, text)
    return 1 if stale and args.check else 0


def stale_files(project: Path) -> Iterable[tuple[Path, str]]:
    """Yield the documents whose tables are not what the code says, each with its new text."""
    for path in (project / "README.md", *sorted((project / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        new = refreshed(text, where=str(path.relative_to(project)))
        if new != text:
            yield path, new


def refreshed(text: str, where: str = "document") -> str:
    """Replace what stands between the marks of a document."""
    opened, closed = text.count("<!-- generated:"), len(MARKED.findall(text))
    if opened != closed:
        raise UserError(f"{where}: {opened} marks `<!-- generated: NAME -->`, but {closed} have an `<!-- end -->`")
    depth = where.count("/")  # tables link from the project's folder
    base = "../" * (depth - 1) if where.startswith("docs/") else "docs/"
    return MARKED.sub(
        lambda found: f"{found['head']}{table(found['name']).replace('](docs/', f']({base}')}{found['end']}", text
    )


def table(name: str) -> str:
    """Write the table of a name: recipes, objectives, rewards, blocks PART, options RECIPE [PREFIX] and so on."""
    kind, *arguments = name.split()
    if kind not in TABLES:
        raise UserError(f"there is no table '{kind}'; {did_you_mean(kind, TABLES)}tables: {', '.join(TABLES)}")
    return TABLES[kind](*arguments)


def _blocks(part: str) -> str:
    """The kinds of block that a part of an objective takes, each with its options and the first line about it."""
    rows = [(f"`{kind}`", *_about_block(block)) for kind, block in (BLOCKS | PREFERENCE_BLOCKS)[part].items()]
    return markdown_table((f"`{part}`", "options and defaults", "what it is"), rows)


def _contrib_blocks() -> str:
    """The kinds of block of contrib, by the part of an objective that takes them."""
    rows = [
        (f"`{part}`", f"`{kind}`", *_about_block(block))
        for part, own in (BLOCKS | PREFERENCE_BLOCKS).items()
        for kind, block in all_kinds(part).items()
        if kind not in own
    ]
    return markdown_table(("part", "kind", "options and defaults", "what it is"), rows)


def _about_block(block: type[Block]) -> tuple[str, str]:
    """The options of a block with their defaults, and the first line about it."""
    options = ", ".join(f"`{item.name}` {str(item.default).lower()}" for item in fields(block))
    return options, re.sub(r"; see [^.]*(?:\.\w[^.]*)*\.$", ".", (block.__doc__ or "").strip().splitlines()[0])


def _options(recipe: str, prefix: str = "") -> str:
    options = options_of(find_recipe(recipe, where="options").load_defaults())
    chosen = select_options(options, prefix) if prefix else options
    rows = [_option_row(option) for option in chosen if not option.part]
    return markdown_table(("option", "default", "allowed", "what it does"), rows)


def _option_row(option: Option) -> tuple[str, str, str, str]:
    default = "must be given" if option.required else option.default_from or f"`{option.default_text}`"
    allowed = option.bounds or f"`{option.type}`"
    kinds = f"; for {', '.join(option.kinds)}" if option.kinds else ""
    return f"`{option.key}`", default, f"{allowed}{kinds}", option.help


def _results(*pages: str) -> str:
    """One line for each page of results: its title and the first sentence of its result."""
    lines = []
    for page in pages:
        text = (PROJECT / f"docs/results/{page}.md").read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        found = re.search(r"\*\*Result\*\*(?:, ([^:]*))?: (.*?\.)(?=\s|\*)", text, re.DOTALL)
        if found is None:
            raise UserError(f"docs/results/{page}.md has no sentence after **Result**")
        setting = f" ({' '.join(found[1].split())})" if found[1] else ""
        lines.append(f"- [{title}](docs/results/{page}.md){setting}: {' '.join(found[2].split())}\n")
    return "".join(lines)


def _first_table(page: str) -> str:
    """The first table of a page, with links as seen from the project's folder."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    found = re.search(r"^\|.*?\n(?=[^|]|\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise UserError(f"{page} has no table")
    return re.sub(r"\]\(#", f"]({page}#", found[0])


def _papers(which: str = "") -> str:
    """The papers that the suite has, or the "partial" ones: other names, place and what is lacking."""
    rows = []
    for paper in (paper for paper in PAPERS if paper.lacking or which != "partial"):
        page = f"[{paper.page.partition('#')[0]}](docs/{paper.page})" if paper.page else ""
        code = f"`{paper.code.partition(':')[2]}`" if paper.code else ""
        here = ", ".join(filter(None, (*(f"`{name}`" for name in paper.found), code, page)))
        lacking = f"*partial*: lacks {paper.lacking}" if paper.lacking else ""
        rows.append((paper.name, ", ".join(paper.names), here, lacking))
    return markdown_table(("paper", "also known as", "here", "status"), rows)


def _omitted() -> str:
    """The papers that are left out, and why."""
    return markdown_table(("paper", "about", "why it is left out"), [paper[:3] for paper in OMITTED])


def _processes() -> str:
    """How far runs in several processes are from the run of one: the worst of the settings measured."""
    sys.path.insert(0, str(PROJECT))
    from tests.contracts.record import OBJECTIVES, PROCESSES, Distance, Setting, read_processes

    def row(name: str, settings: Mapping[Setting, Mapping[str, Distance]]) -> tuple[str, ...]:
        ways = [[each[way] for each in settings.values()] for way in PROCESSES]
        every = [distance for way in ways for distance in way]
        gradient = max(distance.gradient for distance in every)
        cells = [f"{max(d.update for d in way):.0e}, {max(d.weight for d in way):.0e}" for way in ways]
        return f"`{name}`", f"{gradient:.0e}", *cells, f"{min(d.same_samples for d in every):.0%}", str(len(settings))

    found = read_processes()
    rows = [row(name, found[name]) for name in (*RECIPES, *OBJECTIVES) if name in found]
    heads = ("recipe", "gradient", "2 processes", "3 processes", "FSDP2", "equal samples", "settings")
    return f"{markdown_table(heads, rows)}\n"


def _ways() -> str:
    """How far a run in each way is from the run of one process, as measured, and what the tests allow."""
    sys.path.insert(0, str(PROJECT))
    from tests.contracts.record import read_record
    from tests.contracts.test_rollers import SAMPLED, SHARED_WORK, shares_work

    record = read_record()
    heads = {"label": "label device", "units": "units", "workers": "workers"}
    heads |= {"workers against units": "workers, against units"}

    def cell(way: str, name: str) -> str:
        if way != "label" and name not in SAMPLED:
            return "no samples"
        share = record[way].get(name)
        return "" if share is None else f"{share:.0e}" if share else "equal bits"

    rows = [(f"`{name}`", *(cell(way, name) for way in heads)) for name in RECIPES]
    language = sum(shares_work(name) for name in SAMPLED)
    return (
        f"{markdown_table(('recipe', *heads.values()), rows)}\n"
        f"The tests allow nothing for the label device. For workers against units they allow {SHARED_WORK:.0e} in the "
        f"{language} recipes that sample from a language model, and nothing in the others.\n"
    )


def _model_families() -> str:
    """Test results of each family of language and vision-language models."""
    sys.path.insert(0, str(PROJECT))
    from tests.vlm.families.record import read_record

    record = read_record()
    rows = []
    for kind, found in sorted(record["families"].items(), key=lambda item: item[1]["name"].lower()):
        logp, gradient = found["scores"]["logp"], found["scores"]["gradient"]
        saved = (max(found[how].values()) for how in ("full", "lora"))
        rows.append(
            (
                found["name"],
                f"`{kind}`",
                *(f"{value:.0e}" if value else "0" for value in (logp, gradient, *saved)),
            )
        )
    columns = ("models", "`model_type`", "log-probabilities", "gradient", "saved in full", "saved adapter")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"{markdown_table(columns, rows)}\nRecorded with {versions}.\n"


def _peers() -> str:
    """How far each objective is from other trainers, as `make test-peers` has recorded it."""
    sys.path.insert(0, str(PROJECT))
    from tests.peers.record import read_record
    from tests.peers.record import table as peers_table

    return peers_table(read_record())


def _plans() -> str:
    """Memory of runs on released models, as `scripts/plans.py` has recorded them."""
    record = json.loads((PROJECT / "scripts/plans.json").read_text(encoding="utf-8"))
    rows = []
    for name, found in record.items():
        peaks = ["" if value is None else f"{value:.0f}" for value in found["gb"]]
        rows.append((f"`{name.split()[0]}`", found["trained"], *peaks))
    return markdown_table(("model", "trained", "GB, 1 GPU", "GB, 8 GPUs", "GB, 64 GPUs"), rows)


def _package_metrics() -> dict[str, dict[str, str]]:
    """Title of each package that has metrics of its own, with them."""
    return {name: table for name in (*PACKAGES, *CONTRIB) for table in package_tables("METRICS", (name,))}


def _metrics() -> str:
    """Every metric by the package that writes it; a browser folds the tables of single domains."""
    shared, packages = METRICS, _package_metrics()
    text = markdown_table(("metric", "meaning"), [(f"`{name}`", sentence) for name, sentence in shared.items()])
    for title, table in packages.items():
        rows = [(f"`{name}`", sentence) for name, sentence in table.items()]
        folded = f'<details markdown="1"><summary>{title}: {len(rows)} metrics</summary>'
        text += f"\n{folded}\n\n{markdown_table(('metric', 'meaning'), rows)}\n</details>\n"
    return text


TABLES: dict[str, Callable[..., str]] = {
    **{name: partial(markdown, name) for name in LISTINGS},
    "blocks": _blocks,
    "contrib_blocks": _contrib_blocks,
    "methods": methods.part,
    "metrics": _metrics,
    "omitted": _omitted,
    "options": _options,
    "papers": _papers,
    "model_families": _model_families,
    "peers": _peers,
    "plans": _plans,
    "results": _results,
    "table": _first_table,
    "processes": _processes,
    "ways": _ways,
}


if __name__ == "__main__":
    sys.exit(main())
