"""OpenVLA-OFT folders with an action head: a tiny one that the original code evaluated (`openvla_regression_peer`)."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.policies.base.action_policy import PolicyInputs, open_policy
from robotics.policies.openvla.openvla_folder import ActionHead, OpenVlaConfig, StateProjector, read_part, write_part
from robotics.policies.openvla.regression import OpenVlaRegressionPolicy
from robotics.policies.openvla.tokens import OpenVlaPolicy
from robotics.policies.policy_loading import ActionPolicyConfig, check_fit, load_action_policy
from robotics.serving.observations import ServeConfig
from robotics.serving.opening import open_served_policy
from tests.robotics import openvla_peer, openvla_regression_peer
from tests.robotics.line_sim import LineSim
from tests.robotics.test_openvla_policy import evaluated_and_improved, unpacked

HEAD_FILE, PROJECTOR_FILE = "action_head--150000_checkpoint.pt", "proprio_projector--150000_checkpoint.pt"
ROUNDING = 2e-5
"""A hundred roundings of float32 at the largest number of the answers, 1.8; the sums have at most 224 terms."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder, with golden.npz."""
    return unpacked(tmp_path_factory.mktemp("openvla"), "openvla-oft.tar.xz", "openvla-oft-regression.tar.xz")


@pytest.fixture
def policy(folder):
    return OpenVlaRegressionPolicy(config(folder))


@pytest.fixture(scope="module")
def golden(folder):
    with np.load(folder / "golden.npz") as arrays:
        return dict(arrays)


def config(folder, **options):
    return OpenVlaConfig(str(folder), **{"center_crop": False, "num_images_in_input": 2, **options})


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def batch():
    wrist = torch.from_numpy(openvla_peer.wrist_images())[:, None]
    states = torch.from_numpy(openvla_regression_peer.states())
    return PolicyInputs(torch.from_numpy(openvla_peer.images()), states, openvla_peer.TEXTS, wrist)


def changed_folder(folder, target):
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(folder, target))


def test_greedy_actions_are_those_of_the_original(policy, golden):
    """For rows of two lengths at once, and of a state that lies outside the quantiles; the original evaluates row by
    row.
    """
    choice = policy.act(batch(), seeded(), greedy=True)
    np.testing.assert_allclose(choice.actions, golden["normalised"], atol=ROUNDING)
    np.testing.assert_allclose(policy.statistics.unnormalise(choice.actions), golden["actions"], atol=ROUNDING)
    with torch.no_grad():
        assert torch.equal(choice.actions, policy.predict(batch()))
    assert choice.actions.abs().max() > 1
    assert policy.views == 1
    assert (policy.chunk, policy.action_size, policy.decisions, policy.by_step) == (8, 7, 8, True)


def test_the_head_reads_the_states_that_the_original_gives_it(policy, golden):
    pixels, prompts = policy.folder.look(batch(), policy.device)
    with torch.no_grad():
        states = policy.model.hidden(pixels, prompts, 56, after_patches=policy._state_embedding(batch()))
    np.testing.assert_allclose(states[..., ::8], golden["hidden"], atol=ROUNDING)


@pytest.mark.parametrize(("bounds", "answer"), [("q99", "proprio"), ("min_max", "bounds")])
def test_states_are_normalised_and_clipped_as_by_the_original(folder, golden, bounds, answer):
    policy = OpenVlaRegressionPolicy(config(folder, bounds=bounds))
    found = policy._states.normalise(batch().state.double())
    np.testing.assert_allclose(found, golden[answer], atol=1e-6)
    assert golden[answer].max() == 1


def test_the_state_matters_and_attention_is_bidirectional(policy, folder, golden):
    with torch.no_grad():
        moved = policy.predict(replace(batch(), state=batch().state * 0.9))
        causal = OpenVlaRegressionPolicy(config(folder, attention="causal")).predict(batch())
    assert np.abs(moved.numpy() - golden["normalised"]).max() > 0.1
    assert np.abs(causal.numpy() - golden["normalised"]).max() > 0.1


def test_the_density_is_that_of_a_gaussian_around_the_head(policy):
    with torch.no_grad():
        policy.log_std.copy_(torch.linspace(-3, -1, 7))
    choice = policy.act(batch(), seeded(), temperature=1.6)
    assert torch.equal(choice.actions, choice.decisions)
    logp, entropy = policy.log_probs(batch(), choice.decisions, temperature=1.6)
    std = 1.6 * policy.log_std.exp()
    far = (choice.decisions - policy.predict(batch())) / std
    expected = -(0.5 * far.square() + std.log() + 0.5 * math.log(2 * math.pi)).sum(-1)
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(logp.detach(), choice.logp)
    torch.testing.assert_close(entropy, (0.5 * math.log(2 * math.pi * math.e) + std.log()).sum().expand(2, 8))
    assert far.abs().max() > 1  # temperature and noise were used


