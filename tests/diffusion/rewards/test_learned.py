import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diffusion.rewards import learned as plugins
from diffusion.rewards.learned import HPS_FILE, aesthetic, clip_score, hpsv2, image_reward, image_similarity, pickscore
from diffusion.toy.pipelines.tiny import clip_tokenizer
from mmrl.errors import UserError
from mmrl.hub.compat import ensure_torchvision, quiet_transformers

PROMPTS = ["a red circle", "a blue square", "a red circle " * 40]
WIDTH, PROJECTION, TOKENS = 16, 12, 10


def pictures(count=3):
    return list(np.random.default_rng(0).integers(0, 256, (count, 20, 24, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A folder with a tiny random CLIP model, its tokenizer and its image processor, and the model."""
    ensure_torchvision()
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    tokenizer = clip_tokenizer(PROMPTS, 560, TOKENS)
    shared = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": TOKENS, "eos_token_id": tokenizer.eos_token_id}
    vision = {"image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=shared | text, vision_config=shared | vision, projection_dim=PROJECTION))
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    folder = tmp_path_factory.mktemp("clip")
    with quiet_transformers():
        model.save_pretrained(folder)
        CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return str(folder), model.eval()


def reference_cosines(folder, model):
    """One pair at a time, through the towers."""
    from transformers import CLIPProcessor

    processor = CLIPProcessor.from_pretrained(folder)
    cosines = []
    for prompt, image in zip(PROMPTS, pictures(), strict=True):
        tokens = processor.tokenizer(prompt, truncation=True, max_length=TOKENS, return_tensors="pt")
        pixels = processor.image_processor(images=image, return_tensors="pt")
        with torch.no_grad():
            one = model.visual_projection(model.vision_model(**pixels).pooler_output)
            other = model.text_projection(model.text_model(**tokens).pooler_output)
        cosines.append(torch.cosine_similarity(one, other).item())
    return np.asarray(cosines)


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_scores_are_scaled_cosines(clip, batch):
    folder, model = clip
    cosines, scale = reference_cosines(folder, model), model.logit_scale.exp().item()
    assert np.ptp(cosines) > 1e-3
    for reward, factor in ((pickscore, scale / 26), (clip_score, scale / 100), (hpsv2, 1.0)):
        assert reward(PROMPTS, pictures(), path=folder, batch=batch) == pytest.approx(factor * cosines, abs=1e-5)


@pytest.mark.parametrize("batch", [2, 16])
def test_likeness_is_the_cosine_of_two_images(clip, batch):
    folder, model = clip
    from transformers import CLIPProcessor

    images, others = pictures(), pictures()[::-1]
    towers = []
    for some in (images, others):
        pixels = CLIPProcessor.from_pretrained(folder).image_processor(images=some, return_tensors="pt")
        with torch.no_grad():
            towers.append(model.visual_projection(model.vision_model(**pixels).pooler_output))
    expected = torch.cosine_similarity(*towers).tolist()
    found = image_similarity([""] * 3, images, reference=others, path=folder, batch=batch)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found[1] == pytest.approx(1, abs=1e-5)  # the middle one is its own reference
    assert found[0] < found[1]


def head_tensors():
    torch.manual_seed(1)
    layers = {"layers.0": (8, PROJECTION), "layers.2": (4, 8), "layers.10": (1, 4)}
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in layers.items()}
    return weights | {f"{name}.bias": torch.randn(shape[0]) for name, shape in layers.items()}


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_aesthetic_is_the_linear_network_on_unit_features(clip, tmp_path, suffix):
    folder, model = clip
    tensors, head = head_tensors(), tmp_path / f"head.{suffix}"
    if suffix == "pth":
        torch.save(tensors, head)
    else:
        save_file(tensors, head)
    values = aesthetic([""] * 3, pictures(), path=folder, head=str(head), batch=2)
    from transformers import CLIPProcessor

    pixels = CLIPProcessor.from_pretrained(folder).image_processor(images=pictures(), return_tensors="pt")
    with torch.no_grad():
        features = model.visual_projection(model.vision_model(**pixels).pooler_output).numpy()
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    for name in ("layers.0", "layers.2", "layers.10"):
        features = features @ tensors[f"{name}.weight"].numpy().T + tensors[f"{name}.bias"].numpy()
    assert values == pytest.approx(features[:, 0], abs=1e-4)


def test_a_head_that_does_not_fit_is_named(clip, tmp_path):
    save_file({"layers.0.weight": torch.zeros(1, 768), "layers.0.bias": torch.zeros(1)}, tmp_path / "h.safetensors")
    with pytest.raises(UserError, match=f"takes 768 features, .* has {PROJECTION}"):
        aesthetic([""], pictures(1), path=clip[0], head=str(tmp_path / "h.safetensors"))


def test_a_head_with_code_in_it_is_not_run(clip, tmp_path):
    class Code:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"layers.0.weight": Code()}, tmp_path / "head.pth")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        aesthetic([""], pictures(1), path=clip[0], head=str(tmp_path / "head.pth"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("reward", [pickscore, clip_score, hpsv2, aesthetic, image_reward])
def test_missing_weights_are_named_even_without_rows(reward, tmp_path):
    with pytest.raises(UserError, match=f"weights not found at {tmp_path}, expected"):
        reward([], [], path=str(tmp_path))


def test_a_missing_head_is_named(clip):
    with pytest.raises(UserError, match=r"aesthetic_head\.safetensors or .*expected the head"):
        aesthetic([], [], path=clip[0])


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    monkeypatch.setitem(sys.modules, "ImageReward", None)
    for name in (HPS_FILE, "ImageReward.pt", "med_config.json"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="pip install open_clip_torch"):
        hpsv2([], [], path=str(tmp_path))
    with pytest.raises(UserError, match="pip install image-reward"):
        image_reward([], [], path=str(tmp_path))


class TinyOpenClip(torch.nn.Module):
    """Looks like a model of open_clip: features of the mean colour and of the text's length."""

    def __init__(self):
        super().__init__()
        self.colour = torch.nn.Linear(3, 3, bias=False)

    def encode_image(self, pixels):
        return self.colour(pixels.mean((2, 3)))

    def encode_text(self, tokens):
        return tokens


def test_released_hps_weights_go_through_open_clip(tmp_path, monkeypatch):
    asked = {}

    def create(architecture, pretrained, device):
        asked.update(architecture=architecture, pretrained=pretrained)
        return TinyOpenClip(), None, lambda picture: torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255

    package = SimpleNamespace(
        create_model_and_transforms=create,
        get_tokenizer=lambda name: lambda texts: torch.tensor([[float(len(text)), 1.0, 0.0] for text in texts]),
    )
    monkeypatch.setitem(sys.modules, "open_clip", package)
    torch.save({"state_dict": {"colour.weight": 2 * torch.eye(3)}}, tmp_path / HPS_FILE)
    plugins._load_open_clip.cache_clear()
    values = hpsv2(PROMPTS, pictures(), path=str(tmp_path), batch=2)
    colours = np.stack([image.mean((0, 1)) for image in pictures()])
    texts = np.asarray([[len(prompt), 1.0, 0.0] for prompt in PROMPTS])
    norms = np.linalg.norm(colours, axis=1) * np.linalg.norm(texts, axis=1)
    assert values == pytest.approx((colours * texts).sum(1) / norms, abs=1e-5)
    assert asked == {"architecture": "ViT-H-14", "pretrained": None}
    plugins._load_open_clip.cache_clear()


def test_image_reward_asks_its_package(tmp_path, monkeypatch):
    def load(file, *, device, med_config, download_root):
        assert file.endswith("ImageReward.pt")
        assert med_config.endswith("med_config.json")
        return SimpleNamespace(score=lambda prompt, picture: len(prompt) - picture.size[0])

    monkeypatch.setitem(sys.modules, "ImageReward", SimpleNamespace(load=load))
    for name in ("ImageReward.pt", "med_config.json"):
        (tmp_path / name).touch()
    values = image_reward(PROMPTS, pictures(), path=str(tmp_path))
    assert values == [len(prompt) - 24.0 for prompt in PROMPTS]
