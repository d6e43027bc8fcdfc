"""Reinforcement learning of vision-language models.

Recipes, policy, sampler, tasks and options by name; importing the package loads none of them, only what is taken from
it: `from mmrl.vlm import PapoRecipe, VlmPolicy, load_policy, sample`. Critics are in `mmrl.vlm.critic`, frame selection
in long videos in `mmrl.vlm.tspo`.
"""

from __future__ import annotations

from mmrl.lazy import lazy_names

_NAMES = {
    "mmrl.vlm.apo": ("ApoConfig", "ApoRecipe"),
    "mmrl.vlm.config": ("VlmConfig",),
    "mmrl.vlm.data": ("DataConfig", "LoadedTasks", "load_tasks"),
    "mmrl.vlm.evaluation": ("AnswerMeasure", "VlmEvaluationConfig"),
    "mmrl.vlm.kept_prefill": ("KeepPrefill",),
    "mmrl.vlm.masking": ("blacken_frames", "blacken_patches"),
    "mmrl.vlm.model_config": ("CriticSettings", "FrozenModelConfig", "LoraSettings", "ModelConfig"),
    "mmrl.vlm.models": ("load_policy",),
    "mmrl.vlm.pairs": ("PairColumns", "keep_pairs", "sides_of"),
    "mmrl.vlm.papo": ("PapoConfig", "PapoRecipe", "perception_terms"),
    "mmrl.vlm.payload": ("Prompt", "VlmPayload"),
    "mmrl.vlm.policy": ("VlmPolicy",),
    "mmrl.vlm.preference": ("PreferenceRecipe", "PreferenceRunConfig"),
    "mmrl.vlm.recipe": ("VlmRecipe",),
    "mmrl.vlm.reg_grpo": ("RegGrpoConfig", "RegGrpoRecipe"),
    "mmrl.vlm.sampler": ("PolicySampler", "sample"),
    "mmrl.vlm.sampling": ("SamplerConfig", "Samples"),
    "mmrl.vlm.sft": ("SftConfig", "SftRecipe"),
    "mmrl.vlm.task": ("TaskError", "VideoClip", "VlmTask"),
    "mmrl.vlm.video_input": ("VideoOptions", "load_videos"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
