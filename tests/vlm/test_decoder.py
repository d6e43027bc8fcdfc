import contextlib
import dataclasses

import pytest
import torch

from mmrl.core.loss import masked_mean
from mmrl.vlm.engine import attention
from mmrl.vlm.engine import prefix as decoders
from mmrl.vlm.engine.prefix import GroupDecoder, Prefix
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, Samples, sample
from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.builders import draw, make_rollouts, ragged_tasks

STEPS = 10


def sharpen(policy: VlmPolicy, seed: int = 0) -> VlmPolicy:
    """Attention of half the entropy of a uniform one, and nothing left at zero or one as in an untrained model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.network.model.language_model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.add_(torch.rand(parameter.shape, generator=generator))
            elif "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(1.5)
    return policy


@pytest.fixture
def sharp(folder) -> VlmPolicy:
    return sharpen(load_policy(ModelConfig(path=str(folder))))


def prompts_of(policy: VlmPolicy):
    return [policy.encode(task) for task in ragged_tasks()]


def draw_both(policy: VlmPolicy, group: int = 4, **options) -> tuple[Samples, Samples]:
    """The same draws behind shared prompts and behind copies of them in a cache."""
    both = []
    for joins in (True, False):
        policy.reader._joins = joins
        config = SamplerConfig(**{"max_new_tokens": STEPS} | options)
        both.append(sample(policy, prompts_of(policy), group, config, torch.Generator().manual_seed(3)))
    policy.reader._joins = True
    return both[0], both[1]


@torch.no_grad()
def decode(
    policy: VlmPolicy,
    prefix: Prefix,
    group: torch.Tensor,
    tokens: torch.Tensor,
    keep: dict[int, list[int]] | None = None,
) -> dict[int, torch.Tensor]:
    """Log-probabilities (steps, V) after each forced token (b, steps), by row; rows leave as `keep` says."""
    (part,) = prefix.parts
    batch = GroupDecoder(policy, policy.reader, part, group)
    rows = torch.arange(len(group))
    found: dict[int, list[torch.Tensor]] = {int(row): [] for row in rows}
    for step in range(tokens.shape[1]):
        if keep and step in keep:
            index = torch.tensor([place for place, row in enumerate(rows.tolist()) if row in keep[step]])
            batch.keep(index)
            rows = rows[index]
        logp = batch.next_logp(batch.advance(tokens[rows, step]), 1.0)
        for row, value in zip(rows.tolist(), logp, strict=True):
            found[row].append(value)
    return {row: torch.stack(values) for row, values in found.items() if values}


def forced(policy: VlmPolicy, rows: int) -> torch.Tensor:
    return torch.randint(256, (rows, STEPS), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("group", [1, 2, 4])
def test_same_tokens_and_log_probs_as_behind_copies(sharp, group):
    shared, copied = draw_both(sharp, group)
    assert torch.equal(shared.response_ids, copied.response_ids)
    assert_equal_up_to_rounding(shared.logp, copied.logp)


def test_recorded_log_probs_are_those_of_scoring(sharp):
    tasks = ragged_tasks()
    shared, _ = draw_both(sharp)
    with torch.no_grad():
        scores = sharp(make_rollouts(tasks, prompts_of(sharp), shared))
    assert_equal_up_to_rounding(scores.logp, shared.logp)


def test_every_position_and_every_prompt_counts(sharp):
    """The size of the error of a wrong position, a visible padding column or another group's prompt."""
    with torch.no_grad():
        prefix = sharp.encode_prefix(prompts_of(sharp))
    (part,) = prefix.parts
    group = torch.arange(4).repeat_interleave(2)
    tokens = forced(sharp, 8)
    right = decode(sharp, prefix, group, tokens)
    wrongs = {
        "position": Prefix([dataclasses.replace(part, next_position=part.next_position + 1)]),
        "padding": Prefix([dataclasses.replace(part, real=None)]),
        "prompt": Prefix([part.select(torch.tensor([1, 0, 3, 2]))]),
    }
    longest = int(part.lengths.argmax())
    finite = right[0].isfinite()
    for name, wrong in wrongs.items():
        other = decode(sharp, wrong, group, tokens)
        for row in range(8):
            error = (other[row] - right[row])[finite[:1].expand_as(right[row])].abs().max()
            if name == "padding" and int(group[row]) == longest:
                assert error < 1e-5
            else:
                assert error > 1e-3, (name, row)


@pytest.mark.parametrize(
    "keep",
    [
        {0: [0, 1, 4, 5, 6, 11]},
        {3: [1, 2, 3, 6, 9, 10, 11]},
        {2: [0, 1, 2, 3, 4, 5, 6, 9], 5: [1, 9], 6: [9]},
        {4: [3, 4, 5]},
    ],
)
def test_rows_that_stay_do_not_notice_those_that_leave(sharp, keep, monkeypatch):
    with torch.no_grad():
        prefix = sharp.encode_prefix(prompts_of(sharp))
    group = torch.arange(4).repeat_interleave(3)
    tokens = forced(sharp, 12)
    whole = decode(sharp, prefix, group, tokens)
    monkeypatch.setattr(attention, "ROOM", 2)
    parts = decode(sharp, prefix, group, tokens, keep)
    for row, logp in parts.items():
        expected = whole[row][: len(logp)].nan_to_num(neginf=0.0)
        assert_equal_up_to_rounding(logp.nan_to_num(neginf=0.0), expected)
    assert {row for row, logp in parts.items() if len(logp) == STEPS} == set(list(keep.values())[-1])


