"""Policies of LeRobot: the Gaussian around them with a service that stands in for lerobot, and lerobot's own.

The slow test needs an environment with lerobot, see `test_lerobot_peer.py`; diffusion policies need diffusers there:

    lerobot-env/bin/pip install 'lerobot[dataset,diffusion]==0.6.1'
"""

import copy
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from mmrl.cli import main
from mmrl.errors import RunError, UserError
from robotics.episodes.collect import TemporalEnsemble
from robotics.policies.base.action_policy import PolicyInputs, open_policy
from robotics.policies.lerobot import service
from robotics.policies.lerobot.gaussian import LeRobotPolicy, LeRobotPolicyConfig
from robotics.policies.policy_loading import check_fit
from tests.robotics import lerobot_policies
from tests.robotics.lerobot_policies import observations
from tests.robotics.lerobot_process import run_peer
from tests.robotics.line_sim import LineSim

STATES = torch.tensor([[0.0, 0.5], [0.1, -0.4], [0.3, 0.31]])
RUN = """
recipe: robot_grpo
output_dir: {run}
sim: {{kind: "tests.robotics.line_sim:open_line"}}
model: {{kind: lerobot, options: {{folder: {folder}, python: {python}, std: 0.4}}}}
acting: {{n_action_steps: 4}}
reward: {reward}
data: {{tasks: [right, left], layouts: 8}}
eval_data: {{held_out: {{tasks: [right, left], split: held_out, layouts: 4}}}}
evaluation: {{every: 0, greedy: true, samples: 0, videos: 0}}
trainer: {{steps: {steps}, tasks_per_step: 4, samples_per_task: 8, learning_rate: 1.0e-2, threads: 1}}
tracking: {{quiet: true, tensorboard: false}}
"""


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(states=STATES):
    return PolicyInputs(None, states, ("go",) * len(states))


@pytest.fixture
def policy(served, closing):
    return closing(LeRobotPolicy(LeRobotPolicyConfig("anything", std=0.3), seed=1))


def moved(policy):
    """The policy with a correction that is not zero."""
    with torch.no_grad():
        policy.correction[2].weight.normal_(std=0.3, generator=seeded(3))
        policy.log_std.fill_(-0.5)
    return policy


