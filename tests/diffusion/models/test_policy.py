"""Policies on a pipeline: where they start, what is trained and shared, gradients, settings."""

import copy

import pytest
import torch

from diffusion.families.sd3 import ATTENTION as ATTENTION_PROJECTIONS
from diffusion.families.table import family_of
from diffusion.models.diffusion_policy import DiffusionLora, DiffusionPolicy, PipelineConfig, load_policy
from diffusion.models.pipelines import load_pipeline
from diffusion.sampling.latent_sampler import GuidedVelocity, LatentSamplerConfig, check_sampler, euler_ode
from mmrl.config import load
from mmrl.errors import UserError
from tests.diffusion.models.policies import RANK, SIGMA, bits, config_of, disturb, noise, same, text, trained, velocity
from tests.rounding import assert_equal_up_to_rounding

pytestmark = pytest.mark.usefixtures("loads_each_folder_once")


def test_starts_as_the_pipeline(config):
    policy = load_policy(config)
    pipeline = load_pipeline(config.path)
    model = family_of(pipeline).model()
    with torch.no_grad():
        expected = model(noise(), SIGMA, text(policy).expanded())
    assert_equal_up_to_rounding(velocity(policy), expected)
    assert not torch.equal(velocity(disturb(policy)), expected)


def test_is_a_velocity_model_for_guidance(base):
    policy = load_policy(config_of(base))
    guided = GuidedVelocity(policy, text(policy), policy.embeddings.negative(), 2.0)
    with torch.no_grad():
        latents = euler_ode(guided, noise(), torch.tensor([1.0, 0.5, 0.0]))
    assert latents.shape == (2, *policy.latent_shape)
    assert policy.family.tokens(policy.latent_shape) == 16


def test_adapters_are_at_all_attention_projections_that_exist(base):
    policy = load_policy(config_of(base))
    adapted = {name.split(".lora_")[0].removeprefix("transformer.") for name in trained(policy)}
    linear = [name for name, module in policy.pipeline.transformer.named_modules() if name.endswith(".base_layer")]
    assert adapted == {name.removesuffix(".base_layer") for name in linear}
    ends = {end for end in ATTENTION_PROJECTIONS if any(name.endswith(f".attn.{end}") for name in adapted)}
    assert ends == set(ATTENTION_PROJECTIONS)
    plain = load_pipeline(base).transformer
    everywhere = {
        name
        for name, module in plain.named_modules()
        if isinstance(module, torch.nn.Linear) and name.partition(".attn.")[2] in ATTENTION_PROJECTIONS
    }
    assert adapted == everywhere


