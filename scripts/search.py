"""Ask the built site's search what users ask: `python scripts/search.py build/site` fails if an answer is not first.

The ranking is that of the theme's script, computed with lunr.py.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from lunr import get_default_builder, stemmer, trimmer

QUERIES = {
    "wandb": ("logging",),
    "resume": ("run_folder", "scale"),
    "cite": ("cite",),
    "notebook": ("from_python",),
    "custom reward": ("rewards",),
    "LoRA": ("scale",),
    "multi-GPU": ("scale",),
    "out of memory": ("scale", "troubleshooting"),
    "checkpoint": ("run_folder",),
    "dataset format": ("data",),
    "flat reward": ("flat_reward",),
    "export": ("run_folder",),
}
"""What a user types, and the pages that answer it."""


def main(site: Path) -> int:
    """Print each query with the first three pages; 1 if a query finds another page first."""
    content = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    settings, documents = content["config"], content["docs"]
    separator = re.compile(settings["separator"])
    index = _index(documents, settings, separator)
    failed = 0
    for query, expected in QUERIES.items():
        words = [word.lower() for word in separator.split(query) if word]
        scores: dict[str, float] = {}
        for hit in index.search(" ".join(words)):
            location = hit["ref"]
            matched = sum(word in hit["match_data"].metadata for word in words) / len(words)
            # as in the theme: whole pages before sections, and documents with more of the words
            score = hit["score"] * (1 + (("#" not in location) + matched) ** 2)
            page = location.partition("#")[0].removesuffix(".html")
            scores[page] = max(score, scores.get(page, 0.0))
        first = sorted(scores, key=lambda page: -scores[page])[:3]
        found = bool(first) and first[0] in expected
        failed += not found
        sys.stdout.write(f"{'  ' if found else '! '}{query}: {', '.join(first) or 'nothing'}\n")
    return 1 if failed else 0


def _index(documents: list[dict[str, Any]], settings: dict[str, Any], separator: re.Pattern[str]) -> Any:
    """An index like the one that the theme builds in the browser."""
    builder = get_default_builder()
    builder.b(0)
    for function in (trimmer.trimmer, stemmer.stemmer):  # the site keeps whole words
        builder.pipeline.remove(function)
        builder.search_pipeline.remove(function)
    builder.ref("location")
    for name, field in settings["fields"].items():
        builder.field(name, boost=int(field["boost"]))
    for entry in documents:
        # lunr.py splits at blanks and hyphens, the site at its own separator and at tags
        texts = {key: " ".join(separator.split(re.sub(r"<[^>]*>", " ", entry[key]))) for key in ("title", "text")}
        builder.add({"location": entry["location"], "tags": "", **texts}, {"boost": entry.get("boost", 1)})
    return builder.build()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
