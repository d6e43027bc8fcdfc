"""Recipes of single papers for language and vision-language models; loads none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import Paper, RecipeEntry

RECIPES: tuple[RecipeEntry, ...] = (
    RecipeEntry(
        "scaffolded",
        "mmrl.contrib.language.scaffolded:ScaffoldedRecipe:ScaffoldedConfig",
        "hints of the data, as few as it takes, for questions that every sample misses (Scaf-GRPO)",
        "Scaf-GRPO, arXiv 2510.19807",
    ),
    RecipeEntry(
        "dataset_reset",
        "mmrl.contrib.language.dataset_reset:DatasetResetRecipe:DatasetResetConfig",
        "rollouts from random points of reference answers, whose beginning is not trained (DR-PO)",
        "Chang et al., DR-PO, arXiv 2404.08495",
    ),
    RecipeEntry(
        "hbpo",
        "mmrl.contrib.language.hbpo:HbpoRecipe:HbpoConfig",
        "answers to a question begin with different budgets of tokens, compared in one group (HBPO)",
        "Lyu et al., HBPO, arXiv 2507.15844",
    ),
    RecipeEntry(
        "segment",
        "mmrl.contrib.language.segment:SegmentRecipe:SegmentConfig",
        "advantages of segments of answers, by Monte Carlo values of cuts or in trees (SPO-chain, SPO-tree)",
        "Guo et al., SPO, arXiv 2505.23564",
    ),
    RecipeEntry(
        "truncated",
        "mmrl.contrib.language.truncated:TruncatedRecipe:TruncatedConfig",
        "PPO on answers that grow by a window of tokens a step, unfinished ones carried over (T-PPO)",
        "Fan et al., T-PPO, arXiv 2506.15050",
    ),
    RecipeEntry(
        "contrastive",
        "mmrl.contrib.language.contrastive:ContrastiveRecipe:ContrastiveConfig",
        "answers about documents, rewarded by the policy's own states of documents and queries (GRACE)",
        "GRACE, arXiv 2510.04506",
    ),
    RecipeEntry(
        "arbitrary_entropy",
        "mmrl.contrib.language.arbitrary_entropy:ArbitraryEntropyRecipe:ArbitraryEntropyConfig",
        "positive samples of a higher or lower temperature keep the entropy near a wanted one (AEPO)",
        "AEPO (arbitrary entropy), arXiv 2510.08141",
    ),
    RecipeEntry(
        "adaptive_temperature",
        "mmrl.contrib.language.adaptive_temperature:AdaptiveTemperatureRecipe:AdaptiveTemperatureConfig",
        "HAPO whose tokens are drawn hotter where the policy is uncertain and colder where it is sure",
        "HAPO, arXiv 2509.16591; starriver030515/HAPO",
    ),
    RecipeEntry(
        "semantic_entropy",
        "mmrl.contrib.language.semantic_entropy:SemanticEntropyRecipe:SemanticEntropyConfig",
        "smaller updates where answers differ in meaning, as an entailment model or embeddings tell (SEED-GRPO)",
        "Chen et al., SEED-GRPO, arXiv 2505.12346; clusters: jlko/semantic_uncertainty",
    ),
    RecipeEntry(
        "soft_tokens",
        "mmrl.contrib.language.soft_tokens:SoftRecipe:SoftConfig",
        "reasoning in mixtures of tokens, with Gumbel noise as the action (SofT-GRPO)",
        "SofT-GRPO, arXiv 2511.06411",
    ),
    RecipeEntry(
        "value_guided",
        "mmrl.contrib.language.value_guided:ValueGuidedRecipe:ValueGuidedConfig",
        "a critic of a policy that stays as it is, and sampling that adds its values to the next tokens (VAS)",
        "Han et al., Value-Augmented Sampling, arXiv 2405.06639",
    ),
    RecipeEntry(
        "critique_rl",
        "mmrl.contrib.language.critique_rl:CritiqueRlRecipe:CritiqueRlConfig",
        "a critic is rewarded for its verdict about an answer, then for what revisions gain by it (Critique-RL)",
        "Critique-RL, arXiv 2510.24320",
    ),
    RecipeEntry(
        "meta_reward",
        "mmrl.contrib.language.meta_reward:MetaRewardRecipe:MetaRewardConfig",
        "rewards of a judge whose rubric a meta judge rewrites during the run (MPO)",
        "Meta Policy Optimization, arXiv 2504.20157",
    ),
    RecipeEntry(
        "online_preference",
        "mmrl.contrib.language.online_preference:OnlinePreferenceRecipe:OnlinePreferenceConfig",
        "losses on pairs of sampled answers, of which rewards choose the better: online DPO, XPO, Nash-MD, INPO",
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
    "pairs/learnt": "Fraction of the step's pairs that are trained: their rewards differ, or the loss reads rewards.",
    "pairs/won": "Fraction of the trained pairs in which the policy's answer is better than the opponent's.",
    "time/opponent": "Seconds of the rollout in which the opponent's answers were sampled.",
    "accuracy/guided": "Fraction of correct answers among those sampled with a critic's values (value_guided).",
    "scaffold/level_mean": "Mean number of hints behind which the exchanged answers of the step were right.",
    "reset/share": "Fraction of the step's questions whose rollouts start inside the reference answer.",
    "reset/fraction_mean": "Mean fraction of the reference answer that these rollouts start with.",
    "segment/values": "Places in answers of the step whose value was estimated: cuts of chains, or branches of trees.",
    "segment/tokens": "Tokens sampled in the step, for answers and for values.",
    "segment/trained": "Fraction of the tokens of the step's answers that are trained.",
    "rubric/version": "How often the meta judge has changed the rubric.",
    "soft/share": "Fraction of the sampled tokens that are mixtures.",
    "soft/first_weight": "Mean weight of the first token in these mixtures; 1 is an ordinary token.",
    "truncated/unfinished": "Fraction of the step's answers that are unfinished and continue in the next step.",
    "truncated/continued": "Fraction of the step's answers that began in an earlier step.",
    "truncated/reward_mean": "Mean reward of the step's finished answers.",
    "steering/entropy": "Entropy of the last update by which the temperature of further samples is chosen, in nats.",
    "steering/temperature": "Temperature of the step's further samples.",
    "meaning/clusters": "Mean number of different meanings among the answers to a question.",
    "steering/rows": "Further samples of the step that are learned.",
}
