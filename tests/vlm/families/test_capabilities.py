"""Families that cannot be computed are refused by name, before their weights are read."""

import dataclasses
import shutil

import pytest
import torch
import transformers

from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.engine.capabilities import check_architecture, check_behaviour
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.model.network import auto_class
from mmrl.vlm.vlm_plan import footprint, outlined
from mmrl.workers import given
from tests.contracts.domains import domain_of
from tests.contracts.options import with_changes
from tests.vlm.builders import make_task
from tests.vlm.families.zoo import ZOO

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOWER = {"hidden_size": 32, "attention_heads": 2, "num_hidden_layers": 1, "num_global_layers": 1}
MLLAMA = {"text_config": SMALL | TOKENS | {"cross_attention_layers": [1]}, "vision_config": TOWER}
REFUSED = {
    "mllama": (MLLAMA, "MllamaForConditionalGeneration.* it has no get_image_features"),
    "falcon_h1": (SMALL, "layers of type LinearAttentionAndFullAttentionLayer, whose states cannot be copied"),
    "zamba2": ({}, "its cache has layers of type LinearAttentionAndFullAttentionLayer"),
    "florence2": ({}, "it is an encoder-decoder model"),
    "gpt_neo": ({}, "its local attention counts places in the cache"),
    "rwkv": ({}, "its forward pass does not accept a cache"),
    "blip-2": ({}, "its forward pass does not accept a cache"),
    "kosmos-2.5": (
        {},
        "(does not accept mm_encoder_outputs|it has no get_image_features)",
    ),  # by the release of transformers
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_is_refused_by_its_configuration_alone(kind, tmp_path):
    options, message = REFUSED[kind]
    transformers.AutoConfig.for_model(kind, **options).save_pretrained(tmp_path)  # and no weights
    with pytest.raises(UserError, match=rf"models of type {kind} .*{message}") as caught:
        load_policy(ModelConfig(path=str(tmp_path)))
    assert "qwen3_vl" in str(caught.value), "it says what to use"
    assert "AssignedStates" not in str(caught.value)
    assert "mmrl/" not in str(caught.value)


@pytest.mark.parametrize("kind", ZOO)
def test_families_that_are_tested_pass(kind):
    config = transformers.AutoConfig.for_model(kind, **ZOO[kind].options)
    check_architecture(auto_class(kind, kind)._model_mapping[type(config)], config)


def test_a_model_that_keeps_something_outside_of_its_cache_is_found(language_model, monkeypatch):
    policy = load_policy(ModelConfig(path=str(language_model), attention="eager"))
    own = type(policy.reader).advance
    check_behaviour(policy)

    def forgets(self, policy, tokens, part, **options):
        return own(self, policy, tokens, part, **options) + 1.0

    monkeypatch.setattr(type(policy.reader), "advance", forgets)
    with pytest.raises(UserError, match="models of type qwen3: cached states differ from full-row states"):
        load_policy(ModelConfig(path=str(language_model), attention="eager"))

    def fails(self, policy, tokens, part, **options):
        raise RuntimeError("no such state")

    monkeypatch.setattr(type(policy.reader), "advance", fails)
    with pytest.raises(UserError, match=r"models of type qwen3 .* RuntimeError: .*no such state"):
        load_policy(ModelConfig(path=str(language_model), attention="eager"))
    assert torch.is_grad_enabled()


def saved(network, language_model, folder, attention="sdpa"):
    """The model with the tokenizer of another one."""
    shutil.copytree(language_model, folder)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    network.save_pretrained(folder)
    return ModelConfig(path=str(folder), attention=attention)


def test_a_model_without_the_kernels_is_refused_with_those_that_it_has(language_model, tmp_path):
    # attention sinks are not in sdpa
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SMALL | experts, head_dim=16))
    config, expected = (
        saved(model, language_model, tmp_path / "model"),
        "no sdpa attention .* set model.attention to eager",
    )
    for loads in (load_policy, outlined):
        with pytest.raises(UserError, match=f"model .*{expected}"):
            loads(config)
    loaded = transformers.GptOssForCausalLM.from_pretrained(config.path, attn_implementation="eager")
    with given.having({}, {config.path: loaded}), pytest.raises(UserError, match=f"GptOssForCausalLM .*{expected}"):
        load_policy(config)
    config = dataclasses.replace(config, attention="eager")
    with torch.device("meta"):
        assert outlined(config).config._attn_implementation == "eager"
    # torch's shapes of the experts' product are those of bfloat16 alone
    run = with_changes(domain_of("vlm").make_config("vlm", tmp_path), {"model": config})
    (why,) = footprint(run, 8).unknown
    assert "activations, which only a run can tell" in why
    assert not footprint(with_changes(run, {"model.dtype": "bfloat16"}), 8).unknown


def test_a_model_whose_logits_are_not_made_from_its_bodys_output_is_refused(language_model, tmp_path):
    words = len(transformers.AutoTokenizer.from_pretrained(language_model))
    sizes = {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 1}
    config = transformers.OPTConfig(
        vocab_size=words, **sizes, num_attention_heads=2, max_position_embeddings=64, dropout=0.0
    )
    with pytest.raises(UserError, match="a model of type opt does not compute its logits from the output of its body"):
        load_policy(saved(transformers.OPTForCausalLM(config), language_model, tmp_path / "opt"))


OLDER = {
    # the types of its tokens are segments, which have an embedding
    "gpt2": (transformers.GPT2LMHeadModel, {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    "gptj": (
        transformers.GPTJForCausalLM,
        {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8},
    ),
    # its class names another body than it has
    "llama4_text": (transformers.Llama4ForCausalLM, SMALL | {"head_dim": 16, "intermediate_size_mlp": 64}),
    # its layers look for the name of their attention
    "falcon": (
        transformers.FalconForCausalLM,
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": False},
    ),
}


@pytest.mark.parametrize("kind", OLDER)
def test_scores_of_older_families_are_their_own(kind, language_model, tmp_path):
    (model, sizes), words = OLDER[kind], len(transformers.AutoTokenizer.from_pretrained(language_model))
    config = transformers.AutoConfig.for_model(kind, **sizes | {"vocab_size": words})
    network = model(config)
    attention = "sdpa" if network._supports_sdpa else "eager"  # GPT-J before transformers 5.4
    policy = load_policy(saved(network, language_model, tmp_path / kind, attention)).eval()
    prompt, ids = policy.encode(make_task("a", "Make 3 from 1 2.")), torch.tensor([[5, 6, 7]])
    payload = VlmPayload([prompt], [make_task("a", "Make 3.")], ids, [""], ["eos"])
    mask = torch.ones(1, 3)
    found = policy(Rollouts(torch.zeros(1, dtype=torch.long), mask, 0 * mask, torch.zeros(1), payload)).logp
    whole = torch.cat([prompt.input_ids, ids[0]])[None]
    logits = policy.network(whole).logits[0].index_fill(1, policy.banned_ids, float("-inf"))
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, ids[0][:, None])[:, 0]
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)
