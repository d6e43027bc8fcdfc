"""FSDP2: a run whose weights lie in parts on two processes is the run of one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.runs.checkpoint import Checkpoints
from mmrl.training.processes import make_accelerator, merge_lists
from mmrl.training.sharding import is_part, saving
from mmrl.training.trainer import Trainer
from tests.contracts.domains import ONE_PROCESS
from tests.contracts.options import with_changes
from tests.contracts.test_two_processes import STEPS, assert_same, make, train, train_in_double, train_in_two

FSDP2 = {"trainer.sharding": "fsdp2"}
GATHERED = {
    "own": FSDP2,
    "bf16": FSDP2 | {"trainer.gathered": "bf16", "trainer.mixed_precision": "bf16"},
}
QUICK = ("robot_ppo",)
KL = {"kind": "k3", "coef": 0.1}
LORA = {"model.lora.enabled": True}
VARIANTS = {
    "papo, LoRA": ("papo", LORA),
    "vlm, average as reference": ("vlm", {"objective.kl": KL, "reference.kind": "ema"}),
    "vlm, micro-batches": ("vlm", {"trainer.micro_batch": 3}),
    "vlm, minibatches": ("vlm", {"trainer.minibatches_per_step": 2, "trainer.epochs": 2}),
    "awm, average": ("awm", {"eval_ema.decay": 0.9}),
    "flow_grpo, frozen reference": (
        "flow_grpo",
        {"objective.kl": {"kind": "full", "coef": 0.1}, "reference.kind": "frozen"},
    ),
}


def configured(name: str, folder: Path) -> Any:
    """The run of one process."""
    name, changes = VARIANTS.get(name, (name, {}))
    return with_changes(make(name, folder), changes)


def every() -> list[Any]:
    names = (*(name for name in RECIPES if name not in ONE_PROCESS), *VARIANTS)
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", every())
def test_weights_in_parts_learn_what_whole_ones_do(name, tmp_path):
    config = configured(name, tmp_path)
    whole = train_in_double(config, tmp_path / "one")
    assert_same(train_in_two(with_changes(config, FSDP2), tmp_path / "two", run=train_in_double), whole)


def one_step(config: Any, folder: Path) -> dict[str, Any]:
    """Which weights are in parts, bytes of the moments in each process, and the weights, after a step."""
    trainer = Trainer(
        RECIPES[config.recipe].load_recipe_class()(config),
        config,
        folder,
        make_accelerator(config.trainer.mixed_precision),
        None,
    )
    trainer.train_step()
    updater, accelerator = trainer.updater, trainer.accelerator
    state = updater.optimizer.state_dict()["state"].values()
    moments = [moment for entry in state for moment in entry.values() if moment.ndim]
    held = sum(moment.to_local().nbytes if is_part(moment) else moment.nbytes for moment in moments)
    trained = {name: weight for name, weight in trainer.policy.named_parameters() if weight.requires_grad}
    with saving(trainer.policy, keep=True):
        exact = {name: weight.detach().clone() for name, weight in trainer.policy.named_parameters() if name in trained}
    reference = trainer.reference.copy
    found = {
        "in_parts": len(updater.shards.parts) if updater.shards else 0,
        "whole_dtypes": {weight.dtype for weight in trained.values()},
        "any_part": any(is_part(weight) for weight in trained.values()),
        "reference_in_parts": reference is not None and any(is_part(weight) for weight in reference.parameters()),
        "moments": merge_lists([held], accelerator),
        "exact": exact,
    }
    trainer.saver.save(1)
    trainer.recipe.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("gathered", ["own", "bf16"])
def test_each_process_keeps_its_part_alone(gathered, tmp_path):
    config = make("papo", tmp_path)
    one = one_step(config, tmp_path / "one")
    two = train_in_two(with_changes(config, GATHERED[gathered]), tmp_path / "two", run=one_step)
    assert two["in_parts"] == len(one["exact"])
    assert not two["any_part"]
    assert two["whole_dtypes"] == {torch.bfloat16 if gathered == "bf16" else torch.float32}
    assert two["reference_in_parts"]
    assert sum(two["moments"]) == one["moments"][0]
    assert max(two["moments"]) < 0.6 * one["moments"][0]
    assert {weight.dtype for weight in two["exact"].values()} == {torch.float32}


@pytest.mark.slow
def test_float32_parts_learn_steps_that_bfloat16_rounds_away(tmp_path):
    """The whole weights are bfloat16; the parts, from which a checkpoint is written, move by less than those can."""
    config = make("sft", tmp_path)
    config.trainer.learning_rate, config.trainer.adam_eps = 1e-6, 1e-8
    one = train(config, tmp_path / "one")
    two = train_in_two(with_changes(config, GATHERED["bf16"]), tmp_path / "two", run=train_and_load)
    moved, expected = two["saved"] - one["begin"], one["weights"] - one["begin"]
    assert 0 < float(expected.abs().max()) < 1e-5
    agree = torch.nn.functional.cosine_similarity(moved, expected, dim=0)
    assert float(agree) > 0.9  # gradients of bfloat16 turn the sign of some of Adam's steps


def train_and_load(config: Any, folder: Path) -> dict[str, Any]:
    """A run, and the weights in its checkpoint."""
    found = train(config, folder)
    fresh = with_changes(
        config, {"trainer.sharding": "none", "trainer.gathered": "own", "trainer.mixed_precision": "none"}
    )
    policy = RECIPES[config.recipe].load_recipe_class()(fresh).policy
    policy.load_weights(Checkpoints(folder / "checkpoints", 0).latest() / "model")
    return found | {"saved": torch.cat([p.detach().flatten() for p in policy.parameters() if p.requires_grad])}


@pytest.mark.slow
@pytest.mark.parametrize("gathered", ["own", "bf16"])
@pytest.mark.parametrize("name", ["papo", "papo, LoRA", "vlm, average as reference", "awm, average", "robot_ppo"])
def test_a_run_in_parts_resumes_bit_for_bit_and_in_another_number_of_processes(name, gathered, tmp_path):
    config = configured(name, tmp_path)
    sharded = with_changes(config, GATHERED[gathered])
    whole = train_in_two(sharded, tmp_path / "whole")
    train_in_two(sharded, tmp_path / "stopped", STEPS - 1)
    resumed = train_in_two(sharded, tmp_path / "stopped", STEPS, True)
    assert torch.equal(resumed["weights"], whole["weights"])
    assert torch.equal(resumed["rows"][-1].nan_to_num(), whole["rows"][-1].nan_to_num())
    if gathered == "own":
        train_in_two(sharded, tmp_path / "fewer", STEPS - 1)
        assert_same(train(config, tmp_path / "fewer", STEPS, True), whole)
        train(config, tmp_path / "more", STEPS - 1)
        assert_same(train_in_two(sharded, tmp_path / "more", STEPS, True), whole)


def test_one_process_has_nothing_to_divide_its_weights_with(tmp_path):
    config = with_changes(make("robot_ppo", tmp_path), FSDP2)
    recipe = RECIPES[config.recipe].load_recipe_class()(config)
    with pytest.raises(UserError, match="this run has one process"):
        Trainer(recipe, config, tmp_path, make_accelerator(), None)
    recipe.close()
    config.trainer.sharding, config.trainer.gathered = "none", "bf16"
    with pytest.raises(
        UserError, match=r"trainer\.gathered is .bf16., but it has no effect while .* set trainer\.sharding: fsdp2"
    ):
        config.validate()
