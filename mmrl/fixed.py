"""Options that became constants in 0.3: their value and why. A file may still give the value, and no other."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


class Fixed(NamedTuple):
    """Value of a former option and the reason why it is no longer an option."""

    value: Any
    reason: str


def fixed_options(schema: type[Any]) -> dict[str, Fixed]:
    """Former options of a dataclass and its bases by name."""
    kept = {item.name for item in dataclasses.fields(schema)}
    found: dict[str, Fixed] = {}
    for base in schema.__mro__:
        for name, fixed in FIXED.get(f"{base.__module__.rpartition('.')[2]}.{base.__name__}", {}).items():
            if name not in kept:
                found.setdefault(name, fixed)
    return found


BREAKDOWN = "a guard against endless retries"
LONG_CAPTION = "a longer text is not a caption"
LONG_LINE = "a longer line is damaged, or contains images that belong in files"
IK = "the search works with these numbers for every arm"
NOISE = "it allows for noise of the depth camera"
FIXED: dict[str, dict[str, Fixed]] = {
    "settings.BaseTrainerConfig": {"max_nonfinite": Fixed(10, "a run with as many skipped steps has diverged")},
    "settings.TrustRegionConfig": {"backtracks": Fixed(10, "as in the public code")},
    "settings.RollersConfig": {"tries": Fixed(3, BREAKDOWN)},
    "model_config.FrozenModelConfig": {"patch_product": Fixed(True, "a convolution computes the same, slower")},
    "tables.RowsConfig": {"max_line_mb": Fixed(32, LONG_LINE)},
    "prompts.PromptConfig": {"max_prompt_chars": Fixed(10_000, LONG_CAPTION)},
    "captioned_images.ImageDataConfig": {"max_prompt_chars": Fixed(10_000, LONG_CAPTION)},
    "image_pairs.ImagePairConfig": {"max_prompt_chars": Fixed(10_000, LONG_CAPTION)},
    "env_pool.EnvironmentConfig": {
        "heartbeat_timeout_s": Fixed(30.0, "a worker sends a heartbeat every second"),
        "reset_retries": Fixed(2, BREAKDOWN),
        "max_restarts": Fixed(20, BREAKDOWN),
    },
    "grounding_tasks.GroundingSettings": {
        "min_side": Fixed(2, "a smaller box teaches nothing"),
        "min_visible": Fixed(0.5, "a box outside of its image teaches nothing"),
    },
    "multi_teacher.TeachersSettings": {
        "responses_key": Fixed("teacher_responses", "rename the column of the data"),
        "answer_mark": Fixed("<answer>", "the format of the paper's responses"),
        "least_reward": Fixed(1.0, "a teacher's answer counts as correct"),
    },
    "scaffolded.ScaffoldSettings": {"hints_key": Fixed("hints", "rename the column of the data")},
    "meta_reward.RubricSettings": {"longest": Fixed(8000, "a longer text is not a rubric")},
    "masked_config.MaskedSftConfig": {"shortest_time": Fixed(1e-3, "it only serves to keep the weight 1/t finite")},
    "latent_critic.ShapingConfig": {"momentum": Fixed(0.05, "the running mean only needs to follow slowly")},
    "latent_critic.LatentCriticConfig": {"max_grad_norm": Fixed(1.0, "a guard of the critic's optimiser")},
    "planner_config.PlannerConfig": {
        "min_points": Fixed(8, NOISE),
        "smooth_window": Fixed(3, NOISE),
        "least_motion_m": Fixed(0.005, NOISE),
        "check_collisions": Fixed(True, "a path through the table is not feasible"),
        "ik": Fixed(
            {
                "position_tolerance_m": Fixed(0.003, IK),
                "angle_tolerance_rad": Fixed(0.03, IK),
                "iterations": Fixed(50, IK),
                "restarts": Fixed(4, IK),
                "orientation_cost": Fixed(0.3, IK),
                "posture_cost": Fixed(1e-3, IK),
                "step_rad": Fixed(0.5, IK),
                "limit_distance": Fixed(0.005, IK),
                "jump_rad": Fixed(0.6, IK),
            },
            IK,
        ),
    },
    "reach.ReachSettings": {
        "standoff_m": Fixed(0.1, "every gripper approaches a grasp in the same way"),
        "step_m": Fixed(0.05, "as in ReKep's code"),
        "step_rad": Fixed(0.34, "as in ReKep's code"),
        "clearance_m": Fixed(0.003, NOISE),
        "points_inside": Fixed(3, NOISE),
        "hidden_share": Fixed(0.05, NOISE),
        "plans": Fixed(24, "more plans are hardly ever any shorter"),
    },
    "execution.ExecutionSettings": {
        "sub_steps": Fixed(4, "the controller does not need more"),
        "grasp_tries": Fixed(2, BREAKDOWN),
        "drift_m": Fixed(0.02, NOISE),
        "dropped_m": Fixed(0.05, NOISE),
        "tilted_rad": Fixed(0.6, "its only purpose is to separate pouring from placing"),
    },
}
"""Former options by file and class, wherever a configuration has that part; options of a former part are listed inside
it."""