def test_greedy_actions_are_those_of_the_frozen_policy(policy):
    choice = policy.act(inputs(), seeded(), greedy=True)
    assert choice.actions.shape == (3, 4, 1)
    assert not policy.units_known, "neither options nor statistics say them"
    np.testing.assert_allclose(choice.actions[:, :, 0], [[0.12] * 4, [-0.12] * 4, [0.12] * 4], atol=0.01)
    assert torch.equal(choice.actions, policy.act(inputs(), seeded(), greedy=True).actions)
    assert not torch.equal(choice.actions, policy.act(inputs(), seeded(1), greedy=True).actions)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_are_those_of_torch(policy, temperature):
    choice = moved(policy).act(inputs(), seeded(), temperature)
    logp, entropy = policy.log_probs(inputs(), choice.decisions, temperature)
    drawn, base = choice.decisions.split(1, -1)
    seen = torch.cat([STATES, base.flatten(1)], 1)
    normal = Normal(base + policy.correction(seen).reshape(3, 4, 1), policy.log_std.exp() * temperature)
    torch.testing.assert_close(logp, normal.log_prob(drawn).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    torch.testing.assert_close(choice.logp, logp.detach())
    torch.testing.assert_close(choice.actions, drawn.clamp(-1, 1))
    logp.sum().backward()
    assert all(weight.grad is not None for weight in policy.parameters())


CAMERAS = ["observation.images.base", "observation.images.left", "observation.images.right"]


def test_cameras_are_given_in_the_order_of_the_simulators(served, tmp_path, closing):
    policy = closing(LeRobotPolicy(LeRobotPolicyConfig("anything", cameras=CAMERAS)))
    assert (policy.views, policy.cameras) == (2, tuple(CAMERAS))
    pixels = torch.zeros(3, 32, 32, 3, dtype=torch.uint8)
    views = torch.stack([pixels + 10, pixels + 20], 1)
    batch = PolicyInputs(pixels + 100, STATES, ("go",) * 3, views)
    base = policy.act(PolicyInputs(pixels, STATES, ("go",) * 3, views * 0), seeded(), greedy=True).actions
    found = policy.act(batch, seeded(), greedy=True).actions - base
    np.testing.assert_allclose(found[0, :, 0], (100 - 10 - 20) / 255, atol=1e-6)
    with pytest.raises(
        UserError, match=r"needs views, which is missing from the observations; its cameras are .*base, .*left"
    ):
        policy.act(PolicyInputs(pixels, STATES, ("go",) * 3), seeded())
    with pytest.raises(UserError, match=r"uses the cameras .*base, .*left, .*right, but the observations have 1 views"):
        policy.act(PolicyInputs(pixels, STATES, ("go",) * 3, views[:, :1]), seeded())
    check_fit(policy, LineSim(views=("hand", "top")))
    with pytest.raises(UserError, match=r"sees 3 cameras: .*base, .*left, .*right; .*sim.views \[hand\]"):
        check_fit(policy, LineSim(views=("hand",)))
    policy.save_pretrained(tmp_path)
    opened = closing(open_policy(tmp_path))
    assert opened.cameras == tuple(CAMERAS)
    torch.testing.assert_close(opened.act(batch, seeded()).actions, policy.act(batch, seeded()).actions)


def test_a_run_of_several_cameras_trains(served, tmp_path):
    options = f"cameras: [{', '.join(CAMERAS)}], "
    config = Path(configuration(tmp_path, "anything", None, 2))
    text = config.read_text().replace("options: {folder", f"options: {{{options}folder")
    config.write_text(text.replace('open_line"}', 'open_line", views: [hand, top]}'))
    assert main(["train", str(config)]) == 0
    config.write_text(text.replace('open_line"}', 'open_line", views: [hand]}'))
    assert main(["evaluate", str(config)]) == 2


def test_a_saved_policy_is_opened_with_its_correction(policy, tmp_path, closing):
    moved(policy).save_pretrained(tmp_path)
    opened = closing(open_policy(tmp_path))
    assert torch.equal(opened.act(inputs(), seeded()).actions, policy.act(inputs(), seeded()).actions)
    assert json.loads((tmp_path / "policy.json").read_text())["folder"] == "anything"
    twin = copy.deepcopy(policy)
    assert torch.equal(twin.act(inputs(), seeded()).decisions, policy.act(inputs(), seeded()).decisions)


def test_cloning_learns_the_demonstrated_actions(policy):
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.03)
    wanted, mask = torch.full((3, 4, 1), 0.7), torch.ones(3, 4)
    mask[0, 2:] = 0
    for _ in range(60):
        optimiser.zero_grad()
        loss, _ = policy.bc_loss(inputs(), wanted, mask, seeded())
        loss.backward()
        optimiser.step()
    found = policy.act(inputs(), seeded(), greedy=True).actions
    assert (found - 0.7).abs()[mask.bool()].max() < 0.1


def test_what_cannot_be_served_is_named(policy, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="needs state, which is missing from the observations"):
        policy.act(PolicyInputs(None, None, ("go",)), seeded())
    with pytest.raises(ValueError, match="folder is empty"):
        LeRobotPolicy(LeRobotPolicyConfig())
    monkeypatch.undo()
    try:
        import lerobot  # noqa: F401
    except ImportError:
        with pytest.raises(RunError, match=r"lerobot.*model\.options\.python"):
            LeRobotPolicy(LeRobotPolicyConfig(str(tmp_path), python=sys.executable))


def configuration(tmp_path, folder, python, steps, reward="sparse"):
    path = tmp_path / "run.yaml"
    path.write_text(
        RUN.format(run=tmp_path / "run", folder=folder, python=python or "null", steps=steps, reward=reward)
    )
    return str(path)


def test_reinforcement_learning_improves_a_slow_policy(served, tmp_path):
    config = configuration(tmp_path, "anything", None, 20)
    assert main(["train", config]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    rates = [row["reward/success"] for row in rows]
    assert np.mean(rates[:3]) < 0.2
    assert np.mean(rates[-5:]) > 0.35


# Below: policies of the package itself.


@pytest.fixture(scope="module")
def built(lerobot, tmp_path_factory):
    """Folder of policies that lerobot built and saved."""
    folder = tmp_path_factory.mktemp("policies")
    run_peer(lerobot, lerobot_policies, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "chunk"), [("act", 6), ("diffusion", 4)])
