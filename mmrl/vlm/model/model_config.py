"""Options of a model: architecture, precision, adapters, frozen parts, pixel budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, only_with, rare
from mmrl.hub.building import BuiltPath
from mmrl.training.settings import SMALLEST_LOW_PRECISION_STEP

DTYPES = ("float32", "bfloat16")
ATTENTION = ("sdpa", "eager", "flash_attention_2")


@dataclass
class LoraSettings:
    """Low-rank adapters instead of full fine-tuning."""

    enabled: bool = False
    """Train adapters and freeze all weights of the model, including the vision tower and the merger."""
    rank: int = bounded(16, at_least=1)
    """Width of the adapters."""
    alpha: int = 32
    """The adapters' output is scaled by alpha / rank."""
    dropout: float = rare(bounded(0.0, at_least=0, below=1))
    """Dropout on the adapters' input during training; above 0, the ratio is not 1 before the first step."""
    targets: list[str] = rare(
        field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    )
    """Linear layers of the language model's decoder layers that get an adapter; may be empty if vision_targets is
    set."""
    vision_targets: list[str] = rare(only_with(field(default_factory=list), enabled=True))
    """Linear layers of the vision tower and the merger that get an adapter, given by name suffix as in peft's
    `target_modules`, such as qkv, fc1 or merger.mlp.0; all-linear means all of them."""
    seed: int = rare(0)
    """Seed of the adapters' random half; the other half starts at zero, so the model is unchanged at first."""


@dataclass
class CriticSettings:
    """The value head that a model gets if the objective has a critic."""

    hidden: list[int] = field(default_factory=list)
    """Widths of the hidden layers, with ReLU between them; [] gives a single linear layer."""
    stop_gradient: bool = False
    """Stop the critic's gradient at the model's last hidden state, so that its loss only trains the head."""
    seed: int = 0
    """Seed of the hidden layers; the last layer starts at zero, so every value is 0 at first."""


@dataclass
class FrozenModelConfig(BuiltPath):
    """A frozen model, and how it is held in memory."""

    path: str = MISSING
    """Model folder, run folder (its best checkpoint), hub id such as Qwen/Qwen2.5-VL-3B-Instruct, or smollm2, the
    packaged model of `mmrl setup smollm2`. A folder with that name takes precedence."""
    dtype: str = choice("float32", DTYPES)
    """Precision of weights and activations: float32 or bfloat16; log-probabilities are float32 either way."""
    attention: str = rare(choice("sdpa", ATTENTION))
    """Attention kernels: sdpa, eager or flash_attention_2 (needs a GPU, bfloat16 and the flash-attn package)."""
    shared_prefix: bool = rare(True)
    """Compute each prompt once for all responses of its group, with the same gradients."""
    min_pixels: int | None = bounded(None, at_least=1)
    """Minimum image area in pixels; smaller images are enlarged. Default: the processor's setting."""
    max_pixels: int | None = bounded(None, at_least=1)
    """Maximum image area in pixels; larger images are reduced. Default: the processor's setting."""
    max_prompt_tokens: int | None = rare(bounded(None, at_least=1))
    """Maximum prompt length in tokens; longer prompts are skipped and counted. Default: the limit of the model's
    positions."""
    chat_template: str | None = rare(None)
    """Jinja file with a chat template to use instead of the model's own, such as configs/templates/hermes.jinja, which
    describes tools. It is saved with the model. Default: the model's own."""
    thinking: bool | None = rare(None)
    """Whether the model thinks before it answers, if its chat template has a switch for it (as in Qwen3, Qwen3.5 and
    SmolLM3). Default: the template's default."""
    answer_tokens: list[str] | None = rare(None)
    """Special tokens that belong to responses: rewards see them, and they are learned from given answers. Default: the
    tokens that the chat template writes into a response, and thought markers such as `</think>`."""

    def validate(self) -> None:
        """Check that the fields fit together; raises UserError."""
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise UserError(f"model.min_pixels={self.min_pixels} is above model.max_pixels={self.max_pixels}")


@dataclass
class ModelConfig(FrozenModelConfig):
    """A trained model, and how it is held in memory."""

    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapters instead of full fine-tuning."""
    critic: CriticSettings = rare(field(default_factory=CriticSettings))
    """The value head, if the objective has a critic."""
    freeze_vision: bool = False
    """Freeze the vision tower, and also the merger unless `freeze_merger` is false. If both are frozen, features are
    computed once per prompt and step."""
    freeze_merger: bool | None = rare(None)
    """Freeze the merger, which turns the tower's features into tokens (also called projector, connector or aligner).
    Default: same as `freeze_vision`. false together with `freeze_vision` trains the merger but not the tower."""
    freeze_language: bool = rare(False)
    """Freeze the language model, including its embeddings and head."""
    router_aux_loss_coef: float = rare(bounded(0.0, at_least=0))
    """Weight of the load-balancing loss of mixtures of experts, which keeps all experts in use; 0 disables it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: saves memory and takes about a third more time. It takes more than
    twice the time for models whose prompts are copied for every response (sliding windows, linear attention), because
    each response then reads its own prompt."""

    def validate(self) -> None:
        """Check that the fields fit together; raises UserError."""
        super().validate()
        self._validate_parts()
        if any(width < 1 for width in self.critic.hidden):
            raise UserError(f"model.critic.hidden is {list(self.critic.hidden)}; each width must be at least 1")

    @property
    def keeps_merger(self) -> bool:
        """Whether the merger is frozen."""
        return self.freeze_vision if self.freeze_merger is None else self.freeze_merger

    def _validate_parts(self) -> None:
        """Refuse parts that nothing trains, and switches that reach nothing."""
        lora = self.lora
        if lora.enabled and not (lora.targets or lora.vision_targets):
            raise UserError("model.lora.targets is empty; add layers such as q_proj, v_proj")
        if lora.enabled and (self.freeze_language or self.freeze_merger is not None):
            raise UserError(
                "model.lora.enabled freezes all weights of the model, so model.freeze_language and "
                "model.freeze_merger have no effect; remove them, and choose parts with model.lora.targets and "
                "vision_targets"
            )
        if lora.vision_targets and self.freeze_vision:
            raise UserError(
                "model.lora.vision_targets trains adapters in the vision tower or the merger, but "
                "model.freeze_vision is set; remove one of them"
            )
        if self.freeze_vision and self.keeps_merger and self.freeze_language:
            raise UserError(
                "model.freeze_vision and model.freeze_language leave nothing to train; model.freeze_merger=false "
                "trains the merger"
            )


def check_critic(config: ModelConfig, needed: bool) -> None:
    """Reject settings of a value head that is not used."""
    if not needed and config.critic != CriticSettings():
        raise ValueError(
            "model.critic is set, but the objective has no critic; use an advantage that has one (gae, gae_turn), or "
            "remove model.critic"
        )


def check_update_precision(config: ModelConfig, learning_rate: float) -> None:
    """Reject full fine-tuning whose steps are too small for the weights' precision.

    Neighbouring bfloat16 numbers near a typical weight of 0.02 are 1e-4 apart and AdamW moves a weight by about the
    learning rate, so smaller steps are rounded away and nothing is learned. LoRA weights are float32 in any case.
    """
    if config.dtype == "bfloat16" and not config.lora.enabled and learning_rate < SMALLEST_LOW_PRECISION_STEP:
        raise ValueError(
            f"model.dtype is bfloat16 and trainer.learning_rate {learning_rate:g}: such steps are lost to rounding in "
            "bfloat16 weights; use model.dtype=float32 with trainer.mixed_precision=bf16, or model.lora.enabled=true"
        )
