"""Action tokens of a vision-language model."""

import pytest
import torch

from mmrl.errors import UserError
from mmrl.training.recipe import make_reference
from mmrl.training.settings import ReferenceConfig
from robotics.policies.base.action_policy import PolicyInputs, open_policy
from robotics.policies.vlm import VlmActionConfig, VlmActionPolicy
from tests.robotics.policies.builders import TEXTS, D, K, S, draw, make_inputs


def test_action_logits_are_rows_of_the_whole_head(policies):
    policy, batch = policies["vlm_zero"], make_inputs(rows=1)
    texts = policy.vlm.processor.tokenizer.vocab_size
    assert policy.action_ids.tolist() == list(range(texts - 32, texts))
    prompt = policy._prompts(batch)[0]
    assert "What action should the robot take to touch the red cube?" in prompt.text
    network = policy.vlm.network
    language, tokens = network.model.language_model, K * D
    with torch.no_grad():
        embeddings = network.get_input_embeddings()(prompt.input_ids[None])
        seen = network.model.get_image_features(**prompt.media, return_dict=True)
        embeddings[0, prompt.mm_token_type_ids > 0] = torch.cat(seen.pooler_output)
        embeddings = torch.cat([embeddings, torch.zeros(1, tokens, embeddings.shape[-1])], 1)
        following = prompt.next_position + torch.arange(tokens).expand(3, 1, -1)
        positions = torch.cat([prompt.position_ids[:, None], following], 2)
        hidden = language(inputs_embeds=embeddings, position_ids=positions, use_cache=False).last_hidden_state
        whole = network.lm_head(hidden[:, -tokens:])
        torch.testing.assert_close(policy.logits(batch), whole[..., texts - 32 : texts], atol=1e-4, rtol=1e-4)


def test_the_model_sees_image_state_and_instruction(policies):
    policy, batch = policies["vlm_learned"], make_inputs()
    expected = policy.logits(batch).detach()
    for changes in ((255 - batch.images, batch.state, TEXTS), (batch.images, -batch.state, TEXTS)):
        assert float((policy.logits(PolicyInputs(*changes)).detach() - expected).abs().max()) > 1e-3
    told = policy.logits(PolicyInputs(batch.images, batch.state, (TEXTS[1], *TEXTS[1:]))).detach()
    assert float((told[0] - expected[0]).abs().max()) > 1e-3
    torch.testing.assert_close(told[1:], expected[1:], atol=1e-4, rtol=1e-4)


def test_a_model_may_go_without_images_but_not_without_its_state(policies):
    blind = PolicyInputs(None, torch.zeros(1, S), TEXTS[:1])
    assert bool(policies["vlm_learned"].logits(blind).isfinite().all())
    with pytest.raises(UserError, match=f"state of {S} entries, got none"):
        policies["vlm_learned"].logits(PolicyInputs(None, None, TEXTS[:1]))


def test_lora_trains_adapters_and_added_layers(builders, tmp_path):
    from mmrl.vlm.model.model_config import ModelConfig

    policy = builders["vlm_learned"](lora=True)
    names = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert {"extra.learned", "extra.project.weight", "extra.project.bias"} < names
    assert all("lora_" in name for name in names if not name.startswith("extra."))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name in names:
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
    policy.save_pretrained(tmp_path)
    opened = open_policy(tmp_path)
    assert torch.equal(draw(opened).logp, draw(policy).logp)
    assert {name for name, weight in opened.named_parameters() if weight.requires_grad} == names
    reference = make_reference(ReferenceConfig(), opened, needed=True)
    assert torch.equal(reference.score(lambda start: draw(start).logp), draw(policy).logp)
    merged = VlmActionPolicy.from_pretrained(tmp_path, ModelConfig())
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    assert all(weight.requires_grad for weight in merged.vlm.parameters())
    torch.testing.assert_close(draw(merged).logp, draw(policy).logp, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes", [{"bins": 100000}, {"first_id": 399}, {"placeholders": "one"}, {"prompt": "Act."}, {"state_size": 0}]
)
def test_vlm_settings_out_of_range_are_refused(policies, changes):
    config = VlmActionConfig(**{"action_size": D, "chunk": K, "bins": 32} | changes)
    with pytest.raises(UserError):
        VlmActionPolicy(policies["vlm_zero"].vlm, config)
