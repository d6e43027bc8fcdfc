"""Memory of a run on a diffusion or flow model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from diffusion.data.prompts import has_images
from diffusion.diffusion_config import DiffusionConfig, TrajectoryParts
from diffusion.families.base import MASK, REFERENCE
from diffusion.families.table import find_family
from diffusion.models.conditioning import TextEncoders
from diffusion.models.diffusion_policy import DTYPES, PipelineConfig, add_adapter, make_family
from diffusion.models.pipelines import outlined_pipeline, quiet_diffusers, upcast
from diffusion.models.saved import BASE_FILE, read_base
from diffusion.sampling.latent_sampler import LatentSamplerConfig, trained_window
from mmrl.errors import NoPlan, UserError
from mmrl.files import expanded, read_json_object
from mmrl.hub.building import build_if_missing
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from mmrl.runs.export import model_folder
from mmrl.training.objectives import make_objective
from mmrl.training.plan import Facts, Part, Plan, Sizes, autocast, batch_sizes, planned

WORKING = 6
"""Float32 latents per row that a loss keeps in memory at the same time: noise, mean, target and their differences."""
PUBLISHED: dict[str, dict[str, Any]] = read_json_object(Path(__file__).with_name("published.json"))["models"]
"""Released pipelines by hub id: class, network, autoencoder, and text encoder parameters in billions."""


def footprint(config: Any, *, passes: bool = True, recipe: Any = None) -> Plan:
    """Plan a run, assuming that all prompts have the model's maximum length.

    Without passes, the plan only contains what is kept between them: weights, gradients, moments, averages and copies.
    Nothing depends on the data that `recipe` has read: encoders pad texts to one length.
    """
    if not isinstance(getattr(config, "model", None), PipelineConfig):
        raise NoPlan(f"no memory plan for the recipe '{config.recipe}', which does not train a diffusion model")
    ensure_torchvision()
    build_if_missing(config.model, "model")
    step = _StepSizes.of(config)
    # without values: the plan of a 12 billion model fits on any laptop
    with torch.device("meta"), quiet_transformers(), quiet_diffusers():
        model = _Model(config, step)
    return planned(_facts(model, step), config.trainer, passes=passes)


def _facts(model: _Model, step: _StepSizes) -> Facts:
    kind = "videos" if model.family.video else "images"
    times = f"{step.times} {'steps' if step.denoises else 'noisy versions'} of each"
    return Facts(
        network=model.networks,
        learn=model.learn,
        assumed=(
            f"latents {' x '.join(map(str, model.shape))}",
            f"{step.sizes.step} {kind} per step and {times}",
            f"the update of {step.sizes.chunk} {kind} per micro-batch",
        ),
        passes=step.sizes.passes,
        act=model.encode if step.given else model.sample,
        acting="encoding" if step.given else "denoising, or decoding",
        copies=int(not model.config.model.lora.enabled),
        frozen=(model.autoencoder,),
        held=tuple(_held(model)),
        inputs=tuple(_inputs(model)),
    )


def preview(config: Any, recipe: Any) -> list[str]:
    """Lines about the prompts of a recipe; their lengths are checked if the model's tokenizers are on this machine.

    Raises:
        UserError: images that the model's family does not support, or prompts that would be truncated.
    """
    path = pipeline_path(config.model)
    counts = {"data": recipe.train_tasks} | {f"eval_data.{name}": tasks for name, tasks in recipe.eval_tasks.items()}
    lines = [f"{name}: {len(tasks)} {'prompts' if name != 'data' else 'tasks'}" for name, tasks in counts.items()]
    if not expanded(path).is_dir():
        return [*lines, f"prompt lengths were not checked: {path} is not on this machine"]
    ensure_torchvision()
    with torch.device("meta"), quiet_transformers(), quiet_diffusers():
        family = make_family(outlined_pipeline(path, config.model.family), config.model)
    recipe.check_prompts(TextEncoders(family))
    return lines


@dataclass(frozen=True)
class _StepSizes:
    """Sizes of a step."""

    sizes: Sizes
    """Images."""
    times: int
    """Trained steps or noisy versions of an image."""
    denoises: bool
    """Whether the sampler's steps are trained."""
    given: bool
    """Whether images are given instead of sampled."""
    sampler: LatentSamplerConfig

    @classmethod
    def of(cls, config: Any) -> _StepSizes:
        """Read the sizes from a configuration."""
        trainer, given = config.trainer, not isinstance(config, DiffusionConfig)
        sampler = config.evaluation.sampler if given else config.sampler
        group = 1 + hasattr(config, "pairs") if given else trainer.samples_per_task
        denoises = isinstance(config, TrajectoryParts)
        if denoises:
            # the length of the window does not depend on where it is drawn
            times = max(int(len(trained_window(sampler, torch.Generator())) * sampler.random_share), 1)
        else:
            times = config.timesteps.count
        return cls(batch_sizes(trainer, group), times, denoises, given, sampler)

    @property
    def drawn(self) -> int:
        """Images sampled or decoded at once."""
        return min(self.sampler.batch_rows, self.sizes.step)

    @property
    def learned(self) -> int:
        """Trained steps or noisy versions in a forward and backward pass."""
        return self.sizes.chunk * self.times