def test_adapters_start_gaussian_and_zero_from_their_seed(folder):
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    one, again, other = (load_policy(config_of(folder), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.rand(2), expected)
    assert same(bits(one), bits(again))
    halves = {half: [w for name, w in trained(one).items() if f".lora_{half}." in name] for half in "AB"}
    drawn = torch.cat([weight.detach().flatten() for weight in halves["A"]])
    assert drawn.std().item() == pytest.approx(1 / RANK, rel=0.05)
    assert not any(weight.any() for weight in halves["B"])
    assert not any(torch.equal(w, v) for w, v in zip(halves["A"], list(trained(other).values())[::2], strict=True))


def test_only_the_transformer_is_a_submodule_and_gets_gradients(config):
    policy = load_policy(config)
    assert {name.split(".")[0] for name, _ in policy.named_parameters()} == {"transformer"}
    policy(noise(), SIGMA, text(policy).expanded()).square().mean().backward()
    for name, weight in policy.named_parameters():
        if policy.has_adapter and ".lora_" not in name:
            assert not weight.requires_grad
            assert weight.grad is None
    moved = [w for n, w in trained(policy).items() if w.grad is not None and w.grad.any()]
    assert len(moved) >= len(trained(policy)) // 2 - 2
    assert all(weight.grad is None for weight in policy.pipeline.vae.parameters())


def test_training_mode_leaves_the_frozen_parts_alone(base):
    policy = load_policy(config_of(base, dropout=0.5))
    assert not policy.training
    disturb(policy)
    still = velocity(policy)
    assert torch.equal(velocity(policy), still)
    policy.train()
    assert not policy.pipeline.vae.training
    assert not policy.pipeline.text_encoder.training
    assert not torch.equal(velocity(policy), still)


def test_disabled_adapter_is_the_base_and_is_restored(base):
    policy = load_policy(config_of(base))
    start = velocity(policy)
    changed = velocity(disturb(policy))
    flags = {name: weight.requires_grad for name, weight in policy.named_parameters()}
    with policy.disable_adapter():
        with policy.disable_adapter():
            assert_equal_up_to_rounding(velocity(policy), start)
        assert_equal_up_to_rounding(velocity(policy), start)
    assert torch.equal(velocity(policy), changed)
    assert {name: weight.requires_grad for name, weight in policy.named_parameters()} == flags
    frozen = copy.deepcopy(policy).requires_grad_(False)
    with pytest.raises(KeyError), frozen.disable_adapter():
        raise KeyError
    assert torch.equal(velocity(frozen), changed)
    assert not trained(frozen)


def test_disabling_an_adapter_that_is_not_there(folder):
    with pytest.raises(UserError, match="no adapter"), load_policy(config_of(folder, enabled=False)).disable_adapter():
        pass


def test_a_copy_shares_frozen_weights_and_no_trained_ones(config):
    policy = load_policy(config)
    copied = copy.deepcopy(policy)
    assert copied.pipeline is policy.pipeline
    assert copied.embeddings is policy.embeddings
    theirs = dict(copied.named_parameters())
    for name, weight in policy.named_parameters():
        assert (theirs[name] is weight) == (not weight.requires_grad)
    before = velocity(policy)
    disturb(policy)
    assert torch.equal(velocity(copied), before)
    assert not torch.equal(velocity(policy), before)


def test_copy_of_a_frozen_copy_has_adapters_of_its_own(folder):
    frozen = copy.deepcopy(load_policy(config_of(folder))).requires_grad_(False)
    start, second = velocity(frozen), copy.deepcopy(frozen)
    with torch.no_grad():
        for name, weight in second.named_parameters():
            if ".lora_" in name:
                weight.add_(0.1)
    assert torch.equal(velocity(frozen), start)
    assert not torch.equal(velocity(second), start)


def test_checkpointing_changes_no_gradient(base):
    found = {}
    for checkpointing in (False, True):
        config = config_of(base)
        config.gradient_checkpointing = checkpointing
        policy = disturb(load_policy(config))
        assert policy.transformer.is_gradient_checkpointing == checkpointing
        policy(noise(), SIGMA, text(policy).expanded()).square().mean().backward()
        found[checkpointing] = torch.cat([weight.grad.flatten() for weight in trained(policy).values()])
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-7)
    assert found[True].any()


def test_gradient_is_that_of_finite_differences(folder):
    policy = disturb(load_policy(config_of(folder)))
    rows, weights = text(policy).expanded(), list(trained(policy).values())

    def loss():
        return policy(noise(), SIGMA, rows).double().square().mean()

    gradients = torch.autograd.grad(loss(), weights)
    slope = sum(gradient.square().sum() for gradient in gradients).sqrt()
    step, values = 1e-2, []
    for sign in (1, -1):
        moved = copy.deepcopy(policy)
        with torch.no_grad():
            for weight, gradient in zip(trained(moved).values(), gradients, strict=True):
                weight.add_(sign * step / slope * gradient)
            values.append(moved(noise(), SIGMA, rows).double().square().mean())
    assert slope.item() == pytest.approx(((values[0] - values[1]) / (2 * step)).item(), rel=2e-3)


def test_frozen_parts_move_with_the_policy(base):
    policy = DiffusionPolicy(load_pipeline(base), config_of(base))
    policy.to(torch.float64)
    assert policy.pipeline.vae.dtype == policy.pipeline.text_encoder_2.dtype == torch.float64
    assert policy.dtype == torch.float64
    policy.to("meta")
    assert policy.pipeline.vae.device.type == policy.device.type == "meta"


