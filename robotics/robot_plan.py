"""Memory of a run on a robot policy or a world model of 3D flow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusion.diffusion_plan import WORKING, averages_of
from mmrl.errors import NoPlan, UserError
from mmrl.files import expanded, read_json_object
from mmrl.hub.compat import ensure_torchvision
from mmrl.runs.export import model_folder
from mmrl.training.objectives import make_objective
from mmrl.training.plan import Facts, Part, Plan, autocast, batch_sizes, planned
from robotics.flow3d.methods.awm import Flow3dAwmConfig
from robotics.flow3d.methods.flow3d_recipe import Flow3dConfig
from robotics.flow3d.model.context import FlowInputs
from robotics.flow3d.model.world_model import VOCABULARY_FILE, FlowWorldModel
from robotics.flow3d.model.world_model import read_config as read_flow_config
from robotics.flow3d.model.world_model_settings import FlowModelConfig
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.encoder import Vocabulary
from robotics.policies.base.saved import make_config, read_config
from robotics.policies.policy_loading import ONE_CAMERA, ActionPolicyConfig, load_action_policy, model_settings

ACTION = 7
"""Number of action entries if no simulator is queried: an arm with a gripper."""
HORIZON = 300
"""Control steps of an episode if `sim.horizon` leaves it to the task and no simulator is queried."""
PROMPT = 32
"""Tokens of an instruction in its prompt, without the image."""


def footprint(config: Any, *, passes: bool = True, recipe: Any = None) -> Plan:
    """Plan a run, assuming that all episodes have the maximum length.

    Without passes, the plan covers only what is held between them: weights, gradients, moments, averages and copies; a
    small policy has no such plan. With a `recipe`, whose simulator a large policy is not asked to fit, what is assumed
    of a large policy's episodes counts as unknown.
    """
    model, trainer = getattr(config, "model", None), config.trainer
    if isinstance(config, Flow3dConfig | Flow3dAwmConfig):
        ensure_torchvision()
        with torch.device("meta"):
            world = _outlined(config)
        return planned(_flow_facts(config, world), trainer, passes=passes)
    if not isinstance(model, ActionPolicyConfig):
        raise NoPlan(f"no memory plan for the recipe '{config.recipe}'")
    folder = expanded(model_folder(model.path)) if model.path else None
    kind = model.kind if folder is None else str(read_config(folder).get("kind"))
    if kind not in KINDS and ":" not in kind:  # a class or function of the user's own is simply made
        raise NoPlan(f"no memory plan for a policy of model.kind {kind}; available for: {', '.join(KINDS)}")
    if kind in LARGE:
        ensure_torchvision()
        with torch.device("meta"):
            policy = LARGE[kind](config, folder)
        facts = _facts(config, policy)
        if recipe is not None:  # the sizes of these policies are constants here, not those of the run's simulator
            unknown = ("steps of an episode", "lengths of the instructions", "actions of the simulator")
            facts = dataclasses.replace(facts, unknown=unknown)
        return planned(facts, trainer, passes=passes)
    if not passes:
        return Plan((), ())
    with _Small(config) as policy:
        return planned(_facts(config, policy), trainer, passes=passes)


@dataclass(frozen=True)
class _Policy:
    """Weights of a policy and a pass through them."""

    network: nn.Module
    logits: Callable[[int], Tensor]
    """A scalar from a pass through the given number of observations."""
    chunk: int
    horizon: int
    assumed: str


def _facts(config: Any, policy: _Policy) -> Facts:
    trainer = config.trainer
    # behaviour cloning has transitions, the others whole episodes
    clones = not hasattr(trainer, "samples_per_task")
    looks = 1 if clones else -(-policy.horizon // policy.chunk)
    sizes = batch_sizes(trainer, 1 if clones else trainer.samples_per_task)

    def once(rows: int) -> Tensor:
        with autocast(trainer):
            return policy.logits(rows)

    what = "transitions" if clones else f"episodes of {policy.horizon} steps, {looks} observations each"
    at_once = f"{sizes.chunk} {'transitions' if clones else 'episodes'} per micro-batch"
    return Facts(
        network=policy.network,
        learn=lambda: once(sizes.chunk * looks),
        assumed=(f"{sizes.step} {what}", at_once, policy.assumed),
        passes=sizes.passes,
        act=None if clones else lambda: once(min(sizes.step, config.sim.workers or sizes.step)),
        acting="acting",
        copies=int(not clones and make_objective(config.objective).needs_reference),
    )


class _Small:
    """A policy of a few million weights, which is simply made, for the sizes of the simulator."""

    def __init__(self, config: Any) -> None:
        from robotics.rewards.judged_sim import open_run_sim

        self.config = config
        self.sim = open_run_sim(config.sim, config.success)

    def __enter__(self) -> _Policy:
        sim, config = self.sim, self.config
        policy = load_action_policy(config.model, sim, config.seed)
        side = sim.image_size or (0, 0)
        told = next(iter(sim.tasks().values()))

        def inputs(rows: int) -> PolicyInputs:
            images = torch.zeros(rows, *side, 3, dtype=torch.uint8) if sim.image_size else None
            return PolicyInputs(images, torch.zeros(rows, sim.state_size) if sim.state_size else None, (told,) * rows)

        # from an actual action, as their shape differs between action heads
        decisions = policy.act(inputs(1), torch.Generator()).decisions

        def logits(rows: int) -> Tensor:
            if not torch.is_grad_enabled():
                return policy.act(inputs(rows), torch.Generator()).logp.sum()
            if hasattr(config, "demonstrations"):
                actions = torch.zeros(rows, policy.chunk, policy.action_size)
                return policy.bc_loss(inputs(rows), actions, torch.ones(rows, policy.chunk), torch.Generator())[0]
            chosen = decisions.expand(rows, *decisions.shape[1:])
            scores: Tensor = policy("log_probs", inputs(rows), chosen)[0]
            return scores.sum()

        assumed = f"images of {side[0]}, actions of {policy.action_size}"
        return _Policy(policy, logits, policy.chunk, sim.horizon, assumed)

    def __exit__(self, *error: object) -> None:
        self.sim.close()


def _openvla(config: Any, folder: Path | None) -> _Policy:
    """OpenVLA's network by the config.json of its folder, or as it was released."""
    from robotics.policies.openvla.openvla_folder import OpenVlaConfig
    from robotics.policies.openvla.prismatic import Prismatic

    if folder is None:
        given = {"chunk": config.model.chunk, **config.model.options}
        settings = make_config(OpenVlaConfig, given, "model.options")
    else:
        # entries of every policy's config that are no options of the model
        entries = {key: value for key, value in read_config(folder).items() if key not in ("kind", "action_size")}
        known = {key: value for key, value in entries.items() if key in OpenVlaConfig.__dataclass_fields__}
        settings = make_config(OpenVlaConfig, {**known, "folder": str(folder)}, str(folder))
    place = expanded(settings.folder) / "config.json"
    if not place.is_file() and settings.folder not in PUBLISHED:
        raise UserError(f"{place} not found; these can be planned without a folder: {', '.join(PUBLISHED)}")
    entries = read_json_object(place) if place.is_file() else PUBLISHED[settings.folder]
    network = Prismatic(entries, getattr(torch, settings.dtype))
    if settings.train == "language_model":
        network.vision_backbone.requires_grad_(False)
    if settings.gradient_checkpointing:
        network.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    bins, channels = int(entries.get("n_action_bins", 256)), 3 * network.vision_backbone.count
    tokens = settings.chunk * ACTION

    def logits(rows: int) -> Tensor:
        side = entries["image_sizes"][0]
        pixels = torch.zeros(rows, channels * settings.num_images_in_input, side, side)
        prompts = [torch.zeros(PROMPT, dtype=torch.int64)] * rows
        dtype = network.language_model.lm_head.weight.dtype
        found = network.logits(pixels.to(dtype), prompts, tokens, bins, settings.attention == "causal")
        return found.log_softmax(-1)[..., 0].sum()

    horizon = config.sim.horizon or HORIZON
    assumed = f"prompts of {PROMPT} tokens, actions of {ACTION}"
    return _Policy(network, logits, settings.chunk, horizon, assumed)