def test_policies_of_lerobot_act_are_evaluated_and_trained(lerobot, built, kind, chunk, tmp_path, capsys, closing):
    policy = LeRobotPolicy(LeRobotPolicyConfig(str(built / kind), python=lerobot))
    seen = observations()
    batch = PolicyInputs(torch.from_numpy(seen["images"]), torch.from_numpy(seen["state"]), ("go",) * 3)
    # lerobot's own select_action drew its noise from this seed.
    found = policy.predict(batch, seed=5)
    assert found.shape == (3, chunk, 1)
    with np.load(built / "expected.npz") as expected:
        np.testing.assert_allclose(found[:, :4], expected[kind], atol=1e-5)
    policy.close()
    config = configuration(tmp_path, built / kind, lerobot, 2, "potential")
    assert main(["evaluate", config]) == 0
    assert "all tasks" in capsys.readouterr().out
    assert main(["train", config]) == 0
    opened = closing(open_policy(next((tmp_path / "run/checkpoints").glob("step-*/model"))))
    assert opened.correction[2].bias.abs().max() > 0


@pytest.mark.slow
def test_overlapping_chunks_are_averaged_as_by_lerobot(lerobot, built, caplog):
    policy = LeRobotPolicy(LeRobotPolicyConfig(str(built / "act_ensemble"), python=lerobot))
    assert "set acting.ensemble: 0.5" in caplog.text
    seen = observations()
    batch = PolicyInputs(torch.from_numpy(seen["images"]), torch.from_numpy(seen["state"]), ("go",) * 3)
    chunk = policy.predict(batch, seed=5).numpy()
    policy.close()
    ensemble = TemporalEnsemble(3, 6, 1, decay=0.5)
    found = np.stack([ensemble.step(chunk, range(3)) for _ in range(4)], 1)
    assert np.abs(found - chunk[:, :1]).max() > 1e-4
    with np.load(built / "expected.npz") as expected:
        np.testing.assert_allclose(found, expected["act_ensemble"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["act_two", "diffusion_two"])
def test_policies_of_two_cameras_see_both(lerobot, built, kind, tmp_path):
    policy = LeRobotPolicy(LeRobotPolicyConfig(str(built / kind), python=lerobot))
    assert policy.cameras == ("observation.images.front", "observation.images.wrist")
    seen = observations()
    parts = {name: torch.from_numpy(seen[name]) for name in ("images", "state", "views")}
    batch = PolicyInputs(instructions=("go",) * 3, **parts)
    with np.load(built / "expected.npz") as expected:
        np.testing.assert_allclose(policy.predict(batch, seed=5)[:, :4], expected[kind], atol=1e-5)
    if kind == "act_two":  # of 32 pixels the encoder of diffusion makes one keypoint, which cannot move
        for part in ("images", "views"):
            blind = dataclasses.replace(batch, **{part: parts[part] * 0})
            assert (policy.predict(blind, seed=5) - policy.predict(batch, seed=5)).abs().max() > 1e-3
    policy.close()
    with pytest.raises(UserError, match=r"model.options.cameras is \[top\]; .* has the cameras .*front, .*wrist"):
        LeRobotPolicy(LeRobotPolicyConfig(str(built / kind), python=lerobot, cameras=["top"]))
    config = Path(configuration(tmp_path, built / kind, lerobot, 2, "potential"))
    config.write_text(config.read_text().replace('open_line"}', 'open_line", views: [hand]}'))
    assert main(["train", str(config)]) == 0


@pytest.mark.slow
def test_what_lerobot_cannot_load_is_named(lerobot, tmp_path):
    with pytest.raises(UserError, match=r"is not a LeRobot policy: it has no config\.json"):
        LeRobotPolicy(LeRobotPolicyConfig(str(tmp_path), python=lerobot))


def test_settings_of_a_folder_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    file = tmp_path / service.PREPROCESSOR
    for content, reason in (("{", "cannot be read as JSON"), ("[" * 20_000, "RecursionError"), ("[]", "not list")):
        file.write_text(content)
        with pytest.raises(service.RefusedError, match=f"{service.PREPROCESSOR} .*{reason}"):
            service.read_settings(file)
    file.write_text('{"steps": []}')
    assert service.read_settings(file) == {"steps": []}
    monkeypatch.setattr(service, "LARGEST_SETTINGS", 12)
    with pytest.raises(service.RefusedError, match="has 13 bytes; at most 12 are allowed"):
        service.read_settings(file)
