"""Options that became constants: read at their value, refused at another."""

from __future__ import annotations

import dataclasses

import pytest
from omegaconf import OmegaConf

from mmrl.config import fill, load_run, without_fixed
from mmrl.errors import UserError
from mmrl.fields import default_of, hints_of, part_of
from mmrl.fixed import FIXED, fixed_options
from mmrl.recipes import RECIPES, contrib_recipes, find_recipe

QUESTIONS = ["model.path=m", "data.path=d.jsonl", "rewards=[{name: exact}]"]


def filled(recipe, *options):
    return fill(find_recipe(recipe).load_defaults(), [*QUESTIONS, *options], "here")


def test_the_value_of_a_constant_is_read_silently_wherever_its_part_is():
    given = ["trainer.max_nonfinite=10", "eval_data={held: {path: h.jsonl, max_line_mb: 32}}"]
    given += ["evaluation.revision.reasoner.path=r", "evaluation.revision.reasoner.patch_product=true"]
    assert filled("vlm", *given) == filled(
        "vlm", "eval_data={held: {path: h.jsonl}}", "evaluation.revision.reasoner.path=r"
    )


@pytest.mark.parametrize(
    ("recipe", "option", "message"),
    [
        ("vlm", "trainer.max_nonfinite=3", "trainer.max_nonfinite is fixed at 10 since 0.3 (a run with as many"),
        ("vlm", "model.patch_product=false", "model.patch_product is fixed at True since 0.3"),
        ("vlm", "eval_data={held: {path: h, max_line_mb: 64}}", "eval_data.held.max_line_mb is fixed at 32"),
    ],
)
def test_another_value_is_refused_with_the_reason(recipe, option, message):
    with pytest.raises(UserError) as caught:
        filled(recipe, option)
    assert message in str(caught.value)


def test_options_of_a_former_part_are_checked_one_by_one():
    entry = find_recipe("flow3d_eval").load_defaults()
    kept = without_fixed(entry, OmegaConf.create({"loop": {"planner": {"samples": 2, "ik": {"restarts": 4}}}}))
    assert OmegaConf.to_container(kept) == {"loop": {"planner": {"samples": 2}}}
    with pytest.raises(UserError, match=r"loop\.planner\.ik\.restarts is fixed at 4"):
        without_fixed(entry, OmegaConf.create({"loop": {"planner": {"ik": {"restarts": 2}}}}))


def test_a_stored_configuration_of_an_older_run_is_read(tmp_path):
    path = tmp_path / "config.yaml"
    text = "recipe: vlm\nmodel: {path: m, patch_product: true}\ndata: {path: d}\nrewards: [{name: exact}]\n"
    path.write_text(text)
    assert load_run(path)[1].model.path == "m"
    path.write_text(text.replace("true", "false"))
    with pytest.raises(UserError, match=r"model\.patch_product is fixed"):
        load_run(path)


def classes_of(schema, found):
    if schema in found:
        return
    found.add(schema)
    for item in dataclasses.fields(schema):
        part, default = part_of(hints_of(schema)[item.name])[0], default_of(item)
        for each in (part, type(default) if dataclasses.is_dataclass(default) else None):
            if each is not None:
                classes_of(each, found)


def test_every_former_option_belongs_to_a_class_that_recipes_have():
    found = set()
    for entry in (*RECIPES.values(), *contrib_recipes().values()):
        classes_of(entry.load_config_class(), found)
    named = {f"{base.__module__.rpartition('.')[2]}.{base.__name__}" for each in found for base in each.__mro__}
    assert set(FIXED) <= named
    former = {name for schema in found for name in fixed_options(schema)}
    assert former == {name for options in FIXED.values() for name in options}, "an option is fixed and exists"
