"""Model folders that cannot be used."""

import pickle
import shutil

import pytest

from mmrl.errors import UserError
from tests.bad_input.conftest import truncate


def pickle_code(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(print))


MODELS = {
    "no such folder": (shutil.rmtree, "model folder"),
    "empty folder": (lambda folder: [path.unlink() for path in folder.iterdir()], "it has no config.json"),
    "config truncated": (
        lambda folder: truncate(folder / "config.json"),
        "config.json is not valid JSON",
    ),
    "other architecture": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "clip"}'),
        "is of architecture 'clip', which transformers supports neither in AutoModelForImageTextToText nor",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "weights truncated": (lambda folder: truncate(folder / "model.safetensors"), "cannot be loaded: Safetensor"),
    "weights pickled with code": (lambda folder: pickle_code(folder), "contain more than tensors"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "the processor of"),
    "no processor": (lambda folder: (folder / "processor_config.json").unlink(), "the processor of"),
    "no chat template": (lambda folder: (folder / "chat_template.jinja").unlink(), "add chat_template.jinja"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_model_folder_that_cannot_be_used(kind, lab, refused):
    folder = lab.folder / "model"
    shutil.copytree(lab.model, folder)
    change, message = MODELS[kind]
    change(folder)
    line = refused("train", lab.config, f"model.path={folder}")
    assert message in line
    assert str(folder) in line
    assert not lab.run.exists()


NOT_TRAINED = {
    "diffusion.rewards.learned": {
        name: lambda module, path, name=name: getattr(module, name)([], [], path=path)
        for name in ("pickscore", "clip_score", "hpsv2", "aesthetic", "image_reward")
    },
    "mmrl.vlm.tspo.features": {"clip": lambda module, path: module.ClipEncoder(path)},
    "robotics.methods.video_encoder": {"video": lambda module, path: module.VideoEncoder.from_pretrained(path)},
    "robotics.methods.latents": {"vjepa2": lambda module, path: module._load_vjepa2(path)},
    "robotics.flow3d.extract": {
        "depth": lambda module, path: module.ModelDepth(path)._loaded,
        "detector": lambda module, path: module.GroundedMask(path, path)._loaded,
    },
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, own in NOT_TRAINED.items() for name in own])
def test_run_where_a_model_is_needed_that_no_recipe_trains(module, name, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=f"{tmp_path} is a run folder, but an? "):
        NOT_TRAINED[module][name](pytest.importorskip(module), str(tmp_path))


def test_model_that_the_hub_does_not_give(lab, refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refused("train", lab.config, "model.path=no-such-owner/no-such-model")
    assert "'no-such-owner/no-such-model' is not a local folder, and it cannot be fetched from the Hub" in line


def test_responses_beyond_the_model_s_positions(lab, mmrl, refused):
    line = refused("train", lab.config, "sampler.max_new_tokens=512")
    assert "sampler.max_new_tokens is 512" in line
    assert "512 positions" in line
    code, lines = mmrl("train", lab.config, "sampler.max_new_tokens=505", "trainer.steps=1", "sampler.stop=[' ',a,e]")
    assert code == 0
    (line,) = lines
    assert "leaves" in line
    assert "fewer than sampler.max_new_tokens=505" in line
    assert lab.metrics()[0]["response/beyond_positions"] == 2
