"""LeRobot policies whose flow head learns: with a service that stands in for lerobot, and its SmolVLA, pi0 and pi0.5.

The slow tests need an environment with lerobot, see `test_lerobot_peer.py`:

    lerobot-env/bin/pip install 'lerobot[dataset,smolvla,pi]==0.6.1'
"""

import copy
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from mmrl.cli import main
from mmrl.errors import UserError
from robotics.policies.base.action_policy import PolicyInputs, open_policy
from robotics.policies.improved import SteeredPolicy, SteeredPolicyConfig
from robotics.policies.lerobot import lerobot_server
from robotics.policies.lerobot.flow import LeRobotFlowConfig, LeRobotFlowPolicy
from tests.robotics import lerobot_flows, lerobot_policies
from tests.robotics.lerobot_policies import observations
from tests.robotics.lerobot_process import run_peer

STATES = torch.tensor([[0.0, 0.5], [0.1, -0.4], [0.3, 0.31]])
GAP = (STATES[:, 1] - STATES[:, 0])[:, None, None]
RUN = """
recipe: robot_grpo
output_dir: {run}
sim: {{kind: "tests.robotics.line_sim:open_line"}}
model: {{kind: lerobot_flow, options: {{folder: {folder}, python: {python}, noise_level: {noise}}}}}
acting: {{n_action_steps: 4}}
reward: {reward}
data: {{tasks: [right, left], layouts: 8}}
eval_data: {{held_out: {{tasks: [right, left], split: held_out, layouts: 4}}}}
evaluation: {{every: 0, greedy: true, samples: 0, videos: 0}}
trainer: {{steps: {steps}, tasks_per_step: 4, samples_per_task: 8, learning_rate: {rate}, threads: 1}}
tracking: {{quiet: true, tensorboard: false}}
"""


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs():
    return PolicyInputs(None, STATES, ("go",) * len(STATES))


@pytest.fixture
def policy(served, closing):
    return closing(LeRobotFlowPolicy(LeRobotFlowConfig("anything", noise_level=0.4)))


def moved(policy, gain=0.5, shift=0.2):
    with torch.no_grad():
        policy.expert["head/gain"].fill_(gain)
        policy.expert["head/shift"].fill_(shift)
    return policy


def expected(chain, gain, shift, level, temperature=1.0):
    """Log-densities (B, 3, 4, 2) of a chain under Flow-GRPO's SDE around the known velocity of the fake service."""
    steps = []
    for now, later in ((1, 2 / 3), (2 / 3, 1 / 3), (1 / 3, 0)):
        start, following = chain[:, round(3 * (1 - now))], chain[:, round(3 * (1 - now)) + 1]
        end = torch.cat([gain * GAP.expand(-1, 4, 1), shift.expand(3, 4, 1)], -1)
        velocity = (start - end) / now
        spread = level * math.sqrt(now / (1 - min(now, 2 / 3)))
        drift = velocity + spread**2 / (2 * now) * (start + (1 - now) * velocity)
        std = spread * math.sqrt(1 / 3) * temperature
        steps.append(Normal(start + drift * (later - now), std).log_prob(following))
    return torch.stack(steps, 1)


def test_greedy_actions_follow_the_flow(policy):
    choice = policy.act(inputs(), seeded(), greedy=True)
    torch.testing.assert_close(choice.actions, (2 * 0.25 * GAP).expand(3, 4, 1), atol=1e-6, rtol=0)
    assert choice.logp.isnan().all()
    assert choice.decisions.shape == (3, 4, 8)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("scored", ["chain", "actions"])
