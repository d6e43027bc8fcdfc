import copy

import pytest
import torch

from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.data.task import VideoClip, VlmTask
from mmrl.vlm.engine import model_loading
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.model.model_config import ModelConfig
from tests.hub.numbered_clips import even_times, write_clip
from tests.rounding import assert_equal_up_to_rounding, assert_same_gradient
from tests.vlm.builders import draw, make_task, noise_image, ragged_tasks

EVERYTHING = frozenset({"logp", "entropy"})


@pytest.fixture
def rollouts(policy: VlmPolicy) -> Rollouts:
    return draw(policy, ragged_tasks(), temperature=0.8)


def reference_logits(policy: VlmPolicy, prompt: Prompt, response: torch.Tensor) -> torch.Tensor:
    """Logits (T, V) before each response token: the model's own forward on one row without padding."""
    inputs = {
        "input_ids": torch.cat([prompt.input_ids, response])[None],
        "mm_token_type_ids": torch.cat([prompt.mm_token_type_ids, torch.zeros_like(response)])[None],
    }
    output = policy.network(**inputs, **prompt.media)
    return output.logits[0, len(prompt) - 1 : -1]


def reference_scores(policy: VlmPolicy, rollouts: Rollouts, temperature: float):
    """Log-probs and entropies (B, T), row by row through the model's own forward."""
    logp, entropy = torch.zeros_like(rollouts.mask), torch.zeros_like(rollouts.mask)
    for row, length in enumerate(rollouts.lengths.tolist()):
        response = rollouts.payload.response_ids[row, :length]
        prompt = rollouts.payload.prompts[int(rollouts.group[row])]
        logits = reference_logits(policy, prompt, response) / temperature
        allowed = torch.ones(logits.shape[1], dtype=torch.bool)
        allowed[policy.banned_ids] = False
        log_softmax = logits[:, allowed].log_softmax(-1)
        place = allowed.cumsum(0)[response] - 1
        logp[row, :length] = log_softmax.gather(1, place[:, None])[:, 0]
        entropy[row, :length] = -(log_softmax.exp() * log_softmax).sum(-1)
    return logp, entropy


def test_scores_are_those_of_the_models_own_forward(policy, rollouts):
    with torch.no_grad():
        scores = policy(rollouts, temperature=0.8, outputs=EVERYTHING)
        logp, entropy = reference_scores(policy, rollouts, 0.8)
    assert rollouts.lengths.min() < rollouts.lengths.max() or rollouts.mask.all()
    assert_equal_up_to_rounding(scores.logp, logp)
    assert_equal_up_to_rounding(scores.entropy, entropy)
    assert scores.values is None


def test_the_sum_of_squared_probabilities_is_that_of_the_models_own_forward(policy, rollouts):
    with torch.no_grad():
        found = policy(rollouts, temperature=0.8, outputs=EVERYTHING | {"collision"}).collision
    row, length = 1, int(rollouts.lengths[1])
    response = rollouts.payload.response_ids[row, :length]
    logits = reference_logits(policy, rollouts.payload.prompts[int(rollouts.group[row])], response) / 0.8
    logits[:, policy.banned_ids] = float("-inf")
    assert_equal_up_to_rounding(found[row, :length], (logits.softmax(-1) ** 2).sum(-1))


def test_scores_of_videos_are_those_of_the_models_own_forward(policy, tmp_path):
    options = {"fps": 2.0, "min_pixels": 32 * 32, "max_pixels": 64 * 96}
    clip = VideoClip(str(write_clip(tmp_path / "clip.mp4", even_times(20))), options)
    content = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Sum?"}, {"type": "image"}]
    tasks = [
        VlmTask("v", [{"role": "user", "content": content}], [noise_image(64, 64, 0), noise_image(64, 96, 1)], [clip]),
        make_task("i", "Sum?", [(64, 64)]),
        VlmTask("w", [{"role": "user", "content": content[1:3]}], [], [clip]),
    ]
    rollouts = draw(policy, tasks, group=1)
    with torch.no_grad():
        # one second for each pair of frames, which is also what the model assumes when it is not told
        logp, _ = reference_scores(policy, rollouts, 1.0)
        assert_equal_up_to_rounding(policy(rollouts).logp, logp)
    assert_equal_up_to_rounding(rollouts.logp_old, logp)


