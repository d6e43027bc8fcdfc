"""HNPG in the recipe: which turns the critics know the return of, and a step within the trust region."""

import pytest
import torch

from mmrl.agents.methods.digirl import EPISODES
from mmrl.agents.methods.digirl_critics import CriticTraining
from mmrl.agents.rollout.episodes import AgentPayload
from mmrl.contrib.agents.hnpg import HnpgConfig, HnpgRecipe, HnpgSettings
from mmrl.errors import UserError
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step, make_reference
from mmrl.training.settings import ReferenceConfig, TrainerConfig
from mmrl.training.update import Updater, update_constants
from tests.agents.runs import by_length
from tests.contracts.domains import recorded
from tests.contrib.agents.test_archer import config as archer_config


def config(folder, model, **trainer) -> HnpgConfig:
    base = archer_config(folder, model)
    settings = HnpgSettings(
        path=str(recorded(folder)), turns=6, critic=CriticTraining(hidden=16, updates=3, batch_steps=8)
    )
    parts = {name: getattr(base, name) for name in ("output_dir", "model", "environment", "data", "sampler")}
    steps = {"steps": 2, "tasks_per_step": 2, "samples_per_task": 2, "learning_rate": 1.0, "max_grad_norm": 0.0}
    parts |= {"conversation": base.conversation, "actions": base.actions, "trainer": TrainerConfig(**steps | trainer)}
    return HnpgConfig(recipe="hnpg", hnpg=settings, **parts)


@pytest.fixture
def recipe(tmp_path, folder, monkeypatch, closing):
    monkeypatch.setattr("mmrl.agents.environments.environment.ActionConfig.parse", by_length)
    return closing(HnpgRecipe(config(tmp_path, folder)))


def batch_of(recipe, number=0):
    step = Step(number, 2)
    with torch.no_grad():
        rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(number), step)
    return recipe.advantages(recipe.score(rollouts, step), make_accelerator(), step)


def test_own_turns_have_returns_and_recorded_ones_a_bootstrap(recipe):
    for number in range(2):
        batch_of(recipe, number)
    drawn = recipe._choose(Step(1, 2), torch.Generator().manual_seed(0))
    fresh = recipe.store.stored(EPISODES, since=1)
    assert [each.on_policy for each in drawn] == [True] * 3 + [False] * 3
    assert all(any(each.record is record for record in fresh) for each in drawn[:3])
    assert all(any(each.record is record for record in recipe.recorded) for each in drawn[3:])
    _, columns = recipe._read(drawn, torch.rand(6, recipe.config.sampler.max_new_tokens))
    known = torch.stack(columns)[:, -1]
    expected = [sum(each.record["rewards"][each.turn :]) for each in drawn[:3]]
    assert known[:3].tolist() == pytest.approx(expected)
    assert known[3:].isnan().all()


def test_a_step_stays_in_its_trust_region(recipe):
    batch = batch_of(recipe)
    assert {e.trajectory.turns for e in AgentPayload.of(batch).episodes} == {1}
    noise = torch.randn(batch.num_rows, 1, generator=torch.Generator().manual_seed(0))
    batch = batch.replace(advantage=noise * batch.mask)
    accelerator, step = make_accelerator(), Step(0, 2)
    reference = make_reference(ReferenceConfig(), recipe.policy, needed=False)
    updater = Updater(recipe, accelerator, reference, failures=None)
    batch = update_constants(recipe, recipe.policy, reference, batch, step)
    before = recipe.scores(recipe.policy, batch, frozenset({"logp"})).logp.detach()
    updater.update(batch, step)
    moved = ((recipe.scores(recipe.policy, batch, frozenset({"logp"})).logp.detach() - before) * batch.mask).sum(1)
    assert recipe.noted["optim/natural_share"] == 1
    assert float((noise[:, 0] * moved).mean()) > 0
    assert 0 < float(moved.square().mean()) / 2 < 0.0105, "the sampled KL to second order, without its damping"


def test_what_natural_steps_do_not_take_is_refused(tmp_path, folder):
    for option, value in (("weight_decay", 0.1), ("max_grad_norm", 1.0), ("mixed_precision", "bf16")):
        with pytest.raises(ValueError, match=f"trainer.{option} is {value}, but natural-gradient steps"):
            config(tmp_path, folder, **{option: value}).validate()
    made = config(tmp_path, folder)
    made.hnpg.path = ""
    with pytest.raises(UserError, match=r"hnpg\.path is empty"):
        made.validate()
