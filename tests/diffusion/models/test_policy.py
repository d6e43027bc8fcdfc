from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusion.models.pipelines import FluxTransformer, Sd3Transformer, load_pipeline
from diffusion.models.policy import ATTENTION_PROJECTIONS, DiffusionPolicy, LoraSettings, ModelConfig, load_policy
from diffusion.sampling.sampler import GuidedVelocity, SamplerConfig, check_guidance, euler_ode
from diffusion.toy.pipelines.tiny import build_tiny_flux
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.training.recipe import Reference
from tests.diffusion.builders import CAPTIONS, FLUX_SIZES, T5_TOKENS
from tests.rounding import assert_equal_up_to_rounding

RANK, ALPHA = 4, 12
SIGMA = torch.tensor([0.9, 0.3])


@pytest.fixture(scope="module")
def flux_folder(tmp_path_factory):
    return build_tiny_flux(tmp_path_factory.mktemp("policy") / "flux", corpus=CAPTIONS, sizes=FLUX_SIZES)


@pytest.fixture(scope="module")
def loaded():
    return {}


@pytest.fixture(autouse=True)
def _load_each_folder_once(monkeypatch, loaded, folder, flux_folder):
    """A policy with a new transformer and cached other parts, since most tests change only the transformer."""

    def load(path, dtype=torch.float32):
        if path not in (str(folder), str(flux_folder)):
            return load_pipeline(path, dtype)
        if (path, dtype) not in loaded:
            loaded[path, dtype] = load_pipeline(path, dtype)
        pipeline = loaded[path, dtype]
        fresh = type(pipeline)(**pipeline.components | {"transformer": copy.deepcopy(pipeline.transformer)})
        fresh.set_progress_bar_config(disable=True)
        return fresh

    monkeypatch.setattr("diffusion.models.policy.load_pipeline", load)


@pytest.fixture(params=["sd3", "flux"])
def base(request, folder, flux_folder):
    return folder if request.param == "sd3" else flux_folder


@pytest.fixture(params=["lora", "full"])
def config(request, base):
    return config_of(base, enabled=request.param == "lora")


def config_of(base, *, enabled=True, dtype="float32", **lora):
    settings = LoraSettings(**{"enabled": enabled, "rank": RANK, "alpha": ALPHA} | lora)
    return ModelConfig(path=str(base), dtype=dtype, lora=settings, max_sequence_length=T5_TOKENS)


def noise(seed=0):
    return torch.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(seed))


def text(policy):
    return policy.embeddings.rows(["a red circle", "a blue square"])


def velocity(policy, seed=0):
    with torch.no_grad():
        return policy(noise(seed), SIGMA, *text(policy).expanded())


