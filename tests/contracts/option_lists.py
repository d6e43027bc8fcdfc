"""Options that change no number of a tiny run, each as the class that defines it and its name, with the reason."""

CANNOT = {
    "BaseRunConfig.recipe": "the name of the recipe itself",
    "BaseRunConfig.output_dir": "a path",
    "BaseTrainerConfig.timeout_minutes": "how long processes wait for one another",
    "BaseTrainerConfig.threads": "speed, and bits that depend on the machine",
    "BaseTrainerConfig.release_memory": "memory",
    "CheckpointConfig.minutes": "by the clock",
    "EvaluationConfig.batch_tasks": "memory",
    "TrackingConfig.quiet": "what is logged",
    "TrackingConfig.console_every": "what is logged",
    "TrackingConfig.tensorboard": "what is logged",
    "TrackingConfig.wandb": "what is logged",
    "TrackingConfig.trackio": "what is logged",
    "TrackingConfig.run_name": "what is logged",
    "TrackingConfig.strict": "refuses metrics without a definition; the suite's have one",
    "TrainerConfig.skip_zero_advantage_groups": "time; the gradient of those groups is zero",
    "ModelConfig.gradient_checkpointing": "memory",
    "PipelineConfig.gradient_checkpointing": "memory",
    "PipelineConfig.embedding_memory_mb": "memory",
    "PipelineConfig.embedding_cache": "a path",
    "PipelineConfig.free_text_encoders": "memory",
    "LatentSamplerConfig.batch_rows": "memory",
    "LatentSamplerConfig.kept_frames": "for videos",
    "SamplerConfig.keep_prefill": "time",
    "AnswerSampling.batch_rows": "memory",
    "MaskedSampling.batch_rows": "memory",
    "LikelihoodConfig.chunk": "memory",
    "FrozenModelConfig.shared_prefix": "time",
    "PreferenceRunConfig.precompute_reference": "memory and time",
    "LatentCriticConfig.batch_rows": "memory",
    "RewardConfig.isolate": "where a reward runs",
    "RewardConfig.workers": "speed",
    "AnswererConfig.batch_rows": "memory",
    "FeatureConfig.batch": "memory",
    "FeatureConfig.memory_mb": "memory",
    "FeatureConfig.cache": "a path",
    "EnvironmentConfig.workers": "speed",
    "EnvironmentConfig.isolate": "where an environment runs",
    "SimConfig.workers": "speed",
    "EpisodeConfig.cohort": "which episodes are sampled together; only rounding depends on it",
    **dict.fromkeys(
        (
            *("RollersConfig.engine", "RollersConfig.workers", "RollersConfig.address", "RollersConfig.unit"),
            *("RollersConfig.num_cpus", "RollersConfig.num_gpus", "RollersConfig.overlap"),
        ),
        "where tasks are sampled; of a unit's size only rounding depends",
    ),
}
"""Options that can change no number at all."""