class _Model:
    """Networks, autoencoder and sizes of a pipeline without weight values; built on the meta device."""

    def __init__(self, config: Any, step: _StepSizes) -> None:
        self.config, self.step, model = config, step, config.model
        dtype = DTYPES[model.dtype]
        pipeline, encoders = _pipeline(model)
        self.family = family = make_family(pipeline, model)
        self.shape = family.latent_shape(model.height, model.width, model.frames)
        self.dtype = dtype
        present = [name for name in family.networks if getattr(pipeline, name, None) is not None]
        self.networks = nn.ModuleDict()
        for name in present:
            network = getattr(pipeline, name).to(dtype).requires_grad_(False)
            self.networks[name] = network
            if name not in (model.networks or present):
                continue
            if model.lora.enabled:
                add_adapter(network, model.lora, family, seed=0)
            else:
                network.requires_grad_(True)
            if model.gradient_checkpointing:
                network.enable_gradient_checkpointing()
        self.autoencoder = pipeline.vae.to(dtype).requires_grad_(False)
        upcast(self.autoencoder)
        self.encoders = encoders * dtype.itemsize
        self.edits = family.takes_image and has_images(config, family.edits)
        self.halves = 2 if step.sampler.guidance != 1.0 and not step.given else 1
        """Evaluations of guidance."""
        self.detached = not step.denoises or config.step.detach_negative
        """Whether the negative half of guidance keeps no activations."""
        low = model.dtype != "float32" or config.trainer.mixed_precision != "none"
        # as `Trajectories.halves_together`: low precision with a detached half takes two calls in sampling too
        self.per_call = 1 if low and step.denoises and self.detached else self.halves
        """Evaluations of guidance in one call while sampling."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """Weights that are trained."""
        return [weight for weight in self.networks.parameters() if weight.requires_grad]

    def text(self, rows: int) -> dict[str, Tensor]:
        """Zeros instead of the text of some rows, without memory cost."""
        found = {name: torch.zeros(1, *shape, dtype=self.dtype) for name, shape in self.family.text_shapes().items()}
        # a full mask for every entry, since the plan assumes prompts of maximum length
        found |= {name + MASK: torch.ones(value.shape[:2], dtype=torch.bool) for name, value in found.items()}
        if self.edits:
            found[REFERENCE] = torch.zeros(1, *self.shape, dtype=self.dtype)
        return {name: value.expand(rows, *value.shape[1:]) for name, value in found.items()}

    def text_bytes(self) -> int:
        """Bytes of one row's text."""
        return sum(value.nbytes for value in self.text(1).values())

    def latent_bytes(self, itemsize: int | None = None) -> int:
        """Bytes of one row's latents, in the model's precision unless `itemsize` is given."""
        return torch.Size(self.shape).numel() * (itemsize or self.dtype.itemsize)

    def learn(self) -> Tensor:
        """A loss; if steps are trained, the reference is evaluated while the graph is in memory."""
        step = self.step
        loss = self.velocity(step.learned * (1 if self.detached else self.halves))
        if step.denoises and not step.given and make_objective(self.config.objective).needs_reference:
            with torch.no_grad():
                self.velocity(self.halves * step.learned)
        return loss

    def sample(self) -> Tensor:
        """Images, after one of the steps that denoise them; videos are decoded one by one."""
        self.velocity(self.step.drawn * self.per_call)
        rows = 1 if self.family.video else self.step.drawn
        return self.family.decode(torch.zeros(rows, *self.shape, dtype=self.dtype))

    def encode(self) -> Any:
        """Latents of images; videos are encoded one by one."""
        family, rows = self.family, 1 if self.family.video else self.step.drawn
        frames = (1 + (self.shape[1] - 1) * family.frame_factor,) if family.video else ()
        pixels = (family.factor * side for side in self.shape[-2:])
        return family.encode_pixels(torch.zeros(rows, 3, *frames, *pixels, dtype=self.autoencoder.dtype))

    def velocity(self, rows: int) -> Tensor:
        """Evaluate the network for some rows and return a scalar.

        The family converts real zeros, because it may read values; the network runs without values.
        """
        network: Any = next(iter(self.networks.values()))
        found: list[Tensor] = []
        mode: Any  # in which tensors have no values

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            with mode, autocast(self.config.trainer):
                out = network(*args, **kwargs)
            found.extend(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            return tree_map_only(Tensor, lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), out)

        with unset_fake_temporarily() as mode:
            latents = torch.zeros(1, *self.shape, dtype=self.dtype).expand(rows, *self.shape)
            self.family.velocity(_Called(network, evaluate), latents, torch.full((rows,), 0.5), self.text(rows))
        return torch.stack([leaf.float().square().mean() for leaf in found]).sum()


