"""Drawing frames, their log-probabilities, and the choices of inference."""

import itertools
import math

import pytest
import torch

from mmrl.vlm.tspo.picking import (
    NEVER,
    bin_max_frames,
    draw_picks,
    gumbel_noise,
    pick_logprobs,
    temperature_at,
    top_frames,
    uniform_frames,
)

LOGITS = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.7], dtype=torch.float64)


def orders(count):
    return torch.tensor(list(itertools.permutations(range(len(LOGITS)), count)))


def drawn_one_by_one(logits, order):
    """Probability of an order by its definition: a softmax over the remaining frames, pick after pick."""
    left = list(range(len(logits)))
    probability = 1.0
    for pick in order:
        total = sum(math.exp(logits[j]) for j in left)
        probability *= math.exp(logits[pick]) / total
        left.remove(pick)
    return probability


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_plackett_luce_is_the_probability_of_the_order(count):
    every = orders(count)
    logp = pick_logprobs("plackett_luce", LOGITS.expand(len(every), -1), every, torch.ones_like(every)).sum(1)
    expected = [drawn_one_by_one(LOGITS.tolist(), order) for order in every.tolist()]
    torch.testing.assert_close(logp.exp(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert float(logp.exp().sum()) == pytest.approx(1.0, abs=1e-9)


def test_draws_have_the_frequencies_of_plackett_luce():
    rows = 40_000
    noise = gumbel_noise((rows, len(LOGITS)), torch.Generator().manual_seed(0))
    picks, mask = draw_picks(LOGITS.float().expand(rows, -1), noise, torch.full((rows,), 2))
    assert mask.all()
    every = orders(2)
    probability = pick_logprobs("plackett_luce", LOGITS.expand(len(every), -1), every, torch.ones_like(every)).sum(1)
    for order, expected in zip(every, probability.exp().tolist(), strict=True):
        share = float((picks == order).all(1).float().mean())
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / rows)


def test_the_order_of_a_draw_is_kept():
    noise = torch.tensor([[0.0, 9.0, 0.0, 5.0, 7.0]])
    picks, _ = draw_picks(torch.zeros(1, 5), noise, torch.tensor([3]))
    assert picks.tolist() == [[1, 4, 3]]


def test_rows_with_fewer_frames_have_fewer_picks_and_no_gradient_elsewhere():
    logits = torch.tensor([[1.0, 2.0, NEVER, NEVER], [0.0, 1.0, 2.0, 3.0]], requires_grad=True)
    picks, mask = draw_picks(logits.detach(), torch.zeros(2, 4), torch.tensor([2, 3]))
    assert picks.tolist() == [[1, 0, 0], [3, 2, 1]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    for form in ("mean_marginal", "plackett_luce"):
        logp = pick_logprobs(form, logits, picks, mask)
        assert logp[0, 2] == 0
        (slope,) = torch.autograd.grad(logp.sum(), logits)
        assert torch.isfinite(slope).all()
        assert (slope[0, 2:] == 0).all()
    # two of two frames: the second pick is certain
    assert float(logp[0, 1]) == pytest.approx(0.0, abs=1e-6)


def test_marginals_are_those_of_one_softmax_and_the_noisy_form_adds_the_noise():
    picks, mask = torch.tensor([[2, 0]]), torch.ones(1, 2)
    plain = LOGITS.log_softmax(0)[picks]
    torch.testing.assert_close(pick_logprobs("mean_marginal", LOGITS[None], picks, mask), plain)
    torch.testing.assert_close(pick_logprobs("sum_marginal", LOGITS[None], picks, mask), plain)
    noise = torch.randn(1, 5, dtype=torch.float64)
    noisy = (LOGITS + noise[0]).log_softmax(0)[picks]
    torch.testing.assert_close(pick_logprobs("noisy_product", LOGITS[None], picks, mask, noise), noisy)
    with pytest.raises(ValueError, match="needs the noise"):
        pick_logprobs("noisy_product", LOGITS[None], picks, mask)
    with pytest.raises(ValueError, match="available: mean_marginal"):
        pick_logprobs("mean", LOGITS[None], picks, mask)


@pytest.mark.parametrize("form", ["mean_marginal", "noisy_product", "plackett_luce"])
def test_gradients_are_those_of_finite_differences(form):
    picks, mask = torch.tensor([[2, 0, 4]]), torch.ones(1, 3, dtype=torch.float64)
    noise = torch.randn(1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logits = LOGITS[None].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pick_logprobs(form, x, picks, mask, noise), (logits,))


def test_sharp_logits_keep_finite_log_probabilities():
    logits = torch.linspace(-80, 80, 50)[None].requires_grad_()
    picks, mask = torch.arange(49, 33, -1)[None], torch.ones(1, 16)
    logp = pick_logprobs("plackett_luce", logits, picks, mask)
    assert torch.isfinite(logp).all()
    assert (logp <= 0).all()
    (slope,) = torch.autograd.grad(logp.sum(), logits)
    assert torch.isfinite(slope).all()


def test_the_temperature_falls_along_a_line():
    assert temperature_at(0, 100) == 0.025
    assert temperature_at(50, 100) == pytest.approx(0.0175)
    assert temperature_at(100, 100) == pytest.approx(0.01)


def published_bin_max(scores, count):
    """Every frame to the nearest of the evenly spaced proposals, then the best of each bin, with plain loops."""
    last = len(scores) - 1
    count = min(count, len(scores))
    places = [last] if count == 1 else [round(i * (last / (count - 1))) for i in range(count)]
    bins = [min(range(count), key=lambda part: (abs(frame - places[part]), part)) for frame in range(len(scores))]
    found = []
    for part in range(count):
        own = [frame for frame in range(len(scores)) if bins[frame] == part]
        found.append(max(own, key=lambda frame: (scores[frame], -frame)))
    return found


@pytest.mark.parametrize(("total", "count"), [(10, 1), (10, 3), (11, 4), (5, 5), (3, 9), (96, 8)])
def test_inference_picks(total, count):
    scores = torch.randn(total, generator=torch.Generator().manual_seed(total))
    kept = min(total, count)
    assert bin_max_frames(scores, count).tolist() == published_bin_max(scores.tolist(), count)
    assert top_frames(scores, count).tolist() == sorted(sorted(range(total), key=lambda i: -float(scores[i]))[:kept])
    even = uniform_frames(total, count).tolist()
    assert len(set(even)) == kept
    assert even[0] == 0
    assert count == 1 or even[-1] == total - 1
