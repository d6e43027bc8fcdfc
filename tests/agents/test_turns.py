"""A conversation read once, turn after turn, gives the same numbers as rereading it in every turn."""

import pytest
import torch

from mmrl.vlm.data.prompt import VlmPayload, leaves
from mmrl.vlm.engine.rows import pack_reading
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
from mmrl.vlm.toy.tiny_generic import build_tiny_generic
from tests.agents.conversations import converse, one_row_a_turn
from tests.rounding import assert_equal_up_to_rounding, assert_same_gradient
from tests.vlm.builders import CORPUS
from tests.vlm.test_shared_prefix import sharpen

GROUP = [0, 0, 0, 1, 1, 2]
VARIANTS = {
    "trained tower": ModelConfig(),
    "frozen tower": ModelConfig(freeze_vision=True),
    "adapter": ModelConfig(lora=LoraSettings(enabled=True, rank=4)),
}


def load(folder, variant="trained tower", **changes):
    policy = load_policy(ModelConfig(**vars(VARIANTS[variant]) | {"path": str(folder)} | changes)).train()
    sharpen(policy)
    return policy


def backward(policy, rollouts, weights):
    policy.zero_grad()
    scores = policy(rollouts, temperature=2.0)
    (scores.logp * weights).sum().backward()
    return scores.logp.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def random_weights(mask):
    return torch.randn(mask.shape, generator=torch.Generator().manual_seed(1)) * mask


def spread(values, places, shape):
    """Values (rows of turns) at their positions in the rows of conversations."""
    whole = torch.zeros(shape)
    for turn, (row, first) in enumerate(places):
        width = min(values.shape[1], shape[1] - first)
        whole[row, first : first + width] += values[turn, :width]
    return whole


def gathered(values, places, mask):
    """The opposite of `spread`."""
    found = torch.zeros_like(mask)
    for turn, (row, first) in enumerate(places):
        width = min(mask.shape[1], values.shape[1] - first)
        found[turn, :width] = values[row, first : first + width]
    return found * mask


@pytest.mark.parametrize("restart_at", [None, 2])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_one_pass_over_a_trajectory_equals_a_pass_for_each_turn(folder, variant, restart_at):
    policy = load(folder, variant)
    rollouts = converse(policy, GROUP, 4, restart_at=restart_at)
    turns, places = one_row_a_turn(rollouts)
    assert turns.num_rows == 4 * 3 + 3 * 3, "even rows take four turns, odd rows three"
    assert int(turns.mask.sum()) == int(rollouts.mask.sum())
    weights = random_weights(rollouts.mask)
    logp, gradient = backward(policy, rollouts, weights)
    expected_logp, expected = backward(policy, turns, gathered(weights, places, turns.mask))
    assert_equal_up_to_rounding(logp, spread(expected_logp, places, logp.shape))
    assert_same_gradient(gradient, expected)
    assert_equal_up_to_rounding(rollouts.logp_old, logp)


@pytest.mark.parametrize("restart_at", [None, 2])
def test_rows_that_share_nothing_give_the_same_numbers(folder, restart_at):
    shared, flat = load(folder), load(folder, shared_prefix=False)
    rollouts = converse(shared, GROUP, 3, restart_at=restart_at)
    weights = random_weights(rollouts.mask)
    logp, gradient = backward(shared, rollouts, weights)
    expected_logp, expected = backward(flat, rollouts, weights)
    assert_equal_up_to_rounding(logp, expected_logp)
    assert_same_gradient(gradient, expected)


