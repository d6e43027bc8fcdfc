"""Recipes and metrics of vision-language models; imports none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "vlm",
        "mmrl.vlm.vlm_recipe:VlmRecipe:VlmConfig",
        "any objective of the catalogue on a vision-language or language model",
        "objective: see `mmrl list objectives`",
    ),
    RecipeEntry(
        "papo",
        "mmrl.vlm.methods.papo:PapoRecipe:PapoConfig",
        "implicit perception KL against a masked image, double entropy (PAPO_G, PAPO_D)",
        "Wang et al., Perception-Aware Policy Optimization, arXiv 2507.06448",
    ),
    RecipeEntry(
        "apo",
        "mmrl.vlm.methods.apo:ApoRecipe:ApoConfig",
        "difficulty-weighted KL for positives (DADS), length penalty for negatives (STCR)",
        "View-R1 / Asymmetric Policy Optimization, arXiv 2506.21655",
    ),
    RecipeEntry(
        "reg_grpo",
        "mmrl.vlm.methods.reg_grpo:RegGrpoRecipe:RegGrpoConfig",
        "regression on group advantages; hints for hard questions, image noise for easy ones",
        "DeepVideo-R1, arXiv 2506.07464",
    ),
    RecipeEntry(
        "distil",
        "mmrl.vlm.methods.distillation:DistilRecipe:DistilConfig",
        "distillation from a larger model, or from the model itself when shown the answer (OPD, GKD, SDFT)",
        "Agarwal et al., GKD, arXiv 2306.13649; Thinking Machines, on-policy distillation (2025)",
    ),
    RecipeEntry(
        "multi_teacher",
        "mmrl.vlm.methods.multi_teacher:MultiTeacherRecipe:MultiTeacherConfig",
        "answers from several teachers, best understood first, for questions that every sample gets wrong (AMPO)",
        "AMPO, arXiv 2510.02227",
    ),
    RecipeEntry(
        "tspo",
        "mmrl.vlm.tspo.tspo_recipe:TspoRecipe:TspoConfig",
        "an agent that picks frames of long videos for a video model, trained from rewards",
        "TSPO, arXiv 2508.04369",
    ),
    RecipeEntry(
        "sft",
        "mmrl.vlm.methods.sft:SftRecipe:SftConfig",
        "supervised warm start on given completions",
        "maximum likelihood",
        supervised=True,
    ),
    RecipeEntry(
        "preference",
        "mmrl.vlm.methods.preference:PreferenceRecipe:PreferenceRunConfig",
        "preference optimisation on pairs of responses, text and images: DPO, IPO, SLiC, RPO, SPPO, REFUEL",
        "Rafailov et al., DPO, arXiv 2305.18290; others: `mmrl list objectives`",
    ),
)
SCORES = (
    "values",
    "entropy",
    "entropy_old",
    "collision",
    "logp_ref",
    "logp_rollout",
    "probabilities",
    "tokens",
    "answers",
    "code_starts",
    "budgets",
    "greedy",
)
"""Policy outputs other than log-probabilities, and data about responses, that objectives can use."""
PLAN = "mmrl.vlm.vlm_plan:footprint"
PREVIEW = "mmrl.vlm.data.preview:preview"
READER = "mmrl.vlm.data.dataset:load_tasks"
"""Functions for `mmrl train --dry-run`."""

TITLES = {"Decisions per sample": "Response length"}
"""Titles of charts that say more than those of `mmrl.report.curves`, which fit every package."""
METRICS = {
    "loss/nll": "Mean negative log-likelihood of the target tokens, in nats.",
    "data/skipped": "Rows skipped since the run began: bad row, unreadable image, prompt too long.",
    "skipped": "Questions that the evaluation could not ask: unreadable image, prompt too long.",
    "unscored": "Responses of the evaluation that a reward function failed on.",
    "time/answer": "Seconds of the rollout spent answering questions from the picked frames.",
    "time/encode": "Seconds of the rollout spent reading images and turning prompts into model inputs.",
    "time/prefill": "Seconds of the rollout spent running prompts through the model.",
    "time/decode": "Seconds of the rollout spent sampling tokens one after another.",
    "time/masked_logp": "Seconds of PAPO's pass with the masked image before the update.",
    "response/length_mean": "Mean number of sampled decisions in a response: tokens, or frames that tspo picks.",
    "response/length_max": "Maximum response length of the step in decisions.",
    "response/length_<greedy|sampled|guided>": "Mean length of the evaluation's responses in decisions.",
    "response/length_<greedy|sampled|guided>_<right|wrong>": "Mean length of correct or incorrect responses.",
    "response/finished_fraction": "Fraction of responses that ended before the length limit.",
    "response/beyond_positions": "Prompts so far that leave fewer positions than sampler.max_new_tokens.",
    "response/nucleus_mass": "Mean total probability of the tokens kept by top_p and top_k; 1 is on-policy.",
    "loss/router": "Load-balancing loss of a mixture of experts, coefficient included.",
    "router/busiest_max": "Number of tokens of the busiest expert, as a multiple of an even distribution.",
    "time/router": "Seconds of the pass that counts how tokens are spread over the experts.",
    "loss/perception": "PAPO's implicit-perception part of the loss, weight and sign included.",
    "loss/entropy_policy": "PAPO's entropy term on the image, coefficient included.",
    "loss/entropy_masked": "PAPO's entropy term on the masked image, coefficient included.",
    "loss/sft": "PAPO's likelihood term on correct samples, coefficient included.",
    "loss/preference": "Mean loss of a pair of a preferred and a rejected response.",
    "loss/nll_chosen": "Negative log-likelihood of the preferred responses, coefficient included.",
    "rewards/chosen": "Mean implicit reward of the preferred responses: beta times the log-ratio to the reference.",
    "rewards/rejected": "Mean implicit reward of the rejected responses.",
    "rewards/margins": "Mean difference between the implicit rewards of the preferred and the rejected responses.",
    "rewards/accuracies": "Fraction of pairs whose preferred response has the higher implicit reward.",
    "logps/chosen": "Mean log-probability of the preferred responses in nats, summed or averaged as in the loss.",
    "logps/rejected": "Mean log-probability of the rejected responses in nats.",
    "logps/accuracies": "Fraction of pairs whose preferred response is more likely.",
    "kto/baseline": (
        "Mean log-ratio to the reference of other questions' responses, in nats; KTO's baseline if positive."
    ),
    "accuracy/likelier": "Fraction of held-out pairs whose preferred response is more likely.",
    "accuracy/rewards": "Fraction of held-out pairs whose preferred response has the higher implicit reward.",
    "pairs/skipped": "Held-out pairs that could not be used: identical responses, unreadable image, response too long.",
    "papo/kl_masked": "k3 between the policy on the image and on the masked image, in nats per decision.",
    "papo/gamma": "Weight of the implicit-perception term after annealing.",
    "apo/kl_weight_mean": "Mean KL multiplier per sample from difficulty-adaptive divergence shaping.",
    "apo/length_multiplier_mean": (
        "Mean factor on the advantages; it is above 1 for incorrect responses longer than correct ones."
    ),
    "apo/difficulty_mean": "Mean difficulty of the step's tasks, 1 minus the fraction of correct samples.",
    "policy/log_ratio_std": "Mean standard deviation of the log-ratios of whole rows in their group, in nats.",
    "loss/distillation": "Divergence from the teacher over the vocabulary, weight included.",
    "distil/divergence": "Mean divergence from the teacher over the vocabulary, in nats per token.",
    "distil/kl_sampled": (
        "Mean logp - logp_teacher on the policy's samples, which estimates its KL to the teacher, in nats."
    ),
    "time/teacher_logp": "Seconds of the teacher's pass over the step's rows before the update.",
    "replaced/failed": "Fraction of the step's groups without a correct sample.",
    "replaced/rows": "Samples of the step that were replaced by responses with hints or from teachers.",
    "replaced/too_long": (
        "Teachers' answers of the step that were skipped because they are longer than sampler.max_new_tokens."
    ),
    "augment/hinted": "Fraction of the step's groups whose question has a hint.",
    "augment/noised": "Fraction of the step's groups whose images or videos have noise.",
    "augment/hint_fraction_mean": "Mean fraction of a trace that the step's hints reveal.",
    "augment/sigma_mean": (
        "Mean standard deviation of the noise in the step's noised groups, as a fraction of full contrast."
    ),
    "augment/traces": "Samples drawn in the step to make hints.",
    "augment/traces_unused": (
        "Samples drawn to make hints that gave no hint, because none earned more than the question's mean."
    ),
    "augment/probes": "Samples drawn in the step to measure the difficulty of its questions.",
    "augment/window_mean": "Mean reward of the last samples, against which a question's own mean is compared.",
    "tspo/temperature": "Temperature that divides the temporal agent's scores; it decreases linearly.",
    "tspo/videos_embedded": (
        "Videos whose features were computed since the run began instead of read from disk or memory."
    ),
    "recall/<agent|uniform|clip_topk>": "Fraction of a needle's frames that one strategy picks.",
    "accuracy/<agent|uniform|clip_topk>": "Fraction of questions answered correctly from the frames of one strategy.",
    "accuracy/needle": "Fraction of questions answered correctly from the needle's own frames.",
    "accuracy/self_critic": (
        "Fraction of questions for which the answer that the model chooses among its n answers is correct."
    ),
    "accuracy/majority": "Fraction of questions whose most frequent answer among the same n is correct.",
    "accuracy/pass_at_1": "Fraction of correct answers among the same n per question.",
    "accuracy/pass_at_n": "Fraction of questions for which any of the same n answers is correct.",
    "self_critic/different": "Mean number of different answers among the n to a question.",
    "self_critic/compared": "Mean number of answer pairs per question that the model compared, each in both orders.",
    "self_critic/order_agreement": "Fraction of compared pairs for which both orders prefer the same answer.",
    "self_critic/first_share": "Fraction of readable judgements that prefer the answer shown first; 0.5 without bias.",
    "self_critic/unreadable": "Fraction of judgements that contain neither 1 nor 2.",
    "accuracy/unrevised": "Fraction of correct greedy answers before the critic has seen them.",
    "accuracy/revised": "Fraction of correct answers after the critic's rounds of revision.",
    "accuracy/revised_empty": "Fraction of correct answers if every answer is revised after an empty critique.",
    "accuracy/revised_shuffled": "Fraction of correct answers if each answer gets the critique of another question.",
    "revision/found": "Fraction of incorrect first answers that the critic criticises.",
    "revision/false_alarms": "Fraction of correct first answers that the critic criticises.",
    "revision/fixed": "Fraction of incorrect first answers that are correct after revision.",
    "revision/broken": "Fraction of correct first answers that are incorrect after revision.",
}
