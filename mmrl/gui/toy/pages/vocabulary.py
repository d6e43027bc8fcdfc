"""Words and icons of the generated screens by split; the splits share none."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

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
    """Requests that it fulfils; none names it."""
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
