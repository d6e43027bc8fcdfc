"""A LoRA step of PAPO on a model of the size of Qwen2.5-VL-3B, and the checkpoint that it leaves."""

import sys
import time

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks.vlm.workload import Shape, build_model, questions_file
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.processes import make_accelerator
from mmrl.training.settings import CheckpointConfig, TrainerConfig
from mmrl.training.trainer import Trainer
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.methods.papo import PapoConfig
from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
from tests.contracts.domains import weights

pytestmark = pytest.mark.gpu
PROMPT = Shape((25, 40), 1200, 256, group=5)
"""As the images and groups of configs/vlm/qwen2_5_vl_3b_papo.yaml, with shorter answers."""
LARGEST_MB = 40_000
"""7.5 GB of weights in bfloat16, the sampler's keys and values, and the activations of four answers."""


def test_a_lora_step_of_3b_learns_and_is_resumed(tmp_path, capsys):
    AcceleratorState._reset_state(reset_partial_state=True)
    model = build_model(tmp_path, "qwen2_5_vl", "3b", device="cuda")
    config = PapoConfig(
        recipe="papo",
        output_dir=str(tmp_path / "run"),
        model=ModelConfig(
            path=str(model),
            dtype="bfloat16",
            gradient_checkpointing=True,
            lora=LoraSettings(enabled=True, rank=64, alpha=128),
        ),
        data=DataConfig(path=str(questions_file(tmp_path, model, PROMPT))),
        rewards=[RewardConfig(name="checksum", function="benchmarks.vlm.workload:checksum_reward", isolate=False)],
        sampler=SamplerConfig(max_new_tokens=PROMPT.completion),
        trainer=TrainerConfig(
            steps=2, tasks_per_step=2, samples_per_task=PROMPT.group, micro_batch=4, learning_rate=1e-4
        ),
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False),
    )
    config.validate()
    begin = before = None
    for steps in (1, 2):
        config.trainer.steps = steps
        clock = time.perf_counter()
        trainer = Trainer(RECIPES["papo"].load_recipe_class()(config), config, tmp_path, make_accelerator(), None)
        if steps == 2:
            trainer.resume()
            assert torch.equal(weights(trainer), before)
        loaded = time.perf_counter() - clock
        begin = weights(trainer).clone()
        trainer.run()
        seconds = time.perf_counter() - clock - loaded
        before = weights(trainer).clone()
        assert torch.isfinite(before).all()
        assert (before - begin).abs().max() > 1e-5
        peak = torch.cuda.max_memory_allocated() / 1e6
        assert peak < LARGEST_MB
        assert trainer.log.totals["tokens"] > trainer.log.totals["samples"] > 0
        with capsys.disabled():
            sys.stdout.write(f"\n3B LoRA: loaded in {loaded:.1f} s, a step in {seconds:.1f} s, peak {peak:.0f} MB\n")
        trainer.recipe.close()
