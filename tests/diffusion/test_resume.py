"""A run that is interrupted and resumed ends with the bits of one that was not."""

from __future__ import annotations

import pytest
import torch

from mmrl.recipes import RECIPES
from mmrl.training.checkpoint import Checkpoints
from mmrl.training.runs import train
from tests.diffusion.runs import read_lines, run_config


def awm(config):
    config.eval_ema.decay = 0.5
    config.awm.ema_slope = 0.1


def full(config):
    config.model.lora.enabled = False
    config.objective.kl_coef = 0.5


def critic(config):
    config.critic.warmup_updates = 4


def history(config):
    config.history.size, config.history.min_count = 5, 5


def stale(config):
    config.orw.refresh_every = 3


CASES = {
    "awm": ("awm", awm),
    "nft": ("diffusion_nft", None),
    "ac_flow": ("ac_flow", critic),
    "orw": ("orw_cfm_w2", stale),
    "ddpo": ("ddpo", history),
    "lora": ("flow_grpo", None),
    "full": ("flow_grpo", full),
}


def flat(value, prefix=""):
    """Tensors and numbers of a nested state by path."""
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in flat(part, f"{prefix}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for key, part in enumerate(value) for k, v in flat(part, f"{prefix}/{key}").items()}
    return {prefix: value}


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def final_state(folder, case, resumed):
    """State of the last checkpoint, and the metrics of all steps, after four steps."""
    name, change = CASES[case]
    config = run_config(name, folder, steps=4)
    config.evaluation.samples = 1
    if change is not None:
        change(config)
        config.validate()
    if resumed:
        config.trainer.steps = 2
        run_dir = train(RECIPES[name], config)
        (run_dir / "result.json").unlink()
        config.trainer.steps = 4
    run_dir = train(RECIPES[name], config, resume=resumed)
    checkpoint = Checkpoints(run_dir / "checkpoints", 2).latest()
    assert checkpoint.name == "step-000004"
    from diffusion.policy import ModelConfig, load_policy

    policy = load_policy(ModelConfig(path=str(checkpoint / "model"), lora=config.model.lora, max_sequence_length=1))
    weights = {name: value for name, value in policy.named_parameters() if value.requires_grad}
    state = Checkpoints.load_state(checkpoint)
    kept = flat({"recipe": state["recipe"], "optimizer": state["updater"], "tasks": state["tasks"]})
    return weights, kept, read_lines(run_dir / "metrics.jsonl")


@pytest.mark.parametrize("case", list(CASES))
def test_resumed_runs_end_with_the_same_bits(case, tmp_path):
    weights, state, metrics = final_state(tmp_path / "whole", case, resumed=False)
    again, state_again, metrics_again = final_state(tmp_path / "parts", case, resumed=True)
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert state.keys() == state_again.keys()
    assert not [name for name in state if not same(state[name], state_again[name])]
    for one, other in zip(metrics, metrics_again, strict=True):
        timed = ("time/", "tokens/per_second", "memory/", "wall")
        names = [name for name in one if not name.startswith(timed)]
        assert {name: one[name] for name in names} == {name: other[name] for name in names}


def test_a_checkpoint_keeps_every_average_the_recipe_has(tmp_path):
    _, state, _ = final_state(tmp_path, "awm", resumed=False)
    kinds = {path.split("/")[2] for path in state if path.startswith("/recipe")}
    assert {"eval_ema", "kl_ema", "cost", "errors"} <= kinds
    shadow = [value for path, value in state.items() if path.startswith("/recipe/kl_ema/")]
    assert sum(value.numel() for value in shadow) > 1000
