"""Recipes and metrics of robots; does not import the modules it refers to."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "flow3d",
        "robotics.flow3d.methods.flow3d_recipe:Flow3dRecipe:Flow3dConfig",
        "a 3D-flow world model that predicts how the points of an object will move",
        "3DFlowAction, arXiv 2506.06199",
        supervised=True,
    ),
    RecipeEntry(
        "flow3d_awm",
        "robotics.flow3d.methods.awm:Flow3dAwmRecipe:Flow3dAwmConfig",
        "a 3D-flow world model fine-tuned on a verifier's verdicts with the AWM loss",
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
        "robot_hg_dagger",
        "robotics.interventions.hg_dagger:HgDaggerRecipe:HgDaggerConfig",
        "behaviour cloning on a dataset that grows by the steps in which a person (or a script) takes over",
        "Kelly et al., HG-DAgger, arXiv 1810.02890",
        supervised=True,
    ),
    RecipeEntry(
        "robot_grpo",
        "robotics.methods.grpo:RobotGrpoRecipe:RobotGrpoConfig",
        "GRPO on episodes rewarded by success, a hand-written reward, or progress along a predicted 3D flow",
        "SimpleVLA-RL, arXiv 2509.09674",
    ),
    RecipeEntry(
        "robot_ppo",
        "robotics.methods.ppo:RobotPpoRecipe:RobotPpoConfig",
        "PPO on episodes with a critic of the simulator's full state and a reward for every chunk of actions",
        "Schulman et al., PPO, arXiv 1707.06347, with an asymmetric critic, arXiv 1710.06542",
    ),
    RecipeEntry(
        "robot_sac",
        "robotics.offpolicy.sac:RobotSacRecipe:RobotSacConfig",
        "soft actor-critic from a replay of all episodes, with chunks of actions and any number of critics",
        "Haarnoja et al., SAC, arXiv 1801.01290 and 1812.05905",
    ),
    RecipeEntry(
        "robot_residual",
        "robotics.offpolicy.presets:RobotResidualRecipe:RobotResidualConfig",
        "a bounded residual on the actions of any frozen policy, learned by soft actor-critic",
        "Johannink et al., residual reinforcement learning, arXiv 1812.03201; PLD, arXiv 2511.00091",
    ),
    RecipeEntry(
        "robot_dsrl",
        "robotics.offpolicy.presets:RobotDsrlRecipe:RobotDsrlConfig",
        "the noise that a frozen flow policy starts from, learned by soft actor-critic (DSRL-SAC)",
        "Wagenmaker et al., DSRL, arXiv 2506.15799",
    ),
    RecipeEntry(
        "robot_rlpd",
        "robotics.offpolicy.presets:RobotRlpdRecipe:RobotRlpdConfig",
        "robot_sac with demonstrations as half of every batch, ten critics and twenty updates per decision",
        "Ball et al., RLPD, arXiv 2302.02948",
    ),
    RecipeEntry(
        "robot_rlif",
        "robotics.interventions.rlif:RobotRlifRecipe:RobotRlifConfig",
        "robot_rlpd whose only reward is that an overseer takes over, which costs 1",
        "Luo et al., RLIF, arXiv 2311.12996",
    ),
    RecipeEntry(
        "robot_success",
        "robotics.rewards.success_recipe:SuccessRecipe:SuccessRunConfig",
        "a classifier that sees in an image whether a task is solved, as the reward of robots without a success signal",
        "Luo et al., HIL-SERL, arXiv 2410.21845",
        supervised=True,
    ),
    RecipeEntry(
        "robot_distil",
        "robotics.methods.distillation:RobotDistilRecipe:RobotDistilConfig",
        "distillation of a robot policy from a larger or earlier one, in states that the student itself reaches (OPD)",
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
        "closed-loop evaluation of a 3D-flow world model on seen and unseen arms, objects and backgrounds",
        "3DFlowAction, arXiv 2506.06199",
        trains=False,
    ),
)
PLAN = "robotics.robot_plan:footprint"
"""Function for `mmrl train --dry-run`."""
BUILDS_ON = "diffusion"
"""Package whose metrics these recipes also report."""

METRICS = {
    "response/length_mean": (
        "Mean number of decisions in a sample: an episode, a demonstrated chunk, a 3D flow or a classified image."
    ),
    "response/length_max": "Maximum number of decisions in a sample of the step.",
    "time/teacher_logp": "Seconds for the teacher's forward pass over the step's rows before the update.",
    "policy/entropy": "Mean entropy of the policy at the actions (or flows) of the groups in the update, in nats.",
    "loss/distillation": "Exact divergence from the teacher, multiplied by its weight.",
    "distil/divergence": "Mean exact divergence from the teacher, in nats per decision.",
    "distil/kl_sampled": (
        "Mean of logp - logp_teacher on the policy's own samples, which estimates its KL to the teacher, in nats."
    ),
    "accuracy/within_5cm": "Fraction of predicted 3D flow points, over all frames, within 5 cm of the true ones.",
    "accuracy/language_swap": "Fraction of alternative instructions for a scene that the predicted flow follows.",
    "flow/ade_cm": "Mean distance between predicted and true points of 3D flow over all frames, in centimetres.",
    "flow/fde_cm": "Mean distance between predicted and true points of 3D flow in the last frame, in centimetres.",
    "flow/ade_visible_cm": "Mean distance between predicted and true points while they are visible, in centimetres.",
    "flow/fde_visible_cm": (
        "Mean distance between predicted and true points that are visible in the last frame, in centimetres."
    ),
    "flow/best_ade_cm": "Mean distance over all frames of the best of several predictions, in centimetres.",
    "flow/zero_motion_ade_cm": "Mean distance over all frames if nothing moved, in centimetres.",
    "flow/zero_motion_fde_cm": "Mean distance in the last frame if nothing moved, in centimetres.",
    "flow/rotation_deg": "Median angle between the predicted and the true rotation of the object, in degrees.",
    "data/clips": "Number of training clips of 3D flow.",
    "verifier/precision": "Fraction of accepted predictions that solve the task, according to the simulator.",
    "verifier/recall": "Fraction of predictions that solve the task which the verifier accepts.",
    "verifier/accepts": "Fraction of predictions that the verifier accepts.",
    "verifier/judged": "Number of predictions that the verifier judged.",
    "plan/tries": "Mean number of predictions per episode.",
    "plan/ended/<reason>": "Number of episodes that the planner ended early, by reason.",
    "accuracy/<verifier>": "Fraction of sampled flows that a verifier accepts.",
    "score/<verifier>": "Mean score that a verifier gives to sampled flows.",
    "time/verify": "Seconds spent judging sampled flows.",
    "success/<greedy_swapped|sampled_swapped>": "Fraction of successful episodes when shown another episode's images.",
    "success/<greedy_swapped|sampled_swapped>/<task>": (
        "Fraction of successful episodes on one task when shown another episode's images."
    ),
    "success/closed_loop": "Fraction of episodes in which a plan made from the predicted flow succeeds.",
    "success/of_families": "Unweighted mean success over the kinds of task: place, pour, insert, drawer.",
    "episode/steps": "Mean number of control steps in the episodes of the step.",
    "episode/steps_to_success/<greedy|sampled>": (
        "Mean number of control steps in the evaluation's successful episodes."
    ),
    "episode/jump_at_seams/<greedy|sampled>": (
        "Mean distance of consecutive executed actions, in the simulator's -1..1, where one chunk follows another."
    ),
    "episode/jump_inside/<greedy|sampled>": "Mean distance of consecutive executed actions inside of chunks.",
    "episode/failed/<greedy|sampled|closed_loop>": (
        "Number of evaluation episodes without a result because their environment failed."
    ),
    "episode/steps_to_success/<greedy_swapped|sampled_swapped>": (
        "Mean number of control steps in successful episodes when shown another episode's images."
    ),
    "episode/jump_at_seams/<greedy_swapped|sampled_swapped>": (
        "Distance of consecutive executed actions where one chunk follows another, with another episode's images."
    ),
    "episode/jump_inside/<greedy_swapped|sampled_swapped>": (
        "Distance of consecutive executed actions inside of chunks, with another episode's images."
    ),
    "episode/failed/<greedy_swapped|sampled_swapped>": (
        "Number of episodes without a result when shown another episode's images."
    ),
    "sim/episodes_failed": (
        "Number of training episodes without a result so far; the whole group of such an episode is skipped."
    ),
    "srpo/clusters": "Mean number of clusters among the successes of a task or initial state.",
    "srpo/noise_fraction": "Fraction of successes that belong to no cluster.",
    "srpo/tasks_without_reference": "Fraction of the step's tasks or initial states with no success to compare with.",
    "srpo/tasks_with_fallback": "Fraction of the step's initial states that use the successes of other initial states.",
    "srpo/agreement": (
        "Spearman rank correlation of the reward with the simulator's own, over failures from the same initial state."
    ),
    "srpo/advantage_correlation": "Correlation of the advantages with those from the simulator's own reward.",
    "srpo/invalid_latents": "Number of episodes so far that could not be embedded; they are not trained on.",
    "time/latents": "Seconds spent embedding episodes.",
    "time/flow": "Seconds spent predicting flows and comparing episodes with them.",
    "flow/agreement": "Spearman rank correlation of the flow reward with the simulator's own, over failures.",
    "flow/failed_predictions": (
        "Number of initial states so far for which no flow could be predicted; they are not trained on."
    ),
    "flow/failed_tracks": "Number of episodes so far in which the tracker lost the object; they are not trained on.",
    "episode/return/<greedy|sampled>": (
        "Mean sum of the environment's own rewards over the evaluation's episodes, unless these are potentials."
    ),
    "replay/transitions": "Number of decisions in the replay.",
    "replay/control_steps": "Number of control steps in the replay, those of the warm-up included.",
    "sac/updates": "Number of updates of the critics so far.",
    "sac/q": "Mean value that the critics give to the executed actions of the batches.",
    "sac/q_prior": "Mean value of the critics for transitions of prior data, if batches have both kinds.",
    "sac/q_online": "Mean value of the critics for transitions of the run's own replay, if batches have both kinds.",
    "sac/td_error": "Mean distance between the mean value of the critics and its target.",
    "sac/target_max": "Largest target of the step.",
    "sac/entropy": "Mean of -log pi at sampled actions, in nats per entry of an action.",
    "sac/alpha": "Weight of entropy.",
    "loss/critic": "Mean squared error of the critics.",
    "loss/actor": "Loss of the actor: alpha log pi - Q at sampled actions, and behaviour cloning if it has a weight.",
    "loss/temperature": "Loss of log alpha.",
    "classifier/precision": "Fraction of the episodes judged solved whose frame at the verdict shows success.",
    "classifier/recall": "Fraction of the successful episodes that are judged solved at a frame that shows success.",
    "classifier/false_positives": "Fraction of all episodes that are judged solved at a frame without success.",
    "classifier/early": "Fraction of all episodes that are judged solved before they are; part of the false positives.",
    "classifier/frame_precision": "Fraction of the frames above the threshold that show success.",
    "classifier/frame_recall": "Fraction of the frames with success that are above the threshold.",
    "accuracy/episodes": "Fraction of episodes with a right verdict of the success classifier.",
    "judged/<agreement|false_positives|false_negatives|true_success>": (
        "Fractions of the step's episodes in which a success classifier agrees with the environment's own success, "
        "claims success wrongly or misses it, and of episodes that the environment counts as solved."
    ),
    "judged/<agreement|false_positives|false_negatives|true_success>/<greedy|sampled>": (
        "Fractions of the evaluation's episodes in which a success classifier agrees with the environment's success, "
        "claims success wrongly or misses it, and of episodes that the environment counts as solved."
    ),
    "bc/loss": "Loss of behaviour cloning.",
    "bc/token_accuracy": "Fraction of action tokens whose demonstrated value is the most likely one.",
    "bc/action_error": "Mean distance between the most likely and the demonstrated action, on the scale -1..1.",
    "bc/std": "Mean standard deviation of a Gaussian action head, on the scale -1..1.",
    "data/transitions": "Number of transitions in the demonstrations.",
    "data/person_steps": "Number of control steps of an overseer among the transitions.",
    "intervention/rate": "Fraction of the control steps of the last round in which the overseer had control.",
    "intervention/per_episode": "Mean number of times that the overseer took over in an episode of the last round.",
    "intervention/success": "Fraction of successful episodes of the last round, with the overseer's help.",
    "intervention/success_alone": "Fraction of episodes of the last round that succeeded without the overseer.",
    "intervention/failed": "Number of episodes of the last round without a result because their environment failed.",
    "control/hz": "Control steps per second of a live session, averaged over the episodes of the last round.",
    "control/jitter_ms": "Standard deviation of the period of a live session's control steps, in milliseconds.",
    "control/longest_ms": "Longest period between two control steps of a live session's last round, in milliseconds.",
    "control/late": "Number of control steps of a live session's last round that began late.",
}