def test_actions_without_statistics_are_clipped_and_the_decisions_are_not(policy):
    policy.statistics = None  # as after cloning with acting.scale none
    choice = policy.act(batch(), seeded())
    assert choice.decisions.abs().max() > 1
    assert torch.equal(choice.actions, choice.decisions.clamp(-1, 1))


def test_the_standard_deviation_begins_as_the_option_says(folder):
    torch.testing.assert_close(OpenVlaRegressionPolicy(config(folder)).log_std.exp(), torch.full((7,), 0.1))
    wide = OpenVlaRegressionPolicy(config(folder, std=0.5))
    drawn = torch.cat([wide.act(batch(), seeded(seed)).actions for seed in range(20)])
    assert 0.45 < float((drawn - wide.act(batch(), seeded(), greedy=True).actions.repeat(20, 1, 1)).std()) < 0.55


def test_gradients_reach_all_that_acts(policy):
    choice = policy.act(batch(), seeded())
    policy.log_probs(batch(), choice.decisions)[0].sum().backward()
    learning = {name for name, weight in policy.named_parameters() if weight.grad is not None and weight.grad.any()}
    frozen = ("model.vision_backbone", "model.language_model.lm_head")
    assert learning == {name for name, _ in policy.named_parameters() if not name.startswith(frozen)}
    assert {"log_std", "head.model.fc1.weight", "state_projector.fc1.weight", "model.projector.fc1.weight"} <= learning


def test_every_weight_that_is_to_learn_gets_a_gradient(folder):
    policy = OpenVlaRegressionPolicy(config(folder, train="all", gradient_checkpointing=True)).train()
    choice = policy.act(batch(), seeded())
    policy.log_probs(batch(), choice.decisions)[0].sum().backward()
    assert [name for name, weight in policy.named_parameters() if weight.requires_grad and weight.grad is None] == []


def test_cloning_has_the_loss_and_gradients_of_the_original_training(policy, golden):
    shown = torch.from_numpy(openvla_regression_peer.demonstrated())
    loss, metrics = policy.bc_loss(batch(), shown, torch.ones(2, 8))
    np.testing.assert_allclose(loss.item(), golden["loss"], rtol=1e-6)
    assert metrics == {"bc/loss": loss.item()}
    loss.backward()
    layer = policy.model.language_model.model.layers[0].mlp.down_proj
    for name, part in (
        ("state_gradient", policy.state_projector.fc1),
        ("head_gradient", policy.head.model.fc2),
        ("llama_gradient", layer),
    ):
        np.testing.assert_allclose(part.weight.grad, golden[name], atol=1e-5 * np.abs(golden[name]).max())
    assert policy.log_std.grad is None


def test_control_steps_after_the_end_do_not_count_in_cloning(policy):
    shown = torch.from_numpy(openvla_regression_peer.demonstrated())
    mask = torch.ones(2, 8)
    mask[1, 5:] = 0
    loss, _ = policy.bc_loss(batch(), shown, mask)
    distance = (policy.predict(batch()) - shown).abs().mean(-1)
    torch.testing.assert_close(loss, (distance[0].sum() + distance[1, :5].sum()) / 13)


def test_the_gripper_is_turned_for_libero(policy, folder):
    turning = OpenVlaRegressionPolicy(config(folder, gripper="libero"))
    plain, turned = policy.act(batch(), seeded()), turning.act(batch(), seeded())
    assert torch.equal(plain.decisions, turned.decisions)
    assert torch.equal(turned.actions[..., :-1], plain.actions[..., :-1])
    assert torch.equal(turned.actions[..., -1], torch.where(plain.actions[..., -1] > 0.5, -1.0, 1.0))
    raw = torch.from_numpy(openvla_regression_peer.demonstrated())
    shown = torch.cat([raw[..., :-1], 1 - 2 * raw[..., -1:]], -1)
    with torch.no_grad():
        assert turning.bc_loss(batch(), shown, torch.ones(2, 8)) == policy.bc_loss(batch(), raw, torch.ones(2, 8))


