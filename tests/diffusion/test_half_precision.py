"""Runs in fp16, on a CPU too."""

import pytest
import torch
from accelerate.state import AcceleratorState

from mmrl.training.processes import make_accelerator
from mmrl.training.trainer import Trainer
from tests.diffusion.runs import build, run_config, trained

CASES = [("flow_grpo", "float16"), ("awm", "float32")]
MORE = [("flow_grpo", "float32"), ("awm", "float16")]


def moved(name, folder, precision, dtype):
    """Change of the trained weights in one step, and the dtypes of the network's outputs."""
    config = run_config(name, folder, mixed_precision=precision, minibatches_per_step=1)
    config.model.dtype = dtype
    config.validate()
    AcceleratorState._reset_state()
    try:
        trainer = Trainer(build(config), config, folder / "run", make_accelerator(precision), None)
        start, seen = trained(trainer.policy), set()
        trainer.policy.transformer.proj_out.register_forward_hook(lambda module, given, out: seen.add(out.dtype))
        trainer.train_step()
    finally:
        AcceleratorState._reset_state()
    assert (trainer.updater.optimiser_step, trainer.updater.scale.overflows) == (1, 0)
    return trained(trainer.policy) - start, seen


@pytest.mark.parametrize(("name", "dtype"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)])
def test_a_step_in_fp16_goes_where_that_of_float32_goes(name, dtype, tmp_path):
    whole, kinds = moved(name, tmp_path / "whole", "none", "float32")
    assert kinds == {torch.float32}
    half, kinds = moved(name, tmp_path / "half", "fp16", dtype)
    assert kinds == {torch.float16}
    # Adam's first step is about the gradient's sign, in which rounding shows where the gradient is near 0
    assert torch.cosine_similarity(whole, half, dim=0) > 0.9


def test_float16_weights_need_adapters_and_a_scaled_loss(tmp_path):
    config = run_config("flow_grpo", tmp_path)
    config.model.dtype = "float16"
    with pytest.raises(ValueError, match="gradients below 6e-8 would become 0; set trainer"):
        config.validate()
    config.trainer.mixed_precision = "fp16"
    config.validate()
    config.model.lora.enabled = False
    with pytest.raises(ValueError, match="of float16 weights cannot be unscaled"):
        config.validate()
