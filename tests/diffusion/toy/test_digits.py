import numpy as np
import pytest
from PIL import Image

from diffusion.toy.digits import class_log_prob, class_prob, class_prob_judge, digit_scans
from mmrl.errors import UserError


def pictures(half, count=200, side=8):
    scans, labels = digit_scans(half)
    grey = (255 * scans[:count].reshape(-1, 8, 8)).astype(np.uint8)
    large = [np.asarray(Image.fromarray(scan).resize((side, side), Image.Resampling.NEAREST)) for scan in grey]
    return [np.repeat(scan[..., None], 3, axis=2) for scan in large], labels[:count].tolist()


def test_halves_share_no_scan_and_are_all_of_them():
    (reward, reward_labels), (judge, judge_labels) = digit_scans("reward"), digit_scans("judge")
    assert len(reward) + len(judge) == 1797
    assert not {scan.tobytes() for scan in reward} & {scan.tobytes() for scan in judge}
    assert set(reward_labels) == set(judge_labels) == set(range(10))
    assert 0.0 <= reward.min() < reward.max() == 1.0


@pytest.mark.parametrize(("reward", "unseen"), [(class_prob, "judge"), (class_prob_judge, "reward")])
def test_the_right_digit_of_unseen_scans_is_probable(reward, unseen):
    images, labels = pictures(unseen)
    metadata = [{"label": label} for label in labels]
    values = reward(["?"] * len(images), images, metadata=metadata)
    assert np.mean(np.asarray(values) > 0.5) > 0.9
    wrong = reward(["?"] * len(images), images, metadata=[{"label": (label + 1) % 10} for label in labels])
    assert np.mean(wrong) < 0.05
    assert reward([f"a handwritten {label}" for label in labels], images) == values


def test_probabilities_of_the_ten_digits_add_up():
    image = pictures("judge")[0][0]
    assert sum(class_prob([f"a {digit}" for digit in range(10)], [image] * 10)) == pytest.approx(1.0)


def test_log_is_the_log_and_size_does_not_matter():
    small, labels = pictures("judge", 20)
    large, _ = pictures("judge", 20, side=32)
    metadata = [{"label": label} for label in labels]
    values = class_prob(["?"] * 20, small, metadata=metadata)
    assert class_log_prob(["?"] * 20, small, metadata=metadata) == pytest.approx(np.log(values))
    assert class_prob(["?"] * 20, large, metadata=metadata) == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(
    ("prompt", "metadata", "culprit"),
    [
        ("a digit", None, "must have one digit"),
        ("12", None, "must have one digit"),
        ("a 3 and a 4", None, "must have one digit"),
        ("a 3", {"label": 11}, "is 11"),
        ("a 3", {"class": 3}, "is None"),
    ],
)
def test_rows_without_one_digit_are_refused(prompt, metadata, culprit):
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    with pytest.raises(UserError, match=culprit):
        class_prob([prompt], [image], metadata=None if metadata is None else [metadata])
