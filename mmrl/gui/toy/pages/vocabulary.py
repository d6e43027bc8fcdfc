"""Words, icons and themes of the generated screens by split; the splits share no words or icons."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True)
class Theme:
    """Colours and shapes of a page."""

    name: str
    background: str
    surface: str
    text: str
    accent: str
    on_accent: str
    border: str
    font: str
    radius_px: int


SANS, LIBERATION, SERIF, MONO = "DejaVu Sans", "Liberation Sans", "Liberation Serif", "DejaVu Sans Mono"

THEMES: dict[str, tuple[Theme, ...]] = {
    "train": (
        Theme("paper", "#f6f6f4", "#ffffff", "#222222", "#1a66cc", "#ffffff", "#c8c8c8", LIBERATION, 4),
        Theme("night", "#1e2126", "#2b3038", "#e8e8e8", "#4f9dff", "#101418", "#495058", SANS, 6),
        Theme("mint", "#eaf5ef", "#ffffff", "#17352a", "#0b8457", "#ffffff", "#a9cdbd", LIBERATION, 12),
        Theme("plain", "#ffffff", "#eeeeee", "#000000", "#444444", "#ffffff", "#888888", SERIF, 0),
        Theme("rose", "#fff2f4", "#ffffff", "#40151d", "#c2274b", "#ffffff", "#e2b1bb", SANS, 8),
    ),
    "test": (
        Theme("slate", "#dfe5ea", "#f7f9fb", "#1c2a36", "#37546d", "#ffffff", "#9fb0bf", SANS, 3),
        Theme("amber", "#2a2118", "#382d22", "#f5e6cf", "#e39b2d", "#20180f", "#6a5640", LIBERATION, 10),
        Theme("terminal", "#0c140c", "#132013", "#9fe89f", "#2fae2f", "#041004", "#2d5a2d", MONO, 0),
        Theme("lilac", "#f3effa", "#ffffff", "#2c2140", "#7446c9", "#ffffff", "#c6b5e4", SERIF, 16),
    ),
}
"""Themes by split."""

DENSITIES: dict[str, tuple[int, int]] = {"compact": (11, 3), "normal": (13, 5), "roomy": (14, 8)}
"""Font size and padding in CSS pixels."""


LANGUAGES = ("en", "de", "es")
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Function:
    """The function of a control, in one split and language."""

    name: str
    """Key in functions.toml."""
    family: str
    """Functions of one family are easily confused."""
    labels: tuple[str, ...]
    """Texts of its buttons."""
    phrases: tuple[str, ...]
    """Requests that it fulfils, without naming it."""
    icon: str
    """SVG elements."""


@cache
def functions(words: str, language: str) -> Mapping[str, Function]:
    """The functions by name, with the words of a split ("train" or "test") and language."""
    icons = _read("icons.toml")
    prefix = "test_" if words == "test" else ""
    found = {}
    for name, entry in _read("functions.toml").items():
        texts = entry[language]
        labels, phrases = texts[f"{prefix}labels"], texts[f"{prefix}phrases"]
        found[name] = Function(name, entry["family"], tuple(labels), tuple(phrases), icons[name][words])
    return MappingProxyType(found)


@cache
def _read(name: str) -> dict[str, dict]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))


CONTENT: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "people": ("Anna Berger", "Luis Ortega", "Mei Tanaka", "Paul Novak", "Sara Lindt", "Omar Haddad", "Eva Roth"),
        "files": ("budget.xlsx", "report.pdf", "holiday.jpg", "contract.docx", "notes.txt", "slides.pptx", "plan.csv"),
        "topics": ("Quarterly numbers", "Lunch on Friday", "Travel plans", "Invoice 2041", "Team photo", "New printer"),
        "places": ("Berlin", "Madrid", "Oslo", "Lyon", "Kyoto", "Boston", "Quito"),
        "titles": ("Workspace", "Notebook", "Office", "Library", "Studio"),
    },
    "test": {
        "people": ("Ines Valdez", "Tom Fischer", "Aisha Khan", "Jonas Weber", "Nora Silva", "Ravi Patel", "Lena Vogt"),
        "files": ("ledger.ods", "thesis.tex", "sunset.png", "lease.odt", "diary.md", "poster.svg", "grades.tsv"),
        "topics": ("Parking permits", "Fire drill", "Choir rehearsal", "Order 7719", "Garden party", "Lost umbrella"),
        "places": ("Vienna", "Lima", "Turin", "Bergen", "Osaka", "Denver", "Cork"),
        "titles": ("Cockpit", "Inbox", "Depot", "Atelier", "Bureau"),
    },
}
"""Names of people and things by split."""

FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "en": ("Name", "City", "Phone", "Company", "Dark mode", "Newsletter", "Country"),
        "de": ("Name", "Stadt", "Telefon", "Firma", "Dunkler Modus", "Rundbrief", "Land"),
        "es": ("Nombre", "Ciudad", "Teléfono", "Empresa", "Modo oscuro", "Boletín", "País"),
    },
    "test": {
        "en": ("Nickname", "Street", "Website", "Department", "Large print", "Reminders", "Birthplace"),
        "de": ("Spitzname", "Straße", "Webseite", "Abteilung", "Großschrift", "Erinnerungen", "Geburtsort"),
        "es": ("Apodo", "Calle", "Sitio web", "Departamento", "Letra grande", "Recordatorios", "Lugar natal"),
    },
}
"""Labels of inputs by split and language."""
