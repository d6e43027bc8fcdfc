"""Noise, targets and samplers against closed forms, NumPy and diffusers."""

import numpy as np
import pytest
import torch

from robotics.flow3d.model.processes import DdimProcess, RectifiedProcess, guided, make_process
from robotics.flow3d.model.world_model_settings import PARAMETERISATIONS, ProcessConfig

SHAPE = (5, 3, 2, 2, 2)


def pair(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(SHAPE, generator=generator) for _ in range(2))


def alphas(dtype=np.float64):
    """Running product of 1 - beta over the paper's line of betas."""
    return np.cumprod(1 - np.linspace(0.00085, 0.012, 1000, dtype=dtype))


def test_rectified_flow_is_the_line_between_noise_and_flow():
    clean, noise = pair()
    tau = torch.tensor([0.0, 0.25, 0.5, 0.9, 1.0])  # as papers count: 0 is noise
    found = RectifiedProcess("v").noisy(clean, noise, 1 - tau)
    weight = tau.numpy()[:, None, None, None, None]
    np.testing.assert_allclose(found, (1 - weight) * noise.numpy() + weight * clean.numpy(), atol=1e-6)
    assert RectifiedProcess("v").target(clean, noise, 1 - tau).equal(noise - clean)
    assert RectifiedProcess("x0").target(clean, noise, 1 - tau).equal(clean)


def test_rectified_times_are_one_minus_a_square():
    times = RectifiedProcess("x0").times(20000, torch.Generator().manual_seed(0))
    assert times.min() >= 0
    assert times.max() <= 1
    for share in (0.2, 0.5, 0.8):  # P(1 - U^2 > 1 - q^2) = q
        assert float((times > 1 - share**2).float().mean()) == pytest.approx(share, abs=0.02)


def test_euler_steps_of_a_predicted_flow_are_those_of_numpy():
    clean, noise = pair()
    rng = np.random.default_rng(0)
    gain = rng.uniform(0.2, 0.9, SHAPE[1:])

    def predict(noisy, time):
        return clean + torch.from_numpy(gain).float() * (noisy - clean) * time[:, None, None, None, None]

    found = RectifiedProcess("x0").sample(predict, noise, 4)
    x = noise.double().numpy()
    for step in range(4):
        tau = step / 4
        guess = clean.double().numpy() + gain * (x - clean.double().numpy()) * (1 - tau)
        x = x + 0.25 * (guess - x) / (1 - tau)
    np.testing.assert_allclose(found, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("parameterisation", ["v", "x0"])
@pytest.mark.parametrize("steps", [1, 3])
def test_rectified_sampling_with_the_truth_ends_at_the_flow(parameterisation, steps):
    clean, noise = pair()
    process = RectifiedProcess(parameterisation)
    found = process.sample(lambda noisy, time: process.target(clean, noise, time), noise, steps)
    torch.testing.assert_close(found, clean, rtol=0, atol=1e-5)


def test_ddim_noise_has_the_schedule_of_the_paper():
    clean, noise = pair()
    time = torch.tensor([0.0, 1.0, 400.0, 998.0, 999.0])
    a = alphas()[time.long().numpy()][:, None, None, None, None]
    x, e = clean.double().numpy(), noise.double().numpy()
    np.testing.assert_allclose(
        DdimProcess("eps").noisy(clean, noise, time), np.sqrt(a) * x + np.sqrt(1 - a) * e, atol=1e-5
    )
    velocity = DdimProcess("v").target(clean, noise, time)
    np.testing.assert_allclose(velocity, np.sqrt(a) * e - np.sqrt(1 - a) * x, atol=1e-5)
    assert DdimProcess("eps").target(clean, noise, time).equal(noise)
    assert DdimProcess("x0").target(clean, noise, time).equal(clean)


def test_ddim_steps_are_the_closed_form():
    noise = pair()[1]
    process = DdimProcess("eps")
    seen = []

    def predict(noisy, time):
        seen.append(int(time[0]))
        return 0.3 * noisy + 0.1

    found = process.sample(predict, noise, 4)
    assert seen == [751, 501, 251, 1]  # leading, with an offset of 1
    x, a = noise.double().numpy(), alphas()
    for time in seen:
        e = 0.3 * x + 0.1
        clean = (x - np.sqrt(1 - a[time]) * e) / np.sqrt(a[time])
        before = a[time - 250] if time > 250 else 1.0
        x = np.sqrt(before) * clean + np.sqrt(1 - before) * e
    np.testing.assert_allclose(found, x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("parameterisation", PARAMETERISATIONS)
def test_all_parameterisations_of_ddim_sample_the_same(parameterisation):
    """A network that knows flow and noise exactly recovers the flow with every parameterisation."""
    clean, noise = pair()
    process = DdimProcess(parameterisation)
    first = torch.full((5,), 981.0)
    found = process.sample(
        lambda noisy, time: process.target(clean, noise, time), process.noisy(clean, noise, first), 50
    )
    torch.testing.assert_close(found, clean, rtol=0, atol=1e-2)


def test_guidance_by_hand():
    found = guided(torch.tensor([1.0, -2.0]), torch.tensor([1.5, -1.0]), 8.0)
    assert found.tolist() == [5.0, 6.0]


def test_noise_prediction_of_rectified_flow_is_refused():
    with pytest.raises(ValueError, match="starts from pure noise"):
        ProcessConfig(kind="rectified", parameterisation="eps").validate()
    with pytest.raises(ValueError, match="never learns without"):
        ProcessConfig(guidance=8.0).validate()
    assert isinstance(make_process(ProcessConfig(kind="ddim", parameterisation="eps")), DdimProcess)