def test_steps_are_scored_with_the_gradient_of_the_served_weights(policy, temperature, scored):
    policy.settings.scored = scored
    choice = moved(policy).act(inputs(), seeded(), temperature)
    gain, shift = (torch.tensor([value], requires_grad=True) for value in (0.5, 0.2))
    chain = choice.decisions.unflatten(2, (4, 2))
    each = expected(chain, gain, shift, 0.4, temperature)
    wanted = (each if scored == "chain" else each[..., :1]).sum((2, 3))
    logp, entropy = policy.log_probs(inputs(), choice.decisions, temperature)
    torch.testing.assert_close(logp, wanted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(choice.logp, logp.detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(choice.actions, (2 * chain[:, -1, :, :1]).clamp(-1, 1))
    assert entropy.shape == (3, 3)
    weights = torch.tensor([[1.0, 0.3, -0.2], [0.0, 1.0, 0.5], [0.2, 0.1, 2.0]])
    (logp * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(policy.expert["head/gain"].grad, gain.grad, rtol=1e-4, atol=1e-3)
    found = policy.expert["head/shift"].grad
    torch.testing.assert_close(found, shift.grad if scored == "chain" else torch.zeros(1), rtol=1e-4, atol=1e-3)


def test_a_steered_flow_starts_from_the_chosen_noise(policy, tmp_path):
    """With lerobot's padding: the noise has more entries than an action."""
    config = SteeredPolicyConfig(1, 1, bound=2.0, n_action_steps=2)
    config.encoder.width, config.encoder.layers = 32, 1
    steered = SteeredPolicy.improve(policy, config, 2, ["go"])
    choice = steered.act(inputs(), seeded())
    start = 2.0 * steered.chosen(choice.decisions)
    assert (policy.noise_shape, tuple(start.shape), tuple(choice.actions.shape)) == ((4, 2), (3, 4, 2), (3, 2, 1))
    own = policy.act(inputs(), seeded(), greedy=True, start=start)
    torch.testing.assert_close(own.decisions[:, 0], start.flatten(1))
    assert torch.equal(own.actions[:, :2], choice.actions)
    steered.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/base/policy.json").read_text())["kind"] == "lerobot_flow"


def test_copies_share_the_process_and_keep_their_own_weights(policy):
    twin = copy.deepcopy(policy)
    moved(policy)
    for _ in range(2):
        for made, gain in ((policy, 0.5), (twin, 0.25)):
            actions = made.act(inputs(), seeded(), greedy=True).actions
            torch.testing.assert_close(actions, (2 * gain * GAP).expand(3, 4, 1), atol=1e-6, rtol=0)


def test_a_process_that_started_again_gets_the_weights(policy):
    before = moved(policy).act(inputs(), seeded())
    policy.close()
    logp, _ = policy.log_probs(inputs(), before.decisions)
    torch.testing.assert_close(logp, before.logp)
    policy.close()
    assert torch.equal(policy.act(inputs(), seeded()).actions, before.actions)


def test_a_saved_policy_is_opened_with_its_weights(policy, tmp_path):
    moved(policy).save_pretrained(tmp_path / "saved")
    policy.export(tmp_path / "exported")
    wanted = policy.act(inputs(), seeded())
    for name in ("saved", "exported"):
        opened = open_policy(tmp_path / name)
        assert torch.equal(opened.act(inputs(), seeded()).decisions, wanted.decisions)
        opened.close()
    assert json.loads((tmp_path / "saved/policy.json").read_text())["folder"] == "anything"
    with np.load(tmp_path / "exported/lerobot/saved.npz") as saved:
        assert saved["head.gain"] == np.float32(0.5)


def test_the_cloning_loss_is_that_of_flow_matching(policy):
    wanted, mask = (0.8 * GAP).expand(3, 4, 1).clone(), torch.ones(3, 4)
    wanted[0, 2:], mask[0, 2:] = math.nan, 0
    loss, _ = moved(policy, gain=0.3, shift=0.0).bc_loss(inputs(), wanted, mask, seeded())
    loss.backward()
    assert policy.expert["head/gain"].grad < 0
    # the demonstrations are twice the head's numbers, and the velocity of the gain 0.4 is noise - actions
    loss, metrics = moved(policy, gain=0.4, shift=0.0).bc_loss(inputs(), wanted, mask, seeded())
    assert metrics["bc/loss"] == float(loss.detach()) < 1e-6
    with pytest.raises(ValueError, match="pass bc_loss a generator"):
        policy.bc_loss(inputs(), wanted, mask)


def test_decisions_of_another_shape_are_refused(policy):
    with pytest.raises(ValueError, match=r"\(3, 4, 8\)"):
        policy.log_probs(inputs(), torch.zeros(3, 3, 8))
    with pytest.raises(ValueError, match="temperature is 0"):
        policy.act(inputs(), seeded(), temperature=0.0)
    with pytest.raises(UserError, match="needs state, which is missing from the observations"):
        policy.act(PolicyInputs(None, None, ("go",)), seeded())


def configuration(tmp_path, folder, python, steps, reward="sparse", rate=2e-2, noise=0.5):
    path = tmp_path / "run.yaml"
    values = {"folder": folder, "python": python or "null", "steps": steps, "reward": reward, "rate": rate}
    path.write_text(RUN.format(run=tmp_path / "run", noise=noise, **values))
    return str(path)


def rates(tmp_path, name="reward/success"):
    return [json.loads(line)[name] for line in (tmp_path / "run/metrics.jsonl").open()]


def test_reinforcement_learning_improves_a_slow_flow(served, tmp_path):
    assert main(["train", configuration(tmp_path, "anything", None, 20)]) == 0
    found = rates(tmp_path)
    assert np.mean(found[-5:]) > np.mean(found[:3]) + 0.2


# Below: policies of the package itself.


@pytest.fixture(scope="module")
def built(lerobot, tmp_path_factory):
    """Folder of policies that lerobot built and saved."""
    folder = tmp_path_factory.mktemp("flows")
    run_peer(lerobot, lerobot_flows, "build", folder)
    return folder


@pytest.fixture
def tiny(monkeypatch):
    """The service knows a tiny pi0."""
    monkeypatch.setattr(lerobot_server, "SERVICE", Path(__file__).with_name("tiny_lerobot_service.py"))


def seen(policy):
    found = {name: torch.from_numpy(values) for name, values in observations().items()}
    views = found["views"] if policy.views else None
    return PolicyInputs(found["images"], found["state"], ("go right", "go left", "go right"), views)


@pytest.mark.slow
@pytest.mark.parametrize("kind", lerobot_flows.KINDS)
def test_flow_heads_of_lerobot(lerobot, built, tiny, kind, tmp_path, monkeypatch, closing):
    policy = closing(LeRobotFlowPolicy(LeRobotFlowConfig(str(built / kind), python=lerobot, noise_level=0.6)))
    assert (policy.chunk, policy.width, policy.decisions) == (5, 4, 3)
    assert policy.cameras == ("observation.images.front", "observation.images.wrist")[: 1 + kind.endswith("_two")]
    fixed = torch.zeros(3, 4, 5, 4)
    fixed[:, 0] = torch.from_numpy(lerobot_flows.noise())
    with monkeypatch.context() as patch, np.load(built / "expected.npz") as answers:
        patch.setattr(torch, "randn", lambda *_, **__: fixed)
        chunk = policy.act(seen(policy), seeded(), greedy=True).actions
        np.testing.assert_allclose(chunk, answers[kind].clip(-1, 1), atol=1e-5)
        if kind == "pi05":
            assert_state_has_256_bins(policy, patch)
    # an update by the gradient, saved as a folder that lerobot loads
    choice = policy.act(seen(policy), seeded(2))
    loss = -policy.log_probs(seen(policy), choice.decisions)[0].mean()
    loss.backward()
    with torch.no_grad():
        for weight in policy.parameters():
            weight -= 1e-3 * weight.grad.sign()
    policy.zero_grad()
    assert -policy.log_probs(seen(policy), choice.decisions)[0].mean() < loss
    policy.export(tmp_path / "out")
    # what lerobot makes of that folder, its training pass and autograd
    arrays = tmp_path / "arrays.npz"
    np.savez(arrays, chain=choice.decisions.unflatten(2, (5, 4)), level=0.6)
    run_peer(lerobot, lerobot_flows, "check", tmp_path / "out/lerobot", arrays)
    logp, _ = policy.log_probs(seen(policy), choice.decisions)
    logp.sum().backward()
    with monkeypatch.context() as patch, np.load(arrays) as answers, np.load(built / "expected.npz") as before:
        np.testing.assert_allclose(logp.detach(), answers["logp"], rtol=2e-5, atol=2e-3)
        for name, weight in policy.expert.items():
            wanted = answers[f"grad:{name.replace('/', '.')}"]
            np.testing.assert_allclose(weight.grad, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
        patch.setattr(torch, "randn", lambda *_, **__: fixed)
        chunk = policy.act(seen(policy), seeded(), greedy=True).actions
        np.testing.assert_allclose(chunk, answers["chunks"].clip(-1, 1), atol=1e-5)
        assert np.abs(answers["chunks"] - before[kind]).max() > 1e-3


def assert_state_has_256_bins(policy, patch):
    """pi0.5 reads a state as numbers between the quantiles of its data, -0.9 and 0.85 for the first entry."""
    fixed = torch.zeros(3, 4, 5, 4)
    fixed[:, 0] = torch.from_numpy(lerobot_flows.noise()[0])
    patch.setattr(torch, "randn", lambda *_, **__: fixed)
    batch, size = seen(policy), 1.75 / 256
    entry = -0.9 + size * torch.tensor([150.1, 150.9, 151.1])
    same = {"images": batch.images[:1].expand(3, -1, -1, -1), "instructions": ("go right",) * 3}
    batch = dataclasses.replace(batch, state=torch.stack([entry, torch.zeros(3)], 1), **same)
    first, alike, other = policy.act(batch, seeded(), greedy=True).actions
    torch.testing.assert_close(first, alike, atol=1e-6, rtol=0)
    assert (first - other).abs().max() > 1e-3


@pytest.mark.slow
def test_cameras_come_in_the_order_that_is_named(lerobot, built, monkeypatch):
    fixed = torch.zeros(3, 4, 5, 4)
    fixed[:, 0] = torch.from_numpy(lerobot_flows.noise())
    monkeypatch.setattr(torch, "randn", lambda *_, **__: fixed)
    names, chunks = ["observation.images.front", "observation.images.wrist"], []
    for cameras in ([], names[::-1]):
        policy = LeRobotFlowPolicy(LeRobotFlowConfig(str(built / "smolvla_two"), python=lerobot, cameras=cameras))
        batch = seen(policy)
        turned = PolicyInputs(batch.views[:, 0], batch.state, batch.instructions, batch.images[:, None])
        chunks += [policy.act(part, seeded(), greedy=True).actions for part in (batch, turned)]
        policy.close()
    own, mistaken, also_mistaken, named = chunks
    assert torch.equal(own, named)
    assert torch.equal(mistaken, also_mistaken)
    assert (own - mistaken).abs().max() > 1e-3


@pytest.mark.slow
def test_reinforcement_learning_improves_a_smolvla(lerobot, built, tmp_path, capsys):
    config = configuration(tmp_path, built / "smolvla", lerobot, 12, "potential", rate=3e-3)
    assert main(["evaluate", config]) == 0
    assert "all tasks" in capsys.readouterr().out
    assert main(["train", config]) == 0
    found = rates(tmp_path, "reward/mean")
    assert np.mean(found[-3:]) > np.mean(found[:3]) + 0.03
    open_policy(next((tmp_path / "run/checkpoints").glob("step-*/model"))).close()


@pytest.mark.slow
def test_a_policy_without_a_flow_head_is_refused(lerobot, tmp_path):
    run_peer(lerobot, lerobot_policies, tmp_path)
    with pytest.raises(UserError, match=r"type act, which has no trainable flow head.*model\.kind lerobot"):
        LeRobotFlowPolicy(LeRobotFlowConfig(str(tmp_path / "act"), python=lerobot))