def test_gradients_agree_to_double_precision(folder):
    policy = load(folder).double()
    rollouts = converse(load(folder), GROUP, 3)
    turns, places = one_row_a_turn(rollouts)
    weights = random_weights(rollouts.mask).double()
    logp, gradient = backward(policy, rollouts, weights)
    expected_logp, expected = backward(policy, turns, gathered(weights, places, turns.mask.double()))
    assert (logp - spread(expected_logp, places, logp.shape)).abs().max() < 1e-6
    assert float((gradient - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_micro_batches_add_up(folder, rows):
    policy = load(folder)
    rollouts = converse(policy, GROUP, 3, restart_at=2)
    weights = random_weights(rollouts.mask)
    _, expected = backward(policy, rollouts, weights)
    policy.zero_grad()
    start = 0
    with policy.prefixes.open() as shared:
        for part in rollouts.micro_batches(rows):
            own = weights[start : start + part.num_rows, : part.num_decisions]
            (policy(part, temperature=2.0).logp * own).sum().backward()
            start += part.num_rows
        shared.backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    assert_same_gradient(gradient, expected)


def test_turns_left_out_of_the_loss_change_nothing_else(folder):
    """If only some turns are trained, the others are still part of the context."""
    policy = load(folder)
    rollouts = converse(policy, GROUP, 4)
    kept = rollouts.mask * ((rollouts.turn == 0) | (rollouts.turn == 2))
    with torch.no_grad():
        whole, part = policy(rollouts).logp, policy(rollouts.replace(mask=kept)).logp
    assert_equal_up_to_rounding(part, whole * kept)


class Engine:
    """Samples whole conversations with the policy, as an inference engine does with its weights."""

    def __init__(self, policy):
        self.policy, self.images = policy, []

    def draw(self, prompts, n, uniforms):
        self.images.append([sum(len(leaf.images) for leaf in leaves(prompt)) for prompt in prompts])
        return sample(self.policy, prompts, n, SamplerConfig(max_new_tokens=6, temperature=2.0), uniforms)


def test_an_inference_engine_gets_the_whole_conversation_with_its_images(folder):
    policy = load(folder)
    policy.keeps_images = True
    engine = Engine(policy)
    served, own = converse(policy, GROUP, 4, engine=engine), converse(policy, GROUP, 4, reread=True)
    assert torch.equal(VlmPayload.of(served).response_ids, VlmPayload.of(own).response_ids)
    assert torch.equal(served.logp_old, own.logp_old)
    assert [max(images) for images in engine.images] == [1, 2, 3, 4], "earlier turns are part of the prompt"


@pytest.mark.parametrize("restart_at", [None, 2])
@pytest.mark.parametrize("batch_rows", [2, 256])
def test_kept_histories_sample_the_same_tokens_as_rereading(folder, restart_at, batch_rows):
    policy = load(folder)
    kept, reread = (
        converse(policy, GROUP, 4, reread=reread, restart_at=restart_at, batch_rows=batch_rows)
        for reread in (False, True)
    )
    assert torch.equal(VlmPayload.of(kept).response_ids, VlmPayload.of(reread).response_ids)
    assert_equal_up_to_rounding(kept.logp_old, reread.logp_old)


def test_kept_histories_of_other_positions(folder, tmp_path):
    """Rotary positions along three axes, and those that are counted, each behind a history of its own length."""
    other = build_tiny_generic(tmp_path / "smolvlm", family="smolvlm", corpus=CORPUS)
    for model in (folder, other):
        policy = load_policy(ModelConfig(path=str(model)))
        kept, reread = (converse(policy, GROUP, 4, reread=reread, restart_at=1) for reread in (False, True))
        assert torch.equal(VlmPayload.of(kept).response_ids, VlmPayload.of(reread).response_ids)
        assert_equal_up_to_rounding(kept.logp_old, reread.logp_old)
        with torch.no_grad():
            assert_equal_up_to_rounding(policy(kept, temperature=2.0).logp, kept.logp_old * kept.mask)


def test_nothing_is_read_twice(folder):
    """Pixels and tokens that pass the model while sampling are those of the trajectories, each once."""
    policy = load(folder)
    patches, tokens, steps = [], [], []
    hooks = [
        policy.network.model.visual.register_forward_hook(lambda _, inputs, output: patches.append(len(inputs[0]))),
        policy.network.model.language_model.register_forward_hook(
            lambda module, inputs, output: tokens.append(output.last_hidden_state.shape[:2].numel())
        ),
    ]
    rollouts = converse(policy, GROUP, 4)
    payload = VlmPayload.of(rollouts)
    given = [insert.prompt for own in payload.inserts for insert in own]
    pixels = [p.media["pixel_values"] for p in (*payload.prompts, *given) if "pixel_values" in p.media]
    assert sum(patches) == sum(map(len, pixels))
    # of a sampled turn, the decoder reads all tokens but the last, which is read with what comes next
    drawn = int(rollouts.mask.sum()) - rollouts.num_rows
    assert sum(tokens) == sum(map(len, (*payload.prompts, *given))) + drawn
    patches.clear()
    with torch.no_grad():
        policy(rollouts)
    assert not patches, "the features that sampling computed serve the old log-probabilities"
    for hook in hooks:
        hook.remove()
    assert not steps


def test_rotary_positions_are_those_of_the_whole_conversation(family, policy):
    """transformers' own positions for the tokens and grids of a conversation as one prompt."""
    from mmrl.vlm.data.prompt import join_prompts
    from mmrl.vlm.engine.rows import make_reading, split_row

    rollouts = converse(policy, GROUP, 3)
    payload = VlmPayload.of(rollouts)
    reading = make_reading(payload, "original", rollouts.host.group, rollouts.host.mask)
    packed = pack_reading(reading, torch.arange(len(reading.lengths)), policy.device)
    starts = [0, *reading.lengths.cumsum(0).tolist()]
    for row, inserts in enumerate(reading.inserts):
        length = int(reading.lengths[row])
        prompt = payload.prompts[int(reading.group[row])]
        whole = join_prompts([prompt, *split_row(reading.tokens[row, :length], inserts)])
        grids = [leaf.media["image_grid_thw"] for leaf in whole.parts if "image_grid_thw" in leaf.media]
        expected = policy.network.model.get_rope_index(
            whole.input_ids[None], mm_token_type_ids=whole.mm_token_type_ids[None], image_grid_thw=torch.cat(grids)
        )[0][:, 0]
        assert torch.equal(whole.position_ids, expected)
        assert torch.equal(packed.positions[:, 0, starts[row] : starts[row + 1]], expected[:, len(prompt) :])
