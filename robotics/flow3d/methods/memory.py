"""Memory and time of a run on a world model of 3D flow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion.diffusion_plan import WORKING, averages_of
from mmrl.errors import NoPlan
from mmrl.hub.compat import ensure_torchvision
from mmrl.runs.export import model_folder
from mmrl.training.objectives import make_objective
from mmrl.training.plan import Part, Plan, Work, activations, autocast, batch_sizes, forward, imagined, state_parts
from mmrl.training.recipe import single_update
from robotics.flow3d.methods.awm import Flow3dAwmConfig
from robotics.flow3d.methods.flow3d_recipe import Flow3dConfig
from robotics.flow3d.model.context import FlowInputs
from robotics.flow3d.model.world_model import VOCABULARY_FILE, FlowWorldModel, read_config
from robotics.flow3d.model.world_model_settings import FlowModelConfig
from robotics.policies.base.encoder import Vocabulary


def footprint(config: Any, *, passes: bool = True) -> Plan:
    """Plan a run; without passes, only what stays in memory: weights, gradients, moments, averages and copies."""
    if not isinstance(config, Flow3dConfig | Flow3dAwmConfig):
        raise NoPlan(f"there is no plan for the recipe '{config.recipe}'")
    ensure_torchvision()
    with torch.device("meta"):
        model = _outlined(config)
    return _plan(config, model, passes)


def _plan(config: Any, model: FlowWorldModel, passes: bool) -> Plan:
    trainer, samples = config.trainer, isinstance(config, Flow3dAwmConfig)
    compares = samples and make_objective(config.objective).needs_reference
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    parts = state_parts(model, trainer, copies=int(compares))
    parts.append(Part("averages of weights", 4 * averages_of(config) * trained))
    if not passes:
        return Plan(tuple(parts), ())
    group, times = (trainer.samples_per_task, config.timesteps.count) if samples else (1, 1)
    rows, minibatch, chunk = batch_sizes(trainer, group)
    flows = torch.Size(model.flow_shape).numel() * 4

    def predict(scenes: int, rows: int) -> Callable[[], Tensor]:
        """A pass with the given number of rows; images and texts have values, because a text encoder needs them."""
        inputs, kept = _inputs(model, scenes), torch.ones(scenes, dtype=torch.bool)
        own = torch.arange(rows) % scenes

        def once() -> Tensor:
            with autocast(trainer):
                noisy, time = torch.zeros(rows, *model.flow_shape), torch.full((rows,), 0.5)
                return model(inputs, noisy, time, kept, scene=own).float().square().mean()  # type: ignore[no-any-return]

        return once

    learnt = predict(-(-chunk // group), chunk * times)
    drawn = predict(trainer.tasks_per_step, rows)
    with imagined(model):
        update = activations(model, learnt, -(-minibatch // chunk))
        parts.append(Part("flow and noise of a batch", chunk * times * WORKING * flows, "update"))
        parts.append(Part("activations", update.bytes, "update"))
        work = [Work.of("update", update, rows / chunk * trainer.epochs)]
        if samples:
            old = not single_update(trainer)
            scores = trainer.epochs * (compares + (config.awm.ema_coef > 0)) + old
            work.insert(0, Work.of("scores without gradient", forward(model, learnt), rows / chunk * scores))
            draw = forward(model, drawn)
            parts.append(Part("sampling", draw.bytes, "sampling"))
            work.insert(0, Work.of("sampling", draw, model.config.process.steps))
    what = f"samples and {times} noisy versions of each" if samples else "clips"
    shape = " x ".join(map(str, model.flow_shape))
    assumed = (f"flow of {shape}", f"{rows} {what}", f"the update of {chunk} at once")
    low = trainer.mixed_precision != "none"
    return Plan(tuple(part for part in parts if part.bytes), assumed, tuple(work), low)


def _outlined(config: Any) -> FlowWorldModel:
    """The model without values; a new one has no words from the training instructions."""
    if config.model.path:
        folder = Path(model_folder(config.model.path))
        return FlowWorldModel(read_config(folder), Vocabulary.load(folder / VOCABULARY_FILE), load_pretrained=False)
    parts = {name: getattr(config.model, name) for name in FlowModelConfig.__dataclass_fields__}
    words = Vocabulary.from_texts(config.model.words)
    return FlowWorldModel(FlowModelConfig(**parts), words, load_pretrained=False)


def _inputs(model: FlowWorldModel, scenes: int) -> FlowInputs:
    """Inputs of the given number of scenes."""
    side, grid = model.config.condition.image_px, model.encoding.grid
    return FlowInputs(
        torch.zeros(scenes, side, side, 3, dtype=torch.uint8), torch.zeros(scenes, grid, grid, 3), [""] * scenes
    )
