"""The flow-matching policy."""

import json
import math

import pytest
import torch

from mmrl.errors import UserError
from robotics.policies.base.action_policy import open_policy
from tests.robotics.policies.builders import PLACES, B, D, K, demonstrations, draw, make_flow, make_inputs


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_flow_steps_are_the_gaussians_of_flow_grpo(reduction):
    policy, batch, level, temperature = make_flow(logp_reduction=reduction), make_inputs(), 0.5, 1.3
    choice = draw(policy, temperature=temperature)
    chain = choice.decisions.double()
    assert tuple(chain.shape) == (B, 4, K * D)
    with torch.no_grad():
        seen = policy.encoder(batch).flatten(1)
        for number, (now, later) in enumerate([(1, 2 / 3), (2 / 3, 1 / 3), (1 / 3, 0)]):
            velocity = policy.velocity(seen, choice.decisions[:, number], torch.full((B,), now)).double()
            spread = level * math.sqrt(now / (1 - min(now, 2 / 3)))
            dt = later - now
            x = chain[:, number]
            mean = x + velocity * dt + spread**2 / (2 * now) * (x + (1 - now) * velocity) * dt
            step = torch.distributions.Normal(mean, spread * math.sqrt(-dt) * temperature)
            density, entropy = step.log_prob(chain[:, number + 1]), step.entropy()
            expected = [getattr(value, reduction)(1) for value in (density, entropy)]
            torch.testing.assert_close(choice.logp[:, number].double(), expected[0], atol=1e-4, rtol=1e-4)
            found = policy.log_probs(batch, choice.decisions, temperature)[1][:, number]
            torch.testing.assert_close(found.double(), expected[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(choice.actions.flatten(1), choice.decisions[:, -1].clamp(-1, 1))


def test_learned_noise_is_a_gaussian_of_each_number_around_the_ode():
    policy, batch, temperature = make_flow(noise="learned"), make_inputs(), 1.3
    choice = draw(policy, temperature=temperature)
    logp, entropy = policy.log_probs(batch, choice.decisions, temperature)
    torch.testing.assert_close(logp, choice.logp)
    with torch.no_grad():
        seen = policy.encoder(batch).flatten(1)
        for number, now in enumerate((1, 2 / 3, 1 / 3)):
            hidden = policy.velocity.hidden(seen, choice.decisions[:, number], torch.full((B,), now))
            std = policy.noise(hidden)
            assert bool(((std > 0.08) & (std < 0.16)).all())
            assert len(std.unique()) > 1
            mean = choice.decisions[:, number] - policy.velocity.leave(hidden) / 3
            step = torch.distributions.Normal(mean.double(), std.double() * temperature)
            expected = step.log_prob(choice.decisions[:, number + 1].double()).sum(1), step.entropy().sum(1)
            torch.testing.assert_close(logp[:, number].double(), expected[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(entropy[:, number].double(), expected[1], atol=1e-4, rtol=1e-4)
    logp.sum().backward()
    assert all(bool(weight.grad.any()) for weight in policy.noise.parameters())


@pytest.mark.parametrize("noise", ["fixed", "learned"])
def test_greedy_follows_the_flow_without_noise_or_density(noise):
    policy, batch = make_flow(steps=4, noise=noise), make_inputs()
    choice = draw(policy, greedy=True)
    assert bool(choice.logp.isnan().all())
    with torch.no_grad():
        x, seen = choice.decisions[:, 0], policy.encoder(batch).flatten(1)
        for number in range(4):
            x = x - 0.25 * policy.velocity(seen, x, torch.full((B,), 1 - number / 4))
    torch.testing.assert_close(choice.actions.flatten(1), x.clamp(-1, 1), atol=1e-5, rtol=1e-5)


def test_flow_matching_is_the_error_of_the_velocity():
    policy, batch = make_flow(), make_inputs()
    actions, mask = demonstrations()
    loss, _ = policy.bc_loss(batch, actions, mask, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    noise, time = torch.randn(B, K * D, generator=generator), torch.rand(B, generator=generator)
    clean = (actions * mask[..., None]).flatten(1)
    noisy = (1 - time[:, None]) * clean + time[:, None] * noise
    error = (policy.velocity(policy.encoder(batch).flatten(1), noisy, time) - (noise - clean)).square()
    torch.testing.assert_close(loss, error[mask.repeat_interleave(D, 1).bool()].mean())
    with pytest.raises(ValueError, match="pass bc_loss a generator"):
        policy.bc_loss(batch, actions, mask)


def test_prediction_of_the_actions_is_their_error_and_leads_to_them():
    policy, batch = make_flow(parameterisation="x0"), make_inputs()
    actions, mask = demonstrations()
    loss, _ = policy.bc_loss(batch, actions, mask, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    noise, time = torch.randn(B, K * D, generator=generator), torch.rand(B, generator=generator)
    clean = (actions * mask[..., None]).flatten(1)
    noisy = (1 - time[:, None]) * clean + time[:, None] * noise
    error = (policy.velocity(policy.encoder(batch).flatten(1), noisy, time) - clean).square()
    torch.testing.assert_close(loss, error[mask.repeat_interleave(D, 1).bool()].mean())
    with torch.no_grad():
        # whatever the noise, a network that always predicts 0.3 ends there
        policy.velocity.leave.weight.zero_()
        policy.velocity.leave.bias.fill_(0.3)
    torch.testing.assert_close(draw(policy, greedy=True).actions, torch.full((B, K, D), 0.3), atol=1e-5, rtol=0)


def test_old_folders_have_neither_octaves_nor_parameterisation(tmp_path):
    policy = make_flow()
    policy.save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "policy.json").read_text())
    for name in PLACES:
        del entries["encoder"][name]
    del entries["parameterisation"]
    (tmp_path / "policy.json").write_text(json.dumps(entries))
    assert torch.equal(draw(open_policy(tmp_path)).actions, draw(policy).actions)


@pytest.mark.parametrize(
    "changes",
    [
        *({"steps": 1}, {"noise_level": 0.0}, {"logp_reduction": "max"}, {"hidden": 0}, {"parameterisation": "v"}),
        *({"noise": "learned", "noise_level": 0.3}, {"min_std": 0.1}, {"noise": "learned", "min_std": 0.2}),
    ],
)
def test_flow_settings_out_of_range_are_refused(changes):
    with pytest.raises(UserError):
        make_flow(**changes)
