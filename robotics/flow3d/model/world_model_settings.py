"""Options of the world model, stored as config.json of a checkpoint.

The defaults suit a CPU; those of the paper are in configs/robotics/flow3d_unet_motion.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.fields import bounded, choice, only_with, rare
from robotics.flow3d.clip import FlowEncoding

BODIES = ("traj_dit", "unet_motion", "dit_factored")
CONDITIONS = ("small", "clip")
POINT_CONDITIONS = ("tokens", "tokens+concat")
POINT_CODES = ("corrected", "repo")
PROCESSES = ("rectified", "ddim")
PARAMETERISATIONS = ("eps", "v", "x0")
TRAINABLE = ("full", "lora")


@dataclass
class UnetConfig:
    """Sizes of `unet_motion`; the defaults are the sizes of Stable Diffusion 1.5."""

    channels: list[int] = rare(bounded([320, 640, 1280, 1280], at_least=1))
    """Channels of the levels; the grid is halved from one to the next."""
    layers: int = rare(bounded(2, at_least=1))
    """Residual blocks per level."""
    norm_groups: int = rare(bounded(32, at_least=1))
    """Groups of the norms; must divide all channels."""
    max_frames: int = bounded(48, at_least=1)
    """Maximum number of frames that the motion modules have positions for."""
    pretrained: str = ""
    """Folder of a Stable Diffusion 1.5 model whose `unet` initialises everything except the motion modules; empty =
    random weights."""
    trainable: str = choice("full", TRAINABLE)
    """full, or lora as in the paper: adapters on the attention; motion modules and projections are trained in full."""
    lora_rank: int = bounded(128, at_least=1)
    """Rank of the adapters, and their alpha."""

    def validate(self) -> None:
        """Check that the sizes fit together; raises ValueError."""
        wrong = [size for size in self.channels if size % self.norm_groups]
        if wrong:
            raise ValueError(
                f"model.body.unet.channels has {wrong[0]}, which norm_groups={self.norm_groups} does not divide"
            )
        if self.trainable == "lora" and not self.pretrained:
            raise ValueError(
                "model.body.unet.trainable is lora without unet.pretrained: adapters on random weights learn "
                "little; set it to the folder of a Stable Diffusion 1.5 model, or set trainable=full"
            )


@dataclass
class BodyConfig:
    """The network that reads a noisy flow."""

    kind: str = choice("traj_dit", BODIES)
    """traj_dit: one token per query point with its whole future; dit_factored: one token per point and frame;
    unet_motion: the paper's network."""
    width: int = bounded(64, at_least=8)
    """Width of the transformer; used by traj_dit and dit_factored."""
    blocks: int = bounded(3, at_least=1)
    """Number of transformer blocks."""
    heads: int = rare(bounded(4, at_least=1))
    """Number of attention heads."""
    point_condition: str = choice("tokens+concat", POINT_CONDITIONS)
    """tokens: query points are tokens of the context, as in the paper, and the network must learn which belongs to
    which grid cell; tokens+concat: each is also concatenated to the noisy flow of its cell."""
    unet: UnetConfig = field(default_factory=UnetConfig)
    """Sizes of unet_motion."""

    def validate(self) -> None:
        """Check that the sizes fit together; raises ValueError."""
        if self.kind != "unet_motion" and self.width % (2 * self.heads):
            raise ValueError(f"model.body.width is {self.width}; must be a multiple of 2 * heads = {2 * self.heads}")