class _Called:
    """A network whose calls go to another function."""

    def __init__(self, network: Any, function: Any) -> None:
        self.network = network
        self.function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def pipeline_path(config: PipelineConfig) -> str:
    """Folder or hub id of the pipeline below saved weights."""
    path = model_folder(config.path)
    while (expanded(path) / BASE_FILE).is_file():
        path = str(read_base(expanded(path) / BASE_FILE)["path"])
    return path


def _pipeline(config: PipelineConfig) -> tuple[Any, int]:
    """The pipeline without values, and the number of parameters of its text encoders."""
    path = pipeline_path(config)
    # a local copy is read, since it may differ from the released model
    if path not in PUBLISHED or expanded(path).exists():
        try:
            pipeline = outlined_pipeline(path, config.family)
        except UserError as error:
            raise UserError(f"{error}; these can be planned without a folder: {', '.join(PUBLISHED)}") from error
        kind = find_family(type(pipeline).__name__, config.family)
        encoders = [getattr(pipeline, part.encoder, None) for part in kind.text_parts]
        return pipeline, sum(w.numel() for encoder in encoders if encoder is not None for w in encoder.parameters())
    import diffusers

    known = PUBLISHED[path]
    kind = find_family(known["pipeline_class"], config.family)
    parts = {kind.networks[0]: known["network"], "vae": known["autoencoder"]}
    made = {name: getattr(diffusers, own)(**values) for name, (own, values) in parts.items()}
    with torch.device("cpu"):  # schedulers compute their sigmas and need real values
        made["scheduler"] = getattr(diffusers, kind.schedulers[0])()
    own = getattr(diffusers, known["pipeline_class"])
    required = [p.name for p in inspect.signature(own).parameters.values() if p.default is inspect.Parameter.empty]
    settings = {**dict.fromkeys(required), **made, **known.get("settings", {})}
    return own(**settings), round(sum(known["encoder_billions"].values()) * 1e9)


def _held(model: _Model) -> Iterator[Part]:
    """Averages of weights and frozen parts."""
    config = model.config
    yield Part("weight averages", 4 * averages_of(config) * sum(weight.numel() for weight in model.trained))
    autoencoder = sum(weight.nbytes for weight in model.autoencoder.parameters())
    yield Part("autoencoder", autoencoder)
    freed = config.model.free_text_encoders
    yield Part(
        "text encoders" + freed * " and autoencoder, at the start",
        model.encoders + freed * autoencoder,
        "start" if freed else "always",
    )


def _inputs(model: _Model) -> Iterator[Part]:
    """Latents of a step, and the noise and text of sampling and update."""
    config, step = model.config, model.step
    update = Part(
        "text and noise of a batch", step.learned * (model.text_bytes() + WORKING * model.latent_bytes(4)), "update"
    )
    if step.given:
        yield from (Part("latents", step.sizes.step * model.latent_bytes(), divided=True), update)
        return
    states = step.times + 1 if step.denoises else step.times * (getattr(config, "states", "") == "trajectory")
    yield Part("latents and states", step.sizes.step * (1 + states) * model.latent_bytes(), divided=True)
    noise = step.drawn * step.times * model.latent_bytes(4) * step.denoises
    yield Part("noise of the steps", noise, "sampling")
    yield Part("text of the prompts", config.trainer.tasks_per_step * model.text_bytes(), "sampling", divided=True)
    yield Part("text of a batch", step.drawn * model.per_call * model.text_bytes(), "sampling")
    yield update


def averages_of(config: Any) -> int:
    """Moving averages of the trained weights, float32."""
    awm, orw = getattr(config, "awm", None), getattr(config, "orw", None)
    return (
        (config.eval_ema.decay > 0)
        + (awm is not None and (awm.ema_coef > 0 or awm.off_policy))
        + (orw is not None and orw.refresh_every > 1)
        + hasattr(config, "nft")
    )
