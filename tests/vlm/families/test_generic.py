"""The generic lane against the models' own forward and generate, family by family."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.rollouts import Rollouts
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.engine.policy import VlmPolicy
from mmrl.vlm.engine.sampler import SamplerConfig, sample
from tests.vlm.families.zoo import EOS, ZOO, make_policy, make_prompt, own_inputs

LENGTHS = (5, 3, 1, 6, 4, 2)
TOLERANCE = 1e-5
"""Weights are float64, but norms and rotary angles of most families are float32."""
LINEAR_TOLERANCE = 1e-4
"""Linear attention is float32 as a whole, with running products of its gates."""


def make_prompts(policy: VlmPolicy, kind: str) -> list[Prompt]:
    """Two prompts of one length and a longer one, of two images where the family sees them."""
    images = 0 if ZOO[kind].media is None else 1
    return [
        make_prompt(policy, kind, count * images, text, text + count) for count, text in ((1, 12), (1, 12), (2, 13))
    ]


def make_rollouts(prompts: list[Prompt]) -> Rollouts:
    """Two responses to each prompt, of unequal lengths."""
    torch.manual_seed(1)
    responses = torch.randint(3, 400, (len(LENGTHS), max(LENGTHS)))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).float()
    texts = [""] * len(LENGTHS)
    payload = VlmPayload(prompts, [None] * len(prompts), responses, texts, ["length"] * len(LENGTHS))  # type: ignore[list-item]
    group = torch.arange(len(LENGTHS)) // 2
    return Rollouts(group, mask, torch.zeros_like(mask), torch.zeros(len(LENGTHS)), payload)


def own_scores(policy: VlmPolicy, kind: str, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies (B, T), each row through the model's own forward."""
    payload = VlmPayload.of(rollouts)
    logp, entropy = torch.zeros_like(rollouts.mask).double(), torch.zeros_like(rollouts.mask).double()
    for row, length in enumerate(LENGTHS):
        prompt, response = payload.prompts[int(rollouts.group[row])], payload.response_ids[row, :length]
        logits = policy.network(**own_inputs(kind, prompt, response)).logits[0, len(prompt) - 1 : -1]
        logits = logits.index_fill(1, policy.banned_ids, float("-inf"))
        scores = logits.log_softmax(-1)
        logp[row, :length] = scores.gather(1, response[:, None])[:, 0]
        entropy[row, :length] = -(scores.exp() * scores.where(scores > -1e9, 0.0)).sum(-1)
    return logp, entropy


def gradient(policy: VlmPolicy) -> torch.Tensor:
    found = torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in policy.parameters()])
    policy.zero_grad()
    return found


@pytest.mark.parametrize("kind", ZOO)
def test_scores_gradients_and_tokens_are_the_models_own(kind):
    policy = make_policy(kind)
    tolerance = LINEAR_TOLERANCE if kind.startswith("qwen3_5") else TOLERANCE
    prompts = make_prompts(policy, kind)
    rollouts = make_rollouts(prompts)
    weights = torch.randn(2, *rollouts.mask.shape, generator=torch.Generator().manual_seed(0))
    logp, entropy = own_scores(policy, kind, rollouts)
    (logp * weights[0] + entropy * weights[1]).sum().backward()
    expected = gradient(policy)
    for config in ({}, {"shared_prefix": False}):
        policy.generic._config = type(policy.config)(path=kind, lane="generic", **config)
        found = policy(rollouts, outputs=frozenset({"logp", "entropy"}))
        assert (found.logp - logp).abs().max() < tolerance
        assert (found.entropy - entropy).abs().max() < tolerance
        (found.logp * weights[0] + found.entropy * weights[1]).sum().backward()
        assert (gradient(policy) - expected).norm() < tolerance * expected.norm()
    assert (logp[0] - logp[1]).abs().max() > 0.01
    check_greedy(policy, kind, prompts)


def check_greedy(policy: VlmPolicy, kind: str, prompts: list[Prompt]) -> None:
    """The likeliest tokens of all prompts together are those that `generate` finds for each."""
    drawn = sample(policy, prompts, 1, SamplerConfig(max_new_tokens=6), None)
    for row, prompt in enumerate(prompts):
        inputs = own_inputs(kind, prompt, torch.zeros(0, dtype=torch.int64))
        expected = policy.network.generate(
            **inputs, max_new_tokens=6, do_sample=False, suppress_tokens=policy.banned_ids.tolist()
        )[0, len(prompt) :]
        length = int(drawn.mask[row].sum())
        assert drawn.response_ids[row, :length].tolist() == expected[:length].tolist()
        assert length == 6 or drawn.response_ids[row, length - 1] == EOS
