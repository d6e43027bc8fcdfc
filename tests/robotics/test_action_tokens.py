import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.policies.base.action_tokens import TOKEN_MODES, ActionTokenizer, draw_tokens, score_tokens, token_loss

V = 32000


def openvla_ids(actions, vocabulary=V):
    """The public formula, implemented a second time."""
    return vocabulary - np.digitize(np.clip(actions, -1, 1), np.linspace(-1.0, 1.0, 256))


def openvla_actions(ids, vocabulary=V):
    edges = np.linspace(-1.0, 1.0, 256)
    return ((edges[:-1] + edges[1:]) / 2)[np.clip(vocabulary - ids - 1, 0, 254)]


def test_openvla_ids_by_hand():
    tokens = ActionTokenizer()
    ids = V - 256 + tokens.encode(np.array([-1.0, -5.0, 0.0, 0.9999, 1.0, 5.0]))
    # an edge every 2/255: -1 is in the first bin, 0 in the 128th, 1 beyond the last edge
    assert ids.tolist() == [V - 1, V - 1, V - 128, V - 255, V - 256, V - 256]
    centres = tokens.decode(np.array([0, 1, 2, 255]))
    np.testing.assert_allclose(centres, [1 - 1 / 255, 1 - 1 / 255, 1 - 3 / 255, -1 + 1 / 255], rtol=0, atol=2**-22)


def test_openvla_is_the_public_formula():
    tokens = ActionTokenizer(256, "openvla")
    actions = np.concatenate([np.random.default_rng(0).uniform(-1.2, 1.2, 2000), np.linspace(-1, 1, 256)])
    ids = V - 256 + tokens.encode(actions)
    np.testing.assert_array_equal(ids, openvla_ids(actions))
    assert ids.min() == 31744
    assert ids.max() == 31999
    every = np.arange(31744, 32000)
    np.testing.assert_allclose(tokens.decode(every - (V - 256)), openvla_actions(every), rtol=0, atol=2**-22)


def test_uniform_by_hand():
    tokens = ActionTokenizer(4, "uniform")
    np.testing.assert_allclose(tokens.centres, [-0.75, -0.25, 0.25, 0.75])
    assert tokens.encode(np.array([-1, -0.51, -0.5, -0.01, 0.0, 0.49, 0.5, 1.0, 2.0])).tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        3,
    ]


@pytest.mark.parametrize("bins", [3, 16, 255, 256])
def test_centres_of_uniform_bins_are_recovered(bins):
    tokens = ActionTokenizer(bins, "uniform")
    indices = np.arange(bins)
    np.testing.assert_array_equal(tokens.encode(tokens.decode(indices)), indices)


@pytest.mark.parametrize("mode", TOKEN_MODES)
@pytest.mark.parametrize("bins", [3, 32, 256])
def test_decoding_is_within_half_a_bin_and_monotone(mode, bins):
    tokens = ActionTokenizer(bins, mode)
    actions = np.sort(np.random.default_rng(0).uniform(-1, 1, 500))
    indices = tokens.encode(actions)
    steps = np.diff(indices) * (1 if mode == "uniform" else -1)
    assert (steps >= 0).all()
    width = 2 / (bins if mode == "uniform" else bins - 1)
    assert np.abs(tokens.decode(indices) - actions).max() <= width / 2 + 1e-7


@pytest.mark.parametrize("mode", TOKEN_MODES)
def test_tensors_and_arrays_agree_for_any_leading_shape(mode):
    tokens = ActionTokenizer(256, mode)
    actions = np.concatenate([np.random.default_rng(0).uniform(-1.1, 1.1, 344), np.linspace(-1, 1, 256)])
    actions = actions.astype(np.float32).reshape(2, 3, 100)
    indices = tokens.encode(actions)
    as_tensor = tokens.encode(torch.from_numpy(actions))
    assert indices.shape == actions.shape
    assert as_tensor.dtype == torch.int64
    np.testing.assert_array_equal(as_tensor.numpy(), indices)
    decoded = tokens.decode(as_tensor)
    assert decoded.dtype == torch.float32
    np.testing.assert_array_equal(decoded.numpy(), tokens.decode(indices))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UserError, match="openvla, uniform"):
        ActionTokenizer(256, "log")
    with pytest.raises(UserError, match="at least 2"):
        ActionTokenizer(1, "uniform")
    tokens = ActionTokenizer()
    for nan in (np.array([np.nan]), torch.tensor([float("nan")])):
        with pytest.raises(ValueError, match="NaN"):
            tokens.encode(nan)
    for wrong in (np.array([256]), torch.tensor([-1])):
        with pytest.raises(ValueError, match=r"0\.\.255"):
            tokens.decode(wrong)


def test_drawn_tokens_have_the_frequencies_of_the_softmax():
    logits = torch.tensor([0.0, 1.0, float("-inf"), 2.0])
    tokens, logp = draw_tokens(logits.expand(20000, 4), torch.Generator().manual_seed(0), temperature=1.6)
    expected = np.exp(np.array([0.0, 1.0, -np.inf, 2.0]) / 1.6)
    expected /= expected.sum()
    found = np.bincount(tokens.numpy(), minlength=4) / 20000
    assert found[2] == 0
    np.testing.assert_allclose(found, expected, atol=0.015)
    np.testing.assert_allclose(logp.exp().numpy(), expected[tokens.numpy()], rtol=1e-5)


def test_greedy_takes_the_most_likely_and_one_seed_gives_one_draw():
    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw_tokens(logits, torch.Generator(), greedy=True)[0], logits.argmax(-1))
    draws = [draw_tokens(logits, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawing_and_scoring_give_the_same_bits(dtype):
    logits = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens, drawn = draw_tokens(logits, torch.Generator().manual_seed(1), temperature=1.6)
    scored, entropy = score_tokens(logits, tokens, temperature=1.6)
    assert scored.dtype == torch.float32
    assert torch.equal(drawn, scored)
    reference = torch.distributions.Categorical(logits=logits.double() / 1.6)
    torch.testing.assert_close(entropy.double(), reference.entropy(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scored.double(), reference.log_prob(tokens), atol=1e-5, rtol=1e-5)


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        draw_tokens(torch.zeros(1, 2), torch.Generator(), temperature=0.0)
    with pytest.raises(ValueError, match="do not fit"):
        score_tokens(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_is_torchs_over_the_counted_tokens(smoothing):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 5, generator=generator)
    targets = torch.randint(0, 5, (3, 4), generator=generator)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    kept = mask.bool()
    expected = torch.nn.functional.cross_entropy(logits[kept], targets[kept], label_smoothing=smoothing)
    torch.testing.assert_close(token_loss(logits, targets, mask, smoothing), expected)
    whole = torch.nn.functional.one_hot(targets, 5).float()
    torch.testing.assert_close(token_loss(logits, whole, mask, smoothing), expected)


def test_no_demonstration_costs_nothing():
    assert float(token_loss(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3))) == 0
