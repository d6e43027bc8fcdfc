"""Options do something: the code reads each of them, and changing one changes a run or is refused."""

from __future__ import annotations

import ast
import copy
import dataclasses
import shutil
import typing
from pathlib import Path

import pytest

from mmrl.errors import RunError, UserError
from mmrl.fields import Bounds, bounds_of
from mmrl.options import options_of
from mmrl.recipes import RECIPES
from tests.contracts.domains import domain_of, run, weights

PROJECT = Path(__file__).resolve().parent.parent
MOST = 2
"""Other values that are tried before an option counts as unchanged."""
CANNOT = {
    "recipe": "the name of the recipe itself",
    "output_dir": "a path",
    "trainer.steps": "the walk sets it",
    "trainer.release_memory": "memory only",
    "trainer.threads": "speed only, and bits that depend on the machine",
    "tracking.": "what is logged",
    "checkpoint.": "what is kept",
    "evaluation.": "the walk trains without evaluations",
    "eval_data": "the walk trains without evaluations",
    "heldout_rewards": "measured and never optimised",
}
"""Beginnings of the keys of options that cannot change the numbers of training, with the reason."""
IDLE_IN_TINY_RUNS = {
    "trainer.warmup_steps": "a warmup of one step does not change the first rate of one",
    "trainer.final_learning_rate": "needs a schedule",
    "trainer.on_nonfinite": "needs a loss that is not finite",
    "trainer.max_nonfinite": "needs a loss that is not finite",
    "trainer.mixed_precision": "the contract's accelerator has its own",
    "trainer.skip_zero_advantage_groups": "saves time; their gradient is zero",
    "trainer.skip_steps_without_gradient": "needs a step without a gradient",
    "reference.ema_decay": "needs a reference that moves",
    "model.min_pixels": "the tiny images are larger",
    "model.lora.": "the base run trains all weights",
    "model.gradient_checkpointing": "saves memory",
    "data.video.": "the questions have no videos",
    "data.text_only": "needs data without images",
    "data.max_": "limits that the tiny data keep",
    "data.on_bad_row": "needs a row that cannot be read",
    "sampler.batch_rows": "saves memory",
    "sampler.lean": "saves time",
    "sampler.keep_prefill": "saves time",
    "rewards[].timeout_s": "needs a reward that hangs",
    "rewards[].batch_timeout_s": "needs a reward that hangs",
    "rewards[].memory_mb": "needs a reward that takes much memory",
    "rewards[].isolate": "where a reward runs, not what it says",
    "rewards[].rows": "the rewards of the walk score each row by itself",
    "adaptive_kl.horizon": "needs adaptive_kl.target",
}
"""Beginnings of the keys of options that do nothing in the walk's runs of two steps, with what they need or why."""
WALKED = {
    "vlm": {},
    "robot_grpo": {
        "trainer.old_logp": "the policy scores as it samples",
        "reference.kind": "the objective has no divergence",
        "sim.": "the simulator of the walk is a point on a line",
        "acting.": "chunks of one action",
        "data.randomized": "the simulator of the walk is not randomised",
        "logp_level": "chunks of one action",
    },
}
"""Recipes whose walk has been gone through, with what else is idle in their run; the others are still to be done."""
PASSED_ON = {
    "data.video.nframes": "given with the others to the video library, by its name",
    "data.video.total_pixels": "given with the others to the video library, by its name",
    "sim.randomization.friction": "drawn with the others, field by field",
    "sim.randomization.mass": "drawn with the others, field by field",
    "sim.randomization.servo_gain": "drawn with the others, field by field",
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


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An option in a configuration."""

    key: str
    path: tuple[str | int, ...]
    """Attributes and places in lists that lead to it."""
    hint: object
    bounds: Bounds | None


def leaves(config, key="", path=()):
    """Options of a filled configuration, without those of blocks and kinds, which have tests of their own."""
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value, here, way = getattr(config, item.name), f"{key}{item.name}", (*path, item.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{here}.", way)
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            yield from leaves(value[0], f"{here}[].", (*way, 0))
        elif not isinstance(value, dict):
            yield Leaf(here, way, hints[item.name], bounds_of(item))


def others(leaf, value):
    """Other legal values of an option, the nearest first."""
    if leaf.bounds is not None and leaf.bounds.choices is not None:
        return [choice for choice in leaf.bounds.allowed if choice != value]
    options = typing.get_args(leaf.hint) or (leaf.hint,)
    if isinstance(value, bool) or (value is None and bool in options):
        return [not value]
    if isinstance(value, (int, float)) or (value is None and {int, float} & set(options)):
        whole = isinstance(value, int) or (value is None and int in options)
        start = value or 0
        tried = [start + 1, start * 2, start // 2, start - 1] if whole else [start * 1.5, start / 2, 0.5, start + 1.0]
        fits = [one for one in tried if leaf.bounds is None or leaf.bounds.problem(leaf.key, one) is None]
        return [one for one in fits if one != value]
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, (int, float)) for one in value):
        return [[one * 0.9 for one in value]]
    return []


def changed(config, leaf, value):
    """A copy of the configuration with another value."""
    copied = copy.deepcopy(config)
    holder = copied
    for step in leaf.path[:-1]:
        holder = holder[step] if isinstance(step, int) else getattr(holder, step)
    object.__setattr__(holder, leaf.path[-1], value)  # some parts are frozen
    return copied


def outcome(config, folder):
    """Losses and weights of a run of two steps, or its refusal."""
    shutil.rmtree(folder, ignore_errors=True)
    config = copy.deepcopy(config)
    config.output_dir = str(folder)
    try:
        config.validate()
        trainer, losses = run(config, folder, steps=2)
    except (UserError, RunError, ValueError) as error:
        return f"refused: {error}"
    return losses, weights(trainer).tolist()


def unchanged(name, folder):
    """Options of a recipe whose other values change neither losses nor weights and are not refused."""
    base = domain_of(name).make_config(name, folder / "data")
    expected = outcome(base, folder / "run")
    assert not isinstance(expected, str), expected
    assert outcome(base, folder / "run") == expected, "the run does not repeat"
    found = []
    for leaf in leaves(base):
        if leaf.key.startswith(tuple(CANNOT)):
            continue
        value = base
        for step in leaf.path:
            value = value[step] if isinstance(step, int) else getattr(value, step)
        values = others(leaf, value)[:MOST]
        if values and all(outcome(changed(base, leaf, one), folder / "run") == expected for one in values):
            found.append(leaf.key)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKED)
def test_changing_an_option_changes_the_run(name, tmp_path):
    for module in domain_of(name).needs:
        pytest.importorskip(module)
    assert [key for key in unchanged(name, tmp_path) if not key.startswith((*IDLE_IN_TINY_RUNS, *WALKED[name]))] == []