@dataclass
class ConditionConfig:
    """The encoder of image, query points and instruction."""

    kind: str = choice("small", CONDITIONS)
    """small: patches and words, trained from scratch; clip: frozen CLIP towers."""
    width: int = bounded(64, at_least=8)
    """Width of the context's tokens; 768 for the U-Net of Stable Diffusion 1.5."""
    image_px: int = bounded(64, at_least=8)
    """Size of the square that the image is resized to. Its proportions are not kept, because points are fractions of
    its width and height; 224 for CLIP ViT-L/14."""
    patch_px: int = only_with(bounded(8, at_least=1), kind="small")
    """Patch size in pixels; used by small."""
    heads: int = rare(only_with(bounded(4, at_least=1), kind="small"))
    """Number of attention heads; used by small."""
    keypoints: int = rare(only_with(bounded(32, at_least=0), kind="small"))
    """Keypoints that the instruction selects in the image, in addition to the patches; 0 = none; used by small."""
    channels: int = rare(only_with(bounded(32, at_least=8, multiple_of=8), kind="small"))
    """Feature maps from which the keypoints are computed; used by small."""
    words: int = rare(only_with(bounded(24, at_least=1), kind="small"))
    """Maximum number of words in an instruction; used by small."""
    text: str = only_with("", kind="clip")
    """Folder with `text_encoder` and `tokenizer`, such as a Stable Diffusion 1.5; used by clip."""
    vision: str = only_with("", kind="clip")
    """Folder of a CLIP model with its vision tower, such as openai/clip-vit-large-patch14; used by clip."""
    point_pe: str = rare(only_with(choice("corrected", POINT_CODES), kind="clip"))
    """Positional encoding of the query points for clip: corrected, or repo (the values that the released weights were
    trained with, see `repo_code`)."""
    bgr: bool = rare(only_with(False, kind="clip"))
    """Feed CLIP images as BGR, as the released weights expect."""

    def validate(self) -> None:
        """Check that the options fit together; raises ValueError."""
        if self.kind == "clip":
            missing = [name for name in ("text", "vision") if not getattr(self, name)]
            if missing:
                raise ValueError(
                    f"model.condition.kind is clip, but model.condition.{missing[0]} is empty; set it to a folder"
                )
            return
        if self.image_px % self.patch_px:
            raise ValueError(f"model.condition.image_px is {self.image_px}; must be a multiple of {self.patch_px}")
        if self.width % (8 * self.heads):
            raise ValueError(f"model.condition.width is {self.width}; must be a multiple of {8 * self.heads}")


@dataclass
class ProcessConfig:
    """The noising process, its sampling and the prediction target."""

    kind: str = choice("rectified", PROCESSES)
    """rectified: straight paths and Euler steps; ddim: the paper's process."""
    parameterisation: str = choice("x0", PARAMETERISATIONS)
    """What the network predicts: the noise (the paper), the velocity, or the flow itself, which a small network learns
    far faster."""
    steps: int = bounded(8, at_least=1)
    """Sampling steps; 25 in the paper."""
    guidance: float = bounded(1.0, at_least=0)
    """Classifier-free guidance on the instruction: 1 = none; 8 in the paper's code."""
    text_drop: float = bounded(0.0, at_least=0, below=1)
    """Fraction of the training clips shown without their instruction; 0.1 in the paper."""

    def validate(self) -> None:
        """Check that the options fit together; raises ValueError."""
        if self.kind == "rectified" and self.parameterisation == "eps":
            raise ValueError(
                "model.process.parameterisation is eps with kind=rectified, whose sampling starts from pure noise, "
                "where predicting the noise does not determine the flow; use x0 or v, or kind=ddim"
            )
        if self.guidance != 1.0 and self.text_drop == 0:
            raise ValueError(
                f"model.process.guidance is {self.guidance}, but with text_drop=0 the model never learns without an "
                "instruction; set text_drop=0.1"
            )


def _encoding() -> FlowEncoding:
    return FlowEncoding(z_min_m=0.5, z_max_m=1.3, target="displacement", visibility="none")


@dataclass
class FlowModelConfig:
    """A world model."""

    encoding: FlowEncoding = field(default_factory=_encoding)
    """Encoding of flow; the model only samples flows of this size."""
    body: BodyConfig = field(default_factory=BodyConfig)
    """The network."""
    condition: ConditionConfig = field(default_factory=ConditionConfig)
    """Encoder of image, query points and instruction."""
    process: ProcessConfig = field(default_factory=ProcessConfig)
    """Noise, prediction and sampling."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        unet = self.body.unet
        if self.body.kind != "unet_motion":
            return
        if self.encoding.num_frames > unet.max_frames:
            raise ValueError(
                f"model.encoding.num_frames is {self.encoding.num_frames}; the motion modules have positions for "
                f"unet.max_frames={unet.max_frames}"
            )
        if unet.pretrained and self.encoding.channels != 4:
            raise ValueError(
                "model.encoding.visibility is none, but the pretrained U-Net has 4 channels; use ones or channel"
            )