IDLE = {
    "BaseTrainerConfig.on_nonfinite": "needs a loss that is not finite",
    "BaseTrainerConfig.sharding": "needs several processes; see test_sharding",
    "BaseTrainerConfig.gathered": "needs several processes; see test_sharding",
    "BaseTrainerConfig.mixed_precision": "given to the accelerator, and the walk's is made apart",
    "TrainerConfig.skip_steps_without_gradient": "needs a step without a gradient",
    **dict.fromkeys(
        ("PotentialConfig.demonstrations", "PotentialConfig.camera"),
        "needs demonstrations; tests/robotics/test_progress_sim.py",
    ),
    **dict.fromkeys(
        ("SuccessConfig.classifier", "SuccessConfig.threshold", "SuccessConfig.looks"),
        "needs a trained classifier; tests/robotics/rewards/test_judged_sim.py",
    ),
    "BuiltPath.build": "for files that are not there yet",
    "BuiltPath.build_options": "for files that are not there yet",
    "FrozenModelConfig.thinking": "the chat template of the tiny model has no switch",
    "RowsConfig.split": "for data sets of the hub",
    "RowsConfig.subset": "for data sets of the hub",
    "DataConfig.text_only": "needs rows that have no image where others have one",
    "DataConfig.on_bad_row": "needs a row that cannot be read",
    "PipelineConfig.family": "for a pipeline that the suite has no family for",
    "PipelineConfig.family_options": "the family of the tiny model has none of its own",
    "PipelineConfig.networks": "the tiny model has one",
    "PromptConfig.on_bad_row": "needs a row that cannot be read",
    "ImagePairConfig.on_bad_row": "needs a row that cannot be read",
    "TaskSetConfig.build": "for a file that is not there yet",
    "TaskSetConfig.build_options": "for a file that is not there yet",
    "DemonstrationConfig.cache": "a path",
    "DemonstrationConfig.units": "declares what the tiny data say of themselves; tests/robotics/test_seam.py",
    "ActionPolicyConfig.accept_other": "needs a policy that was trained on another robot; tests/robotics/test_seam.py",
    "RewardConfig.options": "the reward of the walk takes any",
    "RewardConfig.timeout_s": "needs a reward that hangs",
    "RewardConfig.batch_timeout_s": "needs a reward that hangs",
    "RewardConfig.memory_mb": "needs a reward that takes much memory",
    "EpisodeConfig.batching": "needs vLLM; tests/agents/test_cohorts.py",
    "EpisodeConfig.spare": "needs an environment that loses episodes; tests/agents/test_cohorts.py",
    "EnvironmentConfig.start_timeout_s": "needs an environment that hangs",
    "EnvironmentConfig.reset_timeout_s": "needs an environment that hangs",
    "EnvironmentConfig.step_timeout_s": "needs an environment that hangs",
    "EnvironmentConfig.memory_mb": "needs an environment that takes much memory",
    "EnvironmentConfig.variables": "the environment of the walk reads none",
    "AgentRewardConfig.invalid_turn": "needs an invalid answer; tests/agents/test_penalties.py",
    "OverflowConfig.result": "needs a conversation that becomes too long; tests/agents/test_penalties.py",
    "OverflowConfig.reward": "needs a conversation that becomes too long; tests/agents/test_penalties.py",
    **dict.fromkeys(
        (
            *("ObjectiveConfig.correction", "ObjectiveConfig.gate"),
            *("Correction.level", "Interval.low", "Interval.high"),
        ),
        "the walk samples and scores alike, within rounding; tests/core/test_mismatch.py",
    ),
    "Cispo.low": "its run has one update a step, in which the ratio is 1",
    "Cispo.high": "its run has one update a step, in which the ratio is 1",
    "RewardConfig.rows": "the rewards of the walk score each row by itself",
}
"""Options that the tiny runs leave idle, and what they need."""

