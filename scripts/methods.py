"""One page for each method of the library, and the table that leads to them.

A method is an objective, a recipe, or both under one name. The site builds the pages (scripts/site.py), and
docs/methods/index.md has the table.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from mmrl.cli import explain
from mmrl.cli.explain import ROWS, golden_sources, part_sources, places, usage
from mmrl.cli.listings import configurations, markdown_table
from mmrl.cli.papers import papers_of, status_of
from mmrl.comparison.evidence import VERDICTS, FindingConfig
from mmrl.comparison.experiment import ExperimentConfig
from mmrl.comparison.reproduce import evidence_of, findings_by_subject, measured
from mmrl.core.catalogue import CATALOGUE, PREFERENCES
from mmrl.core.objectives.objective import Objective
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.entries import load_target
from mmrl.recipes import RECIPES, all_recipes, contrib_recipes

PROJECT = Path(__file__).resolve().parent.parent
LIBRARY = tuple(dict.fromkeys((*RECIPES, *CATALOGUE, *PREFERENCES)))
CONTRIB = tuple(name for name in dict.fromkeys((*contrib_recipes(), *ROWS)) if name not in LIBRARY)
TASKS = {
    "tspo": "videos",
    "vlm": "vision-language, text",
    "masked": "text (masked diffusion)",
    "agents": "agents",
    "gui": "GUI grounding",
    "diffusion": "images, videos",
    "robotics": "robots",
}
"""Package of a recipe to what it trains on."""
DOMAINS = {domain.name: domain.trains for domain in explain.DOMAINS}
TITLES = {"diffusion_dpo": "Diffusion-DPO", "grpo": "GRPO", "vlm": "Any objective on a (vision-)language model"}
"""Titles of pages whose first paper is another one."""
TERMS = {
    "papo": ("mmrl.vlm.methods.papo:Perception", "settings", "papo"),
    "reg_grpo": ("mmrl.vlm.methods.reg_grpo:Augmentation", "settings", "augmentation"),
    "arpo": ("mmrl.agents.methods.arpo:Replay", "config", "replay"),
    "awm": ("diffusion.matching.awm_loss:AwmLoss", "settings", "awm"),
}
"""Recipe to the part that adds to the objective, its attribute of settings, and their section of the configuration."""
NOT_MEASURED = "not measured"


@cache
def _measured() -> Mapping[str, ExperimentConfig]:
    return measured()


@cache
def _found() -> Mapping[str, Mapping[str, list[FindingConfig]]]:
    return findings_by_subject(_measured())


@cache
def _files() -> Mapping[str, list[str]]:
    return configurations()


def part(which: str) -> str:
    """What a page asks for: the table of the library, or how many methods have which verdict."""
    return counts() if which == "counts" else table()


def table() -> str:
    """One row a method: name, kind, tasks, data, what was found here, paper."""
    rows = [
        (f"[`{name}`](#{name})", kind(name), ", ".join(tasks(name)), data(name), "; ".join(verdicts(name)), paper(name))
        for name in LIBRARY
    ]
    return markdown_table(("method", "kind", "trains", "learns from", "found here", "paper"), rows)


def counts() -> str:
    """How many methods have which verdict."""
    lines = []
    for where, names in (("Library", LIBRARY), ("Contrib", CONTRIB)):
        found = Counter(verdict for name in names for verdict in verdicts(name))
        said = ", ".join(f"{verdict} {found[verdict]}" for verdict in (*VERDICTS, NOT_MEASURED))
        lines.append(f"- {where}, {len(names)} methods (one can have several verdicts): {said}.\n")
    return "".join(lines)


def kind(name: str) -> str:
    """Whether a name is an objective, a recipe or both."""
    return " and ".join(word for word, known in (("recipe", all_recipes()), ("objective", ROWS)) if name in known)


def tasks(name: str) -> list[str]:
    """What a method trains on: what its recipe is for, or every domain that can use the objective."""
    entry = all_recipes().get(name)
    if entry is not None:
        parts = (entry.preset or entry.target).partition(":")[0].split(".")
        return [next(words for package, words in TASKS.items() if package in parts)]
    return [DOMAINS[place.domain] for place in places(ROWS[name]) if place.recipe]


def data(name: str) -> str:
    """What a method learns from."""
    entry, row = all_recipes().get(name), ROWS.get(name)
    if name == "kto":
        return "pairs or single labels"
    if isinstance(row, PreferenceObjective) or name in ("preference", "diffusion_dpo"):
        return "pairs"
    if name.endswith("distil"):
        return "a teacher"
    if name == "sft" or (entry is not None and entry.supervised):
        return "given examples"
    return "rewards"


def verdicts(name: str) -> list[str]:
    """The different verdicts of our experiments on a method."""
    found = _found().get(name, {})
    return list(dict.fromkeys(item.verdict for items in found.values() for item in items)) or [NOT_MEASURED]


def paper(name: str) -> str:
    """The citation of a method up to its first arXiv number; tables make it a link."""
    entry = all_recipes().get(name)
    citation = entry.citation if entry is not None else ROWS[name].citation
    found = re.match(r".*?arXiv \d{4}\.\d{5}", citation)
    return found[0] if found else citation.partition(";")[0]


def page(name: str) -> str:
    """The page of a method: what it is, when to use it, formula, configuration, results and sources."""
    entry, row = all_recipes().get(name), ROWS.get(name)
    known = papers_of(name)
    title = TITLES.get(name) or (known[0].name if known else name.upper() if len(name) < 6 else name)
    parts = [f"# {title}: `{name}`\n\n"]
    if entry is not None:
        parts.append(f"{_sentence(entry.summary)}\n\n")
    if row is not None and row.claim:
        parts.append(f"The paper claims: {_sentence(row.claim)}\n\n")
    other = dict.fromkeys(word for each in known for word in each.names)
    facts = [
        ("Kind", kind(name)),
        ("Trains", ", ".join(tasks(name))),
        ("Learns from", data(name)),
        ("Paper", paper(name)),
        ("Also known as", ", ".join(other)),
        ("Status", status_of(name)),
        ("Found here", "; ".join(verdicts(name))),
    ]
    parts.append(markdown_table(("method", f"`{name}`"), [(head, text) for head, text in facts if text]))
    parts += [f"\n## When to use it\n\n{_when(name)}", f"\n## Configuration\n\n{_configuration(name)}"]
    if row is not None:
        parts.append(f"\n## Formula\n\n{formula(row.describe())}\n")
        parts.append(f"{formula(chr(10) + added)}\n\n" if (added := _added(name)) else "\n")
        if isinstance(row, Objective):
            parts.append(
                "A<sub>it</sub> is the advantage of decision t of sample i, r<sub>it</sub> the importance ratio. "
            )
        sources = [(f"`{key}`", f"`{block}`", source) for key, block, source in part_sources(row)]
        parts.append("Its blocks, each of which [a configuration can replace](../blocks.md):\n\n")
        parts.append(markdown_table(("part", "block", "source"), sources))
    parts.append(f"\n## Results\n\n{_results(name)}")
    parts.append(f"\n## How it was checked\n\n{_checked(name)}")
    return "".join(parts)


def _added(name: str) -> str:
    """Lines that a recipe adds to the formula of its objective, with its default settings."""
    if name not in TERMS:
        return ""
    target, attribute, section = TERMS[name]
    # only its settings are needed, not the model that it is made with
    part = object.__new__(load_target(target))
    setattr(part, attribute, getattr(all_recipes()[name].load_defaults()(), section))
    return str(part.formula())


def _when(name: str) -> str:
    row, entry = ROWS.get(name), all_recipes().get(name)
    lines = []
    if entry is not None:
        lines.append(f"Use the recipe (trains {', '.join(tasks(name))}) if you have {_needs(name)}.\n")
    if isinstance(row, Objective | PreferenceObjective):
        takes = [f"{DOMAINS[place.domain]} (`recipe: {place.recipe}`)" for place in places(row) if place.recipe]
        lacks = [f"- {DOMAINS[place.domain]}: {place.lacks}\n" for place in places(row) if not place.recipe]
        lines.append("\nThe objective works for:\n\n" + "".join(f"- {words}\n" for words in takes))
        if lacks:
            lines.append(f"\nIt does not work for:\n\n{''.join(lacks)}")
    lines.append("\n[Choose a method](../choose.md) compares it with the alternatives.\n")
    return "".join(lines)


def _needs(name: str) -> str:
    return {
        "pairs": "pairs of a preferred and a rejected example",
        "pairs or single labels": "examples that are labelled as good or bad",
        "a teacher": "a teacher model to imitate on the policy's own samples",
        "given examples": "examples of what the model should produce",
        "rewards": "a function that scores what the model produces",
    }[data(name)]


def _configuration(name: str) -> str:
    files = _files().get(name, [])
    text = ""
    if name in ROWS:
        text += "```yaml\n" + "\n".join(usage(ROWS[name])) + "\n```\n\n"
    if files:
        text += "```bash\n" + "\n".join(f"mmrl train {file}" for file in files[:5]) + "\n```\n\n"
    if name in all_recipes():
        text += f"`mmrl options {name}` lists its options.\n"
    return text


def _results(name: str) -> str:
    known, found = _measured(), _found().get(name, {})
    if not found:
        return "No experiment here compares it. Contract tests train it, and its numbers are checked as below.\n"
    rows, pictures = [], {}
    for stem, items in found.items():
        experiment = known[stem]
        evidence = evidence_of(experiment)
        for picture in sorted(PROJECT.glob(f"docs/results/{evidence.page}.[ps][nv]g")):
            pictures[evidence.page] = f"![Results of {evidence.page}](../results/{picture.name})\n"
        for item in items:
            pair = f"`{item.arm}` against `{item.against or experiment.baseline}`, {item.metric or experiment.metric}"
            note = f" ({item.note})" if item.note else ""
            shown = f"[{item.shown}](../results/{evidence.page}.md)"
            rows.append((evidence.setting, f"{pair}{note}", shown, item.verdict, item.paper))
    head = markdown_table(("setting", "compared", "difference, 95% interval", "verdict", "the paper reports"), rows)
    first = next(iter(pictures.values()), "")
    again = ", ".join(f"`mmrl reproduce {stem}`" for stem in found)
    return f"{head}\nRepeat on two fresh seeds: {again}. [How to read the verdicts](../results/index.md).\n\n{first}"


def _checked(name: str) -> str:
    row, entry = ROWS.get(name), all_recipes().get(name)
    sources = golden_sources(name) or ([row.verified] if row is not None and row.verified else [])
    lines = [f"- Numbers from {source}\n" for source in sources] or ["- No golden numbers.\n"]
    if row is not None and row.differs:
        lines.append(f"- Differs from the paper and its code: {row.differs}\n")
    if entry is not None:
        lines.append(f"- Code: `{entry.target.rpartition(':')[0]}`\n")
    return "".join(lines)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


# Formulas: `describe` writes plain text, which becomes italic symbols, subscripts and signs.
GREEK = {
    "rho": "ρ", "alpha": "α", "beta": "β", "gamma": "γ", "lambda": "λ", "epsilon": "ε", "eps": "ε", "sigma": "σ",
    "tau": "τ", "eta": "η", "delta": "δ", "mu": "μ", "theta": "θ", "pi": "π",
}  # fmt: skip
UPRIGHT = r"exp|log|max|min|clip|mean|std|sum|sqrt|var|whiten|stopgrad|sigmoid|tanh|sign|softmax"
TOKEN = re.compile(
    rf"(?P<logp>\blogp(?:_(?P<of>\w+))?)|(?P<function>\b(?:{UPRIGHT})(?:_(?P<over>\((?:[^()]*)\)|\w+))?\b)"
    r"|(?P<symbol>(?<!')\b(?:[A-Za-z]|" + "|".join(GREEK) + r")(?:_(?P<index>\([^()]*\)|\w+))?(?![\w'-]))"
    r"|(?P<power>\^(?P<exponent>\([^()]*\)|[\w.]+))|(?P<number>\b\d+(?:\.\d+)?e(?P<ten>[-+]?\d+))"
    r"|(?P<sign> \* |\+-|<-|>=|<=| - |(?<=[(,\[ ])-(?=[\w]))"
)
SIGNS = {" * ": " · ", "+-": "±", "<-": "←", ">=": "≥", "<=": "≤", " - ": " − ", "-": "−"}


def formula(described: str) -> str:
    """The lines of `describe` after its title, as HTML."""
    lines = []
    for line in described.splitlines()[1:]:
        text = TOKEN.sub(_typeset, html.unescape(line.strip()).replace("&", "and"))
        more = line.strip().startswith(("+ ", "- "))
        lines.append(
            f'<div class="formula{" more" if more else ""}">{text.replace("- ", "− ", 1) if more else text}</div>'
        )
    return "\n".join(lines)


def _typeset(found: re.Match[str]) -> str:
    if found["logp"]:
        return f"log π{_lowered(found['of'])}"
    if found["function"]:
        word = found["function"].partition("_")[0]
        return f"{word}{_lowered(found['over'])}"
    if found["symbol"]:
        word = found["symbol"].partition("_")[0]
        if found["symbol"] == "a" and not found.string[found.end() :].startswith(" ="):
            return "a"  # the article
        return f"<i>{GREEK.get(word, word)}</i>{_lowered(found['index'])}"
    if found["power"]:
        return f"<sup>{html.escape(found['exponent'].strip('()').replace('-', '−'))}</sup>"
    if found["number"]:
        base = found["number"].partition("e")[0]
        sign = "" if base == "1" else f"{base}·"
        return f"{sign}10<sup>{int(found['ten'])}</sup>".replace("-", "−")
    return SIGNS[found["sign"]]


def _lowered(index: str | None) -> str:
    if not index:
        return ""
    text = index.strip("()").replace("_", ", ").replace(">=", "≥")
    return f"<sub>{html.escape(text)}</sub>"


def pages() -> Iterable[tuple[str, str]]:
    """Name and text of each page of the library."""
    return ((name, page(name)) for name in LIBRARY)
