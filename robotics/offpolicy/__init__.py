"""Off-policy learning of robot policies from a replay: soft actor-critic, and the parts of methods built on it.

    from robotics.offpolicy.sac_learner import SacLearner, SacSettings

`transitions` and `replay` hold experience, `prior` reads other data, `sac_losses`, `q_ensemble` and `sac_learner` are
the method without a run, `sac` is the recipe `robot_sac`, `presets` has `robot_rlpd`, `robot_residual`, `robot_dsrl`.
"""
