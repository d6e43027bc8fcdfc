"""Options do something: the code reads each of them, a run reads each of them, and changing one changes it.

Three levels:

- Source: in all recipes, some line outside of checks names each option.
- Reads: a tiny run of each recipe (two steps, an evaluation, a checkpoint), and runs of it with other parts on, read
  each option for more than a check, or its other values are refused. Reads are told apart by the dataclass that defines
  an option, not by its place: two parts of one dataclass, such as `data` and `eval_data`, count as one. The default
  tests do this for one recipe of each domain (QUICK), the slow ones for the others.
- Values (slow): in each recipe, other values of its options change metrics, evaluations, samples, checkpoints or
  weights of such a run, stop it, or are refused. An option that several recipes of a domain share belongs to the first
  of them.

Exceptions are listed one by one with their reasons in `tests/contracts/option_lists.py`. Not walked: policies of other
projects (`model.kind` openvla, lerobot, lerobot_flow), latents of large models (`latent.kind` vjepa2, video),
simulators other than the tabletop, language-model verifiers, and evaluations without training.
"""

import ast
import importlib.util
from pathlib import Path

import pytest

from mmrl.cli.options import options_of
from mmrl.core.blocks import BLOCKS
from mmrl.recipes import RECIPES
from tests.contracts.domains import domain_of
from tests.contracts.option_lists import CANNOT, IDLE, OWN
from tests.contracts.option_runs import try_variants, variants_of
from tests.contracts.options import effect, is_refused, leaves, outcome, reads_of, walk_config

PROJECT = Path(__file__).resolve().parent.parent
QUICK = ("vlm", "tspo", "agent", "aepo", "flow_grpo", "flow3d", "robot_grpo")
"""A recipe of each domain, whose reads are gone through in the default tests; those of the others are slow tests."""
PASSED_ON = {
    "data.video.nframes": "given with the others to the video library, by its name",
    "data.video.total_pixels": "given with the others to the video library, by its name",
    "sim.randomization.friction": "drawn with the others, field by field",
    "sim.randomization.mass": "drawn with the others, field by field",
    "sim.randomization.servo_gain": "drawn with the others, field by field",
    "sim.randomization.sensor_noise.pieces_m": "named by the kind of an entry of the state",
    "sim.randomization.sensor_noise.pieces_rad": "named by the kind of an entry of the state",
}
"""Options that no line of code names."""


def names_read():
    """Names that the suite reads as attributes, outside of `validate` and `formula`."""
    found = set()
    for room in ("mmrl", "diffusion", "robotics"):
        for path in (PROJECT / room).rglob("*.py"):
            found |= _names_in(ast.parse(path.read_text(encoding="utf-8")))
    return found


def _names_in(tree):
    found, todo = set(), [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef) and node.name in ("validate", "formula"):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        todo += ast.iter_child_nodes(node)
    return found


def test_the_code_reads_every_option():
    read, unread = names_read(), {}
    for name, entry in RECIPES.items():
        for option in options_of(entry.load_defaults()):
            last = option.key.rpartition(".")[2].removesuffix("[]")
            if last not in read and option.key.replace("eval_data.<name>", "data") not in PASSED_ON:
                unread.setdefault(option.key, []).append(name)
    assert unread == {}


def need(name):
    for module in domain_of(name).needs:
        pytest.importorskip(module)


def listed(name, leaf):
    """Whether an option is listed as one without an effect."""
    own = OWN.get(name, {})
    listed_under = any(leaf.key.startswith(key) for key in own if key.endswith("."))
    return leaf.name in CANNOT or leaf.name in IDLE or leaf.key in own or listed_under


def of_a_block(leaf):
    """Whether an option is that of an objective's block."""
    return any(issubclass(block, leaf.owner[0]) for table in BLOCKS.values() for block in table.values())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_a_run_reads_every_option(name, tmp_path, monkeypatch):
    need(name)
    base = walk_config(name, tmp_path)
    read = reads_of(base, tmp_path, monkeypatch)
    unread = [leaf for leaf in leaves(base) if leaf.owner not in read and not listed(name, leaf)]
    unread = [leaf for leaf in unread if not is_refused(base, leaf)]
    for variant, config in variants_of(name, tmp_path):
        if any(variant.matches(leaf) for leaf in unread):
            read = reads_of(config, tmp_path, monkeypatch)
            unread = [leaf for leaf in unread if leaf.owner not in read]
    assert [leaf.key for leaf in unread] == []


def test_every_further_run_is_one_of_some_recipe(tmp_path):
    refusals, taken = {}, set()
    for name in RECIPES:
        if all(importlib.util.find_spec(module) for module in domain_of(name).needs):
            for variant, config in try_variants(name, tmp_path / name):
                if isinstance(config, str):
                    refusals.setdefault(id(variant), []).append(f"{variant.changes} in {name}: {config}")
                else:
                    taken.add(id(variant))
    assert [reasons for variant, reasons in refusals.items() if variant not in taken] == []


def earlier(name):
    """Recipes of the same domain that come before this one; what they share is changed there."""
    names = list(RECIPES)
    domain = domain_of(name).recipe, RECIPES[name].supervised
    return [
        other for other in names[: names.index(name)] if (domain_of(other).recipe, RECIPES[other].supervised) == domain
    ]


def places(config):
    """Where options are, apart from their names in lists: dataclass, name, and whether it is the evaluation's."""
    return {(leaf.owner, leaf.key.startswith("eval")) for leaf in leaves(config)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_changing_an_option_changes_the_run(name, tmp_path):
    """Options of an objective's blocks are tried in tests/core/test_block_options.py."""
    need(name)
    elsewhere = set().union(*(places(walk_config(other, tmp_path / other)) for other in earlier(name)))
    runs = [(None, walk_config(name, tmp_path)), *variants_of(name, tmp_path)]
    results = {}
    for variant, config in runs:
        own = [leaf for leaf in leaves(config) if (leaf.owner, leaf.key.startswith("eval")) not in elsewhere]
        own = [leaf for leaf in own if not listed(name, leaf) and not of_a_block(leaf)]
        own = [leaf for leaf in own if variant is None or variant.matches(leaf)]
        own = [leaf for leaf in own if results.get((leaf.key, leaf.owner)) not in ("changed", "stopped")]
        expected = outcome(config, tmp_path / "run") if own else None
        assert not isinstance(expected, str), expected
        for leaf in own:
            place = leaf.key, leaf.owner
            found = effect(config, expected, leaf, tmp_path / "run")
            if found != "unchanged" or place not in results:
                results[place] = found
    assert [key for (key, _), result in results.items() if result == "unchanged"] == []
