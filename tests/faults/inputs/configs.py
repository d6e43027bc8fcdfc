"""Damaged configurations: each file of configs/ as values, as text and by overrides, up to where a run would start."""

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from mmrl.config import load_run, to_container
from mmrl.training import run as runs
from tests.faults.batches import Kind, Verdict, of_command
from tests.faults.damage import damage_text, damage_tree, strange_value

__all__ = ["KINDS"]

CONFIGS = Path(__file__).parents[3] / "configs"


class _EnoughError(Exception):
    """The configuration passed every check; the next step would build the model."""


def _stop(*_: Any, **__: Any) -> Any:
    raise _EnoughError


def checked(config: Path, *overrides: str) -> Verdict:
    """`mmrl train` until everything that needs no model has been checked."""
    train = runs.train

    def until_enough(*args: Any, **options: Any) -> Path:
        try:
            return train(*args, **options)
        except _EnoughError:
            return Path("run")

    with mock.patch.object(runs, "_build", _stop), mock.patch.object(runs, "train", until_enough):
        return of_command("train", config, *overrides)


def _prepare(folder: Path) -> list[Path]:
    return sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "experiments")


def _prepare_whole(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    return [(path, to_container(load_run(path)[1])) for path in _prepare(folder)]


def _values(files: list[Path], rng: random.Random, folder: Path) -> Verdict:
    """Values and keys of a file; the file that it extends stays valid."""
    path = rng.choice(files)
    tree = yaml.safe_load(path.read_text())
    if "extends" in tree:
        tree["extends"] = str(path.parent / tree["extends"])
    return _written(damage_tree(rng, tree, ("recipe", "trainer", "rewards", "extends", "objective")), folder)


def _all_values(files: list[tuple[Path, dict[str, Any]]], rng: random.Random, folder: Path) -> Verdict:
    """Values and keys of a configuration in which every option is spelled out."""
    return _written(damage_tree(rng, rng.choice(files)[1]), folder)


def _written(tree: Any, folder: Path) -> Verdict:
    # JSON is YAML; it writes what YAML's own writer refuses, such as surrogates
    (folder / "run.yaml").write_text(json.dumps(tree), encoding="utf-8", errors="surrogatepass")
    return (
        checked(folder / "run.yaml", f"output_dir={folder / 'run'}")
        if isinstance(tree, dict)
        else checked(folder / "run.yaml")
    )


def _text(files: list[Path], rng: random.Random, folder: Path) -> Verdict:
    path = rng.choice(files)
    text = damage_text(rng, path.read_text().replace("extends: ", f"extends: {path.parent}/"))
    (folder / "run.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    return checked(folder / "run.yaml", f"output_dir={folder / 'run'}")


def _override(files: list[tuple[Path, dict[str, Any]]], rng: random.Random, folder: Path) -> Verdict:
    path, whole = rng.choice(files)
    keys = [key for key in _dotted(whole, "") if not key.startswith("output_dir")]
    key = rng.choice(keys)
    key = damage_text(rng, key) if rng.random() < 0.2 else key
    value = strange_value(rng)
    text = value if isinstance(value, str) else json.dumps(value)
    words = [f"output_dir={folder / 'run'}", f"{key}={text}"]
    words = [word.replace("\0", "").encode(errors="ignore").decode() for word in words]  # a shell passes neither
    return checked(path, *words)


def _dotted(tree: Any, prefix: str) -> list[str]:
    if not isinstance(tree, dict) or not tree:
        return [prefix[:-1]]
    return [prefix[:-1], *(key for name in tree for key in _dotted(tree[name], f"{prefix}{name}."))][prefix == "" :]


KINDS = (
    Kind("config values", _prepare, _values, share=2.5),
    Kind("config, all values", _prepare_whole, _all_values, share=2),
    Kind("config text", _prepare, _text, share=2),
    Kind("config overrides", _prepare_whole, _override, share=1.5),
)
