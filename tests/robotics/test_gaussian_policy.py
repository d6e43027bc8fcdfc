"""The Gaussian action head: its density against torch's, its standard deviation, its cloning losses, and its updates.

What every policy keeps is in policies/test_every_policy.py.
"""

import json
import math

import pytest
import torch
from torch.distributions import Independent, Normal

from mmrl.errors import ConfigError, UserError
from mmrl.recipes import find_recipe
from mmrl.training.run import train
from mmrl.training.settings import CheckpointConfig
from robotics.policies.base.action_policy import open_policy
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.gaussian import GaussianActionPolicy, GaussianPolicyConfig, score_gaussian
from robotics.policies.policy_loading import ActionPolicyConfig
from tests.robotics.line_demos import ENCODER
from tests.robotics.policies.builders import TEXTS, B, D, K, demonstrations, draw, make_gaussian, make_inputs
from tests.robotics.test_ppo import ppo
from tests.robotics.test_robot_recipes import srpo, trainer

EACH = pytest.mark.parametrize("std_per", ["action", "state"])


def moved(std_per="action", seed=0, **changes):
    """A policy whose means and standard deviations are no longer those of the start, nor the same everywhere."""
    policy, generator = make_gaussian(std_per, seed, **changes), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (*policy.mean.parameters(), *spread_of(policy)):
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return policy


def spread_of(policy):
    return [policy.spread] if isinstance(policy.spread, torch.nn.Parameter) else list(policy.spread.parameters())


def expected(policy, temperature=1.0):
    """torch's own distribution, in float64, of one decision a control step."""
    with torch.no_grad():
        mean, log_std = policy.gaussian(make_inputs())
    return Independent(Normal(mean.double(), temperature * log_std.double().exp()), 1)


# ---- density ----


def test_density_and_entropy_are_the_closed_forms():
    generator = torch.Generator().manual_seed(0)
    actions, mean, log_std = (torch.randn(7, K, D, generator=generator, dtype=torch.float64) for _ in range(3))
    logp, entropy = score_gaussian(actions, mean, log_std)
    known = Independent(Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(logp, known.log_prob(actions), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, known.entropy(), rtol=1e-12, atol=1e-12)


@EACH
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_decisions_are_scored_by_their_density_before_clipping(std_per, temperature):
    policy = moved(std_per, std=0.5)
    choice = draw(policy, temperature=temperature)
    known = expected(policy, temperature)
    assert tuple(choice.decisions.shape) == (B, K, D)
    assert float(choice.decisions.abs().max()) > 1
    assert torch.equal(choice.actions, choice.decisions.clamp(-1, 1))
    torch.testing.assert_close(choice.logp.double(), known.log_prob(choice.decisions.double()), rtol=1e-5, atol=1e-5)
    logp, entropy = policy.log_probs(make_inputs(), choice.decisions, temperature)
    assert torch.equal(logp, choice.logp)
    torch.testing.assert_close(entropy.double(), known.entropy(), rtol=1e-5, atol=1e-5)


@EACH
def test_greedy_actions_are_the_means_with_their_density(std_per):
    policy = moved(std_per)
    known, choice = expected(policy, 0.5), draw(policy, greedy=True, temperature=0.5)
    torch.testing.assert_close(choice.decisions.double(), known.mean)
    torch.testing.assert_close(choice.logp.double(), known.log_prob(known.mean), rtol=1e-5, atol=1e-5)


def test_the_temperature_multiplies_the_standard_deviation():
    policy = moved()
    cold, warm = (draw(policy, temperature=temperature).decisions for temperature in (0.5, 1.5))
    mean = draw(policy, greedy=True).decisions
    torch.testing.assert_close(warm - mean, 3 * (cold - mean), rtol=1e-4, atol=1e-5)


def test_draws_have_the_mean_and_the_standard_deviation():
    policy, batch = moved("state"), make_inputs(rows=1)
    rows = batch.select([0] * 4000)
    with torch.no_grad():
        mean, log_std = policy.gaussian(batch)
    drawn = draw(policy, rows).decisions
    std = log_std.exp()[0]
    assert bool(((drawn.mean(0) - mean[0]).abs() < 4 * std / math.sqrt(4000)).all())
    torch.testing.assert_close(drawn.std(0), std, rtol=0.05, atol=0)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_of_nothing_is_refused(temperature):
    policy = make_gaussian()
    with pytest.raises(ValueError, match=r"must be above 0\. Use greedy"):
        draw(policy, temperature=temperature)
    with pytest.raises(ValueError, match=r"must be above 0\. Use greedy"):
        policy.log_probs(make_inputs(), torch.zeros(B, K, D), temperature)


def test_decisions_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3, 4\); expected \(3, 4, 2\)"):
        make_gaussian().log_probs(make_inputs(), torch.zeros(B, K))


