"""Folders that the pages of the docs mention, made from tiny random models: questions, checkpoints, demonstrations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmrl.training.run import finish_run
from tests.pages import ROOT

CAPTIONS = ("a red circle", "a blue square", "a green triangle")


def checkpoint(folder: Path, run: str, step: int) -> Path:
    """Folder of a run's model at a step."""
    return folder / "runs" / run / f"checkpoints/step-{step:06d}" / "model"


def shrink_demo(monkeypatch: Any, demo: Any, common: list[str], small: dict[str, list[str]]) -> None:
    """Run a demonstration's configurations with overrides: those of all, and those of each file."""
    monkeypatch.chdir(ROOT)

    def finish(config: Path, run_dir: Path, overrides: Sequence[str] = ()) -> Any:
        return finish_run(config, run_dir, [*common, *small[config.name], *overrides])

    monkeypatch.setattr(demo, "finish_run", finish)


def make_images(folder: Path) -> None:
    """The images and the video that the examples of data.md name."""
    from mmrl.hub.video_writing import write_mp4

    write_mp4(folder / "clips/room.mp4", np.zeros((20, 56, 84, 3), np.uint8), fps=5)
    for name in ("scenes/two_cats.png", "scenes/blank.png", "photos/0001.png", "photos/0002.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (200, 120, 40)).save(folder / name)


def make_metrics(folder: Path) -> None:
    """A run folder with two steps and an evaluation."""
    run = folder / "runs/digits-papo"
    run.mkdir(parents=True, exist_ok=True)
    steps = [{"step": step, "reward/mean": 0.1 * step} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    row = {"step": 2, "time": 0.0, "tag": "after", "split": "heldout", "accuracy/greedy": 0.5}
    (run / "evaluations.jsonl").write_text(json.dumps(row) + "\n")


def make_results(folder: Path) -> None:
    """Checkpoints of each domain as its policies write them."""
    _vlm_results(folder)
    _diffusion_results(folder)
    _robot_results(folder)
    make_images(folder)


def make_model(folder: Path) -> Path:
    """A tiny random Qwen2.5-VL where the configurations of the digits build theirs."""
    from mmrl.vlm.toy.tiny import build_tiny_vlm

    return build_tiny_vlm(folder / "runs/digits-model", corpus=["How many cats are there?", "<answer>2</answer>"] * 20)


def _vlm_results(folder: Path) -> None:
    from mmrl.vlm.engine.vlm_policy import load_policy
    from mmrl.vlm.model.model_config import LoraSettings, ModelConfig

    base = make_model(folder)
    load_policy(ModelConfig(path=str(base))).save_pretrained(checkpoint(folder, "digits-papo", 400))
    lora = ModelConfig(path=str(base), lora=LoraSettings(enabled=True, rank=4, alpha=8))
    load_policy(lora).save_pretrained(checkpoint(folder, "digits-lora", 400))


def _diffusion_results(folder: Path) -> None:
    from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig, load_policy
    from diffusion.toy.pipelines.tiny import TinySd3Sizes, build_tiny_sd3

    base = build_tiny_sd3(folder / "runs/shapes/pipeline", corpus=list(CAPTIONS), sizes=TinySd3Sizes(layers=1))
    full = PipelineConfig(path=str(base), lora=DiffusionLora(enabled=False))
    load_policy(full).save_pretrained(checkpoint(folder, "shapes-pretrain", 3000))
    lora = PipelineConfig(path=str(base))
    load_policy(lora).save_pretrained(checkpoint(folder, "shapes-awm", 40))


def _robot_results(folder: Path) -> None:
    from robotics import SmallVlaConfig, SmallVlaPolicy
    from robotics.data import EpisodeWriter, robot_features
    from robotics.policies.base.encoder import EncoderConfig

    encoder = EncoderConfig(image_size=(64, 64), state_size=10)
    policy = SmallVlaPolicy.build(
        SmallVlaConfig(action_size=5, chunk=4, encoder=encoder), ["push the red cube"], seed=0
    )
    policy.save_pretrained(checkpoint(folder, "tabletop-clone", 1200))
    features = robot_features(state=10, action=5, cameras={"front": (64, 64)})
    with EpisodeWriter(folder / "runs/tabletop-demos", fps=10, features=features) as writer:
        frames = np.zeros((6, 64, 64, 3), np.uint8)
        writer.add_episode(
            np.zeros((6, 10)), np.zeros((6, 5)), {"front": frames}, task="push the red cube", success=True
        )
