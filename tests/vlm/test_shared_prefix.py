"""The shared prompt changes only the time: log-probs and every gradient are those of flat rows."""

import logging

import pytest
import torch

from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.engine import attention as joined_attention
from mmrl.vlm.engine import prefix as kept_prefill
from mmrl.vlm.engine.attention import KERNELS, kernels_for
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
from tests.rounding import assert_equal_up_to_rounding, assert_same_gradient
from tests.vlm.builders import draw, make_task, ragged_tasks

CPU = KERNELS["cpu"]
LENGTHS = torch.tensor([9, 4, 1, 7, 9, 2, 0, 5, 9, 3, 6, 8])
VARIANTS = {
    "trained tower": ModelConfig(),
    "frozen tower": ModelConfig(freeze_vision=True),
    "adapter": ModelConfig(lora=LoraSettings(enabled=True, rank=4)),
    "checkpointing": ModelConfig(gradient_checkpointing=True),
}


def load(folder, variant="trained tower", **changes) -> VlmPolicy:
    settings = vars(VARIANTS[variant]) | {"path": str(folder)} | changes
    policy = load_policy(ModelConfig(**settings)).train()
    sharpen(policy)
    return policy


def sharpen(policy: VlmPolicy) -> None:
    """Make attention far from uniform, so that an error of its mask shows, and adapters other than zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif "language_model" in name and ("q_proj" in name or "k_proj" in name) and parameter.ndim == 2:
                parameter.mul_(1.5)


def ragged(rollouts):
    """Twelve responses of many lengths, one of them without a scored token."""
    width = rollouts.num_decisions
    mask = (torch.arange(width) < LENGTHS[: rollouts.num_rows, None]).float()
    return rollouts.replace(mask=mask)


def weights(rollouts) -> torch.Tensor:
    return torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(1)) * rollouts.mask


def backward(policy, parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of a weighted sum of them over all parameters."""
    policy.zero_grad()
    logp = []
    for part, weight in parts:
        scores = policy(part, temperature=0.7)
        (scores.logp * weight).sum().backward()
        logp.append(scores.logp.detach())
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    width = max(part.shape[1] for part in logp)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in logp]), torch.cat(gradients)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.norm() > 0
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def sampled(tiny_folders):
    """Rollouts of four prompts, of no, one and two images, for each family."""
    return {
        family: ragged(draw(load_policy(ModelConfig(path=str(path))), ragged_tasks(), temperature=3.0))
        for family, path in tiny_folders.items()
    }


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logp_and_gradients_are_those_of_flat_rows(family, folder, sampled, variant):
    rollouts = sampled[family]
    shared, flat = load(folder, variant), load(folder, variant, shared_prefix=False)
    assert shared.shares_prefix
    assert not flat.shares_prefix
    logp, gradient = backward(shared, [(rollouts, weights(rollouts))])
    expected_logp, expected = backward(flat, [(rollouts, weights(rollouts))])
    assert_equal_up_to_rounding(logp, expected_logp)
    assert_same_gradient(gradient, expected)


def test_gradients_agree_to_double_precision(family, folder, sampled):
    """In float64 only the norms and rotations that transformers computes in float32 are left."""
    rollouts = sampled[family]
    shared, flat = load(folder).double(), load(folder, shared_prefix=False).double()
    logp, gradient = backward(shared, [(rollouts, weights(rollouts))])
    expected_logp, expected = backward(flat, [(rollouts, weights(rollouts))])
    assert (logp - expected_logp).abs().max() < 1e-6
    assert relative(gradient, expected) < 1e-6