# ---- the start, and the bounds of the standard deviation ----


@EACH
def test_a_new_policy_acts_near_zero_with_the_given_standard_deviation(std_per):
    policy = make_gaussian(std_per, std=0.3)
    mean, log_std = policy.gaussian(make_inputs())
    assert 0 < float(mean.detach().abs().max()) < 0.05
    torch.testing.assert_close(log_std.exp(), torch.full((B, K, D), 0.3))


@EACH
def test_standard_deviations_depend_on_what_is_seen_only_if_asked(std_per):
    std = moved(std_per).gaussian(make_inputs())[1].detach().exp()
    assert len(std.flatten().unique()) == (D if std_per == "action" else B * K * D)


@EACH
def test_no_weight_leads_out_of_the_bounds(std_per):
    policy = make_gaussian(std_per, std=0.1, min_std=0.02, max_std=0.5)
    for value, bound in ((-1e4, 0.02), (1e4, 0.5)):
        with torch.no_grad():
            spread_of(policy)[-1].fill_(value)
        torch.testing.assert_close(policy.gaussian(make_inputs())[1].exp(), torch.full((B, K, D), bound))


def test_a_change_in_the_middle_of_the_range_is_one_of_the_logarithm():
    policy = make_gaussian(std=0.1, min_std=0.01, max_std=1.0)
    with torch.no_grad():
        before = policy.gaussian(make_inputs())[1]
        policy.spread += 0.05
        change = policy.gaussian(make_inputs())[1] - before
    torch.testing.assert_close(change, torch.full((B, K, D), 0.05), rtol=1e-3, atol=0)


@EACH
@pytest.mark.parametrize("cloning", ["likelihood", "error"])
def test_the_gradient_reaches_mean_and_standard_deviation(std_per, cloning):
    policy = moved(std_per, cloning=cloning)
    actions, mask = demonstrations()
    policy.bc_loss(make_inputs(), actions, mask)[0].backward()
    learned = [weight.grad is not None and bool(weight.grad.abs().max() > 0) for weight in spread_of(policy)]
    assert set(learned) == {cloning == "likelihood"}
    policy.zero_grad()
    policy.log_probs(make_inputs(), draw(policy).decisions)[0].sum().backward()
    for weight in (*policy.mean.parameters(), *spread_of(policy), policy.encoder.queries):
        assert float(weight.grad.abs().max()) > 0


