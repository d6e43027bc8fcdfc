"""Shared prompts against copies of them in a cache and against flat rows, on Qwen-VL."""

import dataclasses
import logging

import pytest
import torch

from mmrl.core.rollouts import Rollouts
from mmrl.vlm.data.prompt import Insert, VlmPayload
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.model.model_config import ModelConfig
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.builders import draw, make_task, ragged_tasks

OUTPUTS = frozenset({"logp", "entropy", "values"})


def scores_and_gradient(policy: VlmPolicy, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """All scores and the gradient of a weighted sum of them."""
    found = policy(rollouts, outputs=OUTPUTS)
    scores = torch.stack([found.logp, found.entropy, found.values])
    generator = torch.Generator().manual_seed(0)
    (scores * torch.randn(scores.shape, generator=generator)).sum().backward()
    parts = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in policy.parameters()]
    return scores.detach(), torch.cat([part.flatten() for part in parts])


def policies(folder, **options) -> list[VlmPolicy]:
    """Policies in float64, which a bug does not hide behind: shared, copied, flat."""
    found = []
    for joins, shared in ((True, True), (False, True), (False, False)):
        config = ModelConfig(path=str(folder), shared_prefix=shared, **options)
        policy = load_policy(config, value_head=True)
        assert policy.reader.joins(policy) == shared
        policy.reader._joins = joins
        torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(1))
        found.append(policy.double())
        policy.value_head.float()
    return found


def assert_same(folder, rollouts: Rollouts, **options) -> None:
    (scores, gradient), *others = (scores_and_gradient(one, rollouts) for one in policies(folder, **options))
    for other, its_gradient in others:
        assert (scores - other).abs().max() < 1e-5  # norms and rotary angles are float32 in all
        assert (gradient - its_gradient).norm() < 1e-6 * gradient.norm()


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_scores_and_gradients_are_the_same(folder, policy, options):
    assert_same(folder, draw(policy, ragged_tasks()), **options)


def test_images_inside_responses_are_read(folder, policy):
    prompts = [policy.encode(make_task("one", "Sum?", [(64, 64)]))]
    turn = policy.encode_turn(make_task("next", "And now?", [(64, 96)]))
    said = torch.tensor([5, 6, 7])
    ids = torch.cat([said, turn.input_ids, said.flip(0)])
    mask = torch.ones(2, len(ids))
    mask[:, 3 : 3 + len(turn)] = 0
    payload = VlmPayload(
        prompts,
        [make_task("one", "Sum?")],
        ids.expand(2, -1),
        ["", ""],
        ["eos", "eos"],
        inserts=[(Insert(3, turn),)] * 2,
    )
    mask[1, -2:] = 0
    rollouts = Rollouts(torch.zeros(2, dtype=torch.int64), mask, torch.zeros_like(mask), torch.zeros(2), payload)
    assert_same(folder, rollouts)
    other = policy.encode_turn(make_task("other", "And now?", [(64, 96)]))
    seen = [policy(rollouts).logp]
    changed = dataclasses.replace(payload, inserts=[(Insert(3, other),)] * 2)
    seen.append(policy(rollouts.replace(payload=changed)).logp)
    assert (seen[0] - seen[1])[:, -3:].abs().max() > 1e-3  # the image matters


def test_greedy_and_drawn_tokens_are_the_same(folder, policy):
    copied = load_policy(ModelConfig(path=str(folder)))
    copied.reader._joins = False
    prompts = [policy.encode(task) for task in ragged_tasks()]
    for draws in (None, torch.rand(8, 10, generator=torch.Generator().manual_seed(0))):
        for rows in (256, 3):  # few rows at a time: some prompts are decoded in two parts
            one, two = (
                sample(model, prompts, 2, SamplerConfig(max_new_tokens=10, batch_rows=rows), draws)
                for model in (policy, copied)
            )
            assert torch.equal(one.response_ids, two.response_ids)
            assert_equal_up_to_rounding(two.logp, one.logp)


def test_the_log_says_why_prompts_are_copied(folder, caplog):
    with caplog.at_level(logging.INFO, "mmrl"):
        policy = load_policy(ModelConfig(path=str(folder), attention="eager"))
    assert "takes samples_per_task times the memory: model.attention is eager" in caplog.text
    assert not policy.reader.joins(policy)
