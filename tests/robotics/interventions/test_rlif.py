"""Recipe robot_rlif on the line: what is rewarded, what the demonstration half holds, and resuming."""

import dataclasses

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.data import LeRobotReader
from robotics.interventions.overseers import OverseerConfig
from robotics.interventions.rlif import RobotRlifRecipe
from robotics.offpolicy.sac_learner import QSettings, SacLearner, SacSettings
from robotics.policies.policy_loading import ActionPolicyConfig
from tests.robotics.line_demos import demonstrate
from tests.robotics.offpolicy.line_sac import TINY, rlif_config, trainer_of, weights_of


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return demonstrate(tmp_path_factory.mktemp("rlif") / "demos", episodes=2)


def run(config, folder, steps=3, resume=False):
    trainer = trainer_of(config, folder, steps)
    if resume:
        trainer.resume()
    trainer.seen, log = [], trainer.log.step
    trainer.log.step = lambda step, metrics, tokens: trainer.seen.append(dict(metrics)) or log(step, metrics, tokens)
    trainer.run()
    trainer.recipe.close()
    return trainer


def test_each_step_before_an_intervention_costs_one_and_nothing_else_pays(tmp_path, demos):
    trainer = run(rlif_config(tmp_path, demos), tmp_path)
    dataset = LeRobotReader(tmp_path / "replay/dataset")
    assert len(dataset) == 6
    costs = 0
    for episode in dataset:
        owner = episode.extra["intervention"].ravel().tolist()
        paid = episode.extra["next.reward"].ravel().tolist()
        wanted = [-1.0 if not now and then else 0.0 for now, then in zip(owner, [*owner[1:], False], strict=True)]
        assert paid == wanted
        costs -= sum(paid)
        # of every episode the last step is there, ended by the task or cut off
        ends = episode.extra["next.terminated"].ravel().tolist()
        assert ends == [False] * (len(ends) - 1) + [episode.success]
        assert episode.success or len(ends) == 12
    assert costs > 2
    last = trainer.seen[-1]
    assert 0 < last["intervention/rate"] < 1
    assert last["reward/mean"] <= 0
    # a success with help is not the policy's own
    assert not [name for name in last if name.startswith("episode/success")]


def test_the_demonstration_half_holds_demonstrations_and_the_overseers_steps(tmp_path, demos, monkeypatch):
    seen, update = [], SacLearner.update

    def watched(learner, batch, generator):
        seen.append(batch)
        return update(learner, batch, generator)

    monkeypatch.setattr(SacLearner, "update", watched)
    # 0.3 stands out from the demonstrations, which move at the same speed in all steps
    critics = QSettings(count=3, subset=2, layer_norm=True, width=16, layers=1)
    config = rlif_config(tmp_path, demos, sac=SacSettings(actor_every=None, critics=critics, demo_bc=1.0))
    trainer = run(config, tmp_path)
    assert all(int(batch.prior.sum()) == 8 and len(batch.prior) == 16 for batch in seen)
    half = [dataclasses.replace(batch, prior=batch.prior) for batch in seen]
    rewards = torch.cat([batch.rewards[batch.prior] for batch in half])
    states = torch.cat([batch.state[batch.prior] for batch in half]).tolist()
    imitated = torch.cat([batch.demonstrated[batch.prior] for batch in half])
    actions = torch.cat([batch.actions[batch.prior] for batch in half])
    assert torch.equal(rewards, torch.zeros_like(rewards))
    assert torch.equal(imitated, actions)
    given = {tuple(state) for episode in LeRobotReader(demos) for state in episode.state.tolist()}
    owned = set()
    for episode in LeRobotReader(tmp_path / "replay/dataset"):
        mine = episode.extra["intervention"].ravel()
        owned |= {tuple(state) for state in episode.state[mine].tolist()}
    drawn = {tuple(state) for state in states}
    assert drawn <= given | owned
    assert drawn & (owned - given)
    assert drawn & given
    # the other half has steps of the policy, whose interruptions cost something
    assert any(bool((batch.rewards[~batch.prior] < 0).any()) for batch in seen)
    assert trainer.updater.learner.updates == len(seen)


def test_corrections_older_than_the_capacity_are_not_drawn(tmp_path, demos):
    run(rlif_config(tmp_path, demos), tmp_path)
    config = rlif_config(tmp_path / "again", demos, capacity=5)
    recipe = RobotRlifRecipe(config)
    recipe.open_replay(tmp_path / "again/replay")
    recipe.load_parts(max((tmp_path / "checkpoints").iterdir()))
    newest, given = recipe.replay.index.records[-5:], recipe.prior.records
    known = {tuple(state) for part in (newest["state"], given["state"]) for state in part.tolist()}
    for seed in range(20):
        batch = recipe.draw(torch.Generator().manual_seed(seed))
        assert {tuple(state) for state in batch.state.tolist()} <= known
    recipe.close()


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, demos):
    whole = run(rlif_config(tmp_path / "whole", demos), tmp_path / "whole")
    run(rlif_config(tmp_path / "parts", demos), tmp_path / "parts", steps=2)
    parts = run(rlif_config(tmp_path / "parts", demos), tmp_path / "parts", resume=True)
    ours, theirs = weights_of(whole), weights_of(parts)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert whole.updater.learner.updates > 10
    names = [name for name in whole.seen[-1] if name.startswith(("sac/", "loss/", "intervention/"))]
    assert [whole.seen[-1][name] for name in names] == pytest.approx(
        [parts.seen[-1][name] for name in names], rel=0, abs=0, nan_ok=True
    )


def test_without_interventions_nothing_is_paid(tmp_path, demos):
    quiet = OverseerConfig(kind="random", rate=0.0, flip=0.0)
    trainer = run(rlif_config(tmp_path, demos, overseer=quiet), tmp_path, steps=2)
    assert trainer.seen[-1]["intervention/rate"] == 0
    assert trainer.seen[-1]["reward/mean"] == 0
    for episode in LeRobotReader(tmp_path / "replay/dataset"):
        assert not np.any(episode.extra["intervention"])
        assert not np.any(episode.extra["next.reward"])


def test_options_without_an_effect_are_refused(tmp_path, demos):
    with pytest.raises(ValueError, match="reward has no effect in robot_rlif"):
        rlif_config(tmp_path, demos, potential=1.0)
    with pytest.raises(ValueError, match="warmup is random"):
        rlif_config(tmp_path, demos, warmup="random")
    with pytest.raises(ValueError, match=r"overseer\.kind is keyboard; robot_rlif takes distance, random, environment"):
        RobotRlifRecipe(rlif_config(tmp_path, demos, overseer=OverseerConfig(kind="keyboard")))
    model = ActionPolicyConfig(kind="squashed", chunk=2, options={"encoder": {**TINY, "image_size": None}})
    with pytest.raises(UserError, match=r"chunk is 2; robot_rlif needs model\.chunk=1"):
        RobotRlifRecipe(rlif_config(tmp_path, demos, model=model))