def test_groups_of_unequal_size(sharp):
    with torch.no_grad():
        prefix = sharp.encode_prefix(prompts_of(sharp))
    group = torch.tensor([0, 1, 1, 1, 2, 3, 3])
    tokens = forced(sharp, 7)
    together = decode(sharp, prefix, group, tokens)
    for row in range(7):
        alone = decode(sharp, prefix.select(group[row : row + 1]), torch.tensor([0]), tokens[row : row + 1])[0]
        assert_equal_up_to_rounding(together[row].nan_to_num(neginf=0.0), alone.nan_to_num(neginf=0.0))


def test_a_changed_weight_is_seen(sharp):
    before, _ = draw_both(sharp)
    with torch.no_grad():
        for layer in sharp.network.model.language_model.layers:
            layer.mlp.down_proj.weight.mul_(1.5)
    after, copied = draw_both(sharp)
    assert torch.equal(after.response_ids, copied.response_ids)
    assert_equal_up_to_rounding(after.logp, copied.logp)
    assert not torch.equal(before.response_ids, after.response_ids)


@pytest.fixture
def adapted(folder) -> VlmPolicy:
    lora = LoraSettings(enabled=True, rank=4, targets=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
    policy = sharpen(load_policy(ModelConfig(path=str(folder), lora=lora)))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def test_adapters_on_and_off(adapted):
    drawn = []
    for context in (contextlib.nullcontext(), adapted.disable_adapter()):
        with context:
            shared, copied = draw_both(adapted)
        assert torch.equal(shared.response_ids, copied.response_ids)
        assert_equal_up_to_rounding(shared.logp, copied.logp)
        drawn.append(shared)
    assert not torch.equal(drawn[0].response_ids, drawn[1].response_ids)


def forced_logp(policy: VlmPolicy, autocast: bool = False) -> torch.Tensor:
    """(8, steps, V) probabilities after forced tokens."""
    group = torch.arange(4).repeat_interleave(2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        prefix = policy.encode_prefix(prompts_of(policy))
        return torch.stack(list(decode(policy, prefix, group, forced(policy, 8)).values())).exp()


@pytest.mark.parametrize("lora", [False, True])
def test_low_precision_is_near_float32(folder, lora):
    """Total variation between distributions: small compared with that of another set of weights."""

    def load(dtype: str) -> VlmPolicy:
        policy = load_policy(ModelConfig(path=str(folder), dtype=dtype, lora=LoraSettings(enabled=lora, rank=4)))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        return policy

    def distance(one: torch.Tensor, two: torch.Tensor) -> float:
        return float((one - two).abs().sum(-1).mean() / 2)

    full, low = load("float32"), load("bfloat16")
    exact = forced_logp(full)
    apart = distance(exact, exact.flip(1))
    assert 0 < distance(exact, forced_logp(low)) < 0.05 * apart
    assert 0 < distance(exact, forced_logp(full, autocast=True)) < 0.05 * apart


@pytest.mark.parametrize("autocast", [False, True])
def test_keys_and_values_in_bfloat16_cost_no_more_than_its_rounding(folder, autocast, monkeypatch):
    """Sampling is about as far from scoring as bfloat16 takes scoring from float32."""
    low = sharpen(load_policy(ModelConfig(path=str(folder), dtype="float32" if autocast else "bfloat16")))
    exact = sharpen(load_policy(ModelConfig(path=str(folder))))
    exact.network.load_state_dict(low.network.state_dict())
    made = []
    monkeypatch.setattr(decoders, "GroupDecoder", lambda *a, **k: made.append(GroupDecoder(*a, **k)) or made[-1])
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            rollouts = draw(low, ragged_tasks())
            scored = low(rollouts).logp
        rounding = masked_mean((scored - exact(rollouts).logp).abs(), rollouts.mask).mean()
    assert len(made) == 1
    assert 0 < masked_mean((rollouts.logp_old - scored).abs(), rollouts.mask).mean() < 2 * rounding


def test_biases_everywhere_in_attention(tiny_folders):
    """Qwen3-VL may be configured with biases, which the released models do not have."""
    policy = load_policy(ModelConfig(path=str(tiny_folders["qwen3_vl"])))
    torch.manual_seed(0)
    for layer in policy.network.model.language_model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            linear.bias = torch.nn.Parameter(torch.randn(linear.out_features))
    shared, copied = draw_both(policy)
    assert torch.equal(shared.response_ids, copied.response_ids)
    assert_equal_up_to_rounding(shared.logp, copied.logp)


def test_a_scaled_rotation_is_respected(sharp):
    sharp.network.model.language_model.rotary_emb.attention_scaling = 1.3
    shared, copied = draw_both(sharp)
    assert torch.equal(shared.response_ids, copied.response_ids)
    assert_equal_up_to_rounding(shared.logp, copied.logp)
