"""TSPO's scores, advantages and loss against its public code."""

import torch

from mmrl.core import PolicyOutputs, Rollouts, get
from mmrl.vlm.tspo.agent import TemporalAgent
from mmrl.vlm.tspo.picking import pick_logprobs
from tests.golden.numbers import assert_agrees, inputs_of, load


def test_the_agent_scores_frames_as_the_public_module():
    b, (peer,) = inputs_of("tspo"), load("tspo").peers
    agent = TemporalAgent(b.frames.shape[1], int(b.heads), int(b.window)).double()
    layers = (agent.query, agent.key, agent.value, agent.mlp[0], agent.mlp[2])
    with torch.no_grad():
        for layer, weight, bias in zip(layers, b.weights, b.biases, strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        logits = agent(b.frames[None], b.text[None])[0] / float(b.temperature)
    assert_agrees(logits, peer, "logits")


def test_the_loss_of_the_catalogue_is_that_of_the_public_trainer():
    b, (peer,) = inputs_of("tspo"), load("tspo").peers
    logits = torch.tensor(peer["logits"], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(b.picks.shape, dtype=torch.float64)
    logp = pick_logprobs("mean_marginal", logits.expand(len(b.picks), -1), b.picks, mask)
    rollouts = Rollouts(
        group=torch.zeros(len(b.picks), dtype=torch.int64), mask=mask, logp_old=logp.detach(), reward=b.reward
    )
    objective = get("tspo")
    rollouts = objective.compute_advantages(rollouts)
    assert_agrees(rollouts.advantage[:, 0], peer, "advantage")
    loss = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts)).loss
    (slope,) = torch.autograd.grad(loss, logits)
    assert_agrees(slope, peer, "gradient")
    # the advantages add up to 0 but for the constant in their denominator
    assert_agrees(loss, peer, "loss", size=1.0)
