"""The world model: encoding, context, network, process and vocabulary, saved in one folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from diffusion.sampling.latent_sampler import row_noise
from mmrl.core.payload import to_device
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.files import read_json_object, replaced, write_atomically
from mmrl.hub.building import base_entries, base_path, check_finite, sort_header
from mmrl.runs.checkpoint import check_model
from mmrl.runs.export import model_folder
from robotics.flow3d.clip import FlowEncoding, Observation
from robotics.flow3d.geometry import FloatArray
from robotics.flow3d.model.context import TOWERS, ClipContext, FlowContext, FlowInputs, make_context, make_inputs
from robotics.flow3d.model.dit import FactoredDit, TrajectoryDit
from robotics.flow3d.model.processes import guided, make_process
from robotics.flow3d.model.world_model_settings import (
    BodyConfig,
    ConditionConfig,
    FlowModelConfig,
    ProcessConfig,
    UnetConfig,
)
from robotics.policies.base.encoder import Vocabulary
from robotics.policies.base.saved import WEIGHTS_FILE, check_fitting

CONFIG_FILE = "config.json"
FOLDERS = ("text", "vision")
"""Options of the context that point to folders of frozen models."""
VOCABULARY_FILE = "vocabulary.json"


def write_config(config: FlowModelConfig, folder: Path) -> None:
    """Write config.json to a folder, created with its parents."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = dataclasses.asdict(config)
    if config.condition.kind == "clip":
        # paths relative to the folder where possible, so that a moved run finds its towers
        entries["condition"] |= {name: base_entries(getattr(config.condition, name), folder) for name in FOLDERS}
    write_atomically(folder / CONFIG_FILE, json.dumps(entries, indent=2) + "\n")


def read_config(folder: Path) -> FlowModelConfig:
    """Read what `write_config` wrote; raises UserError if it is missing or damaged."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"{folder} is not a saved world model: {CONFIG_FILE} not found")
    entries = read_json_object(file)
    try:
        parts = {name: dict(entries[name]) for name in ("encoding", "body", "condition", "process")}
        for name in FOLDERS:
            # only CLIP's folders were written as relative paths; the small context has plain strings
            if isinstance(parts["condition"].get(name), dict):
                parts["condition"][name] = base_path(parts["condition"][name], folder)
        parts["body"]["unet"] = UnetConfig(**parts["body"]["unet"])
        config = FlowModelConfig(
            FlowEncoding(**parts["encoding"]),
            BodyConfig(**parts["body"]),
            ConditionConfig(**parts["condition"]),
            ProcessConfig(**parts["process"]),
        )
        check_config(config, "model")
        return config
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} does not belong to a world model: {error!r}") from error


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write weights by name to a folder's model.safetensors."""
    from safetensors.torch import save_file

    with replaced(folder / WEIGHTS_FILE) as draft:
        save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, str(draft))
        # equal weights give equal files: safetensors does not fix the order of its header
        sort_header(draft)