def test_rows_are_counted_with_and_without_a_graph(folder):
    policy = load_policy(config_of(folder))
    velocity(policy)
    velocity(copy.deepcopy(policy))
    policy(noise(), SIGMA, text(policy).expanded())
    assert policy.cost == {"forward_rows": 4, "train_rows": 2}


def test_guidance_embedding_reaches_flux(flux_folder):
    found = []
    for scale in (1.0, 6.0):
        config = config_of(flux_folder)
        config.guidance_embedding = scale
        found.append(velocity(load_policy(config)))
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_guidance_embedding_of_a_transformer_without_one_is_refused(folder):
    config = config_of(folder)
    config.guidance_embedding = 2.0
    with pytest.raises(UserError, match=r"guidance_embedding is 2\.0, .* no guidance input"):
        load_policy(config)


@pytest.mark.parametrize("scales", [{"guidance": 4.5}, {"guidance": 1.0, "eval_guidance": 4.5}])
def test_guidance_on_top_of_distilled_guidance_is_refused(folder, flux_folder, scales):
    sampler = LatentSamplerConfig(**scales)
    config = config_of(flux_folder)
    with pytest.raises(UserError, match=rf"evaluation\.sampler\.{[*scales][-1]} is 4\.5, .* applied twice"):
        check_sampler(load_policy(config), sampler, "evaluation.sampler")
    check_sampler(load_policy(config), LatentSamplerConfig(guidance=1.0))
    config.guidance_embedding = 1.0  # the negative prompt alone
    check_sampler(load_policy(config), sampler)
    check_sampler(load_policy(config_of(folder)), sampler)


def test_options_of_embeddings_reach_them(folder, tmp_path, closing):
    config = config_of(folder)
    config.embedding_memory_mb, config.embedding_cache, config.free_text_encoders = 3, str(tmp_path / "cache"), True
    embeddings = closing(load_policy(config).embeddings)
    assert embeddings.max_bytes == 3 * 2**20
    assert len([*(tmp_path / "cache").iterdir()]) == 1


def test_size_is_that_of_the_settings(folder):
    config = config_of(folder)
    config.height, config.width = 16, 24
    policy = load_policy(config)
    assert policy.latent_shape == (4, 4, 6)
    assert policy.family.tokens(policy.latent_shape) == 6
    config.height = 18
    with pytest.raises(UserError, match="height=18"):
        load_policy(config)


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"dtype": "float64"}, r"model\.dtype is 'float64'"),
        ({"height": 0}, r"model\.height is 0"),
        ({"guidance_embedding": float("nan")}, r"model\.guidance_embedding is nan"),
        ({"max_sequence_length": 0}, r"model\.max_sequence_length is 0"),
        ({"lora": DiffusionLora(rank=0)}, r"model\.lora\.rank is 0"),
        ({"lora": DiffusionLora(alpha=-1)}, r"model\.lora\.alpha is -1"),
        ({"lora": DiffusionLora(dropout=1.0)}, r"model\.lora\.dropout is 1.0"),
        ({"lora": DiffusionLora(targets=[])}, r"model\.lora\.targets is empty"),
    ],
)
def test_settings_out_of_range_are_named(folder, change, culprit):
    with pytest.raises(UserError, match=culprit):
        load_policy(PipelineConfig(**{"path": str(folder)} | change))


def test_unknown_targets_are_named_with_existing_ones(base):
    with pytest.raises(UserError, match=r"\['q_proj'\]; a block of the network has: .*attn\.to_q.*attn\.add_q_proj"):
        load_policy(config_of(base, targets=["to_k", "q_proj"]))
    policy = load_policy(config_of(base, targets=["ff.net.2"]))
    assert all(".ff.net.2.lora_" in name for name in trained(policy))


def test_settings_can_be_read_from_a_file(tmp_path, folder):
    (tmp_path / "model.yaml").write_text(f"path: {folder}\nlora: {{rank: 8, targets: [to_q, to_v]}}\n")
    config = load(tmp_path / "model.yaml", PipelineConfig)
    assert (config.lora.rank, config.lora.alpha, list(config.lora.targets)) == (8, 64, ["to_q", "to_v"])
    assert all(weight.shape[0] == 8 for name, weight in trained(load_policy(config)).items() if ".lora_A." in name)
