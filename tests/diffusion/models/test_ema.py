import pytest
import torch

from diffusion.models.ema import EMAWeights, eval_ema_decay, kl_ema_decay, nft_old_decay
from mmrl.errors import UserError


class Policy(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.trained = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.3], dtype=dtype))
        self.frozen = torch.nn.Parameter(torch.tensor([5.0]), requires_grad=False)


def put(policy, value):
    with torch.no_grad():
        policy.trained.fill_(value)


def test_average_of_a_constant_has_a_closed_form():
    policy = Policy()
    put(policy, 2.0)
    shadow = EMAWeights(policy)
    put(policy, 10.0)
    for _ in range(7):
        shadow.update(0.9)
    # after k updates the old value keeps the share 0.9 ** k
    expected = torch.full((3,), 0.9**7 * 2.0 + (1 - 0.9**7) * 10.0)
    torch.testing.assert_close(shadow.state_dict()["trained"], expected)


def test_average_of_a_sequence_is_the_weighted_sum():
    policy, values, decays = Policy(), [1.0, -3.0, 4.0, 0.5], [0.2, 0.7, 0.4, 0.95]
    put(policy, 6.0)
    shadow = EMAWeights(policy)
    for value, decay in zip(values, decays, strict=True):
        put(policy, value)
        shadow.update(decay)
    kept = torch.tensor([*decays, 1.0]).flip(0).cumprod(0).flip(0)
    shares = (1 - torch.tensor(decays)) * kept[1:]
    expected = kept[0] * 6.0 + (shares * torch.tensor(values)).sum()
    torch.testing.assert_close(shadow.state_dict()["trained"], expected.expand(3))


def test_only_trained_weights_are_held():
    shadow = EMAWeights(Policy())
    assert set(shadow.state_dict()) == {"trained"}
    assert len(shadow) == 1
    with pytest.raises(UserError, match="nothing to average"):
        EMAWeights(Policy().requires_grad_(False))


def test_copy_is_exact_and_a_copy():
    policy = Policy()
    shadow = EMAWeights(policy)
    put(policy, 0.1)
    shadow.copy_()
    held = shadow.state_dict()["trained"].clone()
    assert torch.equal(held, policy.trained)
    put(policy, 7.0)
    assert torch.equal(shadow.state_dict()["trained"], held)
    shadow.update(1.0)
    assert torch.equal(shadow.state_dict()["trained"], held)


def test_a_copy_forgets_values_that_are_not_numbers():
    policy = Policy()
    put(policy, float("nan"))
    shadow = EMAWeights(policy)
    put(policy, 1.0)
    shadow.copy_()
    assert torch.equal(shadow.state_dict()["trained"], torch.ones(3))


def test_applied_swaps_and_restores_every_bit():
    policy = Policy()
    shadow = EMAWeights(policy)
    before = torch.tensor([0.1, 1 / 3, -7e-30])
    with torch.no_grad():
        policy.trained.copy_(before)
    parameter = policy.trained
    with shadow.applied():
        assert torch.equal(policy.trained, torch.tensor([1.0, -2.0, 0.3]))
        assert policy.trained.requires_grad
        assert policy.trained.is_leaf
    assert policy.trained is parameter
    assert torch.equal(policy.trained, before)
    assert policy.trained.grad is None


def test_applied_restores_after_an_error_and_after_writing():
    policy = Policy()
    shadow = EMAWeights(policy)
    put(policy, 3.0)

    def fail():
        with shadow.applied():
            put(policy, 99.0)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert torch.equal(policy.trained, torch.full((3,), 3.0))
    assert torch.equal(shadow.state_dict()["trained"], torch.tensor([1.0, -2.0, 0.3]))
    shadow.update(0.0)


def test_nothing_else_is_done_while_the_shadow_is_applied():
    shadow = EMAWeights(Policy())
    with shadow.applied():
        for action in (shadow.copy_, shadow.applied().__enter__, lambda: shadow.load_state_dict(shadow.state_dict())):
            with pytest.raises(RuntimeError, match="currently has the averaged weights"):
                action()
    shadow.copy_()


def test_small_steps_add_up_with_bfloat16_weights():
    policy = Policy(torch.bfloat16)
    put(policy, 1.0)
    shadow = EMAWeights(policy)
    put(policy, 1.5)
    for _ in range(100):
        shadow.update(0.999)
    torch.testing.assert_close(shadow.state_dict()["trained"], torch.full((3,), 1.5 - 0.5 * 0.999**100))
    with shadow.applied():
        assert policy.trained.dtype == torch.bfloat16


def test_state_goes_to_another_shadow_and_back():
    policy = Policy()
    shadow, other = EMAWeights(policy), EMAWeights(Policy())
    put(policy, 4.0)
    shadow.update(0.3)
    state = shadow.state_dict()
    other.load_state_dict(state)
    shadow.update(0.5)
    assert torch.equal(other.state_dict()["trained"], state["trained"])
    assert not torch.equal(shadow.state_dict()["trained"], state["trained"])


@pytest.mark.parametrize("state", [{}, {"trained": torch.zeros(2)}, {"trained": torch.zeros(3), "more": torch.ones(1)}])
def test_state_of_another_policy_is_refused(state):
    with pytest.raises(UserError, match=r"a different policy; (trained|more)"):
        EMAWeights(Policy()).load_state_dict(state)


def test_schedules_have_their_published_values():
    assert [eval_ema_decay(step, 0.99) for step in (0, 8, 10_000)] == pytest.approx([0.1, 0.5, 0.99])
    assert eval_ema_decay(10**9) == 0.9999
    assert [kl_ema_decay(step) for step in (0, 100, 300, 900)] == pytest.approx([0.0, 0.1, 0.3, 0.3])
    assert kl_ema_decay(10, limit=0.5, slope=0.1) == 0.5
    assert [nft_old_decay(step, 0) for step in (0, 500)] == [0.0, 0.0]
    assert [nft_old_decay(step, 1) for step in (0, 200, 800)] == pytest.approx([0.0, 0.2, 0.5])
    assert [nft_old_decay(step, 2) for step in (74, 75, 95, 1000)] == pytest.approx([0.0, 0.0, 0.15, 0.999])


def test_under_autocast_the_average_and_then_the_policy_compute_with_their_own_weights():
    """Autocast keeps copies of weights in low precision, which a swap must not leave behind."""
    policy = torch.nn.Linear(4, 4)
    average = EMAWeights(policy)
    start = policy.weight.detach().clone()
    with torch.no_grad():
        policy.weight.add_(1.0)
    x = torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        policy(x)
        with torch.no_grad(), average.applied():
            found = policy(x)
            assert torch.equal(found, torch.nn.functional.linear(x, start, policy.bias))
        assert (policy(x) - found).float().mean().item() == pytest.approx(4.0, abs=0.1)