def _vlm(config: Any, folder: Path | None) -> _Policy:
    """An action head on a vision-language model."""
    from mmrl.vlm.engine.model_loading import prepare
    from mmrl.vlm.vlm_plan import outlined

    entries = {} if folder is None else read_config(folder)
    chunk = int(entries.get("chunk", config.model.chunk))
    size = int(entries.get("action_size", ACTION))
    settings = model_settings(entries.get("model", {}), dict(config.model.options.get("vlm", {})))
    if folder is not None:
        settings.path = str(folder / "vlm")
    network = outlined(settings)
    wrapped = prepare(network, settings, None)
    vision = network.config.vision_config
    side = config.sim.image_size // (vision.patch_size * vision.spatial_merge_size)
    length = PROMPT + side**2 + chunk * size
    bins = int(config.model.options.get("bins", 256))

    def logits(rows: int) -> Tensor:
        states = network.get_input_embeddings()(torch.zeros(rows, length, dtype=torch.int64))
        positions = torch.zeros(3, rows, length, dtype=torch.int64)
        found = network.get_decoder()(inputs_embeds=states, position_ids=positions, use_cache=False)
        last = found.last_hidden_state[:, -chunk * size :]
        scores = nn.functional.linear(last, network.get_output_embeddings().weight[:bins].to(last.dtype))
        return scores.float().log_softmax(-1)[..., 0].sum()

    horizon = config.sim.horizon or HORIZON
    assumed = f"rows of {length} tokens, actions of {size}, without the pass through the vision tower"
    return _Policy(wrapped, logits, chunk, horizon, assumed)


