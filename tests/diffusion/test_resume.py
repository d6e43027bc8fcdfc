"""A run that is interrupted and resumed ends bit for bit like an uninterrupted one."""

import pytest
import torch

from mmrl.runs.checkpoint import Checkpoints
from tests.diffusion.runs import make_trainer, run_config, trained


def awm(config):
    config.eval_ema.decay = 0.5
    config.awm.ema_slope = 0.1


def full(config):
    config.model.lora.enabled = False
    config.objective.kl = {"coef": 0.5}


def critic(config):
    config.critic.warmup_updates = 4


def states(config):
    config.states, config.credit = "trajectory", "difference"
    config.sampler.solver, config.timesteps.count = "flow_sde", 2


def history(config):
    config.history.size, config.history.min_count = 5, 5


def stale(config):
    config.orw.refresh_every = 3


CASES = {
    "awm": ("awm", awm),
    "nft": ("diffusion_nft", None),
    "ac_flow": ("ac_flow", critic),
    "ac_flow_states": ("ac_flow", states),
    "flow_ppo": ("flow_ppo", critic),
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
    """Weights and state after four steps."""
    name, change = CASES[case]
    config = run_config(name, folder, steps=2 if resumed else 4)
    config.evaluation.samples = 1
    config.checkpoint.every = 2
    if change is not None:
        change(config)
        config.validate()
    trainer = make_trainer(config, folder)
    trainer.run()
    if resumed:
        trainer.recipe.close()
        config.trainer.steps = 4
        config.evaluation.at_start = False
        trainer = make_trainer(config, folder)
        trainer.resume()
        assert trainer.step == 2
        trainer.run()
    trainer.recipe.close()
    state = Checkpoints.load_state(trainer.saver.checkpoints.latest())
    assert state["step"] == 4
    kept = flat({name: state[name] for name in ("recipe", "updater", "tasks")})
    after = [row for row in state["evaluations"] if row["tag"] != "after" or row["step"] == 4]
    scores = [{key: value for key, value in row.items() if key != "cost/seconds"} for row in after]
    return trained(trainer.policy), kept, scores


QUICK = ("ac_flow_states", "orw", "lora", "full")
"""Cases that tests/contracts/test_recipes.py does not cover; the others are slow."""


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_resumed_runs_end_with_the_same_bits(case, tmp_path):
    weights, state, scores = final_state(tmp_path / "whole", case, resumed=False)
    again, state_again, scores_again = final_state(tmp_path / "parts", case, resumed=True)
    assert torch.equal(weights, again)
    assert state.keys() == state_again.keys()
    assert not [name for name in state if not same(state[name], state_again[name])]
    assert [row["tag"] for row in scores] == ["before", "after"]
    assert scores == scores_again


def test_a_checkpoint_keeps_every_average_the_recipe_has(tmp_path):
    _, state, _ = final_state(tmp_path, "awm", resumed=False)
    kinds = {path.split("/")[2] for path in state if path.startswith("/recipe")}
    assert {"eval_ema", "terms", "cost"} <= kinds
    shadow = [value for path, value in state.items() if path.startswith("/recipe/terms/kl_ema/")]
    assert sum(value.numel() for value in shadow) > 1000
