"""Reinforcement learning of vision-language models.

Recipes, policy, sampler, tasks and options by name; importing the package loads none of them, only what is taken from
it: `from mmrl.vlm import PapoRecipe, VlmPolicy, load_policy, sample`. Critics are in `mmrl.vlm.critic`, frame selection
in long videos in `mmrl.vlm.tspo`.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "mmrl.vlm.vlm_config": (
        "VlmConfig",
        "VlmEvaluationConfig",
    ),
    "mmrl.vlm.data.dataset": (
        "DataConfig",
        "LoadedTasks",
        "load_tasks",
    ),
    "mmrl.vlm.data.prompt": (
        "Prompt",
        "VlmPayload",
    ),
    "mmrl.vlm.data.task": (
        "TaskError",
        "VideoClip",
        "VideoOptions",
        "VlmTask",
        "load_videos",
    ),
    "mmrl.vlm.engine.vlm_policy": (
        "VlmPolicy",
        "load_policy",
    ),
    "mmrl.vlm.engine.prefix": ("KeepPrefill",),
    "mmrl.vlm.engine.vlm_sampler": (
        "PolicySampler",
        "SamplerConfig",
        "Samples",
        "sample",
    ),
    "mmrl.vlm.vlm_evaluation": ("AnswerMeasure",),
    "mmrl.vlm.methods.apo": (
        "ApoConfig",
        "ApoRecipe",
    ),
    "mmrl.vlm.methods.pairs": (
        "PairColumns",
        "keep_pairs",
        "sides_of",
    ),
    "mmrl.vlm.methods.papo": (
        "PapoConfig",
        "PapoRecipe",
        "blacken_frames",
        "blacken_patches",
        "perception_terms",
    ),
    "mmrl.vlm.methods.preference": (
        "PreferenceRecipe",
        "PreferenceRunConfig",
    ),
    "mmrl.vlm.methods.distillation": ("DistilConfig", "DistilRecipe", "DistilSettings"),
    "mmrl.vlm.methods.multi_teacher": ("MultiTeacherConfig", "MultiTeacherRecipe"),
    "mmrl.vlm.methods.teacher": ("Teacher", "TeacherConfig"),
    "mmrl.vlm.methods.reg_grpo": (
        "RegGrpoConfig",
        "RegGrpoRecipe",
    ),
    "mmrl.vlm.methods.sft": (
        "SftConfig",
        "SftRecipe",
    ),
    "mmrl.vlm.model.model_config": (
        "CriticSettings",
        "FrozenModelConfig",
        "LoraSettings",
        "ModelConfig",
    ),
    "mmrl.vlm.vlm_recipe": ("VlmRecipe",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