def test_scores_do_not_depend_on_other_rows(policy, rollouts):
    with torch.no_grad():
        whole = policy(rollouts, outputs=EVERYTHING)
        for rows in ([0], [7, 1], [11, 3, 4]):
            part = policy(rollouts.select(torch.tensor(rows)), outputs=EVERYTHING)
            assert_equal_up_to_rounding(part.logp, whole.logp[rows])
            assert_equal_up_to_rounding(part.entropy, whole.entropy[rows])


def test_what_lies_in_the_padding_does_not_matter(policy, rollouts):
    short = rollouts.replace(mask=rollouts.mask * (torch.arange(rollouts.num_decisions) < 4))
    payload = short.payload
    noise = torch.randint_like(payload.response_ids, 256)
    garbage = torch.where(short.mask.bool(), payload.response_ids, noise)
    wide = torch.cat([garbage, torch.zeros_like(garbage)], 1)
    other = VlmPayload(payload.prompts, payload.tasks, wide, payload.texts, payload.finish)
    with torch.no_grad():
        assert torch.equal(policy(short.replace(payload=other)).logp, policy(short).logp)


def test_masked_decisions_inside_a_row_stay_in_its_context(policy, rollouts):
    hole = rollouts.mask.clone()
    hole[:, 1] = 0
    with torch.no_grad():
        expected = policy(rollouts).logp * hole
        assert_equal_up_to_rounding(policy(rollouts.replace(mask=hole)).logp, expected)


def test_scores_are_zero_off_the_mask(policy, rollouts):
    rollouts = rollouts.replace(mask=rollouts.mask * (torch.arange(rollouts.num_decisions) < 2))
    scores = policy(rollouts, outputs=EVERYTHING)
    for value in (scores.logp, scores.entropy):
        assert value.shape == rollouts.mask.shape
        assert value.dtype == torch.float32
        assert (value[:, 2:] == 0).all()
        assert (value[:, :2] != 0).all()


def test_micro_batches_have_the_gradient_of_the_whole(folder):
    policy = load_policy(ModelConfig(path=str(folder)))
    rollouts = draw(policy, ragged_tasks())

    def gradient(parts) -> torch.Tensor:
        policy.zero_grad()
        for part in parts:
            policy(part).logp.sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])

    whole = gradient([rollouts])
    parts = gradient(rollouts.micro_batches(5))
    assert_same_gradient(parts, whole)


def test_a_shared_prompt_has_the_gradient_of_one_prompt_for_each_row(folder):
    """One pass of the tower for a group gives the same as one for each row, and is what is computed."""
    policy = load_policy(ModelConfig(path=str(folder)))
    shared = draw(policy, ragged_tasks())
    payload, group = shared.payload, shared.group.tolist()
    copies = VlmPayload(
        [copy.copy(payload.prompts[index]) for index in group],
        [payload.tasks[index] for index in group],
        payload.response_ids,
        payload.texts,
        payload.finish,
    )
    separate = shared.replace(group=torch.arange(shared.num_rows), payload=copies)
    patches, gradients = [], []
    hook = policy.network.model.visual.register_forward_hook(lambda module, inputs, output: patches.append(inputs[0]))
    for rollouts in (shared, separate):
        policy.zero_grad()
        policy(rollouts).logp.sum().backward()
        tower = policy.network.model.visual.parameters()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in tower]))
    hook.remove()
    assert [len(pixels) for pixels in patches] == [
        sum(len(prompt.media["pixel_values"]) for prompt in some.payload.prompts if prompt.has_vision)
        for some in (shared, separate)
    ]
    assert gradients[0].norm() > 0
    assert_same_gradient(*gradients)


def test_every_weight_gets_a_gradient(folder):
    policy = load_policy(ModelConfig(path=str(folder)), value_head=True)
    scores = policy(draw(policy, ragged_tasks()), outputs=frozenset({"logp", "values"}))
    (scores.logp.sum() + scores.values.sum()).backward()
    assert [name for name, parameter in policy.named_parameters() if parameter.grad is None] == []


def test_gradient_is_that_of_the_models_own_forward(folder):
    policy = load_policy(ModelConfig(path=str(folder)))
    rollouts = draw(policy, ragged_tasks(), group=2)
    gradients = []
    for own in (False, True):
        policy.zero_grad()
        if own:
            logp, entropy = reference_scores(policy, rollouts, 0.8)
        else:
            scores = policy(rollouts, temperature=0.8, outputs=EVERYTHING)
            logp, entropy = scores.logp, scores.entropy
        (logp.sum() + 0.3 * (entropy * torch.arange(rollouts.num_decisions)).sum()).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]))
    assert_same_gradient(*gradients)


