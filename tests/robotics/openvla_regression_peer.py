"""An action head and a projector of the state for a tiny folder, built and evaluated by OpenVLA-OFT's own code.

    python -m tests.robotics.openvla_regression_peer CHECKOUT FOLDER
    python -m tests.robotics.openvla_regression_peer CHECKOUT FOLDER answers.npz

FOLDER is that of `openvla-oft.tar.xz`, see `openvla_peer`. The first command adds `action_head--150000_checkpoint.pt`
and `proprio_projector--150000_checkpoint.pt`, with the names that data-parallel training gives weights,
`dataset_statistics.json`, and the answers, `golden.npz`; `openvla-oft-regression.tar.xz` beside this file has these
four. The second one only writes the answers of a folder that is complete, such as one that was saved by this suite.

CHECKOUT is a copy of moojink/openvla-oft at 213c5ff8. It needs Python 3.11, torch 2.13.0, NumPy 2.4.6, timm 0.9.16,
diffusers 0.30.3, tokenizers 0.19.1, and transformers 4.40.1 with modeling_llama.py of moojink/transformers-openvla-oft
at bc339d9a (attention in both directions). Packages that are imported there but not called here (TensorFlow,
json_numpy) are empty modules. Head and projector pass through bfloat16, as its loader casts them; the rest is float32.

    tar -cJf openvla-oft-regression.tar.xz -C FOLDER action_head--150000_checkpoint.pt \\
        proprio_projector--150000_checkpoint.pt dataset_statistics.json golden.npz
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

from tests.robotics.openvla_peer import EMPTY_ID, STATISTICS, TEXTS, WORDS, _pixels, images, prompt, wrist_images

KEY = "tiny_no_noops"
STEP = 150000
PROPRIO = {
    "q01": [-0.45, -0.3, 0.9, 2.4, -1.5, -0.9, 0.001, -0.04],
    "q99": [0.15, 0.35, 1.3, 3.7, 0.7, 0.6, 0.04, -0.001],
    "min": [-0.5, -0.35, 0.85, 1.5, -2.8, -1.8, 0.0, -0.042],
    "max": [0.2, 0.4, 1.4, 3.8, 1.4, 1.2, 0.042, 0.0],
    "mean": [-0.1, 0.0, 1.1, 3.0, -0.2, -0.1, 0.03, -0.03],
    "std": [0.1] * 8,
}
PLACES = ("extern", "extern.hf", "models", "training", "vla")
PLACES += ("vla.datasets", "vla.datasets.rlds", "vla.datasets.rlds.utils")


def states() -> np.ndarray:
    """(2, 8) float32; two entries of the second row lie outside the quantiles, one of them outside the bounds."""
    inside = [-0.2, 0.1, 1.15, 3.1, -0.4, 0.25, 0.03, -0.035]
    return np.array([inside, [0.1, -0.25, 1.0, 2.6, 0.5, -1.2, 0.05, -0.01]], np.float32)


def demonstrated() -> np.ndarray:
    """(2, 8, 7) float32 actions in -1..1, the last entry 0 or 1."""
    found = np.sin(np.arange(2 * 8 * 7) * 0.7).astype(np.float32).reshape(2, 8, 7)
    found[..., -1] = found[..., -1] > 0
    return found


def build(checkout: Path, folder: Path) -> None:
    """Add the head, the projector and the statistics to a folder, and evaluate it."""
    import torch

    original = _original(checkout)
    width = json.loads((folder / "config.json").read_text())["text_config"]["hidden_size"]
    torch.manual_seed(1)
    parts = {
        "action_head": original.L1RegressionActionHead(input_dim=width, hidden_dim=width, action_dim=7),
        "proprio_projector": original.ProprioProjector(llm_dim=width, proprio_dim=8),
    }
    for name, part in parts.items():
        with torch.no_grad():
            for weight in part.parameters():
                if weight.dim() >= 2:
                    torch.nn.init.normal_(weight, std=1.0 / weight.shape[1] ** 0.5)
                else:
                    weight.add_(0.2 * torch.randn_like(weight))
                weight.copy_((weight * 64).round() / 64)  # exact in bfloat16, and the file is small
        weights = {f"module.{key}": value for key, value in part.state_dict().items()}
        torch.save(weights, folder / f"{name}--{STEP}_checkpoint.pt")
    (folder / "dataset_statistics.json").write_text(json.dumps({KEY: {"action": STATISTICS, "proprio": PROPRIO}}))
    ask(checkout, folder, folder / "golden.npz")


def ask(checkout: Path, folder: Path, answers: Path) -> None:
    """Write the outputs of the original code for a folder with a head and a projector, with two images."""
    import torch

    original = _original(checkout)
    config = SimpleNamespace(pretrained_checkpoint=str(folder), use_l1_regression=True, use_diffusion=False)
    model = original.OpenVLAForActionPrediction.from_pretrained(folder).eval()
    model.vision_backbone.set_num_images_in_input(2)
    original._load_dataset_stats(model, str(folder))
    projector = original.get_proprio_projector(config, model.llm_dim, proprio_dim=8).float()
    head = original.get_action_head(config, model.llm_dim).float()
    pixels = torch.from_numpy(np.concatenate([_pixels(images()), _pixels(wrist_images())], 1))
    found: dict[str, list[np.ndarray]] = {"proprio": [], "normalised": [], "actions": [], "hidden": []}
    head.model.register_forward_hook(lambda *parts: found["normalised"].append(parts[2].detach().numpy()[0]))
    statistics = model.norm_stats[KEY]["proprio"]
    for text, one, state in zip(TEXTS, pixels, states(), strict=True):
        ids = torch.tensor([[1, *(3 + WORDS.index(word) for word in prompt(text).split())]])
        proprio = original.normalize_proprio(state, statistics)
        with torch.no_grad():
            actions, hidden = model.predict_action(
                input_ids=ids,
                attention_mask=torch.ones_like(ids).bool(),
                pixel_values=one[None],
                unnorm_key=KEY,
                proprio=proprio,
                proprio_projector=projector,
                action_head=head,
            )
        found["proprio"].append(proprio)
        found["actions"].append(actions)
        found["hidden"].append(hidden.numpy()[0, :, ::8])
    original.ACTION_PROPRIO_NORMALIZATION_TYPE = "bounds"
    bounds = [original.normalize_proprio(state, statistics) for state in states()]
    original.ACTION_PROPRIO_NORMALIZATION_TYPE = "bounds_q99"
    arrays = {name: np.stack(rows).astype(np.float32) for name, rows in {**found, "bounds": bounds}.items()}
    proprio = torch.from_numpy(arrays["proprio"])
    np.savez_compressed(answers, **arrays, **_training_pass(original, model, projector, head, pixels, proprio))


def _training_pass(original, model, projector, head, pixels, proprio) -> dict[str, np.ndarray]:
    """Loss of vla-scripts/finetune.py for rows of two lengths, and some of its gradients."""
    import torch

    lines = [[1, *(3 + WORDS.index(word) for word in prompt(text).split()), EMPTY_ID] for text in TEXTS]
    pad, taught, tokens = 32000, list(range(31744, 31744 + 56)), max(map(len, lines)) + 57
    rows = [(line + taught + [2], [-100] * len(line) + taught + [2]) for line in lines]
    ids = torch.tensor([row + [pad] * (tokens - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [-100] * (tokens - len(row)) for _, row in rows])
    output = model(
        input_ids=ids,
        attention_mask=ids.ne(pad),
        pixel_values=pixels,
        labels=labels,
        output_hidden_states=True,
        proprio=proprio,
        proprio_projector=projector,
    )
    patches = 2 * model.vision_backbone.get_num_patches() + 1
    is_action = original.get_current_action_mask(labels[:, 1:]) | original.get_next_actions_mask(labels[:, 1:])
    hidden = output.hidden_states[-1][:, patches:-1][is_action].reshape(2, 56, -1)
    loss = torch.nn.L1Loss()(torch.from_numpy(demonstrated()), head.predict_action(hidden))
    loss.backward()
    norms = {
        "state_gradient": projector.fc1.weight.grad,
        "head_gradient": head.model.fc2.weight.grad,
        "llama_gradient": model.language_model.model.layers[0].mlp.down_proj.weight.grad,
    }
    return {"loss": loss.detach().numpy(), **{name: grad.numpy() for name, grad in norms.items()}}


def _original(checkout: Path) -> ModuleType:
    """experiments/robot/openvla_utils.py of the original code, with tiny backbones."""
    from mmrl.hub.compat import ensure_torchvision
    from tests.robotics.tiny_timm import register

    if "experiments.robot.openvla_utils" in sys.modules:
        return sys.modules["experiments.robot.openvla_utils"]
    ensure_torchvision()
    register()
    sys.path.insert(0, str(checkout))
    packages = ["prismatic", *(f"prismatic.{part}" for part in PLACES), "experiments", "experiments.robot"]
    for name in packages:  # the packages' own files import what this does not need
        module = ModuleType(name)
        module.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules[name] = module
    import diffusers.schedulers.scheduling_ddim  # noqa: F401  before there is an empty tensorflow
    import transformers  # noqa: F401

    for name in ("tensorflow", "json_numpy"):
        sys.modules[name] = ModuleType(name)
    sys.modules["tensorflow"].Tensor, sys.modules["json_numpy"].patch = object, lambda: None
    from prismatic.vla.constants import NormalizationType

    data = ModuleType("prismatic.vla.datasets.rlds.utils.data_utils")
    data.NormalizationType = NormalizationType
    sys.modules[data.__name__] = data
    from experiments.robot import openvla_utils
    from prismatic.training.train_utils import get_current_action_mask, get_next_actions_mask

    openvla_utils.model_is_on_hf_hub = lambda path: False
    openvla_utils.get_current_action_mask = get_current_action_mask
    openvla_utils.get_next_actions_mask = get_next_actions_mask
    return openvla_utils


if __name__ == "__main__":
    if len(sys.argv) > 3:
        ask(*map(Path, sys.argv[1:]))
    else:
        build(*map(Path, sys.argv[1:]))
