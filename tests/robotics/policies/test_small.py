"""The small policy of action tokens and its encoder."""

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.fields import check_config
from robotics.policies.base.action_policy import PolicyInputs, open_policy
from robotics.policies.base.action_statistics import StateStatistics
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.small import SmallVlaConfig, SmallVlaPolicy
from tests.robotics.policies.builders import ENCODER, PLACES, TEXTS, B, D, K, S, draw, make_inputs, make_small


def test_small_log_probs_are_the_softmax_of_the_logits(policies):
    policy, batch = policies["small_step"], make_inputs()
    choice = draw(policy, temperature=1.6)
    logits = policy.logits(batch).detach().double().numpy() / 1.6
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = choice.decisions.numpy()
    np.testing.assert_allclose(choice.logp, np.take_along_axis(logp, tokens[..., None], -1)[..., 0], atol=1e-5)
    entropy = policy.log_probs(batch, choice.decisions, 1.6)[1].detach()
    np.testing.assert_allclose(entropy, -(np.exp(logp) * logp).sum(-1), atol=1e-5)
    np.testing.assert_allclose(choice.actions.flatten(1), (2 * tokens + 1) / 16 - 1, atol=1e-6)


@pytest.mark.parametrize("mode", ["uniform", "openvla"])
def test_a_spread_target_has_its_mean_at_the_demonstration(mode):
    policy = make_small(label_spread=0.2, token_mode=mode)
    actions = torch.tensor([[0.05, 0.11, -0.3]])
    target = policy._blurred(actions)
    torch.testing.assert_close(target.sum(-1), torch.ones(1, 3))
    centres = torch.from_numpy(policy.tokenizer.centres).float()
    torch.testing.assert_close((target * centres).sum(-1), actions, atol=0.02, rtol=0)
    assert torch.equal(
        policy.tokenizer.decode(target.argmax(-1)), policy.tokenizer.decode(policy.tokenizer.encode(actions))
    )


def test_everything_that_it_sees_matters(policies):
    policy, batch = policies["small_step"], make_inputs()
    expected = policy.logits(batch).detach()
    changes = {"images": 255 - batch.images, "state": batch.state + 1, "instructions": tuple(reversed(TEXTS))}
    for name, value in changes.items():
        changed = PolicyInputs(**{"images": batch.images, "state": batch.state, "instructions": TEXTS} | {name: value})
        assert float((policy.logits(changed).detach() - expected).abs().max()) > 1e-3, name


def test_the_order_of_words_matters(policies):
    policy, batch = policies["small_step"], make_inputs()
    swapped = PolicyInputs(batch.images, batch.state, ("red on the blue cube",) * B)
    other = PolicyInputs(batch.images, batch.state, ("blue on the red cube",) * B)
    assert float((policy.logits(swapped) - policy.logits(other)).detach().abs().max()) > 1e-4


def test_keypoints_lie_where_the_map_is_high():
    from robotics.policies.base.encoder import expected_places

    maps = torch.zeros(1, 2, 5, 9)
    maps[0, 0, 4, 0] = maps[0, 1, 2, 8] = 100.0
    # rows first, then columns: bottom left, and the middle of the right edge
    torch.testing.assert_close(expected_places(maps), torch.tensor([[1.0, 0.0, -1.0, 1.0]]))


def test_unknown_words_are_counted_and_known_ones_are_not():
    policy = make_small()
    batch = make_inputs()
    odd = PolicyInputs(batch.images, batch.state, ("touch the Purple, cube!", TEXTS[0], TEXTS[0]))
    policy.logits(odd)
    assert dict(policy.vocabulary.unknown) == {"purple": 1}


def test_a_task_without_words_is_an_instruction_too():
    policy, batch = SmallVlaPolicy.build(SmallVlaConfig(D, K, encoder=EncoderConfig(**ENCODER)), [""]), make_inputs()
    logits = policy.logits(PolicyInputs(batch.images, batch.state, ("", *TEXTS[1:])))
    assert torch.isfinite(logits).all()
    assert policy.vocabulary.unknown.total() == sum(len(text.split()) for text in TEXTS[1:])


def test_states_are_scaled_by_the_data_sets_statistics():
    policy, batch = make_small(), make_inputs()
    mean, std = np.arange(S, dtype=float), np.array([1.0, 2.0, 3.0, 4.0, 0.0])
    before = policy.logits(batch).detach()
    policy.scale_states(StateStatistics(mean, std))
    raw = batch.state * torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0]) + torch.from_numpy(mean).float()
    torch.testing.assert_close(policy.logits(PolicyInputs(batch.images, raw, TEXTS)), before, atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match=f"2 state entries, but the policy has {S}"):
        policy.scale_states(StateStatistics(np.zeros(2), np.ones(2)))


def test_a_policy_may_see_only_a_state_or_only_images():
    for changes, batch in (
        ({"image_size": None}, PolicyInputs(None, torch.zeros(1, S), TEXTS[:1])),
        ({"state_size": None}, PolicyInputs(make_inputs().images[:1], None, TEXTS[:1])),
        ({"keypoints": 0}, make_inputs(rows=1)),
        ({"keypoints": 0} | PLACES, make_inputs(rows=1)),
        ({"image_size": None} | PLACES, PolicyInputs(None, torch.zeros(1, S), TEXTS[:1])),
    ):
        config = SmallVlaConfig(D, K, encoder=EncoderConfig(**ENCODER | changes))
        assert SmallVlaPolicy.build(config, TEXTS).logits(batch).shape == (1, K * D, 64)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (make_inputs(64), r"images of \(32, 32\) pixels, got \(64, 64\)"),
        (PolicyInputs(None, torch.zeros(1, S), TEXTS[:1]), "got none"),
        (PolicyInputs(make_inputs().images, torch.zeros(B, 2), TEXTS), f"state of {S} entries, got 2"),
        (PolicyInputs(make_inputs().images[:1], torch.zeros(1, S), ("word " * 33,)), "33 words; at most 32"),
    ],
)
def test_observations_that_do_not_fit_are_named(batch, message):
    with pytest.raises(UserError, match=message):
        make_small().logits(batch)


@pytest.mark.parametrize(
    "changes", [{"queries": "both"}, {"label_smoothing": 1.0}, {"chunk": 0}, {"token_mode": "log"}]
)
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(UserError):
        SmallVlaPolicy.build(SmallVlaConfig(**{"action_size": D} | changes), TEXTS)


@pytest.mark.parametrize("changes", [{"image_size": (30, 32)}, {"width": 30}, {"image_size": None, "state_size": None}])
def test_encoder_sizes_out_of_range_are_refused(changes):
    with pytest.raises(UserError):
        check_config(EncoderConfig(**ENCODER | changes))


def test_folders_that_are_not_policies_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no policy\.json"):
        open_policy(tmp_path)
    make_small().save_pretrained(tmp_path)
    other = SmallVlaPolicy.build(SmallVlaConfig(D, K, bins=16, encoder=EncoderConfig(**ENCODER)), ["other words"])
    with pytest.raises(UserError, match="differ from this policy's vocabulary"):
        other.load_weights(tmp_path)
    with pytest.raises(UserError, match="do not fit"):
        make_small("token").load_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="damaged"):
        open_policy(tmp_path)
    (tmp_path / "policy.json").write_text('{"kind": "large"}')
    with pytest.raises(UserError, match=r"known: small, gaussian, squashed, residual.*docs/adding\.md"):
        open_policy(tmp_path)
