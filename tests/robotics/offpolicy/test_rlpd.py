"""Recipe robot_rlpd: half of each batch is of demonstrations, which may be noisy and may be imitated."""

import json

import numpy as np
import pytest
import torch

from mmrl.config import from_values
from mmrl.errors import UserError
from robotics.data import LeRobotReader
from robotics.data.features import ACTION, EXECUTED
from robotics.episodes.recording import build_demonstrations
from robotics.offpolicy.presets import RobotRlpdConfig
from robotics.offpolicy.prior import PriorConfig, prior_records
from robotics.offpolicy.q_ensemble import QEnsemble
from robotics.offpolicy.sac import RobotSacRecipe
from robotics.offpolicy.sac_learner import QSettings, Rates, SacLearner, SacSettings, TemperatureSettings
from robotics.offpolicy.transitions import TransitionBatch, TransitionForm
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.policies.squashed import SquashedActionPolicy, SquashedPolicyConfig
from robotics.sim.opening import SimConfig
from tests.robotics.line_demos import demonstrate
from tests.robotics.noisy_line import NoisyLine
from tests.robotics.offpolicy.line_sac import TINY, rlpd_config, sac_config, trainer_of, weights_of

KIND = "tests.robotics.noisy_line:open_noisy"
FORM = TransitionForm(state=2, full=3, chunk=2, action=2, demonstrated=True)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Demonstrations with noise and full states."""
    folder = tmp_path_factory.mktemp("noisy") / "demos"
    sim = {"kind": KIND, "image_size": 0}
    return build_demonstrations(str(folder), sim=sim, episodes=3, noise=0.4, full=True)


def run(config, folder, steps=3, resume=False):
    trainer = trainer_of(config, folder, steps)
    if resume:
        trainer.resume()
    trainer.seen, log = [], trainer.log.step
    trainer.log.step = lambda step, metrics, tokens: trainer.seen.append(dict(metrics)) or log(step, metrics, tokens)
    trainer.run()
    trainer.recipe.close()
    return trainer


def test_the_preset_has_the_settings_of_rlpd(tmp_path):
    given = {"sac": {"gamma": 0.97}, "prior": {"path": "demos"}, "sim": {"image_size": 0}}
    config = from_values(RobotRlpdConfig, given | {"recipe": "robot_rlpd", "output_dir": "run"}, "")
    sac = config.sac
    assert (sac.gamma, sac.critics.count, sac.critics.subset, sac.critics.layer_norm) == (0.97, 10, 2, True)
    assert (sac.actor_values, sac.entropy_in_target, sac.temperature.target_entropy) == ("mean", False, -0.5)
    assert (config.utd, config.prior.ratio, config.warmup, sac.demo_bc) == (20, 0.5, "policy", 0)
    with pytest.raises(ValueError, match=r"set prior\.path"):
        rlpd_config(tmp_path, prior=PriorConfig())


@pytest.mark.parametrize(("utd", "every"), [(20.0, 20), (3.4, 3), (0.3, 1)])
def test_the_actor_learns_once_per_decision(tmp_path, utd, every):
    demos = demonstrate(tmp_path / "demos", episodes=2)
    config = rlpd_config(tmp_path / "run", utd=utd, prior=PriorConfig(path=str(demos)))
    learner = RobotSacRecipe(config).make_learner()
    assert learner.settings.actor_every == every
    assert config.sac.actor_every is None


@pytest.mark.parametrize(("batch", "wanted"), [(16, 8), (7, 4)])
def test_each_update_has_half_demonstrations(tmp_path, monkeypatch, batch, wanted):
    demos = demonstrate(tmp_path / "demos", episodes=2)
    seen, update = [], SacLearner.update

    def watched(learner, given, generator):
        seen.append((len(given.prior), int(given.prior.sum())))
        return update(learner, given, generator)

    monkeypatch.setattr(SacLearner, "update", watched)
    run(rlpd_config(tmp_path / "run", batch=batch, prior=PriorConfig(path=str(demos))), tmp_path / "run", steps=2)
    assert len(seen) > 8
    assert set(seen) == {(batch, wanted)}


def test_a_resumed_run_with_noisy_demonstrations_equals_an_uninterrupted_one(tmp_path, noisy):
    def config(folder):
        sac = SacSettings(actor_every=None, critics=QSettings(3, 2, True, width=16), demo_bc=1.0, demo_bc_updates=200)
        return rlpd_config(
            folder, sim=SimConfig(kind=KIND, image_size=0), prior=PriorConfig(path=str(noisy)), sac=sac, utd=0.7
        )

    whole = run(config(tmp_path / "whole"), tmp_path / "whole")
    run(config(tmp_path / "parts"), tmp_path / "parts", steps=2)
    parts = run(config(tmp_path / "parts"), tmp_path / "parts", resume=True)
    ours, theirs = weights_of(whole), weights_of(parts)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert 20 < whole.updater.learner.updates < 200  # the weight had not vanished
    last = whole.seen[-1]
    assert np.isfinite([last["bc/loss"], last["sac/q_prior"]]).all()
    names = [name for name in last if name.startswith(("sac/", "loss/", "bc/"))]
    assert [last[name] for name in names] == [parts.seen[-1][name] for name in names]


def test_critics_read_what_was_executed_and_the_actor_imitates_the_expert(noisy):
    records = prior_records(PriorConfig(path=str(noisy)), FORM, NoisyLine())
    first = LeRobotReader(noisy).episode(0)
    length = len(first)
    last = np.minimum(np.arange(length)[:, None] + np.arange(2), length - 1)
    own = records[:length]
    assert np.array_equal(own["actions"], first.extra[EXECUTED][last])
    assert np.array_equal(own["demonstrated"], first.action[last])
    assert not np.array_equal(own["actions"], own["demonstrated"])
    full = first.extra["observation.environment_state"]
    assert np.array_equal(own["full"], full)
    assert np.array_equal(own["next_full"][:-2], full[2:])
    # the executed actions lead to the next state
    moved = own["next_state"][:-2, 0] - own["state"][:-2, 0]
    np.testing.assert_allclose(moved, 0.1 * own["actions"][:-2, :, 0].sum(1), atol=1e-6)
    # plain demonstrations: both are the same
    without = prior_records(PriorConfig(path=str(noisy)), TransitionForm(2, 0, 2, 2), NoisyLine())
    assert without["full"].shape == (len(records), 0)
    assert np.array_equal(without["actions"], records["actions"])


def edited(folder, change):
    """Change the metadata of a dataset."""
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    change(info["features"])
    path.write_text(json.dumps(info))


def test_what_demonstrations_lack_is_named(tmp_path, noisy):
    def records(folder, form, **changes):
        return prior_records(PriorConfig(path=str(folder), **changes), form, NoisyLine())

    sim = {"kind": KIND, "image_size": 0}
    options = {"sim": sim, "episodes": 1, "noise": 0.4}
    build = {"build": "robotics.episodes.recording:build_demonstrations", "build_options": options}
    # missing, so it is built
    assert len(records(tmp_path / "demos", TransitionForm(2, 0, 1, 2), **build))
    with pytest.raises(UserError, match=r"3 entries of the simulator's full state, which .* does not store; build"):
        records(tmp_path / "demos", FORM)
    edited(tmp_path / "demos", lambda features: features.pop(EXECUTED))
    with pytest.raises(UserError, match=r"noise of 0\.4 .* it lacks complementary_info\.executed_action"):
        records(tmp_path / "demos", TransitionForm(2, 0, 1, 2))
    edited(tmp_path / "demos", lambda features: features[ACTION]["info"].pop("noise"))
    assert len(records(tmp_path / "demos", TransitionForm(2, 0, 1, 2)))


def test_a_replay_is_not_imitated(tmp_path):
    demos = demonstrate(tmp_path / "demos", episodes=2)
    run(rlpd_config(tmp_path / "first", prior=PriorConfig(path=str(demos))), tmp_path / "first", steps=1)
    replay = PriorConfig(path=str(tmp_path / "first/replay"))
    with pytest.raises(UserError, match="replay, with the actions of a policy"):
        RobotSacRecipe(rlpd_config(tmp_path / "other", prior=replay, sac=SacSettings(demo_bc=1.0)))
    RobotSacRecipe(rlpd_config(tmp_path / "other", prior=replay)).close()


def test_a_run_whose_demonstrations_changed_does_not_continue(tmp_path):
    demos = demonstrate(tmp_path / "demos", episodes=2)
    prior = PriorConfig(path=str(demos))
    run(rlpd_config(tmp_path / "run", prior=prior), tmp_path / "run", steps=1)
    other = PriorConfig(path=str(demonstrate(tmp_path / "others", episodes=3)))
    with pytest.raises(UserError, match="contents differ"):
        run(rlpd_config(tmp_path / "run", prior=other), tmp_path / "run", steps=2, resume=True)


# the learner alone, on two states: from 0 an action a < 0 ends the task with the reward -a / 2, another one leads to 1,
# where the task ends with the reward 1


def policy_of():
    encoder = EncoderConfig(image_size=None, state_size=1, **TINY)
    return SquashedActionPolicy.build(SquashedPolicyConfig(1, 1, encoder=encoder), [""], seed=0)


def learner_of(**settings):
    critics = QEnsemble(1, 1, critics=3, width=16, layers=1, norm=True)
    chosen = SacSettings(
        **{"gamma": 0.9, "tau": 0.1, "entropy_in_target": False, "actor_values": "mean", **settings},
        temperature=TemperatureSettings(initial=0.01),
    )
    return SacLearner(policy_of(), critics, chosen, Rates(learning_rate=1e-2))


def two_states(action, prior):
    """Transitions from 0 by actions (B,), and as many from 1."""
    rows = len(action)
    zeros, ones = torch.zeros(rows), torch.ones(rows)
    right, first = action > 0, torch.arange(2 * rows) < rows
    state = torch.cat([zeros, ones])[:, None]
    after = torch.cat([right.float(), ones])[:, None]
    rewards = torch.cat([torch.where(right, 0, -action / 2), ones])[:, None]
    ends = ~first | torch.cat([~right, right])
    actions = torch.cat([action, action])[:, None, None]
    numbers = torch.zeros(2 * rows, dtype=torch.int64)
    flags = torch.full((2 * rows,), prior)
    return TransitionBatch(state, state, actions, rewards, numbers + 1, after, after, ends, numbers, flags, actions)


def joined(*batches):
    parts = [vars(batch) for batch in batches]
    return TransitionBatch(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def test_demonstrations_teach_an_action_that_the_run_never_tried():
    generator = torch.Generator().manual_seed(0)
    own = two_states(-torch.rand(16, generator=generator), prior=False)
    demos = two_states(0.8 + 0.2 * torch.rand(16, generator=generator), prior=True)

    def learned(batch):
        """How often the policy goes from 0 to 1, and the value of that."""
        learner, zero = learner_of(), torch.zeros(64, 1)
        for number in range(100):
            learner.update(batch, torch.Generator().manual_seed(number))
        with torch.no_grad():
            drawn = learner.actor.act(PolicyInputs(None, zero, ("",) * 64), torch.Generator().manual_seed(0)).actions
            value = learner.critics(zero, torch.full((64, 1, 1), 0.9)).mean()
            return float((drawn > 0).float().mean()), float(value)

    assert learned(own)[0] < 0.1
    share, value = learned(joined(own, demos))
    assert share > 0.9
    assert value == pytest.approx(0.9, abs=0.15)


def test_the_weight_of_behaviour_cloning_falls_to_nothing():
    settings = SacSettings(demo_bc=2.0, demo_bc_updates=10)
    assert [settings.demo_bc_after(updates) for updates in (0, 5, 10, 11)] == [2.0, 1.0, 0.0, 0.0]
    assert SacSettings(demo_bc=2.0).demo_bc_after(10**6) == 2.0


def states_after(batch, **settings):
    learner = learner_of(**settings)
    metrics = [learner.update(batch, torch.Generator().manual_seed(number)) for number in range(2)]
    return learner.actor.state_dict(), metrics


def test_behaviour_cloning_imitates_the_demonstrated_actions_of_prior_transitions_alone():
    own = two_states(torch.full((4,), -0.9), prior=False)
    demos = two_states(torch.full((4,), 0.7), prior=True)
    shown = torch.full_like(demos.actions, 0.3)
    batch = joined(own, TransitionBatch(**{**vars(demos), "demonstrated": shown}))
    plain, metrics = states_after(batch)
    assert "bc/loss" not in metrics[0]
    cloned, (first, _) = states_after(batch, demo_bc=3.0)
    with torch.no_grad():
        inputs = PolicyInputs(None, demos.state, ("",) * len(demos.state))
        mean = policy_of().gaussian(inputs)[0].tanh()
    error = float((mean - shown).square().mean())
    assert first["bc/loss"] == pytest.approx(error, rel=1e-5)
    assert first["loss/actor"] == pytest.approx(metrics[0]["loss/actor"] + 3.0 * error, rel=1e-5)
    assert any(not torch.equal(plain[name], cloned[name]) for name in plain)
    # without demonstrations in the batch, and after the last of its updates, nothing differs to the bit
    for other, settings in ((own, {"demo_bc": 3.0}), (batch, {"demo_bc": 3.0, "demo_bc_updates": 1})):
        one, two = states_after(other)[0], states_after(other, **settings)[0]
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_actions_past_the_end_of_a_demonstration_are_not_imitated():
    encoder = EncoderConfig(image_size=None, state_size=1, **TINY)
    policy = SquashedActionPolicy.build(SquashedPolicyConfig(1, 2, encoder=encoder), [""], seed=0)
    settings = SacSettings(demo_bc=1.0)
    learner = SacLearner(policy, QEnsemble(1, 2, width=8), settings)
    state, flags = torch.zeros(1, 1), torch.ones(1, dtype=torch.bool)
    shown = torch.tensor([[[0.5], [0.9]]])
    one = torch.ones(1, dtype=torch.int64)
    batch = TransitionBatch(state, state, shown, torch.zeros(1, 2), one, state, state, flags, one - 1, flags, shown)
    mean = policy.gaussian(PolicyInputs(None, state, ("",)))[0].tanh()
    error = float((mean[0, 0].detach() - 0.5).square())
    assert learner.update(batch, torch.Generator())["bc/loss"] == pytest.approx(error, rel=1e-5)
    with pytest.raises(ValueError, match="no demonstrated actions"):
        learner.update(TransitionBatch(**{**vars(batch), "demonstrated": None}), torch.Generator())


def test_behaviour_cloning_without_demonstrations_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"sac\.demo_bc is 1, but there are no demonstrations; set prior\.path"):
        sac_config(tmp_path, sac=SacSettings(demo_bc=1.0))


def test_the_loss_of_behaviour_cloning_is_the_policys(tmp_path):
    demos = demonstrate(tmp_path / "demos", episodes=2)
    found = []
    for cloning in ("error", "likelihood"):
        options = {"encoder": {**TINY, "image_size": None}, "cloning": cloning}
        model = ActionPolicyConfig(kind="squashed", chunk=1, options=options)
        sac = SacSettings(critics=QSettings(width=16), demo_bc=1.0)
        config = rlpd_config(tmp_path / cloning, model=model, sac=sac, prior=PriorConfig(path=str(demos)))
        found.append(run(config, tmp_path / cloning, steps=2).policy.state_dict())
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])