def read_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Copy a folder's weights into those of a model, bit for bit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_model(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise UserError(f"{folder} is not a saved world model: {WEIGHTS_FILE} not found")
    try:
        saved = load_file(folder / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise UserError(f"the weights in {folder} are damaged: {error}") from error
    # checked as a whole before the first copy, so that a mismatch leaves the model unchanged
    # symmetric: missing and unknown names
    different = sorted(set(weights) ^ set(saved))
    different += [name for name, own in weights.items() if name in saved and own.shape != saved[name].shape]
    if different:
        raise UserError(f"the weights in {folder} belong to a different model; {', '.join(different[:4])} do not match")
    # a damaged file may have the right shapes
    check_finite(saved, folder)
    with torch.no_grad():
        for name, value in saved.items():
            weights[name].copy_(value)


def copy_towers(context: ClipContext, folder: Path) -> None:
    """Copy the frozen models of a context into a model's folder."""
    towers: Any = context.towers
    towers["text"].save_pretrained(folder / "text" / "text_encoder")
    context.tokenizer.save_pretrained(folder / "text" / "tokenizer")
    towers["vision"].save_pretrained(folder / "vision")
    entries = read_json_object(folder / CONFIG_FILE)
    entries["condition"] |= {name: {"path": str(folder / name), "relative": name} for name in FOLDERS}
    write_atomically(folder / CONFIG_FILE, json.dumps(entries, indent=2) + "\n")


class FlowWorldModel(nn.Module):
    """p(3D flow | first image, query points, instruction).

    Args:
        config: options of the model.
        vocabulary: words of the instructions, for condition.kind=small.
        seed: seed of the weights; the global generator is not used.
        load_pretrained: load pretrained weights of the network; False if saved weights follow.

    Raises:
        UserError: options that do not fit, or folders that cannot be read.
    """

    def __init__(
        self, config: FlowModelConfig, vocabulary: Vocabulary, seed: int = 0, *, load_pretrained: bool = True
    ) -> None:
        super().__init__()
        check_config(config, "model")
        self.config = config
        self.vocabulary = vocabulary
        self.encoding = config.encoding
        self.process = make_process(config.process)
        # the modules initialise from the global generator, which must be left as it was
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.context = make_context(config.condition, vocabulary)
            self.body = _make_body(config, load_pretrained)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    @property
    def flow_shape(self) -> tuple[int, int, int, int]:
        """C, T, N, N of an encoded flow."""
        encoding = self.encoding
        return encoding.channels, encoding.num_frames, encoding.grid, encoding.grid

    def forward(
        self,
        inputs: FlowInputs,
        noisy: Tensor,
        time: Tensor,
        keep_text: Tensor | None = None,
        scene: Tensor | None = None,
    ) -> Tensor:
        """Predict the target of `ProcessConfig.parameterisation`.

        Args:
            inputs: B scenes, or fewer if several rows share a scene.
            noisy: (B, C, T, N, N) flow at the process's times.
            time: (B,) those times.
            keep_text: bool per scene, False blanks its instruction; None keeps all.
            scene: (B,) int64 scene of each row; None = the rows are the scenes.

        Returns:
            (B, C, T, N, N).

        Gradient: into all weights except frozen ones.
        """
        context = self.encode(inputs, keep_text)
        return self._predict(context if scene is None else context.of(scene), noisy, time)

    def encode(self, inputs: FlowInputs, keep_text: Tensor | None = None) -> FlowContext:
        """Context of B scenes; `keep_text` as in `forward`."""
        kept = torch.ones(len(inputs), dtype=torch.bool) if keep_text is None else keep_text
        found: FlowContext = self.context(inputs.to(self.device), to_device(kept, self.device))
        return found

    def inputs_of(self, observations: Sequence[Observation], points: Sequence[FloatArray]) -> FlowInputs:
        """Inputs of scenes and their (N, N, 3) query points; raises UserError for another N than the model's."""
        return make_inputs(observations, points, self.encoding, self.config.condition.image_px)

    @torch.no_grad()
    def sample(
        self, inputs: FlowInputs, seeds: Tensor, *, steps: int | None = None, guidance: float | None = None
    ) -> Tensor:
        """Sample encoded flows, equally many for each scene.

        Args:
            inputs: N scenes, each encoded once.
            seeds: (B = N K,) int64 of the noise, those of a scene together; a row's flow depends on its own seed alone.
            steps: steps of the sampler; None = the configured value.
            guidance: guidance on the instruction; None = the configured value.

        Returns:
            (B, C, T, N, N) on the device of the weights.

        Raises:
            UserError: guidance is set, but the model never trained without an instruction.
        """
        settings = self.config.process
        scale = settings.guidance if guidance is None else guidance
        # without dropped texts the blank instruction is untrained, and guidance would extrapolate from noise
        if scale != 1.0 and settings.text_drop == 0:
            raise UserError(f"guidance is {scale}, but this model was trained with text_drop=0; guidance must be 1")
        # rows of a scene are contiguous, as the seeds are
        # equally many samples for each scene
        scene = torch.arange(len(inputs), device=self.device).repeat_interleave(len(seeds) // len(inputs))
        context = self.encode(inputs).of(scene)
        # encoded once: guidance needs it at every step
        blank = None if scale == 1.0 else self.encode(inputs, torch.zeros(len(inputs), dtype=torch.bool)).of(scene)

        def predict(noisy: Tensor, time: Tensor) -> Tensor:
            found = self._predict(context, noisy, time)
            return found if blank is None else guided(self._predict(blank, noisy, time), found, scale)

        # noise of each row by its own seed: a sample does not depend on how many are drawn with it
        noise = to_device(row_noise(seeds, 1, self.flow_shape)[:, 0], self.device)
        return self.process.sample(predict, noise, steps or settings.steps)

    def predict(
        self,
        observation: Observation,
        points: FloatArray,
        samples: int = 1,
        seed: int = 0,
        *,
        steps: int | None = None,
        guidance: float | None = None,
    ) -> FloatArray:
        """Sample how the object will move.

        Args:
            observation: image and instruction; depth enters through the query points alone.
            points: (N, N, 3) query points on the object: u, v in pixels, z in metres.
            samples: K.
            seed: seed of the noise; the k-th sample does not depend on K.
            steps: steps of the sampler; None = the configured value.
            guidance: guidance on the instruction; None = the configured value.

        Returns:
            (K, T, N, N, 4): u and v in pixels, z in metres, visibility 0 to 1.

        Raises:
            UserError: another N than the model's, or an instruction that cannot be read.
        """
        # one scene, encoded once for all K samples
        inputs = self.inputs_of([observation], [points])
        written = self.sample(inputs, sample_seeds(seed, samples), steps=steps, guidance=guidance)
        # float32 first: NumPy has no bfloat16
        return self.encoding.decode(written.float().cpu().numpy(), points, observation.size_px)

    def check_flow(self, flow: FloatArray) -> None:
        """Raise UserError for a flow (T, N, N, 4) of another length or grid."""
        _, frames, side, _ = self.flow_shape
        if flow.shape != (frames, side, side, 4):
            raise UserError(
                f"a flow has the shape {flow.shape}; this model predicts {(frames, side, side, 4)}: set "
                f"model.encoding.num_frames={flow.shape[0]} and grid={flow.shape[1]}, or re-extract the clips"
            )

    def check_instructions(self, texts: Sequence[str]) -> None:
        """Raise UserError for instructions that the model cannot read completely."""
        self.context.check_texts([text.lower() for text in texts])

    def save_pretrained(self, path: Path | str) -> None:
        """Write the model to a folder, created with its parents; frozen CLIP towers are referenced, not copied."""
        write_config(self.config, Path(path))
        self.vocabulary.save(Path(path) / VOCABULARY_FILE)
        write_weights(self._saved_weights(), Path(path))

    def export(self, path: Path | str) -> None:
        """Write a self-contained folder: frozen CLIP towers copied, adapters merged into the weights."""
        self._merged().save_pretrained(path)
        if isinstance(self.context, ClipContext):
            copy_towers(self.context, Path(path))

    @classmethod
    def from_pretrained(cls, path: Path | str) -> Self:
        """Read what `save_pretrained` or `export` wrote, or the best checkpoint of a run.

        Raises:
            UserError: no such folder, or a damaged one.
        """
        folder = Path(model_folder(str(path)))
        config, words = read_config(folder), Vocabulary.load(folder / VOCABULARY_FILE)
        # before the model is built: damaged options must not allocate memory
        # a damaged config.json could ask for any size
        check_fitting(lambda: _parts(config, words), dataclasses.asdict(config), folder)
        model = cls(config, words, load_pretrained=False)
        model.load_weights(folder)
        return model

    def load_weights(self, path: Path | str) -> None:
        """Restore saved weights bit for bit; raises UserError if they do not fit this model."""
        # the same words at other indices would load without an error and read nonsense
        self.vocabulary.check_same(Path(path) / VOCABULARY_FILE)
        read_weights(self._saved_weights(), Path(path))

    def _predict(self, context: FlowContext, noisy: Tensor, time: Tensor) -> Tensor:
        found: Tensor = self.body(noisy, self.process.network_time(time), context)
        return found

    # frozen towers are referenced in config.json, not saved
    def _saved_weights(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.state_dict().items() if not name.startswith(f"context.{TOWERS}.")}

    def _merged(self) -> FlowWorldModel:
        """This model with its adapters merged, or the model itself if it has none."""
        unet = self.config.body.unet
        if self.config.body.kind != "unet_motion" or unet.trainable == "full":
            return self
        from diffusion.models.saved import merged

        # `full` and not `lora`: the merged U-Net has no adapters to create
        body = dataclasses.replace(self.config.body, unet=dataclasses.replace(unet, trainable="full"))
        config = dataclasses.replace(self.config, body=body)
        model = FlowWorldModel(config, self.vocabulary, load_pretrained=False)
        # shared, not copied: the merged model is only saved
        model.context = self.context
        model.body.unet = merged(self.body.unet)
        return model


def sample_seeds(seed: int, count: int) -> Tensor:
    """(count,) int64 seeds of samples; the first ones do not depend on the count."""
    # drawn at once from one generator, whose first numbers do not depend on how many follow
    return torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seed))


def _parts(config: FlowModelConfig, vocabulary: Vocabulary) -> nn.ModuleDict:
    """The parts whose sizes follow from the options alone; those of CLIP's context also depend on its towers."""
    # CLIP's towers are read from their own folders and have the sizes given there
    parts: dict[str, nn.Module] = {"body": _make_body(config, load_pretrained=False)}
    if config.condition.kind != "clip":
        parts["context"] = make_context(config.condition, vocabulary)
    return nn.ModuleDict(parts)


def _make_body(config: FlowModelConfig, load_pretrained: bool) -> nn.Module:
    body, width = config.body, config.condition.width
    if body.kind == "unet_motion":
        from robotics.flow3d.model.unet_motion import MotionUnet

        return MotionUnet(body, config.encoding, width, load_pretrained=load_pretrained)
    kind = TrajectoryDit if body.kind == "traj_dit" else FactoredDit
    return kind(body, config.encoding, width)