def test_gradient_checkpointing_recomputes_and_changes_nothing(folder):
    tasks = ragged_tasks()
    plain = load_policy(ModelConfig(path=str(folder))).train()
    saving = load_policy(ModelConfig(path=str(folder), gradient_checkpointing=True)).train()
    rollouts, again = draw(plain, tasks), draw(saving, tasks)
    assert torch.equal(rollouts.payload.response_ids, again.payload.response_ids)
    counts = {}
    for policy in (plain, saving):
        seen = counts.setdefault(policy, [])
        visual, language = policy.network.model.visual, policy.network.model.language_model
        for first in (visual.blocks[0].norm1, language.layers[0].input_layernorm):
            first.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        policy(rollouts).logp.sum().backward()
    assert len(counts[plain]) == 3  # the tower, the prompts and the responses, each once
    assert len(counts[saving]) == 6
    one, two = (torch.cat([p.grad.flatten() for p in policy.parameters()]) for policy in (plain, saving))
    assert_same_gradient(two, one)


def test_a_frozen_tower_is_passed_once_and_gets_no_gradient(folder):
    free = load_policy(ModelConfig(path=str(folder)))
    frozen = load_policy(ModelConfig(path=str(folder), freeze_vision=True))
    tower, passes = frozen.network.model.visual, []
    tower.register_forward_hook(lambda *_: passes.append(1))
    rollouts = draw(frozen, ragged_tasks())
    for _ in range(2):
        free.zero_grad()
        frozen.zero_grad()
        free(rollouts).logp.sum().backward()
        frozen(rollouts).logp.sum().backward()
    assert len(passes) == 1  # in the sampler; the two updates find the features of the same prompts
    assert all(parameter.grad is None for parameter in tower.parameters())
    language = [policy.network.model.language_model.parameters() for policy in (free, frozen)]
    one, two = (torch.cat([parameter.grad.flatten() for parameter in parameters]) for parameters in language)
    assert_same_gradient(two, one)


def test_cached_features_end_with_their_prompts_and_with_the_towers_weights(folder):
    policy = load_policy(ModelConfig(path=str(folder), freeze_vision=True))
    rollouts = draw(policy, ragged_tasks())
    before = policy(rollouts).logp
    assert len(policy.features) == 3
    with torch.no_grad():  # as loading other weights does
        for parameter in policy.network.model.visual.parameters():
            parameter.mul_(0.5)
    fresh = load_policy(ModelConfig(path=str(folder), freeze_vision=True))
    fresh.load_state_dict(policy.state_dict())
    assert torch.equal(policy(rollouts).logp, fresh(rollouts).logp)
    assert not torch.equal(policy(rollouts).logp, before)
    del rollouts
    assert len(policy.features) == 0


def test_a_copy_shares_a_frozen_tower_and_its_features(folder):
    frozen = load_policy(ModelConfig(path=str(folder), freeze_vision=True))
    rollouts = draw(frozen, ragged_tasks())
    passes = []
    frozen.network.model.visual.register_forward_hook(lambda *_: passes.append(1))
    copied = copy.deepcopy(frozen)
    assert torch.equal(copied(rollouts).logp, frozen(rollouts).logp)
    assert not passes
    free = copy.deepcopy(load_policy(ModelConfig(path=str(folder))))
    assert free.features is not frozen.features
    assert copied.prefixes is not frozen.prefixes


def test_a_copy_of_a_trained_tower_is_its_own(folder):
    free = load_policy(ModelConfig(path=str(folder)))
    copied = copy.deepcopy(free)
    mine, other = (next(p.network.model.visual.parameters()) for p in (free, copied))
    before = mine.detach().clone()
    with torch.no_grad():
        mine.add_(1.0)
    assert torch.equal(mine, before + 1.0)
    assert torch.equal(other, before)


def image_features(policy: VlmPolicy, prompts: list[Prompt]) -> torch.Tensor:
    """Features (n, H) of the images of prompts."""
    return torch.cat(list(policy.reader._features(policy, prompts)["image"].pooler_output))


