"""The moving average used in evaluations: swapping it into the policy, and its checkpoint."""

import torch
from torch import nn

from diffusion.models.ema import EvalAverage, EvalEmaConfig


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def save_pretrained(self, folder):
        folder.mkdir(parents=True)
        torch.save(self.weight.detach().clone(), folder / "weight.pt")


def test_the_average_is_applied_saved_and_restored(tmp_path):
    policy = Policy()
    average = EvalAverage(policy, EvalEmaConfig(decay=0.9))
    with torch.no_grad():
        policy.weight.fill_(11.0)
    average.on_step_end(1)  # keeps 2 / 11 of the zeros
    with average.applied():
        assert policy.weight.tolist() == [9.0] * 3
    assert policy.weight.tolist() == [11.0] * 3
    average.save(tmp_path)
    assert EvalAverage.folder_of(tmp_path) == tmp_path / "eval_ema"
    assert torch.load(tmp_path / "eval_ema" / "weight.pt").tolist() == [9.0] * 3
    other = EvalAverage(policy, EvalEmaConfig(decay=0.9))
    other.load_state_dict(average.state_dict())
    with other.applied():
        assert policy.weight.tolist() == [9.0] * 3


def test_without_a_decay_the_policy_itself_is_evaluated(tmp_path):
    policy = Policy()
    average = EvalAverage(policy, EvalEmaConfig())
    with torch.no_grad():
        policy.weight.fill_(2.0)
    average.on_step_end(1)
    with average.applied(policy):
        assert policy.weight.tolist() == [2.0] * 3
    average.save(tmp_path)
    assert average.state_dict() is None
    assert EvalAverage.folder_of(tmp_path) == tmp_path / "model"
    average.load_state_dict(None)
