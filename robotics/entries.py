"""Recipes and metrics of robots; loads none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "flow3d",
        "robotics.flow3d.methods.flow3d_recipe:Flow3dRecipe:Flow3dConfig",
        "a world model of 3D flow, which predicts how the points of an object will move",
        "3DFlowAction, arXiv 2506.06199",
        supervised=True,
    ),
    RecipeEntry(
        "flow3d_awm",
        "robotics.flow3d.methods.awm:Flow3dAwmRecipe:Flow3dAwmConfig",
        "a world model of 3D flow fine-tuned on a verifier's verdict, with the loss of AWM",
        "Xue et al., AWM, arXiv 2509.25050, on 3DFlowAction, arXiv 2506.06199",
    ),
    RecipeEntry(
        "robot_clone",
        "robotics.methods.clone:CloneRecipe:CloneConfig",
        "behaviour cloning of a robot policy",
        "Pomerleau, ALVINN, 1988; action chunks as in ACT, arXiv 2304.13705",
        supervised=True,
    ),
    RecipeEntry(
        "robot_grpo",
        "robotics.methods.grpo:RobotGrpoRecipe:RobotGrpoConfig",
        "GRPO on episodes with success, a hand-written reward, or progress along a predicted 3D flow",
        "SimpleVLA-RL, arXiv 2509.09674",
    ),
    RecipeEntry(
        "robot_ppo",
        "robotics.methods.ppo:RobotPpoRecipe:RobotPpoConfig",
        "PPO on episodes with a critic of the simulator's full state and a reward for every chunk of actions",
        "Schulman et al., PPO, arXiv 1707.06347, with an asymmetric critic, arXiv 1710.06542",
    ),
    RecipeEntry(
        "robot_distil",
        "robotics.methods.distillation:RobotDistilRecipe:RobotDistilConfig",
        "distillation of a robot policy from a larger or an earlier one, in the states that it reaches itself (OPD)",
        "Thinking Machines, on-policy distillation (2025); RLinf, OPD",
    ),
    RecipeEntry(
        "srpo",
        "robotics.methods.srpo:SrpoRecipe:SrpoConfig",
        "failures rewarded by their distance to the policy's own successes",
        "SRPO, arXiv 2511.15605",
    ),
)
EVALUATIONS = (
    RecipeEntry(
        "flow3d_eval",
        "robotics.flow3d.closed_loop.closed_loop_recipe:Flow3dEvaluation:Flow3dEvaluationConfig",
        "a world model of 3D flow in closed loop, on arms, objects and backgrounds it has and has not seen",
        "3DFlowAction, arXiv 2506.06199",
        trains=False,
    ),
)
PLAN = "robotics.robot_plan:footprint"
"""Function for `mmrl train --dry-run`."""
BUILDS_ON = "diffusion"
"""Package whose metrics the recipes have too."""

METRICS = {
    "time/teacher_logp": "Seconds of the teacher's pass over the step's rows before the update.",
    "policy/entropy": "Mean entropy of the policy at the actions, or flows, of the update's groups, in nats.",
    "loss/distillation": "Exact divergence from the teacher, weight included.",
    "distil/divergence": "Mean exact divergence from the teacher, in nats per decision.",
    "distil/kl_sampled": "Mean logp - logp_teacher on the policy's own samples: its KL to the teacher, in nats.",
    "accuracy/within_5cm": "Fraction of predicted 3D flow points, over all frames, within 5 cm of the true ones.",
    "accuracy/language_swap": "Fraction of other instructions for a scene whose predicted flow follows them.",
    "flow/ade_cm": "Mean distance between predicted and true points of 3D flow over all frames, in centimetres.",
    "flow/fde_cm": "Mean distance between predicted and true points of 3D flow in the last frame, in centimetres.",
    "flow/ade_visible_cm": "Mean distance between predicted and true points while they are visible, in centimetres.",
    "flow/fde_visible_cm": "Mean distance of the points that are visible in the last frame, in centimetres.",
    "flow/best_ade_cm": "Mean distance over all frames of the nearest of several predictions, in centimetres.",
    "flow/zero_motion_ade_cm": "Mean distance over all frames if nothing moved, in centimetres.",
    "flow/zero_motion_fde_cm": "Mean distance in the last frame if nothing moved, in centimetres.",
    "flow/rotation_deg": "Median angle between the predicted and the true rotation of the object, in degrees.",
    "data/clips": "Training clips of 3D flow.",
    "verifier/precision": "Fraction of accepted predictions that end with the task done, by the simulator's check.",
    "verifier/recall": "Fraction of predictions ending with the task done that the verifier accepts.",
    "verifier/accepts": "Fraction of predictions that the verifier accepts.",
    "verifier/judged": "Predictions that the verifier judged.",
    "plan/tries": "Mean number of predictions per episode.",
    "plan/ended/<reason>": "Episodes that the planner ended early, by reason.",
    "accuracy/<verifier>": "Fraction of guessed flows that a verifier accepts.",
    "score/<verifier>": "Mean score that a verifier gives to guessed flows.",
    "time/verify": "Seconds of judging guessed flows.",
    "success/<greedy_swapped|sampled_swapped>": "Fraction of successful episodes when shown another episode's images.",
    "success/<greedy_swapped|sampled_swapped>/<task>": "Fraction of successes on one task, shown other images.",
    "success/closed_loop": "Fraction of episodes in which a plan made from the predicted flow succeeds.",
    "success/of_families": "Plain mean of the success of the kinds of task: place, pour, insert, drawer.",
    "episode/steps": "Mean number of control steps of the step's episodes.",
    "episode/steps_to_success/<greedy|sampled>": "Mean number of control steps of the evaluation's successes.",
    "episode/failed/<greedy|sampled|closed_loop>": "Evaluation episodes without a result: their environment broke.",
    "episode/steps_to_success/<greedy_swapped|sampled_swapped>": "Mean control steps of successes, shown other images.",
    "episode/failed/<greedy_swapped|sampled_swapped>": "Episodes without a result, shown other images.",
    "sim/episodes_failed": "Training episodes without a result so far; each took its group out of a step.",
    "srpo/clusters": "Mean number of clusters among the successes of a task or initial state.",
    "srpo/noise_fraction": "Fraction of the successes outside all clusters.",
    "srpo/tasks_without_reference": "Fraction of the step's tasks or initial states with no success to compare with.",
    "srpo/tasks_with_fallback": "Fraction of the step's initial states that borrow the successes of others.",
    "srpo/agreement": "Spearman's rank correlation of the reward with the simulator's own, over failures of one start.",
    "srpo/advantage_correlation": "Correlation of the advantages with those that the simulator's reward would give.",
    "srpo/invalid_latents": "Episodes so far that could not be embedded; they are not trained on.",
    "time/latents": "Seconds of embedding episodes.",
    "time/flow": "Seconds of predicting flows and comparing episodes with them.",
    "flow/agreement": "Spearman's rank correlation of the flow reward with the simulator's own, over failures.",
    "flow/failed_predictions": "Initial states so far for which no flow could be predicted; they are not trained on.",
    "flow/failed_tracks": "Episodes so far whose object was lost by the tracker; they are not trained on.",
    "bc/loss": "Loss of behaviour cloning.",
    "bc/token_accuracy": "Fraction of action tokens for which the demonstrated value is the most likely one.",
    "bc/action_error": "Mean distance of the most likely action to the demonstrated one, in -1..1.",
    "bc/std": "Mean standard deviation of a Gaussian action head, in -1..1.",
    "data/transitions": "Transitions of the demonstrations.",
}