def test_a_leak_between_responses_would_show(folder, sampled, family, monkeypatch):
    """Negative control: the tolerances above catch responses that see each other."""

    def leaky(q, k, v, prompt_k, prompt_v, real, scale):
        n, g, t = q.shape[:3]
        joined = [x.flatten(1, 2)[:, None] for x in (q, k, v)]
        return dense(*joined, prompt_k, prompt_v, real, scale).reshape(n, g, t, *q.shape[3:])

    dense = joined_attention._dense
    rollouts = sampled[family]
    _, expected = backward(load(folder, shared_prefix=False), [(rollouts, weights(rollouts))])
    monkeypatch.setattr(joined_attention, "kernels_for", lambda *_: None)
    logp, gradient = backward(load(folder), [(rollouts, weights(rollouts))])
    assert_same_gradient(gradient, expected)
    monkeypatch.setattr(joined_attention, "_dense", leaky)
    leaked_logp, leaked = backward(load(folder), [(rollouts, weights(rollouts))])
    assert (leaked_logp - logp).abs().max() > 0.01
    assert relative(leaked, expected) > 0.01


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_micro_batches_share_the_prompt_of_their_group(folder, sampled, family, rows):
    rollouts = sampled[family]
    policy = load(folder)
    weight = weights(rollouts)
    expected_logp, expected = backward(policy, [(rollouts, weight)])
    chunks = list(rollouts.micro_batches(rows))
    starts = torch.tensor([0, *[chunk.num_rows for chunk in chunks]]).cumsum(0).tolist()
    parts = [
        (chunk, weight[start : start + chunk.num_rows, : chunk.num_decisions])
        for start, chunk in zip(starts, chunks, strict=False)
    ]
    tokens = []
    hook = policy.network.model.language_model.register_forward_hook(
        lambda module, inputs, output: tokens.append(output.last_hidden_state.shape[1])
    )
    policy.zero_grad()
    with policy.prefixes.open() as shared:
        for part, values in parts:
            (policy(part, temperature=0.7).logp * values).sum().backward()
        shared.backward()
    hook.remove()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    assert_same_gradient(gradient, expected)
    prompts = sum(len(prompt) for prompt in rollouts.payload.prompts)
    assert sum(tokens) == prompts + int((rollouts.lengths - 1).clamp(min=0).sum())
    with torch.no_grad(), policy.prefixes.open():
        logp = [policy(part, temperature=0.7).logp for part, _ in parts]
    padded = [torch.nn.functional.pad(part, (0, expected_logp.shape[1] - part.shape[1])) for part in logp]
    assert_equal_up_to_rounding(torch.cat(padded), expected_logp)


def test_rows_need_not_be_in_the_order_of_their_groups(folder, sampled, family):
    rollouts = sampled[family]
    policy = load(folder)
    order = torch.randperm(rollouts.num_rows, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole, mixed = policy(rollouts).logp, policy(rollouts.select(order)).logp
    assert_equal_up_to_rounding(mixed, whole[order])


def test_responses_of_one_token_need_no_pass_of_their_own(folder, sampled, family):
    rollouts = sampled[family]
    short = rollouts.replace(mask=(torch.arange(rollouts.num_decisions) < 1).float() * (LENGTHS > 0)[:, None])
    shared, flat = load(folder), load(folder, shared_prefix=False)
    logp, gradient = backward(shared, [(short, weights(short))])
    expected_logp, expected = backward(flat, [(short, weights(short))])
    assert_equal_up_to_rounding(logp, expected_logp)
    assert_same_gradient(gradient, expected)


def test_groups_may_differ_in_size(folder, sampled, family):
    rows = sampled[family].select(torch.tensor([0, 3, 4, 5, 9, 11]))
    shared, flat = load(folder), load(folder, shared_prefix=False)
    (logp, gradient), (expected_logp, expected) = (backward(p, [(rows, weights(rows))]) for p in (shared, flat))
    assert_equal_up_to_rounding(logp, expected_logp)
    assert_same_gradient(gradient, expected)


def test_bfloat16_autocast_gives_both_forms_the_same_error(folder, sampled, family):
    rollouts = sampled[family]
    shared, flat = load(folder), load(folder, shared_prefix=False)
    exact = backward(flat, [(rollouts, weights(rollouts))])[1]
    with torch.autocast("cpu", torch.bfloat16):
        errors = [relative(backward(p, [(rollouts, weights(rollouts))])[1], exact) for p in (shared, flat)]
    assert errors[0] < max(1.5 * errors[1], 0.05)


def test_kept_prefixes_serve_until_the_weights_change(folder, sampled, family):
    rollouts = sampled[family]
    policy = load(folder)
    prompts = rollouts.payload.prompts
    fresh, expected = backward(policy, [(rollouts, weights(rollouts))])
    passes = []
    hook = policy.network.model.visual.register_forward_hook(lambda *_: passes.append(1))
    policy.prefixes.keep(prompts, policy.encode_prefix(prompts))
    with torch.no_grad():
        assert_equal_up_to_rounding(policy(rollouts, temperature=0.7).logp, fresh)
    _, gradient = backward(policy, [(rollouts, weights(rollouts))])
    assert len(passes) == 1
    assert_same_gradient(gradient, expected)
    backward(policy, [(rollouts, weights(rollouts))])  # the graph was used, so this one is new
    assert len(passes) == 2
    policy.prefixes.keep(prompts, policy.encode_prefix(prompts).detach())
    assert len(passes) == 3
    with torch.no_grad():
        policy(rollouts)
        assert len(passes) == 3
        next(policy.parameters()).mul_(1.01)
        policy(rollouts)
    assert len(passes) == 4
    hook.remove()


def test_a_reference_without_its_adapter_does_not_read_the_adapters_prefix(folder, sampled, family):
    rollouts = sampled[family]
    policy = load(folder, "adapter")
    prompts = rollouts.payload.prompts
    with torch.no_grad():
        with policy.disable_adapter():
            expected = policy(rollouts).logp
        policy.prefixes.keep(prompts, policy.encode_prefix(prompts))
        with policy.disable_adapter():
            assert torch.equal(policy(rollouts).logp, expected)


def test_no_more_is_kept_than_there_is_room_for(folder, sampled, family, monkeypatch):
    prompts = sampled[family].payload.prompts
    policy = load(folder)
    with torch.no_grad():
        parts = [policy.encode_prefix([prompt]) for prompt in prompts]
        monkeypatch.setattr(kept_prefill, "KEPT_BYTES", parts[0].num_bytes + parts[1].num_bytes)
        expected = policy(sampled[family]).logp
        for prompt, part in zip(prompts, parts, strict=True):
            policy.prefixes.keep([prompt], part)
        read = []
        monkeypatch.setattr(policy, "encode_prefix", lambda some: read.append(len(some)))
        policy.prefixes.get(prompts[:2], "original")
        assert not read
        policy.prefixes.get(prompts[1:3], "original")
        assert read == [2]
        monkeypatch.undo()
        assert_equal_up_to_rounding(policy(sampled[family]).logp, expected)


def test_some_of_the_kept_prompts_can_be_taken(folder, sampled, family):
    rollouts = sampled[family]
    policy = load(folder)
    prompts = rollouts.payload.prompts
    some = rollouts.select_groups(torch.tensor([3, 1]))
    with torch.no_grad():
        expected = policy(some).logp
        policy.prefixes.keep(prompts[:2], policy.encode_prefix(prompts[:2]))
        policy.prefixes.keep(prompts[2:], policy.encode_prefix(prompts[2:]))
        assert_equal_up_to_rounding(policy(some).logp, expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": "eager"}, "takes samples_per_task times the memory: model.attention is eager"),
        ({"shared_prefix": False}, "model.shared_prefix is false"),
    ],
)
def test_the_log_reports_the_form_in_use(folder, caplog, changes, reason):
    with caplog.at_level(logging.INFO, "mmrl"):
        load_policy(ModelConfig(path=str(folder), **changes))
    assert reason in caplog.text


