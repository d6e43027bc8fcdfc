"""Maximum likelihood against transformers."""

import torch

from mmrl.core import PolicyOutputs, Rollouts, get, logprobs_from_logits
from tests.golden.numbers import assert_agrees, inputs_of, load


def test_sft_is_the_loss_of_transformers():
    b, (peer,) = inputs_of("sft"), load("sft").peers
    logits, targets = b.logits.requires_grad_(), b.labels[:, 1:]
    mask = (targets >= 0).double()
    # the last position predicts nothing
    logp = logprobs_from_logits(logits[:, :-1].flatten(0, 1), targets.clamp(min=0).flatten()).logp.view_as(mask)
    objective = get("sft")
    rollouts = Rollouts(torch.arange(3), mask, logp.detach(), torch.zeros(3), advantage=mask)
    loss = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts)).loss
    (gradient,) = torch.autograd.grad(loss, logits)
    assert_agrees(loss, peer, "loss")
    assert_agrees(gradient, peer, "gradient")