def _flow_facts(config: Any, model: FlowWorldModel) -> Facts:
    trainer, samples = config.trainer, isinstance(config, Flow3dAwmConfig)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    group, times = (trainer.samples_per_task, config.timesteps.count) if samples else (1, 1)
    sizes = batch_sizes(trainer, group)
    flows = torch.Size(model.flow_shape).numel() * 4

    def predict(scenes: int, rows: int) -> Callable[[], Tensor]:
        """A pass with the given number of rows; images and texts have values, because a text encoder needs them."""
        inputs, kept = _inputs(model, scenes), torch.ones(scenes, dtype=torch.bool)
        own = torch.arange(rows) % scenes

        def once() -> Tensor:
            with autocast(trainer):
                noisy, time = torch.zeros(rows, *model.flow_shape), torch.full((rows,), 0.5)
                return model(inputs, noisy, time, kept, scene=own).float().square().mean()

        return once

    what = f"samples and {times} noisy versions of each" if samples else "clips"
    shape = " x ".join(map(str, model.flow_shape))
    return Facts(
        network=model,
        learn=predict(-(-sizes.chunk // group), sizes.chunk * times),
        assumed=(f"flow of {shape}", f"{sizes.step} {what}", f"the update of {sizes.chunk} per micro-batch"),
        passes=sizes.passes,
        act=predict(trainer.tasks_per_step, sizes.step) if samples else None,
        copies=int(samples and make_objective(config.objective).needs_reference),
        held=[Part("weight averages", 4 * averages_of(config) * trained)],
        inputs=[Part("flow and noise of a batch", sizes.chunk * times * WORKING * flows, "update")],
    )


def _outlined(config: Any) -> FlowWorldModel:
    """The model without values; a new one has no words from the training instructions."""
    if config.model.path:
        folder = Path(model_folder(config.model.path))
        return FlowWorldModel(
            read_flow_config(folder), Vocabulary.load(folder / VOCABULARY_FILE), load_pretrained=False
        )
    parts = {name: getattr(config.model, name) for name in FlowModelConfig.__dataclass_fields__}
    words = Vocabulary.from_texts(config.model.words)
    return FlowWorldModel(FlowModelConfig(**parts), words, load_pretrained=False)


def _inputs(model: FlowWorldModel, scenes: int) -> FlowInputs:
    """Inputs of the given number of scenes."""
    side, grid = model.config.condition.image_px, model.encoding.grid
    return FlowInputs(
        torch.zeros(scenes, side, side, 3, dtype=torch.uint8), torch.zeros(scenes, grid, grid, 3), [""] * scenes
    )


LARGE: dict[str, Callable[[Any, Path | None], _Policy]] = {"openvla": _openvla, "vlm": _vlm}
"""Policies planned without allocating their weights."""
KINDS = tuple(dict.fromkeys((*ONE_CAMERA, *LARGE)))
PUBLISHED: dict[str, dict[str, Any]] = read_json_object(Path(__file__).with_name("published.json"))["models"]
"""Entries of config.json by Hub id."""
