"""Memory and time of a run on a robot policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.errors import NoPlan, UserError
from mmrl.files import expanded, read_json_object
from mmrl.hub.compat import ensure_torchvision
from mmrl.runs.export import model_folder
from mmrl.training.objectives import make_objective
from mmrl.training.plan import Part, Plan, Work, activations, autocast, batch_sizes, forward, imagined, state_parts
from mmrl.training.recipe import single_update
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.saved import make_config, read_config
from robotics.policies.policy_loading import ONE_CAMERA, ActionPolicyConfig, load_action_policy, model_settings

ACTION = 7
"""Entries of an action where no simulator is asked: those of an arm with a gripper."""
HORIZON = 300
"""Control steps of an episode where `sim.horizon` leaves it to the task and no simulator is asked."""
PROMPT = 32
"""Tokens of an instruction in its prompt, the image aside."""


def footprint(config: Any, *, passes: bool = True) -> Plan:
    """Plan a run whose episodes all last for the longest time allowed.

    Without passes the plan has what is held between them only: weights, gradients, moments and copies; a small policy
    has no such plan.
    """
    model = getattr(config, "model", None)
    if not isinstance(model, ActionPolicyConfig):
        from robotics.flow3d.methods.memory import footprint as of_flow

        return of_flow(config, passes=passes)
    folder = expanded(model_folder(model.path)) if model.path else None
    kind = model.kind if folder is None else str(read_config(folder).get("kind"))
    if kind not in KINDS and ":" not in kind:  # a class or function of the user's own is simply made
        raise NoPlan(f"there is no plan for a policy of model.kind {kind}; there is one for: {', '.join(KINDS)}")
    if kind not in LARGE:
        if not passes:
            return Plan((), ())
        with _Small(config) as policy:
            return _plan(config, policy)
    ensure_torchvision()
    # no memory is taken: only shapes are needed
    with torch.device("meta"):
        policy = LARGE[kind](config, folder)
    with imagined(policy.network):
        return _plan(config, policy, passes=passes)


@dataclass(frozen=True)
class _Policy:
    """Weights of a policy and a pass through them."""

    network: nn.Module
    logits: Callable[[int], Tensor]
    """A scalar of a pass through so many observations."""
    chunk: int
    horizon: int
    low: bool
    assumed: str


def _plan(config: Any, policy: _Policy, *, passes: bool = True) -> Plan:
    trainer = config.trainer
    # behaviour cloning has transitions, the others whole episodes
    clones = not hasattr(trainer, "samples_per_task")
    size = 1 if clones else trainer.samples_per_task
    # observations of an episode: one for each chunk of actions
    looks = 1 if clones else -(-policy.horizon // policy.chunk)
    total, minibatch, chunk = batch_sizes(trainer, size)
    compares = not clones and make_objective(config.objective).needs_reference
    parts = state_parts(policy.network, trainer, copies=int(compares))
    if not passes:
        return Plan(tuple(parts), ())

    def once(rows: int) -> Tensor:
        with autocast(trainer):
            return policy.logits(rows)

    update = activations(policy.network, lambda: once(chunk * looks), -(-minibatch // chunk))
    parts.append(Part("activations", update.bytes, "update"))
    work = [Work.of("update", update, total / chunk * trainer.epochs)]
    if not clones:
        acting = min(total, config.sim.workers or total)
        act = forward(policy.network, lambda: once(acting))
        parts.append(Part("acting", act.bytes, "sampling"))
        low = policy.low or trainer.old_logp == "recompute"
        # passes without gradient: the reference, and old log-probabilities that differ from the sampler's
        unscored = compares + (low and trainer.old_logp != "sampler" and not single_update(trainer))
        if unscored:
            score = forward(policy.network, lambda: once(chunk * looks))
            work.insert(0, Work.of("scores without gradient", score, total / chunk * unscored))
        work.insert(0, Work.of("acting", act, total / acting * looks))
    what = "transitions" if clones else f"episodes of {policy.horizon} steps, {looks} observations each"
    assumed = (f"{total} {what}", f"{chunk} {'transitions' if clones else 'episodes'} at once", policy.assumed)
    return Plan(tuple(part for part in parts if part.bytes), assumed, tuple(work), policy.low)


def _precision(config: Any, dtype: str) -> bool:
    return dtype != "float32" or config.trainer.mixed_precision != "none"


class _Small:
    """A policy of a few million weights, which is simply made, for the sizes of the simulator."""

    def __init__(self, config: Any) -> None:
        from robotics.sim.opening import open_sim

        self.config = config
        self.sim = open_sim(config.sim)

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
        return _Policy(policy, logits, policy.chunk, sim.horizon, _precision(config, "float32"), assumed)

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
        raise UserError(f"there is no {place}; known without a folder: {', '.join(PUBLISHED)}")
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
    return _Policy(network, logits, settings.chunk, horizon, _precision(config, settings.dtype), assumed)


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
    return _Policy(wrapped, logits, chunk, horizon, _precision(config, settings.dtype), assumed)


LARGE: dict[str, Callable[[Any, Path | None], _Policy]] = {"openvla": _openvla, "vlm": _vlm}
"""Policies whose weights are only imagined."""
KINDS = tuple(dict.fromkeys((*ONE_CAMERA, *LARGE)))
PUBLISHED: dict[str, dict[str, Any]] = read_json_object(Path(__file__).with_name("published.json"))["models"]
"""The entries of config.json by hub id."""