def test_a_saved_model_does_not_record_the_attention(folder, tmp_path):
    load_policy(ModelConfig(path=str(folder))).save_pretrained(tmp_path / "saved")
    assert "mmrl" not in (tmp_path / "saved" / "config.json").read_text()
    again = load_policy(ModelConfig(path=str(tmp_path / "saved"), attention="eager"))
    assert not again.reader.joins(again)


def twice_as_large(*arguments):
    out, lse, rest = CPU.forward(*arguments)
    return 2 * out, lse, rest


def missing(*_):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(("forward", "message"), [(twice_as_large, "is off by"), (missing, "no such kernel")])
def test_kernels_that_are_wrong_are_not_trusted(monkeypatch, caplog, forward, message):
    monkeypatch.setitem(joined_attention.KERNELS, "cpu", CPU._replace(forward=forward))
    kernels_for.cache_clear()
    try:
        assert kernels_for("cpu", torch.float32, 32) is None
        assert message in caplog.text
        assert kernels_for("nowhere", torch.float32, 32) is None
    finally:
        kernels_for.cache_clear()


def test_an_empty_view_falls_back_to_the_prompt_itself(folder, sampled, family):
    rollouts = sampled[family]
    policy = load(folder)
    payload = rollouts.payload
    views = {"masked": [None] * len(payload.prompts)}
    same = VlmPayload(payload.prompts, payload.tasks, payload.response_ids, payload.texts, payload.finish, views)
    with torch.no_grad():
        assert torch.equal(policy(rollouts.replace(payload=same), view="masked").logp, policy(rollouts).logp)


def test_a_prompt_of_one_group_is_packed_as_it_is(folder, family):
    policy, flat = load(folder), load(folder, shared_prefix=False)
    rollouts = draw(policy, [make_task("one", "Sum?", [(64, 96)])], group=4)
    (logp, gradient), (expected_logp, expected) = (backward(p, [(rollouts, weights(rollouts))]) for p in (policy, flat))
    assert_equal_up_to_rounding(logp, expected_logp)
    assert_same_gradient(gradient, expected)