def test_options_of_no_use_are_refused_by_name():
    for changes, message in (
        ({"std": 0.0}, "std is 0.0; must be positive"),
        ({"std": 0.05}, r"std is 0\.05; must be above min_std=0\.05 and below max_std=1"),
        ({"std": 1.5}, r"std is 1\.5; must be above min_std=0\.05 and below max_std=1"),
        ({"min_std": -0.1}, "min_std is -0.1; must be positive"),
        ({"max_std": math.inf}, "max_std is inf; must be finite"),
        ({"std_per": "chunk"}, "std_per is 'chunk'; allowed: action, state"),
        ({"cloning": "mse"}, "cloning is 'mse'; allowed: likelihood, error"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_gaussian(**changes)
    with pytest.raises(ConfigError, match="chunk is 0; must be at least 1"):
        GaussianActionPolicy.build(GaussianPolicyConfig(D, 0, encoder=EncoderConfig(**ENCODER)), TEXTS)


def test_a_folder_of_another_kind_of_standard_deviation_does_not_fit(tmp_path):
    moved("state").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="do not fit"):
        make_gaussian("action").load_weights(tmp_path)
    entries = json.loads((tmp_path / "policy.json").read_text())
    (tmp_path / "policy.json").write_text(json.dumps(entries | {"std": 2.0}))
    with pytest.raises(UserError, match=r"policy\.json|std is 2; must be above") as refused:
        open_policy(tmp_path)
    assert str(tmp_path) in str(refused.value)


# ---- cloning ----


@EACH
def test_the_likelihood_is_a_mean_over_demonstrated_control_steps(std_per):
    policy = moved(std_per)
    actions, mask = demonstrations()
    loss, metrics = policy.bc_loss(make_inputs(), actions, mask)
    each = -expected(policy).log_prob(actions.double())
    assert float(loss.detach()) == pytest.approx(float(each[mask.bool()].mean()), rel=1e-5)
    far = (draw(policy, greedy=True).actions - actions).abs().mean(-1)
    assert metrics["bc/action_error"] == pytest.approx(float(far[mask.bool()].mean()), rel=1e-5)
    std = policy.gaussian(make_inputs())[1].detach().exp().mean(-1)
    assert metrics["bc/std"] == pytest.approx(float(std[mask.bool()].mean()), rel=1e-5)


def test_the_error_is_that_of_the_mean():
    policy = moved(cloning="error")
    actions, mask = demonstrations()
    loss, _ = policy.bc_loss(make_inputs(), actions, mask)
    each = (expected(policy).mean - actions.double()).square().mean(-1)
    assert float(loss.detach()) == pytest.approx(float(each[mask.bool()].mean()), rel=1e-5)


@EACH
def test_the_likelihood_is_best_where_errors_are_one_standard_deviation(std_per):
    policy, mask = moved(std_per), torch.ones(B, K)
    with torch.no_grad():
        mean, log_std = policy.gaussian(make_inputs())
    slopes = []
    for errors in (0.5, 1.0, 2.0):
        policy.zero_grad()
        policy.bc_loss(make_inputs(), mean + errors * log_std.exp(), mask)[0].backward()
        slopes.append(spread_of(policy)[-1].grad)
    assert bool((slopes[0] > 0.01).all())  # down to smaller ones
    torch.testing.assert_close(slopes[1], torch.zeros(D), rtol=0, atol=1e-5)
    assert bool((slopes[2] < -0.01).all())


@EACH
@pytest.mark.parametrize("cloning", ["likelihood", "error"])
def test_cloning_for_long_leaves_something_to_explore(std_per, cloning):
    policy = make_gaussian(std_per, cloning=cloning)
    actions, mask = demonstrations()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        loss = policy.bc_loss(make_inputs(), actions, mask)[0]
        loss.backward()
        optimizer.step()
    assert bool(loss.isfinite())
    std = policy.gaussian(make_inputs())[1].detach().exp()
    if cloning == "error":
        torch.testing.assert_close(std, torch.full((B, K, D), 0.2))
    else:
        assert 0.05 <= float(std.min()) < 0.2


# ---- in the loop ----


@EACH
@pytest.mark.parametrize("recipe", ["robot_ppo", "srpo"])
def test_recipes_with_critic_and_with_progress_take_their_steps(tmp_path, recipe, std_per, monkeypatch):
    monkeypatch.setattr("mmrl.report.page.write_report", lambda run_dir: None)
    make = ppo if recipe == "robot_ppo" else srpo
    # a new policy with less noise stays where it starts, and SRPO without any success gives nothing
    options = {"std_per": std_per, "std": 0.9, "max_std": 2.0, "encoder": ENCODER}
    model = ActionPolicyConfig(kind="gaussian", chunk=4, options=options)
    few = {"steps": 2, "tasks_per_step": 4, "learning_rate": 1e-3, "samples_per_task": 1 if make is ppo else 6}
    config = make(tmp_path, model=model, trainer=trainer(**few), checkpoint=CheckpointConfig(every=1, keep=5))
    run_dir = train(find_recipe(recipe), config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    updates = [row for row in rows if "policy/ratio_mean" in row]
    assert len(updates) == 2
    assert all(math.isfinite(row[name]) for row in updates for name in ("loss/total", "policy/entropy"))
    first, second = (open_policy(run_dir / "checkpoints" / f"step-{step:06d}" / "model") for step in (1, 2))
    assert type(second) is GaussianActionPolicy
    assert not torch.equal(first.mean.weight, second.mean.weight)
    assert not torch.equal(spread_of(first)[-1], spread_of(second)[-1])
