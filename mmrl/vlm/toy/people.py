"""People: a sentence about a person becomes JSON with name, age and city. Text only, for a model that knows English.

Names, cities and sentence forms of held-out rows are in no training row. Most training forms begin with another word
than the name, so that taking the first capitalised word for the name earns less than reading.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.files import write_atomically
from mmrl.rewards.answers import Chat, completion_text

WOMEN = (
    "Anna Carla Emma Grace Ivy Karen Mona Olga Rosa Tina Vera Xenia Zoe Alice Chloe Elena Gina Irene Kate Maria Nina "
    "Paula Sara Ursula Wendy"
)
MEN = (
    "Ben David Frank Henry Jack Liam Noah Peter Quinn Sam Umar Walter Yusuf Bruno Diego Felix Hugo James Leo Oscar "
    "Ravi Tom Victor"
)
CITIES = (
    "Paris London Berlin Madrid Rome Vienna Prague Lisbon Dublin Oslo Athens Cairo Tokyo Delhi Boston Chicago Denver "
    "Dallas Miami Seattle Toronto Sydney Lima Havana"
)
AGES = range(18, 81)
FORMS = {
    "train": (
        "{name} is {age} years old and lives in {city}.",
        "My friend {name} lives in {city} and turned {age} last week.",
        "At {age}, {name} moved to {city}.",
        "In {city} I met {name}, who is {age}.",
        "{name}, {age}, comes from {city}.",
        "{city} is where {name}, who is {age}, works.",
        "{He} told me that {his} name is {name}, that {he} is {age} and that {he} likes {city}.",
        "Nobody in {city} runs faster than {name}, aged {age}.",
        "Our neighbour {name} left {city} at the age of {age}.",
        "{His} name is {name}, {his} home is {city}, and {his} age is {age}.",
    ),
    "test": (
        "This is {name} from {city}, who will soon be {age}.",
        "{city} is home to {name}, aged {age}.",
        "{He} is called {name}, {he} is {age}, and {city} is {his} town.",
    ),
}
"""Sentence forms of each split."""
SHE = {"He": "She", "he": "she", "His": "Her", "his": "her"}
HE = {word: word for word in SHE}
PEOPLE = [*((name, SHE) for name in WOMEN.split()), *((name, HE) for name in MEN.split())]
"""Names, each with the pronouns of its sentences."""
TEST_SHARE = 4
"""One name and one city in this many are held out."""
QUESTION = "{sentence}\nWrite this person as JSON with the keys name, age and city."
KEYS = ("name", "age", "city")


def build_people(path: str | Path, *, count: int = 600, split: str = "train", seed: int = 0) -> Path:
    """Write distinct sentences about people.

    Args:
        path: JSONL file to write; columns question, name, age, city, form (the sentence without name, age and city) and
            completion (the object).
        count: number of rows.
        split: "train" or "test", whose names, cities and sentence forms are disjoint.
        seed: random seed.

    Returns:
        The file.

    Raises:
        ValueError: unknown split, or more rows than there are.
    """
    if split not in FORMS:
        raise ValueError(f"split is {split!r}; must be one of {', '.join(FORMS)}")
    people, cities, forms = _part(PEOPLE, split), _part(CITIES.split(), split), FORMS[split]
    shape = (len(forms), len(people), len(cities), len(AGES))
    if count > (most := int(np.prod(shape))):
        raise ValueError(f"count is {count}, but the split {split} only has {most} distinct rows")
    chosen = np.random.default_rng(seed).choice(most, count, replace=False)
    rows = []
    for form, person, city, age in zip(*np.unravel_index(chosen, shape), strict=True):
        name, pronouns = people[person]
        columns = {"name": name, "age": AGES[age], "city": cities[city]}
        question = QUESTION.format(sentence=forms[form].format(**columns, **pronouns))
        shown = forms[form].format(name="…", age="…", city="…", **SHE).rstrip(".")
        rows.append({"question": question, **columns, "form": shown, "completion": json.dumps(columns)})
    write_atomically(Path(path), "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    return Path(path)


def _part(values: Sequence[Any], split: str) -> list[Any]:
    """Names or cities of a split."""
    return [value for place, value in enumerate(values) if (place % TEST_SHARE == 0) == (split == "test")]


def person_json(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    name: Sequence[str],
    age: Sequence[int],
    city: Sequence[str],
    **_: Any,
) -> list[float]:
    """Give 0.25 to a JSON object with exactly the keys name, age and city, and 0.25 more for each correct value.

    Args:
        prompts: questions.
        completions: responses; one with anything but the object earns nothing.
        name: name of each person.
        age: age of each person in years; as a number or a text.
        city: city of each person.

    Returns:
        0, 0.25, 0.5, 0.75 or 1 for each response.
    """
    scores = []
    for said, *right in zip(completions, name, age, city, strict=True):
        found = _parsed(completion_text(said))
        if set(found) != set(KEYS):
            scores.append(0.0)
            continue
        same = [str(found[key]) == str(value) for key, value in zip(KEYS, right, strict=True)]
        scores.append((1 + sum(same)) / (1 + len(KEYS)))
    return scores


def person_exact(prompts: Sequence[Chat], completions: Sequence[Chat], **columns: Any) -> list[float]:
    """Give 1 to an object that `person_json` gives 1, else 0."""
    return [float(score == 1.0) for score in person_json(prompts, completions, **columns)]


def _parsed(text: str) -> dict[str, Any]:
    """The JSON object that a text consists of; empty if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