def test_a_saved_policy_is_a_folder_of_the_same_kind(policy, folder, tmp_path):
    with torch.no_grad():
        for weight in (
            policy.head.model.fc1.weight,
            policy.state_projector.fc1.weight,
            policy.model.projector.fc1.weight,
        ):
            weight.mul_(1.5)
        policy.log_std.copy_(torch.linspace(-3, -1, 7))
    saved = tmp_path / "saved"
    policy.save_pretrained(saved)
    opened, plain = open_policy(saved), OpenVlaRegressionPolicy(config(saved))
    other = OpenVlaRegressionPolicy(config(folder))
    other.load_weights(saved)
    with torch.no_grad():
        wanted = policy.predict(batch())
        for made in (opened, plain, other):
            assert torch.equal(made.predict(batch()), wanted)
    assert isinstance(opened, OpenVlaRegressionPolicy)
    assert torch.equal(opened.log_std, policy.log_std)
    assert torch.equal(other.log_std, policy.log_std)
    assert np.array_equal(opened.statistics.q99, policy.statistics.q99)
    names = {file.name for file in folder.iterdir()}
    assert {file.name for file in saved.iterdir()} - names == {"policy.json", "action_statistics.json", "log_std.pt"}
    for file in (HEAD_FILE, PROJECTOR_FILE):
        before, after = (torch.load(where / file, weights_only=True) for where in (folder, saved))
        assert list(before) == list(after)
        assert all(name.startswith("module.") for name in after)
    policy.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / HEAD_FILE).read_bytes() == (saved / HEAD_FILE).read_bytes()
    policy.save_pretrained(saved)  # over itself
    assert torch.equal(open_policy(saved).log_std, policy.log_std)


def test_names_without_the_prefix_of_parallel_training_are_read_too(policy, folder, tmp_path):
    target = changed_folder(folder, tmp_path / "plain")
    for file in (HEAD_FILE, PROJECTOR_FILE):
        torch.save(read_part(folder / file), target / file)
    with torch.no_grad():
        assert torch.equal(OpenVlaRegressionPolicy(config(target)).predict(batch()), policy.predict(batch()))


def test_a_head_without_a_projector_reads_no_state(folder, tmp_path):
    target = changed_folder(folder, tmp_path / "stateless")
    (target / PROJECTOR_FILE).unlink()
    policy = OpenVlaRegressionPolicy(config(target))
    with torch.no_grad():
        blind = policy.predict(replace(batch(), state=None))
        assert torch.equal(policy.predict(batch()), blind)
    assert policy.config.state_size is None
    policy.save_pretrained(tmp_path / "saved")
    assert torch.equal(open_policy(tmp_path / "saved").act(batch(), seeded(), greedy=True).actions, blind)


def test_weights_in_bfloat16_give_float32_densities(folder):
    policy = OpenVlaRegressionPolicy(config(folder, dtype="bfloat16"))
    choice = policy.act(batch(), seeded())
    assert {weight.dtype for weight in policy.head.parameters()} == {torch.bfloat16}
    logp, _ = policy.log_probs(batch(), choice.decisions)
    assert choice.actions.dtype == logp.dtype == policy.log_std.dtype == torch.float32


def test_the_folder_decides_the_policy(folder, tmp_path):
    def load(where, **options):
        settings = {"folder": str(where), "center_crop": False, **options}
        return load_action_policy(ActionPolicyConfig(kind="openvla", options=settings), LineSim(views=("wrist",)), 0)

    assert isinstance(load(folder, num_images_in_input=2), OpenVlaRegressionPolicy)
    tokens = changed_folder(folder, tmp_path / "tokens")
    (tokens / HEAD_FILE).unlink()
    with pytest.raises(
        UserError, match=r"has proprio_projector--150000_checkpoint\.pt; a policy with action tokens has"
    ):
        load(tokens)
    (tokens / PROJECTOR_FILE).unlink()
    assert isinstance(load(tokens), OpenVlaPolicy)
    with pytest.raises(UserError, match=r"no action_head--\*_checkpoint\.pt; use OpenVlaPolicy"):
        OpenVlaRegressionPolicy(config(tokens))


