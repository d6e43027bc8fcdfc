"""Folders of policies: weights bit for bit, adapters, merged pipelines, and folders that do not fit."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusion.families.table import family_of
from diffusion.models.diffusion_policy import DiffusionPolicy, load_policy
from diffusion.models.pipelines import load_pipeline
from diffusion.models.saved import merged_pipeline
from mmrl.errors import UserError
from mmrl.training.recipe import Reference
from tests.diffusion.builders import T5_TOKENS
from tests.diffusion.models.policies import SCALE, SIGMA, bits, config_of, disturb, noise, same, text, trained, velocity
from tests.rounding import assert_equal_up_to_rounding

pytestmark = pytest.mark.usefixtures("loads_each_folder_once")


@pytest.mark.parametrize("enabled", [True, False])
def test_frozen_reference_stays_and_is_saved_and_loaded(folder, tmp_path, enabled):
    policy = load_policy(config_of(folder, enabled=enabled))
    start = velocity(policy)
    reference = Reference("frozen", policy)
    disturb(policy)
    reference.save(tmp_path)
    assert torch.equal(reference.score(velocity), start)
    later = Reference("frozen", policy)
    assert not torch.equal(later.score(velocity), start)
    later.load(tmp_path)
    assert torch.equal(later.score(velocity), start)
    assert trained(policy)


def test_saved_weights_are_restored_bit_for_bit(config, tmp_path):
    policy = disturb(load_policy(config))
    policy.save_pretrained(tmp_path / "saved")
    other = load_policy(config, seed=9)
    assert not same(bits(other), bits(policy))
    other.load_weights(tmp_path / "saved")
    assert same(bits(other), bits(policy))
    assert trained(other).keys() == trained(policy).keys()
    assert torch.equal(velocity(other), velocity(policy))


def test_saved_folder_can_be_trained_further(config, tmp_path):
    policy = disturb(load_policy(config))
    policy.save_pretrained(tmp_path / "once")
    config.path = str(tmp_path / "once")
    again = load_policy(config, seed=2)
    assert same(bits(again), bits(policy))
    again.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice/base.json").read_text() == (tmp_path / "once/base.json").read_text()


def test_bfloat16_has_float32_adapters_that_are_saved_exactly(base, tmp_path):
    policy = disturb(load_policy(config_of(base, dtype="bfloat16")))
    assert {weight.dtype for weight in trained(policy).values()} == {torch.float32}
    assert policy.dtype == torch.bfloat16
    found = velocity(policy)
    assert found.dtype == torch.bfloat16
    policy.save_pretrained(tmp_path)
    again = load_policy(config_of(tmp_path, dtype="bfloat16"))
    assert same(bits(again), bits(policy))
    whole = disturb(load_policy(config_of(base)))
    assert (found.float() - velocity(whole)).abs().max() < 0.1 * velocity(whole).abs().max()


def test_full_bfloat16_weights_are_saved_exactly(folder, tmp_path):
    policy = disturb(load_policy(config_of(folder, enabled=False, dtype="bfloat16")))
    policy.save_pretrained(tmp_path)
    again = load_policy(config_of(folder, enabled=False, dtype="bfloat16"))
    again.load_weights(tmp_path)
    assert same(bits(again), bits(policy))


def test_pipeline_reads_the_saved_adapter(base, tmp_path):
    policy = disturb(load_policy(config_of(base)))
    policy.save_pretrained(tmp_path)
    pipeline = load_pipeline(base)
    pipeline.load_lora_weights(str(tmp_path))
    other = family_of(pipeline).model()
    with torch.no_grad():
        found = other(noise(), SIGMA, text(policy).expanded())
    assert_equal_up_to_rounding(found, velocity(policy))


def test_saved_pipeline_is_an_ordinary_one(config, tmp_path):
    policy = disturb(load_policy(config))
    before = bits(policy)
    policy.save_pipeline(tmp_path / "pipeline")
    assert same(bits(policy), before)
    assert policy.pipeline.transformer is policy.transformer
    pipeline = load_pipeline(tmp_path / "pipeline")
    assert not any("lora" in name for name, _ in pipeline.transformer.named_parameters())
    other = DiffusionPolicy(pipeline, config_of("", enabled=False))
    assert_equal_up_to_rounding(velocity(other), velocity(policy))
    options = {"num_inference_steps": 2, "height": 32, "width": 32, "max_sequence_length": T5_TOKENS}
    one, two = (
        p("a red circle", generator=torch.Generator().manual_seed(0), output_type="np", **options).images
        for p in (policy.pipeline, pipeline)
    )
    assert abs(one - two).max() < 1e-4


def test_a_merged_copy_of_a_pipeline_can_be_saved(base, tmp_path):
    policy = disturb(load_policy(config_of(base)))
    before = bits(policy)
    copied = merged_pipeline(policy.pipeline, policy.family.settings)
    assert same(bits(policy), before)
    assert copied.vae is policy.pipeline.vae
    assert copied.transformer.proj_out.weight is policy.transformer.proj_out.weight
    copied.save_pretrained(tmp_path)
    for pipeline in (copied, load_pipeline(tmp_path)):
        other = DiffusionPolicy(pipeline, config_of("", enabled=False))
        assert_equal_up_to_rounding(velocity(other), velocity(policy))
    assert merged_pipeline(copied, policy.family.settings) is copied


def test_merged_weights_are_the_sum_of_base_and_product(folder, tmp_path):
    policy = disturb(load_policy(config_of(folder)))
    policy.save_pipeline(tmp_path)
    merged = load_pipeline(tmp_path).transformer.state_dict()
    own, name = bits(policy), "transformer_blocks.0.attn.to_out.0"
    product = own[f"transformer.{name}.lora_B.default.weight"] @ own[f"transformer.{name}.lora_A.default.weight"]
    expected = own[f"transformer.{name}.base_layer.weight"] + SCALE * product
    assert_equal_up_to_rounding(merged[f"{name}.weight"], expected)
    assert torch.equal(merged["proj_out.weight"], own["transformer.proj_out.weight"])


def test_saving_after_the_text_encoders_were_freed(folder, tmp_path):
    policy = load_policy(config_of(folder))
    policy.embeddings.free_encoders()
    policy.save_pipeline(tmp_path)
    assert load_pipeline(tmp_path).text_encoder is None


def test_weights_that_do_not_fit_are_refused_and_change_nothing(folder, flux_folder, tmp_path):
    policy = disturb(load_policy(config_of(folder)))
    before = bits(policy)

    def refused(path, match):
        with pytest.raises(UserError, match=match) as caught:
            policy.load_weights(path)
        assert "\n" not in str(caught.value)
        assert same(bits(policy), before)

    others = {
        "rank": config_of(folder, rank=2),
        "alpha": config_of(folder, alpha=5),
        "full": config_of(folder, enabled=False),
        "FluxTransformer2DModel": config_of(flux_folder),
    }
    for name, config in others.items():
        load_policy(config).save_pretrained(tmp_path / name)
        refused(tmp_path / name, name)
    load_policy(config_of(folder, targets=["to_q"])).save_pretrained(tmp_path / "targets")
    refused(tmp_path / "targets", "they differ in")
    refused(tmp_path / "nothing", "base.json not found")
    policy.save_pretrained(tmp_path / "own")
    file = tmp_path / "own/pytorch_lora_weights.safetensors"
    state = load_file(file)
    save_file({key: value[:, :1].contiguous() for key, value in state.items()}, file)
    refused(tmp_path / "own", "they differ in")
    file.write_bytes(b"no weights")
    refused(tmp_path / "own", "cannot be read")
    file.unlink()
    refused(tmp_path / "own", "cannot be read")


def test_transformer_folders_that_do_not_fit_are_refused(folder, tmp_path):
    policy = load_policy(config_of(folder, enabled=False))
    policy.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved/diffusion_pytorch_model.safetensors"
    state = load_file(file)
    save_file({key: value for key, value in state.items() if key != "proj_out.bias"}, file)
    with pytest.raises(UserError, match=r"proj_out\.bias"):
        policy.load_weights(tmp_path / "saved")


def test_folder_whose_base_is_not_named(tmp_path):
    (tmp_path / "base.json").write_text("{}")
    with pytest.raises(UserError, match="does not say which base pipeline it belongs to"):
        load_policy(config_of(tmp_path))
