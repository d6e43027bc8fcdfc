"""BESO: cloning, guidance, its folder, and the methods that can and cannot improve it."""

import pytest
import torch

from mmrl.errors import ConfigError, UserError
from mmrl.fields import check_config
from mmrl.recipes import find_recipe
from mmrl.training.run import train
from robotics.contrib.beso import BesoPolicy, BesoPolicyConfig
from robotics.policies.base.action_policy import PolicyInputs, open_policy
from robotics.policies.base.action_tokens import RowGenerators
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.policy_loading import ActionPolicyConfig
from tests.contracts.domains import domain_of
from tests.robotics.line_demos import BLIND
from tests.robotics.offpolicy.line_sac import improving_config, trainer_of

STATE, TEXTS = 3, ("go left", "go right")


def make(**options):
    encoder = EncoderConfig(image_size=None, state_size=STATE, width=32, heads=2, layers=1)
    return BesoPolicy.build(BesoPolicyConfig(2, 3, hidden=64, blocks=1, encoder=encoder, **options), TEXTS)


def inputs(rows=4, texts=TEXTS):
    states = torch.randn(rows, STATE, generator=torch.Generator().manual_seed(0))
    return PolicyInputs(None, states, tuple(texts[row % len(texts)] for row in range(rows)))


def cloned(policy, steps=300):
    """A policy that imitates 0.6 for one instruction and -0.6 for the other."""
    batch = inputs(64)
    actions = torch.tensor([-0.6, 0.6]).repeat(32)[:, None, None].expand(64, 3, 2)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    losses = []
    for number in range(steps):
        loss, _ = policy.bc_loss(batch, actions, torch.ones(64, 3), torch.Generator().manual_seed(number))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy, losses


def test_it_learns_what_each_instruction_asks_for_and_guidance_exaggerates_it():
    policy, losses = cloned(make(goal_dropout=0.3))
    assert sum(losses[-50:]) < 0.2 * sum(losses[:50])
    batch = inputs(32)
    signs = torch.tensor([-1.0, 1.0]).repeat(16)[:, None, None]
    means = {}
    for guidance in (0.0, 1.0, 1.5):
        policy.config.guidance = guidance
        actions = policy.act(batch, torch.Generator().manual_seed(1)).decisions
        means[guidance] = float((actions * signs).mean())
    assert means[1.0] == pytest.approx(0.6, abs=0.1)
    # without the goal both instructions have the same mean; beyond 1, the difference grows
    assert abs(means[0.0]) < 0.3
    assert means[1.5] > means[1.0] + 0.02


def test_actions_after_the_end_of_a_demonstration_do_not_count():
    policy, batch = make(), inputs()
    actions, mask = torch.zeros(4, 3, 2), torch.tensor([[1.0, 1.0, 0.0]] * 4)
    other = actions.clone()
    other[:, 2] = float("nan")
    found = [policy.bc_loss(batch, given, mask, torch.Generator().manual_seed(0))[0] for given in (actions, other)]
    assert torch.equal(*found)


def test_a_row_does_not_depend_on_the_others_and_starts_from_given_noise():
    policy, batch = make(), inputs(3)
    whole = policy.act(batch, RowGenerators.seeded([1, 2, 3]))
    alone = policy.act(batch.select([2]), RowGenerators.seeded([3]))
    torch.testing.assert_close(whole.actions[2:], alone.actions)
    start = torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(5))
    chosen = [policy.act(batch, torch.Generator().manual_seed(seed), start=start).actions for seed in (1, 2)]
    assert torch.equal(*chosen)
    assert whole.logp.isnan().all()


def test_a_cloning_run_trains_it_and_its_folder_gives_the_same_actions(tmp_path):
    config = domain_of("robot_clone").make_config("robot_clone", tmp_path)
    config.model = ActionPolicyConfig(kind="beso", chunk=2, options={"hidden": 32, "blocks": 1, "encoder": BLIND})
    config.validate()
    run_dir = train(find_recipe("robot_clone"), config)
    policy = open_policy(run_dir)
    assert isinstance(policy, BesoPolicy)
    policy.save_pretrained(tmp_path / "again")
    batch = PolicyInputs(None, torch.randn(5, 2), ("go right",) * 5)
    drawn = [each.act(batch, torch.Generator().manual_seed(0)) for each in (policy, open_policy(tmp_path / "again"))]
    assert torch.equal(drawn[0].actions, drawn[1].actions)


def test_its_noise_can_be_steered(tmp_path):
    encoder = EncoderConfig(image_size=None, state_size=2, width=32, heads=2, layers=1)
    config = BesoPolicyConfig(1, 2, hidden=32, blocks=1, encoder=encoder)
    BesoPolicy.build(config, ("go right", "go left")).save_pretrained(tmp_path / "base")
    trainer = trainer_of(improving_config(tmp_path / "run", tmp_path / "base", "steered"), tmp_path / "run", 3)
    trainer.run()
    assert trainer.updater.learner.updates > 0
    trainer.recipe.close()


def test_what_it_cannot_do_is_refused(tmp_path):
    policy = make()
    with pytest.raises(UserError, match=r"only imitates.*model\.kind flow"):
        policy.log_probs(inputs(), torch.zeros(4, 3, 2))
    with pytest.raises(UserError, match=r"acting\.temperature is 0\.5"):
        policy.act(inputs(), torch.Generator(), temperature=0.5)
    config = domain_of("robot_grpo").make_config("robot_grpo", tmp_path)
    config.model = ActionPolicyConfig(kind="beso", chunk=2, options={"hidden": 32, "encoder": BLIND})
    with pytest.raises(UserError, match="only imitates"):
        train(find_recipe("robot_grpo"), config)
    for options, message in (
        ({"sigma_min": 2.0}, "sigma_min is 2; must be below sigma_max=1"),
        ({"guidance": 2.0, "goal_dropout": 0.0}, "no row is trained without a goal"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_config(BesoPolicyConfig(1, 1, **options))
