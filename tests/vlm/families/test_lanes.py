"""Both lanes on the two families that have both."""

import dataclasses
import logging

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


def lanes(folder, **options) -> list[VlmPolicy]:
    """Policies in float64, which a bug does not hide behind."""
    found = []
    for lane in ("fast", "generic"):
        policy = load_policy(ModelConfig(path=str(folder), lane=lane, **options), value_head=True)
        torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(1))
        found.append(policy.double())
        policy.value_head.float()
    return found


def assert_same(folder, rollouts: Rollouts, **options) -> None:
    (scores, gradient), (others, other) = (scores_and_gradient(one, rollouts) for one in lanes(folder, **options))
    assert (scores - others).abs().max() < 1e-5  # norms and rotary angles are float32 in both
    assert (gradient - other).norm() < 1e-6 * gradient.norm()


def test_scores_and_gradients_are_the_same(folder, policy):
    assert_same(folder, draw(policy, ragged_tasks()))


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
    generic = load_policy(ModelConfig(path=str(folder), lane="generic"))
    prompts = [policy.encode(task) for task in ragged_tasks()]
    for draws in (None, torch.rand(8, 10, generator=torch.Generator().manual_seed(0))):
        for rows in (256, 3):  # few rows at a time: some prompts are decoded in two parts
            one, two = (
                sample(model, prompts, 2, SamplerConfig(max_new_tokens=10, batch_rows=rows), draws)
                for model in (policy, generic)
            )
            assert torch.equal(one.response_ids, two.response_ids)
            assert_equal_up_to_rounding(two.logp, one.logp)


def test_the_log_says_which_lane_and_why(folder, caplog):
    with caplog.at_level(logging.INFO, "mmrl"):
        assert load_policy(ModelConfig(path=str(folder), lane="generic")).generic is not None
        assert "generic lane, through transformers' modules: model.lane is generic" in caplog.text
        caplog.clear()
        assert load_policy(ModelConfig(path=str(folder))).generic is None
    assert "fast lane; each prompt is computed once" in caplog.text
