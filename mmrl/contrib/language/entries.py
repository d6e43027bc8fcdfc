"""Recipes from single papers for language and vision-language models; imports none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import Paper, RecipeEntry

RECIPES: tuple[RecipeEntry, ...] = (
    RecipeEntry(
        "scaffolded",
        "mmrl.contrib.language.scaffolded:ScaffoldedRecipe:ScaffoldedConfig",
        "the fewest hints from the data that help, for questions that every sample gets wrong (Scaf-GRPO)",
        "Scaf-GRPO, arXiv 2510.19807",
    ),
    RecipeEntry(
        "dataset_reset",
        "mmrl.contrib.language.dataset_reset:DatasetResetRecipe:DatasetResetConfig",
        "rollouts that start at random points of reference answers, without training on the given part (DR-PO)",
        "Chang et al., DR-PO, arXiv 2404.08495",
    ),
    RecipeEntry(
        "hbpo",
        "mmrl.contrib.language.hbpo:HbpoRecipe:HbpoConfig",
        "responses to a question with different token budgets, compared in one group (HBPO)",
        "Lyu et al., HBPO, arXiv 2507.15844",
    ),
    RecipeEntry(
        "segment",
        "mmrl.contrib.language.segment:SegmentRecipe:SegmentConfig",
        "advantages for segments of responses, from Monte Carlo values at cuts or in trees (SPO-chain, SPO-tree)",
        "Guo et al., SPO, arXiv 2505.23564",
    ),
    RecipeEntry(
        "truncated",
        "mmrl.contrib.language.truncated:TruncatedRecipe:TruncatedConfig",
        "PPO on responses that grow by one window of tokens per step; unfinished ones are carried over (T-PPO)",
        "Fan et al., T-PPO, arXiv 2506.15050",
    ),
    RecipeEntry(
        "contrastive",
        "mmrl.contrib.language.contrastive:ContrastiveRecipe:ContrastiveConfig",
        "responses about documents, rewarded by the policy's hidden states of documents and queries (GRACE)",
        "GRACE, arXiv 2510.04506",
    ),
    RecipeEntry(
        "arbitrary_entropy",
        "mmrl.contrib.language.arbitrary_entropy:ArbitraryEntropyRecipe:ArbitraryEntropyConfig",
        "positive samples drawn at a higher or lower temperature hold the entropy near a target (AEPO)",
        "AEPO (arbitrary entropy), arXiv 2510.08141",
    ),
    RecipeEntry(
        "adaptive_temperature",
        "mmrl.contrib.language.adaptive_temperature:AdaptiveTemperatureRecipe:AdaptiveTemperatureConfig",
        "HAPO with a higher sampling temperature for uncertain tokens and a lower one for certain tokens",
        "HAPO, arXiv 2509.16591; starriver030515/HAPO",
    ),
    RecipeEntry(
        "semantic_entropy",
        "mmrl.contrib.language.semantic_entropy:SemanticEntropyRecipe:SemanticEntropyConfig",
        "smaller updates if responses differ in meaning, judged by an entailment model or embeddings (SEED-GRPO)",
        "Chen et al., SEED-GRPO, arXiv 2505.12346; clusters: jlko/semantic_uncertainty",
    ),
    RecipeEntry(
        "soft_tokens",
        "mmrl.contrib.language.soft_tokens:SoftRecipe:SoftConfig",
        "reasoning with soft tokens (mixtures of embeddings), with Gumbel noise as the action (SofT-GRPO)",
        "SofT-GRPO, arXiv 2511.06411",
    ),
    RecipeEntry(
        "value_guided",
        "mmrl.contrib.language.value_guided:ValueGuidedRecipe:ValueGuidedConfig",
        "a critic of a frozen policy, and sampling that adds its values to the next-token scores (VAS)",
        "Han et al., Value-Augmented Sampling, arXiv 2405.06639",
    ),
    RecipeEntry(
        "critique_rl",
        "mmrl.contrib.language.critique_rl:CritiqueRlRecipe:CritiqueRlConfig",
        "a critic is rewarded first for a correct verdict, then for how much revisions improve (Critique-RL)",
        "Critique-RL, arXiv 2510.24320",
    ),
    RecipeEntry(
        "meta_reward",
        "mmrl.contrib.language.meta_reward:MetaRewardRecipe:MetaRewardConfig",
        "rewards from a judge whose rubric is rewritten by a meta judge during the run (MPO)",
        "Meta Policy Optimization, arXiv 2504.20157",
    ),
    RecipeEntry(
        "online_preference",
        "mmrl.contrib.language.online_preference:OnlinePreferenceRecipe:OnlinePreferenceConfig",
        "losses on pairs of sampled responses, ranked by rewards: online DPO, XPO, Nash-MD, INPO",
        "Guo et al., online AI feedback, arXiv 2402.04792; others: `mmrl list objectives`",
    ),
)
EXTENDS = "mmrl.vlm"
PAPERS = (
    Paper(
        "Accelerated preference optimization",
        ("online_preference",),
        ("accelerated_po", "apo"),
        code="mmrl.contrib.language.online_preference:OnlineSettings",
        source="arXiv 2410.06293",
        page="objectives.md#online-dpo-and-nash-methods",
        lacking="extrapolated log-probabilities (`online.extrapolation` moves the weights instead), and golden numbers",
    ),
    Paper(
        "AutoMathCritique",
        (),
        ("critique in the loop",),
        code="mmrl.contrib.language.critique_loops:build_refinements",
        source="arXiv 2411.16579",
        page="objectives.md#critics-self-generated-data-automathcritique-spc",
        lacking="critiques by stronger models, critiques of single steps, and the second filter",
    ),
    Paper(
        "DPA",
        (),
        ("directional preference alignment",),
        code="mmrl.contrib.language.directions:build_directed",
        source="arXiv 2402.18571",
        page="text.md#reward-weights-in-the-prompt",
    ),
    Paper(
        "LSPO",
        (),
        ("latent space policy optimization", "werewolf"),
        code="mmrl.contrib.language.latent_strategies:build_strategy_pairs",
        source="arXiv 2502.04686",
        page="agent_methods.md#lspo-strategies-as-clusters-of-utterances",
        lacking="Werewolf, and games of more than one move with counterfactual regret minimisation",
    ),
    Paper(
        "SPC",
        ("spc",),
        ("self-play critic",),
        code="mmrl.contrib.language.critique_loops:build_game",
        page="objectives.md#critics-self-generated-data-automathcritique-spc",
        lacking="false steps hidden inside a solution: whole answers are altered",
    ),
)
"""Papers whose functions are here; others are found by their rows and recipes."""

METRICS = {
    "pairs/learnt": (
        "Fraction of the step's pairs that are trained, because their rewards differ or the loss reads rewards."
    ),
    "pairs/won": "Fraction of the trained pairs in which the policy's response is better than the opponent's.",
    "time/opponent": "Seconds of the rollout spent sampling the opponent's responses.",
    "accuracy/guided": "Fraction of correct responses among those sampled with a critic's values (value_guided).",
    "scaffold/level_mean": "Mean number of hints that the step's replacement responses needed to be correct.",
    "reset/share": "Fraction of the step's questions whose rollouts start inside the reference answer.",
    "reset/fraction_mean": "Mean fraction of the reference answer that is given at the start of a rollout.",
    "segment/values": (
        "Positions in the step's responses whose value was estimated: cuts of chains, or branches of trees."
    ),
    "segment/tokens": "Tokens sampled in the step, for responses and for value estimates.",
    "segment/trained": "Fraction of the tokens of the step's responses that are trained.",
    "rubric/version": "Number of times the meta judge has changed the rubric.",
    "soft/share": "Fraction of the sampled tokens that are soft tokens (mixtures).",
    "soft/first_weight": "Mean weight of the first token in the mixtures; 1 is an ordinary token.",
    "truncated/unfinished": "Fraction of the step's responses that are unfinished and continue in the next step.",
    "truncated/continued": "Fraction of the step's responses that began in an earlier step.",
    "truncated/reward_mean": "Mean reward of the step's finished responses.",
    "steering/entropy": "Entropy of the last update in nats, which sets the temperature of the extra samples.",
    "steering/temperature": "Temperature of the step's extra samples.",
    "meaning/clusters": "Mean number of different meanings among the responses to a question.",
    "steering/rows": "Number of the step's extra samples that are trained.",
}
