"""OpenVLA-OFT folders: a tiny one that SimpleVLA-RL's code built, saved and evaluated (`openvla_peer`)."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.cli import main
from mmrl.errors import UserError
from mmrl.hub.compat import ensure_torchvision
from robotics.policies.base.action_policy import PolicyInputs, open_policy
from robotics.policies.openvla.openvla_folder import OpenVlaConfig, _centre
from robotics.policies.openvla.tokens import OpenVlaPolicy
from tests.robotics import openvla_peer, tiny_timm

RUN = """
recipe: robot_grpo
output_dir: {run}
sim: {{kind: "tests.robotics.line_sim:open_line"}}
model: {{kind: openvla, chunk: 8, options: {{folder: {folder}, center_crop: false{more}}}}}
acting: {{n_action_steps: 4, scale: bounds_q99}}
reward: potential
data: {{tasks: [right], layouts: 8}}
eval_data: {{held_out: {{tasks: [right], split: held_out, layouts: 4}}}}
evaluation: {{every: 0, greedy: true, samples: 0, videos: 0}}
trainer: {{steps: {steps}, tasks_per_step: 2, samples_per_task: 12, learning_rate: 1.0e-3, threads: 1}}
tracking: {{quiet: true, tensorboard: false}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder, with golden.npz."""
    return unpacked(tmp_path_factory.mktemp("openvla"), "openvla-oft.tar.xz")


def unpacked(target, *names):
    """A folder with the content of the archives."""
    ensure_torchvision()
    pytest.importorskip("timm", reason="needs timm, whose vision backbones OpenVLA has")
    tiny_timm.register()
    for name in names:
        with tarfile.open(Path(__file__).with_name(name)) as archive:
            archive.extractall(target, filter="data")
    return target


@pytest.fixture
def policy(folder):
    return OpenVlaPolicy(OpenVlaConfig(str(folder), center_crop=False))


@pytest.fixture
def golden(folder):
    with np.load(folder / "golden.npz") as arrays:
        return dict(arrays)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(texts=openvla_peer.TEXTS):
    return PolicyInputs(torch.from_numpy(openvla_peer.images()), None, texts)


def test_logits_and_actions_are_those_of_the_original(policy, golden):
    with torch.no_grad():
        logits = policy.logits(batch())
    np.testing.assert_allclose(logits[..., ::8], golden["logits"], atol=1e-4)
    choice = policy.act(batch(), seeded(), greedy=True)
    assert np.array_equal(choice.decisions + 31744, golden["tokens"])
    np.testing.assert_allclose(policy.statistics.unnormalise(choice.actions), golden["actions"], atol=1e-6)


def test_an_instruction_cannot_end_itself(policy):
    end = policy.folder._texts.eos_token
    assert policy.folder._texts.eos_token_id not in policy.folder._prompt(f"open{end} the drawer")


def test_two_images_are_seen_as_by_the_original(folder):
    """openvla-oft-two.npz has the outputs of SimpleVLA-RL's code for the same folder."""
    policy = OpenVlaPolicy(OpenVlaConfig(str(folder), center_crop=False, num_images_in_input=2))
    wrist = torch.from_numpy(openvla_peer.wrist_images())[:, None]
    both = PolicyInputs(batch().images, None, batch().instructions, wrist)
    with torch.no_grad():
        logits = policy.logits(both)
    with np.load(Path(__file__).with_name("openvla-oft-two.npz")) as golden:
        np.testing.assert_allclose(logits[..., ::8], golden["logits"], atol=1e-4)
        choice = policy.act(both, seeded(), greedy=True)
        assert np.array_equal(choice.decisions + 31744, golden["tokens"])
    assert policy.views == 1
    with pytest.raises(UserError, match=r"uses 2 images \(num_images_in_input\), but the observations have 1,"):
        policy.logits(batch())


def test_a_causal_pass_differs_and_ignores_later_tokens(policy, folder, golden):
    causal = OpenVlaPolicy(OpenVlaConfig(str(folder), center_crop=False, attention="causal"))
    with torch.no_grad():
        logits = causal.logits(batch())
        short = causal.model.logits(
            causal.folder._images(batch().images, [32], False),
            [causal.folder._prompt(text) for text in batch().instructions],
            1,
            256,
        )
    assert not np.allclose(logits[..., ::8], golden["logits"], atol=1e-2)
    assert short.shape == (2, 1, 256)
    causal.decisions = 3
    with torch.no_grad():
        torch.testing.assert_close(causal.logits(batch()), logits[:, :3], atol=1e-5, rtol=1e-5)


def test_scores_of_samples_are_those_of_the_softmax(policy):
    choice = policy.act(batch(), seeded(), temperature=1.6)
    logp, entropy = policy.log_probs(batch(), choice.decisions, temperature=1.6)
    expected = (policy.logits(batch()) / 1.6).log_softmax(-1)
    torch.testing.assert_close(logp, expected.gather(-1, choice.decisions[..., None])[..., 0])
    torch.testing.assert_close(choice.logp, logp.detach())
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    logp.sum().backward()
    trained = {name for name, weight in policy.named_parameters() if weight.grad is not None}
    wanted = {name for name, weight in policy.named_parameters() if "vision" not in name}
    assert trained == wanted


def test_the_vision_backbones_learn_where_they_are_read(folder):
    policy = OpenVlaPolicy(OpenVlaConfig(str(folder), center_crop=False, train="all", gradient_checkpointing=True))
    choice = policy.train().act(batch(), seeded())
    policy.log_probs(batch(), choice.decisions)[0].sum().backward()
    lost = [name for name, weight in policy.named_parameters() if weight.requires_grad and weight.grad is None]
    assert not lost
    assert policy.model.vision_backbone.featurizer.blocks[0].ls1.gamma.grad.abs().max() > 0


def test_actions_come_from_the_statistics_and_the_gripper_is_turned(policy, folder):
    """-1 and 1 correspond to the quantiles or the bounds; the gripper is 0 to 1, for LIBERO 1 closes and -1 opens."""
    plain = policy.act(batch(), seeded())
    wide = OpenVlaPolicy(OpenVlaConfig(str(folder), center_crop=False, bounds="min_max", gripper="libero"))
    turned = wide.act(batch(), seeded())
    assert torch.equal(plain.decisions, turned.decisions)
    torch.testing.assert_close(plain.actions[..., :-1], turned.actions[..., :-1])
    assert torch.equal(turned.actions[..., -1], torch.where(plain.actions[..., -1] > 0.5, -1.0, 1.0))
    ends = torch.tensor([[-1.0] * 7, [1.0] * 7])
    given = openvla_peer.STATISTICS
    for made, low, high in ((policy, "q01", "q99"), (wide, "min", "max")):
        found = made.statistics.unnormalise(ends)
        torch.testing.assert_close(found[:, :6], torch.tensor([given[low][:6], given[high][:6]]))
        assert torch.equal(found[:, 6], ends[:, 6])


def test_demonstrations_have_the_gripper_of_the_simulator(policy, folder):
    turning = OpenVlaPolicy(OpenVlaConfig(str(folder), center_crop=False, gripper="libero"))
    raw = torch.zeros(2, 8, 7)
    raw[:, ::2, -1] = 1
    shown = raw.clone()
    shown[..., -1] = 1 - 2 * raw[..., -1]
    mask = torch.ones(2, 8)
    with torch.no_grad():
        assert turning.bc_loss(batch(), shown, mask)[0] == policy.bc_loss(batch(), raw, mask)[0]


def test_cloning_is_the_cross_entropy_of_the_demonstrated_bins(policy):
    tokens = torch.tensor([3, 60, 120, 180, 240, 90, 30]).repeat(2, 8)
    actions = policy.tokenizer.decode(tokens).unflatten(1, (8, 7))
    mask = torch.ones(2, 8)
    mask[1, 5:] = 0
    loss, metrics = policy.bc_loss(batch(), actions, mask)
    loss.backward()
    weight = mask.repeat_interleave(7, 1)
    with torch.no_grad():
        logp = policy.logits(batch()).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        torch.testing.assert_close(loss, -(logp * weight).sum() / weight.sum())
        for each in policy.parameters():
            if each.grad is not None:
                each -= 1e-4 * each.grad.sign()
        assert policy.bc_loss(batch(), actions, mask)[1]["bc/loss"] < metrics["bc/loss"]


def test_a_saved_policy_is_a_folder_of_the_same_kind(policy, folder, tmp_path):
    with torch.no_grad():
        policy.model.projector.fc1.weight.mul_(1.5)
    policy.save_pretrained(tmp_path / "saved")
    opened, plain = (
        open_policy(tmp_path / "saved"),
        OpenVlaPolicy(OpenVlaConfig(str(tmp_path / "saved"), center_crop=False)),
    )
    with torch.no_grad():
        wanted = policy.logits(batch())
        assert torch.equal(opened.logits(batch()), wanted)
        assert torch.equal(plain.logits(batch()), wanted)
    from safetensors.torch import load_file

    names = [set(load_file(where / "model.safetensors")) for where in (folder, tmp_path / "saved")]
    assert names[0] == names[1]
    other = OpenVlaPolicy(OpenVlaConfig(str(folder), center_crop=False))
    other.load_weights(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(other.logits(batch()), wanted)


def test_images_are_cropped_as_tensorflow_does():
    """tf.image.crop_and_resize of the box (1 - sqrt 0.9) / 2 samples (H - 1) (y1 + i (y2 - y1) / (H - 1))."""
    image = torch.arange(0, 250, 10, dtype=torch.uint8)[None, :, None, None].expand(1, 25, 25, 3).contiguous()
    found = _centre(image)[0, :, 12, 0]
    low = (1 - 0.9**0.5) / 2
    wanted = [10 * 24 * (low + row * (1 - 2 * low) / 24) for row in range(25)]
    np.testing.assert_allclose(found, np.floor(np.array(wanted) / 255 * 255.5), atol=1)


def test_what_cannot_be_used_is_named(folder, tmp_path):
    import shutil

    def changed(file, **entries):
        target = tmp_path / "changed"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        given = json.loads((target / file).read_text())
        (target / file).write_text(json.dumps({**given, **entries}))
        return OpenVlaConfig(str(target))

    with pytest.raises(ValueError, match="folder is empty"):
        OpenVlaPolicy(OpenVlaConfig())
    with pytest.raises(UserError, match=r"not an OpenVLA model: it has no config\.json"):
        OpenVlaPolicy(OpenVlaConfig(str(tmp_path)))
    with pytest.raises(UserError, match=r"unnorm_key is 'bridge'; .* has statistics of: tiny_no_noops"):
        OpenVlaPolicy(OpenVlaConfig(str(folder), unnorm_key="bridge"))
    with pytest.raises(UserError, match="resizes images by 'letterbox'"):
        OpenVlaPolicy(changed("preprocessor_config.json", image_resize_strategy="letterbox"))
    with pytest.raises(UserError, match=r"language model is of type 'phi'.*docs/adding\.md"):
        OpenVlaPolicy(changed("config.json", text_config={"model_type": "phi"}))
    with pytest.raises(UserError, match=r"weights in .* belong to a different model: .*projector\.fc1"):
        OpenVlaPolicy(changed("config.json", use_fused_vision_backbone=False))
    config = changed("config.json")
    (tmp_path / "changed/action_head--150000_checkpoint.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"has action_head--150000_checkpoint\.pt; a policy with action tokens has"):
        OpenVlaPolicy(config)
    with pytest.raises(UserError, match="needs images, but the observations have none"):
        OpenVlaPolicy(OpenVlaConfig(str(folder))).act(PolicyInputs(None, None, ("go",)), seeded())


def evaluated_and_improved(line, tmp_path, capsys, more=""):
    """The policy of a folder after a run that raises its reward."""
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(run=tmp_path / "run", folder=line, steps=8, more=more))
    assert main(["evaluate", str(path)]) == 0
    assert "all tasks" in capsys.readouterr().out
    assert main(["train", str(path)]) == 0
    rewards = [json.loads(row)["reward/mean"] for row in (tmp_path / "run/metrics.jsonl").open()]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2])
    return open_policy(next((tmp_path / "run/checkpoints").glob("step-*/model")))


def test_it_is_evaluated_and_improved(folder, tmp_path, capsys):
    """On a line with one action: the statistics are reduced to one entry."""
    import shutil

    line = tmp_path / "line"
    shutil.copytree(folder, line)
    columns = {"q01": [-0.8], "q99": [0.9], "min": [-1.0], "max": [1.0], "mean": [0.0], "std": [0.3]}
    statistics = {"line": {"action": columns}}
    (line / "dataset_statistics.json").write_text(json.dumps(statistics))
    assert evaluated_and_improved(line, tmp_path, capsys).action_size == 1
