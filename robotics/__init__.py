"""Robots: simulation, vision-language-action policies, and training from the policies' own successes.

    from robotics import ModuleAdapter, RobotGrpoConfig, TabletopBatch

The rooms are `robotics.sim` (MuJoCo scenes, Gymnasium environments, workers, rendering), `robotics.data` (the format
LeRobotDataset v3), `robotics.methods` (cloning, GRPO, PPO, SRPO), `robotics.offpolicy` (SAC from a replay),
`robotics.interventions` (people who take over from a policy), `robotics.serving` (a policy behind a websocket) and
`robotics.flow3d` (3D flow of objects: its world model, planner and rewards). Importing the package loads none of them,
only what is taken from it.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "robotics.data": ("EpisodeWriter", "LeRobotReader"),
    "robotics.episodes.collect": ("ActingSettings", "run_episodes"),
    "robotics.episodes.payload": ("EpisodeSetConfig",),
    "robotics.flow3d.clip": ("FlowClip",),
    "robotics.flow3d.methods.awm": ("Flow3dAwmConfig", "Flow3dAwmRecipe"),
    "robotics.flow3d.methods.flow3d_recipe": ("Flow3dConfig", "Flow3dRecipe"),
    "robotics.flow3d.model.world_model_settings": ("FlowModelConfig",),
    "robotics.flow3d.model.world_model": ("FlowWorldModel",),
    "robotics.flow3d.plan.planner": ("FlowPlanner", "PlannerConfig"),
    "robotics.flow3d.reward.following": ("FlowProgress", "flow_progress_reward"),
    "robotics.interventions.hg_dagger": ("HgDaggerConfig", "HgDaggerRecipe"),
    "robotics.interventions.rlif": ("RobotRlifConfig", "RobotRlifRecipe"),
    "robotics.methods.clone": ("CloneConfig", "CloneRecipe"),
    "robotics.methods.grpo": ("RobotGrpoConfig", "RobotGrpoRecipe"),
    "robotics.methods.latents": ("LatentConfig", "make_latent"),
    "robotics.methods.ppo": ("RobotPpoConfig", "RobotPpoRecipe"),
    "robotics.methods.progress": ("ProgressSettings", "progress_rewards"),
    "robotics.methods.srpo": ("SrpoConfig", "SrpoRecipe"),
    "robotics.methods.video_encoder": ("VideoEncoder", "train_video_encoder"),
    "robotics.offpolicy.presets": (
        "RobotDsrlConfig",
        "RobotDsrlRecipe",
        "RobotResidualConfig",
        "RobotResidualRecipe",
        "RobotRlpdConfig",
        "RobotRlpdRecipe",
    ),
    "robotics.offpolicy.sac": ("RobotSacConfig", "RobotSacRecipe"),
    "robotics.offpolicy.sac_learner": ("SacLearner", "SacSettings"),
    "robotics.policies.base.action_tokens": ("RowGenerators", "draw_rows"),
    "robotics.policies.base.action_policy": ("ActionPolicy", "PolicyInputs", "open_policy"),
    "robotics.policies.flow": ("FlowActionPolicy", "FlowPolicyConfig"),
    "robotics.policies.gaussian": ("GaussianActionPolicy", "GaussianPolicyConfig"),
    "robotics.policies.improved": ("ResidualPolicy", "ResidualPolicyConfig", "SteeredPolicy", "SteeredPolicyConfig"),
    "robotics.policies.policy_loading": ("ActionPolicyConfig", "load_action_policy"),
    "robotics.policies.module": ("ModuleAdapter",),
    "robotics.policies.squashed": ("SquashedActionPolicy", "SquashedPolicyConfig"),
    "robotics.policies.small": ("SmallVlaConfig", "SmallVlaPolicy"),
    "robotics.policies.vlm": ("VlmActionConfig", "VlmActionPolicy"),
    "robotics.rewards.judged_sim": ("JudgedSim",),
    "robotics.rewards.lerobot_classifier": ("LeRobotClassifier",),
    "robotics.rewards.success_classifier": ("SuccessClassifier",),
    "robotics.rewards.success_recipe": ("SuccessRecipe", "SuccessRunConfig"),
    "robotics.scenes.arms": ("ARMS",),
    "robotics.scenes.batch": ("BatchSettings", "TabletopBatch"),
    "robotics.scenes.envs": ("TabletopEnv",),
    "robotics.scenes.experts": ("EXPERTS", "Expert"),
    "robotics.scenes.tabletop_tasks": ("TASKS",),
    "robotics.scenes.vector_env": ("TabletopVectorEnv",),
    "robotics.sim.episodes": ("ChunkResult", "EpisodeSpec", "RobotObservation", "RobotSim"),
    "robotics.sim.opening": ("SimConfig", "open_sim"),
    "robotics.sim.subprocess_sim": ("SubprocessSettings", "SubprocessSim"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
