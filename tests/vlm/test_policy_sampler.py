"""The suite's own engine behind the `Sampler` protocol."""

import copy

import pytest
import torch

from mmrl.training.processes import Streams
from mmrl.vlm.engine.prefix import KeepPrefill
from mmrl.vlm.engine.vlm_sampler import PolicySampler, SamplerConfig, sample
from tests.vlm.builders import ragged_tasks

STREAMS = Streams(0)


def test_it_samples_the_same_as_the_function(policy):
    prompts = [policy.encode(task) for task in ragged_tasks()]
    config = SamplerConfig(max_new_tokens=6)
    engine = PolicySampler(config)
    engine.load(policy, 0)
    found, expected = (
        engine.sample(prompts, 2, STREAMS),
        sample(policy, prompts, 2, config, STREAMS.uniform(len(prompts), 2, 6)),
    )
    assert torch.equal(found.response_ids, expected.response_ids)
    assert torch.equal(found.logp, expected.logp)


def test_it_samples_from_the_weights_loaded_last(policy):
    other = copy.deepcopy(policy)
    with torch.no_grad():
        other.network.lm_head.weight.mul_(-1.0)
    prompts = [policy.encode(task) for task in ragged_tasks()]
    engine = PolicySampler(SamplerConfig(max_new_tokens=6))
    drawn = []
    for version, model in enumerate((policy, other, policy)):
        engine.load(model, version)
        drawn.append(engine.sample(prompts, 2, STREAMS).logp)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_it_keeps_the_prefill_in_the_policy_that_sampled(policy, monkeypatch):
    kept = []
    monkeypatch.setattr(policy.prefixes, "keep", lambda prompts, prefix: kept.extend(prompts))
    prompts = [policy.encode(task) for task in ragged_tasks()]
    engine = PolicySampler(SamplerConfig(max_new_tokens=2), KeepPrefill.VALUES)
    engine.load(policy, 0)
    engine.sample(prompts, 1, STREAMS)
    assert kept == prompts


def test_without_weights_it_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"call load\(policy, version\) first"):
        PolicySampler(SamplerConfig()).sample([], 1, STREAMS)