def test_patches_are_multiplied_as_they_are_convolved(folder, monkeypatch):
    gradients, features = [], []
    for multiply in (model_loading.multiply_patches, lambda tower: None):
        monkeypatch.setattr(model_loading, "multiply_patches", multiply)
        policy = load_policy(ModelConfig(path=str(folder)))
        tokens = image_features(policy, [policy.encode(make_task("one", "Sum?", [(64, 96)]))])
        tokens.square().sum().backward()
        features.append(tokens)
        gradients.append(policy.network.model.visual.patch_embed.proj.weight.grad)
    assert_equal_up_to_rounding(*features)
    assert_same_gradient(*gradients)


def test_features_of_a_group_are_those_of_its_own_images(policy):
    prompts = [policy.encode(task) for task in ragged_tasks()]
    assert not policy.reader._features(policy, prompts[:1])
    alone = torch.cat([image_features(policy, [prompt]) for prompt in prompts[1:]])
    assert_equal_up_to_rounding(image_features(policy, prompts), alone)
    deepstack = policy.reader._features(policy, prompts)["image"].deepstack_features
    assert len(deepstack or []) == {"qwen2_5_vl": 0, "qwen3_vl": 1}[policy.network.config.model_type]


def test_the_image_matters_in_a_view(policy, rollouts):
    masked = [
        policy.encode(task, images=[noise_image(image.height, image.width, 99) for image in task.images])
        if task.images
        else None
        for task in rollouts.payload.tasks
    ]
    payload = rollouts.payload
    viewed = rollouts.replace(
        payload=VlmPayload(
            payload.prompts, payload.tasks, payload.response_ids, payload.texts, payload.finish, {"masked": masked}
        )
    )
    with torch.no_grad():
        original, other = policy(viewed).logp, policy(viewed, view="masked").logp
    without = viewed.group == 0
    assert_equal_up_to_rounding(other[without], original[without])
    assert (other[~without] - original[~without]).abs().max(1).values.min() > 1e-4
    with pytest.raises(ValueError, match="no view 'blurred'"):
        policy(viewed, view="blurred")


def test_values_are_those_of_the_state_before_each_token(folder):
    policy = load_policy(ModelConfig(path=str(folder)), value_head=True)
    rollouts = draw(policy, ragged_tasks())
    assert (policy(rollouts, outputs=frozenset({"values"})).values == 0).all()
    torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(policy.value_head.bias, 0.5)
    with torch.no_grad():
        values = policy(rollouts, outputs=frozenset({"values"})).values
        length = int(rollouts.lengths[3])
        prompt, response = rollouts.payload.prompts[1], rollouts.payload.response_ids[3, :length]
        hidden = policy.network.model(
            input_ids=torch.cat([prompt.input_ids, response])[None],
            mm_token_type_ids=torch.cat([prompt.mm_token_type_ids, torch.zeros_like(response)])[None],
            **prompt.media,
        ).last_hidden_state
        expected = policy.value_head(hidden[0, len(prompt) - 1 : -1])[:, 0]
    assert_equal_up_to_rounding(values[3, :length], expected)


def test_wrong_requests(policy, rollouts):
    with pytest.raises(ValueError, match="entropy, logp, routes, states, values"):
        policy(rollouts, outputs=frozenset({"logits"}))
    with pytest.raises(ValueError, match="value_head=True"):
        policy(rollouts, outputs=frozenset({"values"}))
    with pytest.raises(UserError, match="no adapter"), policy.disable_adapter():
        pass


def test_bfloat16_scores_are_float32_and_close(folder, policy, rollouts):
    half = load_policy(ModelConfig(path=str(folder), dtype="bfloat16"))
    own = draw(half, ragged_tasks())
    with torch.no_grad():
        assert half(rollouts).logp.dtype == torch.float32
        assert (half(rollouts).logp - policy(rollouts).logp).abs().mean() < 0.1
        assert (half(own).logp - own.logp_old).abs().mean() < 0.05


def test_eager_attention_is_the_same_model(folder, policy, rollouts):
    eager = load_policy(ModelConfig(path=str(folder), attention="eager"))
    with torch.no_grad():
        assert_equal_up_to_rounding(eager(rollouts).logp, policy(rollouts).logp)
    assert torch.equal(
        draw(eager, ragged_tasks()).payload.response_ids, draw(policy, ragged_tasks()).payload.response_ids
    )