UNTRIED = "the values that were tried do nothing in the tiny runs, and others were not tried yet"
VIDEOS = {
    f"{data}.video.{name}": "the runs of other recipes have videos, which are read by the same code"
    for data in ("data", "eval_data.<name>")
    for name in ("fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels")
}
UNPLANNED = "the flow of an untrained model moves no object; tests/robotics/flow3d/plan change these options"
KEPT = dict.fromkeys(("evaluation.videos", "evaluation.fps", "evaluation.video_size"), "what is kept")
ROBOT = {
    "objective.kl.clamp": "needs a large divergence",
    "model.options.label_smoothing": "for learning from demonstrations",
    "model.options.label_spread": "for learning from demonstrations",
}
OFFPOLICY = {
    **dict.fromkeys(
        (
            *("model.options.encoder.channels", "model.options.encoder.keypoints"),
            *("model.options.encoder.octaves", "model.options.encoder.condition_queries"),
            "model.options.encoder.words",
        ),
        "for images, which robot_sac has none of, and a limit",
    ),
    "capacity": "the replay of a tiny run is smaller; tests/robotics/offpolicy/test_sac_recipe.py",
    "critic_state": "the full state of the walk's simulator is that of the policy",
}
JPEG = "the reward of the walk reads no prompts"
EDITED = {
    f"eval_data.<name>.{name}": "the recipes that sample edit images, which are read by the same code"
    for name in ("image_key", "max_image_pixels")
}
ONE_KIND = {
    "objective.scaling.kind": "there is one kind",
    "objective.entropy.kind": "its weight is 0 by default",
    "objective.filter.kind": "every group has a signal",
    "objective.advantage.singleton": "needs a group of one sample",
    "objective.scaling.eps_to": "the variance of the tiny groups is much larger",
    "objective.kl.clamp": "needs a large divergence",
}
TALK = {
    "evaluation.videos": "what is kept",
    "episode.max_turns": "the environment of the walk ends by itself after two turns",
    "eval_data.<name>.first_seed": "the tiny model says the same whatever it sees",
    "eval_data.<name>.seen": "only says that training on these tasks is meant",
    **{
        f"{data}.{name}": "the environment of the walk has no named tasks and no options"
        for data in ("data", "eval_data.<name>")
        for name in ("names", "options")
    },
    "conversation.drop_thoughts": "the tiny model writes no thoughts",
    "conversation.history": "the chat template of the tiny model rewrites no turn",
    "conversation.history_turns": "the environment of the walk ends after two turns, the first of which stays",
    **{
        f"actions.{name}": "every text is one action of the walk's environment"
        for name in ("strict", "max_actions", "on_parse_error")
    },
}
NO_POINTS = "needs answers with points, which the tiny model does not write"
GROUNDING = {
    "grounding.space": NO_POINTS,
    **{
        f"answer.{name}": NO_POINTS
        for name in (
            *("accuracy", "parser", "collinear_scope", "collinear_tol_px", "max_answers", "dedupe_px"),
            "empty_is_malformed",
        )
    },
}
TEXT_ALONE = {
    **VIDEOS,
    **dict.fromkeys(
        ("data.max_image_pixels", "eval_data.<name>.max_image_pixels"),
        "masked-diffusion models read no pictures",
    ),
}
OWN: dict[str, dict[str, str]] = {
    "masked": {
        **ONE_KIND,
        **TEXT_ALONE,
        "trainer.old_logp": "its sampler has no log-probabilities, so auto recomputes them",
        **dict.fromkeys(("inpainting.stretch", "inpainting.max_gap"), "the answers of the walk have no room"),
    },
    "masked_sft": TEXT_ALONE,
    "aepo": {**ONE_KIND, **GROUNDING, "model.min_pixels": "the screens of the walk have more"},
    "apo": {"apo.stcr_base": "needs right and wrong answers of different lengths"},
    "vlm": {
        "evaluation.temperature": "no answer of the tiny model is right at any temperature",
        **dict.fromkeys(
            (
                *("evaluation.self_critic.shown", "evaluation.self_critic.protocol"),
                *("evaluation.self_critic.max_new_tokens", "evaluation.revision.max_new_tokens"),
            ),
            "the tiny model writes no judgement and no revision",
        ),
        "objective.scaling.kind": "there is one kind",
        "objective.scaling.eps_to": "the variance of the tiny groups is much larger",
        "objective.advantage.singleton": "needs a group of one sample",
        "objective.advantage.mask_carry": "needs masked tokens",
        "objective.kl.clamp": "needs a large divergence",
        "objective.filter.max_tries": "needs groups without a signal",
        "objective.clip.dual": UNTRIED,
        "objective.ratio.limit": UNTRIED,
        "objective.kl.aggregation": UNTRIED,
        "objective.filter.kind": UNTRIED,
        "model.min_pixels": UNTRIED,
        "model.max_pixels": UNTRIED,
        "model.max_prompt_tokens": UNTRIED,
        "model.lora.targets": UNTRIED,
        "sampler.stop": UNTRIED,
        **dict.fromkeys(VIDEOS, UNTRIED),
    },
    "awm": {
        "awm.ema_limit": "needs more steps",
        "awm.ema_slope": "needs more steps",
        "awm.off_policy": "needs more steps",
        "timesteps.shift": "for continuous times",
        "timesteps.share_times": "every image has all times of so short a grid",
    },
    "diffusion_nft": {"nft.old_schedule": "needs more steps", "nft.clip": "the policy moves too little"},
    "robot_grpo": {
        "acting.ensemble": "evaluations measure success alone, which is 0; tests/robotics/test_ensemble.py",
        "model.options.cloning": "for learning from demonstrations",
        "model.options.label_smoothing": "for learning from demonstrations",
        "model.options.label_spread": "for learning from demonstrations",
        "model.options.seed": "the action words of the vision-language model start at zero",
        "trainer.old_logp": "the policy scores as it samples",
        "evaluation.videos": "what is kept",
        "evaluation.fps": "what is kept",
        "evaluation.video_size": "what is kept",
        "sim.options": "the simulator of the walk takes none and says so itself",
        "sim.randomization.friction": "nothing is touched in so few steps",
        "sim.randomization.observation_delay": "the delay of one step is longer than a chunk leaves",
        "sim.randomization.sensor_noise.pieces_m": "the policy does not observe the pieces",
        "sim.randomization.sensor_noise.pieces_rad": "the policy does not observe the pieces",
        "eval_data.<name>.randomized": "the simulator of the walk is not randomised",
        "objective.advantage.singleton": "needs a group of one sample",
        "objective.scaling.kind": "there is one kind",
        "objective.scaling.eps_to": "the variance of the tiny groups is much larger",
        "objective.entropy.kind": "its weight is 0 by default",
        "objective.filter.kind": "every group has a signal",
        "objective.kl.clamp": "needs a large divergence",
    },
    "sft": {
        **VIDEOS,
        "evaluation.temperature": "no answer of the tiny model is right at any temperature",
        "evaluation.sampler.stop": "the tiny model's greedy answers have none of the texts",
    },
    "agent": {**TALK, **ONE_KIND},
    "agent_clone": {
        "episode.success_above": "greedy answers of the tiny model are cut, and a cut answer does nothing",
        **TALK,
        "random_actions": "the environment of the walk has no list of actions",
        "play_once": "the expert of the walk plays a task alike each time",
    },
    "ddpo": {**ONE_KIND, "heldout_rewards[].chat": JPEG},
    "flow_pretrain": {"evaluation.heldout_rewards[].chat": JPEG, **EDITED},
    "diffusion_dpo": {
        "evaluation.heldout_rewards[].chat": JPEG,
        **EDITED,
        **dict.fromkeys(
            ("filter.alpha", "filter.margin", "filter.neighbours", "filter.normalise"),
            "the same three of so few pairs are kept",
        ),
        "objective.score.kind": "there is one kind",
        "objective.likelihood.kind": "its weight is 0 by default",
    },
    "arpo": dict.fromkeys(("replay.size", "replay.memory_mb"), "the episodes of a tiny run are fewer"),
    "vl_dac": {"objective.advantage.truncation": "no episode is cut"},
    "digirl": {
        **dict.fromkeys(("digirl.gamma", "digirl.lam", "digirl.clamp"), "the tiny model earns nothing"),
        **dict.fromkeys(("digirl.capacity", "digirl.memory_mb"), "the episodes of a tiny run are fewer"),
    },
    "grounding_sft": {
        **GROUNDING,
        "evaluation.temperature": "no answer of the tiny model is right at any temperature",
        "model.min_pixels": "the screens of the walk have more",
    },
    "flow3d": {
        **dict.fromkeys(("model.body.unet.max_frames", "in_memory"), "a limit, and memory"),
        "model.body.unet.lora_rank": "of adapters; the walk trains in full",
        "model.process.text_drop": "the instruction reaches the untrained network through weights of zero",
        "loss_mask": "every point of the walk is seen",
        "eval_ema.decay": "needs more steps",
        "episodes": "the walk has a run with one",
        "loop.language_swap": UNPLANNED,
        "episodes.<name>.lose_after_m": UNPLANNED,
        "loop.planner.": UNPLANNED,
    },
    "flow3d_awm": {
        **ONE_KIND,
        "awm.ema_limit": "needs more steps",
        "heldout_verifiers": "the list is of parts, not of texts",
    },
    "robot_clone": {
        **dict.fromkeys(
            (
                *("sim.randomization.", "eval_data.<name>.first", "eval_data.<name>.randomized", "acting.temperature"),
                *(
                    "acting.ensemble",
                    "model.options.steps",
                    "model.options.noise_level",
                    "model.options.logp_reduction",
                ),
            ),
            "evaluations of cloning measure success alone, which is 0; robot_grpo has the same options",
        ),
        **KEPT,
        "demonstrations.only_success": "all demonstrations of the walk succeed",
    },
    "robot_hg_dagger": {
        **dict.fromkeys(
            ("sim.", "eval_data.", "acting.", "model.", "demonstrations.", "data."),
            "robot_clone and robot_grpo have the same options",
        ),
        **KEPT,
        "interventions.path": "a folder",
        "interventions.live": "the run then waits for the episodes of another process",
        "interventions.overseer.axes": "of a person's device",
        "interventions.overseer.speed": "of a person's device",
    },
    "robot_distil": dict.fromkeys(
        ("model.options.label_smoothing", "model.options.label_spread"), "for learning from demonstrations"
    ),
    "robot_ppo": ROBOT,
    "robot_sac": {**OFFPOLICY, "model.options.cloning": "for learning from demonstrations"},
    "robot_rlpd": {
        **OFFPOLICY,
        **dict.fromkeys(("sim.", "eval_data.", "acting."), "robot_sac has the same options"),
    },
    "robot_rlif": {
        **OFFPOLICY,
        **dict.fromkeys(("sim.", "acting.", "data.", "eval_data.", "evaluation."), "robot_sac has the same options"),
        "overseer.threshold": "the overseer of the walk acts at random",
        "model.options.cloning": "for sac.demo_bc; robot_rlpd has the same option",
        "overseer.axes": "of a person's device",
        "overseer.speed": "of a person's device",
    },
    "robot_success": {
        "data.label": "the label of the walk is that of its last frames",
        "data.camera": "the walk has one camera",
        "model.encoder.words": "a limit",
        **dict.fromkeys(
            ("model.looks", "data.positive_frames", "eval_data.<name>.positive_frames"),
            "after two steps it is sure of nothing; tests/robotics/rewards/test_success.py",
        ),
    },
    **dict.fromkeys(
        ("robot_residual", "robot_dsrl"),
        dict.fromkeys(("sim.", "acting.", "data.", "eval_data.", "evaluation."), "robot_sac has the same options"),
    ),
    "srpo": {
        **ROBOT,
        "progress.invalid": "no trajectory of the walk is invalid",
        "latent.frames": "the walk's latent is of states",
        "latent.options.mean": "the means that are tried are the same",
        **dict.fromkeys(
            ("model.options.token_mode", "model.options.encoder.condition_queries"),
            "no success and no step in the tabletop run",
        ),
    },
    "tspo": {
        **ONE_KIND,
        "trainer.old_logp": "the policy scores as it samples",
        "answerer.reward.weight": "there is one reward",
        "picks.general_count": "needs questions without a needle",
    },
    "preference": {
        **VIDEOS,
        "objective.likelihood.kind": "its weight is 0 by default",
        "evaluation.rewards[].weight": "only in the samples of the report",
    },
    "reg_grpo": {
        "augmentation.max_hinted": "no step has several hard questions",
        "augmentation.think_end": "needs answers that close their reasoning",
    },
}
"""Further ones of single recipes, by key, or by its beginning up to a dot."""