def disturb(policy, size=0.05, seed=1):
    """Change every trained weight, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * size)
    return policy


def trained(policy):
    return {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}


def bits(policy):
    return {name: weight.detach().clone() for name, weight in policy.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_starts_as_the_pipeline(config):
    policy = load_policy(config)
    pipeline = load_pipeline(config.path)
    model = (Sd3Transformer if "StableDiffusion" in type(pipeline).__name__ else FluxTransformer)(pipeline.transformer)
    with torch.no_grad():
        expected = model(noise(), SIGMA, *text(policy).expanded())
    assert_equal_up_to_rounding(velocity(policy), expected)
    assert not torch.equal(velocity(disturb(policy)), expected)


def test_is_a_velocity_model_for_guidance(base):
    policy = load_policy(config_of(base))
    guided = GuidedVelocity(policy, text(policy), policy.embeddings.negative(), 2.0)
    with torch.no_grad():
        latents = euler_ode(guided, noise(), torch.tensor([1.0, 0.5, 0.0]))
    assert latents.shape == (2, *policy.latent_shape)
    assert policy.image_tokens == 16


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
    policy(noise(), SIGMA, *text(policy).expanded()).square().mean().backward()
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
    other = (Sd3Transformer if "StableDiffusion" in type(pipeline).__name__ else FluxTransformer)(pipeline.transformer)
    with torch.no_grad():
        found = other(noise(), SIGMA, *text(policy).expanded())
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


def test_merged_weights_are_the_sum_of_base_and_product(folder, tmp_path):
    policy = disturb(load_policy(config_of(folder)))
    policy.save_pipeline(tmp_path)
    merged = load_pipeline(tmp_path).transformer.state_dict()
    own, name = bits(policy), "transformer_blocks.0.attn.to_out.0"
    product = own[f"transformer.{name}.lora_B.default.weight"] @ own[f"transformer.{name}.lora_A.default.weight"]
    expected = own[f"transformer.{name}.base_layer.weight"] + ALPHA / RANK * product
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
    refused(tmp_path / "nothing", "no base.json")
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


def test_checkpointing_changes_no_gradient(base):
    found = {}
    for checkpointing in (False, True):
        config = config_of(base)
        config.gradient_checkpointing = checkpointing
        policy = disturb(load_policy(config))
        assert policy.transformer.is_gradient_checkpointing == checkpointing
        policy(noise(), SIGMA, *text(policy).expanded()).square().mean().backward()
        found[checkpointing] = torch.cat([weight.grad.flatten() for weight in trained(policy).values()])
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-7)
    assert found[True].any()


def test_gradient_is_that_of_finite_differences(folder):
    policy = disturb(load_policy(config_of(folder)))
    rows, weights = text(policy).expanded(), list(trained(policy).values())

    def loss():
        return policy(noise(), SIGMA, *rows).double().square().mean()

    gradients = torch.autograd.grad(loss(), weights)
    slope = sum(gradient.square().sum() for gradient in gradients).sqrt()
    step, values = 1e-2, []
    for sign in (1, -1):
        moved = copy.deepcopy(policy)
        with torch.no_grad():
            for weight, gradient in zip(trained(moved).values(), gradients, strict=True):
                weight.add_(sign * step / slope * gradient)
            values.append(moved(noise(), SIGMA, *rows).double().square().mean())
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
    policy(noise(), SIGMA, *text(policy).expanded())
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
    with pytest.raises(UserError, match=r"guidance_embedding is 2\.0, .* no such input"):
        load_policy(config)


@pytest.mark.parametrize("scales", [{"guidance": 4.5}, {"guidance": 1.0, "eval_guidance": 4.5}])
def test_guidance_on_top_of_distilled_guidance_is_refused(folder, flux_folder, scales):
    sampler = SamplerConfig(**scales)
    config = config_of(flux_folder)
    with pytest.raises(UserError, match=rf"evaluation\.sampler\.{[*scales][-1]} is 4\.5, .* guided twice"):
        check_guidance(load_policy(config), sampler, "evaluation.sampler")
    check_guidance(load_policy(config), SamplerConfig(guidance=1.0))
    config.guidance_embedding = 1.0  # the negative prompt alone
    check_guidance(load_policy(config), sampler)
    check_guidance(load_policy(config_of(folder)), sampler)


def test_options_of_embeddings_reach_them(folder, tmp_path):
    config = config_of(folder)
    config.embedding_memory_mb, config.embedding_cache, config.free_text_encoders = 3, str(tmp_path / "cache"), True
    embeddings = load_policy(config).embeddings
    assert embeddings.max_bytes == 3 * 2**20
    assert len([*(tmp_path / "cache").iterdir()]) == 1
    embeddings.close()


def test_size_is_that_of_the_settings(folder):
    config = config_of(folder)
    config.height, config.width = 16, 24
    policy = load_policy(config)
    assert policy.latent_shape == (4, 4, 6)
    assert policy.image_tokens == 6
    config.height = 18
    with pytest.raises(UserError, match="height=18"):
        load_policy(config)


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"dtype": "float16"}, r"model\.dtype is 'float16'"),
        ({"height": 0}, r"model\.height is 0"),
        ({"guidance_embedding": float("nan")}, r"model\.guidance_embedding is nan"),
        ({"max_sequence_length": 0}, r"model\.max_sequence_length is 0"),
        ({"lora": LoraSettings(rank=0)}, r"model\.lora\.rank is 0"),
        ({"lora": LoraSettings(alpha=-1)}, r"model\.lora\.alpha is -1"),
        ({"lora": LoraSettings(dropout=1.0)}, r"model\.lora\.dropout is 1.0"),
        ({"lora": LoraSettings(targets=[])}, r"model\.lora\.targets names no layer"),
    ],
)
def test_settings_out_of_range_are_named(folder, change, culprit):
    with pytest.raises(UserError, match=culprit):
        load_policy(ModelConfig(**{"path": str(folder)} | change))


def test_unknown_targets_are_named_with_existing_ones(base):
    with pytest.raises(
        UserError, match=r"\['q_proj'\]; a block of the transformer has: .*attn\.to_q.*attn\.add_q_proj"
    ):
        load_policy(config_of(base, targets=["to_k", "q_proj"]))
    policy = load_policy(config_of(base, targets=["ff.net.2"]))
    assert all(".ff.net.2.lora_" in name for name in trained(policy))


def test_settings_can_be_read_from_a_file(tmp_path, folder):
    (tmp_path / "model.yaml").write_text(f"path: {folder}\nlora: {{rank: 8, targets: [to_q, to_v]}}\n")
    config = load(tmp_path / "model.yaml", ModelConfig)
    assert (config.lora.rank, config.lora.alpha, list(config.lora.targets)) == (8, 64, ["to_q", "to_v"])
    assert all(weight.shape[0] == 8 for name, weight in trained(load_policy(config)).items() if ".lora_A." in name)


def test_folder_whose_base_is_not_named(tmp_path):
    (tmp_path / "base.json").write_text("{}")
    with pytest.raises(UserError, match="names no base pipeline"):
        load_policy(config_of(tmp_path))
