"""The contrastive encoder: its loss by hand, what it learns from films of a square and an arm, and its files."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from mmrl.errors import UserError
from robotics.vla.contrastive import (
    ContrastiveEncoder,
    ContrastiveEncoderConfig,
    ContrastiveTraining,
    LateFrames,
    contrastive_loss,
    train_contrastive_encoder,
)
from robotics.vla.contrastive_latent import ContrastiveLatent, ContrastiveSettings

SIDE = 32
QUICK = ContrastiveTraining(steps=3, seeds=2, batch=4)


def film(rng, length=8):
    """A red square moves from the middle to a place of its own; a blue bar, the arm, jumps about."""
    places = np.linspace([14, 14], rng.uniform(2, 24, 2), length)
    arm = rng.uniform(0, 30, length)
    frames = np.zeros((length, SIDE, SIDE, 3), np.uint8)
    for frame, (row, column), at in zip(frames, places.round().astype(int), arm.astype(int), strict=True):
        frame[:, at : at + 2, 2] = 255
        frame[row : row + 6, column : column + 6, 0] = 255
    return frames, arm[:, None].astype(np.float32), places[-1]


def late_frames(count, seed=0):
    rng = np.random.default_rng(seed)
    return [LateFrames.of(*film(rng)[:2], label=number % 2, late=0.3) for number in range(count)]


def test_the_loss_by_hand():
    z, h = torch.tensor([[[0.0], [2.0]], [[0.0], [1.0]]]), torch.tensor([[[0.0], [1.0]], [[0.0], [0.0]]])
    # -(z_a - z_b)^2 is 0, -1 / -4, -1 and -(h_a - h_b)^2 is 0, 0 / -1, -1, so the logits are 0, -1 / -5, -2
    rows = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-3))
    columns = math.log(1 + math.exp(-5)) + math.log(1 + math.exp(1))
    assert contrastive_loss((z[0], z[1]), (h[0], h[1])).item() == pytest.approx((rows + columns) / 4, rel=1e-6)
    nothing = torch.zeros(5, 3)
    assert contrastive_loss((nothing, nothing), (nothing, nothing)).item() == pytest.approx(math.log(5))


def test_late_frames_have_the_nearest_states():
    frames, path, _ = film(np.random.default_rng(0), length=9)
    found = LateFrames.of(frames, path[::4], "start", 0.3)  # frames 6, 7 and 8; states of 0, 4 and 8
    np.testing.assert_array_equal(found.frames, frames[6:])
    np.testing.assert_array_equal(found.states, path[[8, 8, 8]])
    np.testing.assert_array_equal(found.first, frames[0])
    assert len(LateFrames.of(frames, path, "start", 0.01).frames) == 2
    assert LateFrames.of(frames[:1], path[:1], "start", 0.3) is None


def test_it_learns_where_the_object_is_and_not_where_the_arm_is():
    encoder, (loss,) = train_contrastive_encoder(
        late_frames(96), training=ContrastiveTraining(steps=100, batch=16, seeds=1)
    )
    assert loss < -0.5
    rng = np.random.default_rng(9)
    films, arms, places = zip(*(film(rng) for _ in range(40)), strict=True)
    latent = ContrastiveLatent(ContrastiveSettings())
    latent.load_state_dict({"encoder": encoder.state_dict()})
    found = latent.embed(films, arms).latents
    gaps = [
        np.linalg.norm(part - part[0], axis=1)[1:]
        for part in (found, np.array(places), np.array([[arm[-1, 0]] for arm in arms]))
    ]
    assert spearmanr(gaps[0], gaps[1]).statistic > 0.6
    assert abs(spearmanr(gaps[0], gaps[2]).statistic) < 0.5


def test_equal_arguments_give_equal_weights_and_the_best_seed_is_kept():
    (first, losses), (again, same) = (train_contrastive_encoder(late_frames(16), training=QUICK) for _ in range(2))
    assert losses == same
    assert len(losses) == 2
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), again.parameters(), strict=True))
    seed = int(np.argmin(losses))
    alone, (loss,) = train_contrastive_encoder(
        late_frames(16), training=ContrastiveTraining(steps=3, seeds=1, batch=4, seed=seed)
    )
    assert loss == losses[seed]
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), alone.parameters(), strict=True))


def test_a_trained_encoder_is_read_as_it_was_written(tmp_path):
    encoder, _ = train_contrastive_encoder(late_frames(16), ContrastiveEncoderConfig(channels=8, size=3), QUICK)
    encoder.save_pretrained(tmp_path / "encoder")
    frames, path, _ = film(np.random.default_rng(3))
    given = torch.from_numpy(frames[[-1, 0]])
    latent = ContrastiveLatent(ContrastiveSettings(path=str(tmp_path / "encoder")))
    assert latent.ready
    found = latent.embed([frames], [path])
    np.testing.assert_allclose(found.latents[0], encoder(given[:1], given[1:]).detach()[0], rtol=1e-6)
    assert latent.state_dict() == {}


def test_files_that_are_no_encoder_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        ContrastiveEncoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mmrl_video_encoder"}')
    with pytest.raises(UserError, match="does not describe a contrastive encoder"):
        ContrastiveEncoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mmrl_contrastive_encoder", "channels": 6}')
    with pytest.raises(UserError, match=r"cannot be read: .*channels is 6; must be at least 1 and a multiple of 4"):
        ContrastiveEncoder.from_pretrained(tmp_path)


def test_what_it_cannot_learn_from_is_refused():
    with pytest.raises(UserError, match="at least 4 of them; of the 3 given the largest has 2"):
        train_contrastive_encoder(late_frames(3), training=QUICK)
    with pytest.raises(UserError, match="of the 0 given the largest has 0"):
        train_contrastive_encoder([], training=QUICK)
    with pytest.raises(UserError, match="held_out is 1"):
        train_contrastive_encoder(late_frames(8), training=ContrastiveTraining(held_out=1.0))


def test_it_embeds_nothing_before_it_is_trained():
    frames, path, _ = film(np.random.default_rng(0))
    found = ContrastiveLatent(ContrastiveSettings()).embed([frames], [path])
    assert not found.valid.any()
    assert "has not been trained yet" in found.reasons[0]
