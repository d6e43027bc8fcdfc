"""The prefill of sampling is reused by the passes up to the first update, and changes nothing else."""

import copy

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from mmrl.core.rollouts import Rollouts
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import make_accelerator
from mmrl.training.trainer import Trainer
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.engine.prefix import KeepPrefill, PrefixStore
from mmrl.vlm.engine.reader import FeatureCache, weights_state
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe
from tests.vlm.builders import ragged_tasks
from tests.vlm.runs import run_config


def answers_differ(prompts, completions, **columns):
    """Rewards that always differ within a group."""
    return [index % 4 / 3 for index, _ in enumerate(completions)]


def one_step(
    tmp_path, model, *, kept: bool, preset: str = "grpo", copied: bool = False, **trainer
) -> tuple[list[int], torch.Tensor]:
    """Prompts of each pass over prompts during a step, and all weights after it."""
    config: VlmConfig = run_config(VlmConfig, tmp_path, model, **trainer)
    config.rewards = [RewardConfig(name="tests.vlm.test_kept_prefill:answers_differ", isolate=False)]
    config.objective = ObjectiveConfig(preset=preset, kl={"coef": 0.0})
    config.sampler.keep_prefill = kept
    config.model.attention = "eager" if copied else "sdpa"
    recipe = VlmRecipe(config)
    read: list[int] = []
    encode = recipe.policy.encode_prefix

    def counted(prompts):
        read.append(len(prompts))
        return encode(prompts)

    recipe.policy.encode_prefix = counted
    try:
        Trainer(recipe, config, tmp_path / "run", make_accelerator(), None).train_step()
    finally:
        recipe.close()
    return read, torch.cat([p.detach().flatten() for p in recipe.policy.parameters()])


@pytest.mark.parametrize(
    ("preset", "trainer", "kept_passes", "passes"),
    [
        ("grpo", {}, 1, 2),  # the update goes on from the prefill
        ("grpo", {"micro_batch": 4}, 1 + 3, 1 + 3),  # parts of a step read their prompts when it is their turn
        ("grpo", {"minibatches_per_step": 3}, 1 + 3, 1 + 1 + 3),  # old log-probs are read off the prefill
        ("ppo", {"minibatches_per_step": 1}, 1, 1 + 1 + 1),  # values too, then the update
        ("grpo", {"copied": True}, 1, 2),
        ("ppo", {"copied": True}, 1, 1 + 1 + 1),
    ],
)
def test_prompts_are_not_read_again_until_the_weights_change(
    tmp_path, tiny_folders, preset, trainer, kept_passes, passes
):
    seen, after = {}, {}
    for kept in (True, False):
        folder = tmp_path / str(kept)
        seen[kept], after[kept] = one_step(folder, tiny_folders["qwen2_5_vl"], kept=kept, preset=preset, **trainer)
    assert (len(seen[True]), len(seen[False])) == (kept_passes, passes)
    # AdamW's first step moves every weight by the learning rate: a sign that rounding turns shows as twice that
    moved = (after[True] - after[False]).abs() > 1e-4
    assert moved.float().mean() < 0.01


@pytest.mark.parametrize("with_gradient", ["through the store", "beside it"])
def test_a_loop_of_ones_own_with_fused_adamw_never_reads_stale_prompts(policy, with_gradient):
    """A fused optimiser moves weights without raising their version, so the version alone is not enough."""
    policy = copy.deepcopy(policy)
    prompts = [policy.encode(task) for task in ragged_tasks()]
    config = SamplerConfig(max_new_tokens=4)
    samples = sample(policy, prompts, 2, config, torch.Generator().manual_seed(0), keep=KeepPrefill.VALUES)
    rollouts = Rollouts(
        group=torch.arange(len(prompts)).repeat_interleave(2),
        mask=samples.mask,
        logp_old=samples.logp,
        reward=torch.zeros(len(samples.texts)),
        payload=VlmPayload(prompts, ragged_tasks(), samples.response_ids, samples.texts, samples.finish),
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, fused=True)
    if with_gradient == "beside it":
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
    else:
        policy(rollouts).logp.sum().backward()
    with torch.no_grad():
        before = policy(rollouts).logp
        optimizer.step()
        after = policy(rollouts).logp
        policy.prefixes = PrefixStore(policy)
        fresh = policy(rollouts).logp
    assert (after - before).abs().max() > 0.1, "the step must matter"
    torch.testing.assert_close(after, fresh, rtol=0, atol=0)


def test_features_of_a_tower_that_was_trained_and_frozen_again_are_not_stale(policy):
    """The gradients of the last step are still there, so the next step moves the frozen tower too."""
    policy = copy.deepcopy(policy)
    prompts = [policy.encode(task) for task in ragged_tasks()]
    tower = policy.network.model.visual
    optimizer = torch.optim.AdamW(tower.parameters(), lr=0.1, fused=True)
    for parameter in tower.parameters():
        parameter.grad = torch.ones_like(parameter)
    tower.requires_grad_(False)

    def features() -> torch.Tensor:
        return torch.cat(list(policy.reader._features(policy, prompts)["image"].pooler_output))

    before = features()
    optimizer.step()
    found = features()
    policy.features = FeatureCache()
    fresh = features()
    assert not torch.equal(found, before)
    torch.testing.assert_close(found, fresh, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7)])
def test_a_change_of_one_weight_changes_the_state(dtype, shape):
    flat = nn.Parameter(torch.randn(64).to(dtype)[1:])  # a part of a larger tensor, as sharded weights are
    weight = nn.Parameter(torch.randn(shape).to(dtype))
    before = weights_state([flat, weight])
    assert before == weights_state([flat, weight])
    for changed in (weight, flat):
        changed.data.view(-1)[-1] += 1  # .data does not raise the version
        assert weights_state([flat, weight]) != before
        before = weights_state([flat, weight])
    weight.requires_grad_(False)
    assert weights_state([flat, weight]) != before


@pytest.fixture
def fresh_accelerate():
    """accelerate remembers the precision of a process; a test with another one starts and leaves it clean."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_under_autocast_every_weight_learns_from_the_kept_prefill(tmp_path, tiny_folders):
    """Sampling shares an autocast region with the prefill; a weight cast without gradient must not serve it."""
    changed = {}
    for kept in (True, False):
        config: VlmConfig = run_config(VlmConfig, tmp_path / str(kept), tiny_folders["qwen2_5_vl"])
        config.rewards = [RewardConfig(name="tests.vlm.test_kept_prefill:answers_differ", isolate=False)]
        config.objective = ObjectiveConfig(preset="grpo", kl={"coef": 0.0})
        config.sampler.keep_prefill = kept
        recipe = VlmRecipe(config)
        before = {name: p.detach().clone() for name, p in recipe.policy.named_parameters()}
        try:
            Trainer(recipe, config, tmp_path / "run", make_accelerator("bf16"), None).train_step()
        finally:
            recipe.close()
        changed[kept] = {n for n, p in recipe.policy.named_parameters() if not torch.equal(p.cpu(), before[n])}
    assert changed[True] == changed[False]
    assert any("visual" in name for name in changed[True])
    assert any("k_proj" in name for name in changed[True])