def test_sizes_that_do_not_fit_are_named(policy, folder, tmp_path):
    for state, found in ((None, "none"), (torch.zeros(2, 3), "3")):
        with pytest.raises(UserError, match=f"reads a state of 8 entries, but the observations have {found}"):
            policy.act(replace(batch(), state=state), seeded())
    with pytest.raises(UserError, match=r"uses 2 images \(num_images_in_input\), but the observations have 1"):
        policy.act(replace(batch(), views=None), seeded())
    sim = LineSim(views=("wrist",))
    sim.action_size = 7
    with pytest.raises(UserError, match="the policy reads 8 state entries, but the simulator has 2"):
        check_fit(policy, sim)
    sim.state_size = 8
    check_fit(policy, sim)
    target = changed_folder(folder, tmp_path / "sizes")
    known = json.loads((folder / "dataset_statistics.json").read_text())["tiny_no_noops"]

    def statistics(**parts):
        (target / "dataset_statistics.json").write_text(json.dumps({"x": {**known, **parts}}))
        return config(target)

    short = {part: {name: values[:6] for name, values in known[part].items()} for part in known}
    with pytest.raises(UserError, match="predicts actions of 7 entries, but the statistics have 6"):
        OpenVlaRegressionPolicy(statistics(action=short["action"]))
    with pytest.raises(UserError, match="reads a state of 8 entries, but the statistics have 6"):
        OpenVlaRegressionPolicy(statistics(proprio=short["proprio"]))
    (target / "dataset_statistics.json").write_text(json.dumps({"x": {"action": known["action"]}}))
    with pytest.raises(UserError, match=r"statistics of 'x' in .* have no part 'proprio'"):
        OpenVlaRegressionPolicy(config(target))


def test_other_parts_are_refused_by_name(folder, tmp_path):
    target = tmp_path / "other"

    def holds(message, file, weights=None, **options):
        changed_folder(folder, target)
        if weights is None:
            (target / file).write_bytes(b"")
        else:
            torch.save(weights, target / file)
        with pytest.raises(UserError, match=message):
            OpenVlaRegressionPolicy(config(target, **options))

    holds(r"noisy_action_projector--5_checkpoint\.pt, .* a diffusion head", "noisy_action_projector--5_checkpoint.pt")
    holds(r"vision_backbone--5_checkpoint\.pt, .* FiLM", "vision_backbone--5_checkpoint.pt")
    holds("several files action_head: action_head--150000", "action_head--5_checkpoint.pt")
    holds("is a diffusion head", HEAD_FILE, {"module.noise_predictor.mlp_resnet.fc1.weight": torch.zeros(1)})
    holds(r"cannot be read \(EOFError\)", HEAD_FILE)
    holds(r"cannot be read \(UnpicklingError\)", HEAD_FILE, {"x": Path("code")})
    holds("contains no named weights", HEAD_FILE, [1])
    holds("not an OpenVLA-OFT action head", HEAD_FILE, {"x": torch.zeros(1)})
    holds("not an OpenVLA-OFT projector", PROJECTOR_FILE, {"x": torch.zeros(1)})
    holds(r"do not fit this model: .*layer_norm1\.weight", HEAD_FILE, ActionHead(7, 16, 32).state_dict())
    holds("label_smoothing has no effect", "notes.txt", label_smoothing=0.1)


def test_weights_of_another_policy_are_not_loaded(policy, tmp_path):
    policy.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / PROJECTOR_FILE).unlink()
    with pytest.raises(UserError, match=r"no proprio_projector--\*_checkpoint\.pt, so it is not a saved policy"):
        policy.load_weights(tmp_path / "saved")
    policy.save_pretrained(tmp_path / "saved")
    torch.save({"log_std": torch.zeros(3)}, tmp_path / "saved/log_std.pt")
    with pytest.raises(UserError, match=r"log_std\.pt does not contain a log_std with 7 entries"):
        open_policy(tmp_path / "saved")


def test_a_saved_policy_is_served_with_its_state(policy, tmp_path):
    policy.save_pretrained(tmp_path / "saved")
    served = open_served_policy(tmp_path / "saved", ServeConfig())
    assert (served.format.state_size, served.format.views) == (8, 1)
    assert served.format.image_size == (None, None)


def test_it_is_evaluated_and_improved(folder, tmp_path, capsys):
    """On a line with one action and a state of two numbers, with a new head and a new projector."""
    line = changed_folder(folder, tmp_path / "line")
    columns = {"q01": [-0.8], "q99": [0.9], "min": [-1.0], "max": [1.0], "mean": [0.0], "std": [0.3]}
    states = {name: values * 2 for name, values in columns.items()}
    (line / "dataset_statistics.json").write_text(json.dumps({"line": {"action": columns, "proprio": states}}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_part(ActionHead(1, 32, 32), line / HEAD_FILE)
        write_part(StateProjector(2, 32), line / PROJECTOR_FILE)
    opened = evaluated_and_improved(line, tmp_path, capsys, ", std: 0.5")
    assert isinstance(opened, OpenVlaRegressionPolicy)
    assert opened.action_size == 1
    assert float(opened.log_std.detach().exp()) != 0.5
