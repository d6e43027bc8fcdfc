"""Recipes and metrics for screens; imports none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "aepo",
        "mmrl.gui.grounding.aepo:AepoRecipe:AepoConfig",
        "screen grounding with several points per response and the adaptive exploration reward; naive RLVR via options",
        "InfiGUI-G1, arXiv 2508.05731",
    ),
    RecipeEntry(
        "grounding_sft",
        "mmrl.gui.grounding.grounding_sft:GroundingSftRecipe:GroundingSftConfig",
        "supervised warm start on worked answers to questions about screens",
        "maximum likelihood",
        supervised=True,
    ),
)
EVALUATIONS = (
    RecipeEntry(
        "grounding_eval",
        "mmrl.gui.benchmarks.benchmark_recipe:GroundingEvaluation:GroundingEvaluationConfig",
        "published GUI grounding benchmarks, with greedy decoding",
        "protocol of InfiXAI/InfiGUI-G1 eval/eval.py",
        trains=False,
    ),
)
PLAN = "mmrl.vlm.vlm_plan:footprint"
READER = "mmrl.vlm.data.dataset:load_tasks"
"""Functions for `mmrl train --dry-run`."""
BUILDS_ON = "mmrl.agents"
"""Package whose metrics the recipes have too."""

TITLES = {"Decisions per sample": "Response length"}
METRICS = {
    "response/length_mean": "Mean number of sampled decisions in a response.",
    "response/length_max": "Maximum response length of the step in decisions.",
    "aepo/no_signal/<kind>": (
        "Fraction of the groups with one kind of instruction in which all responses get the same reward."
    ),
    "accuracy/first": "Fraction of screens whose first predicted point is in the target.",
    "accuracy/any": "Fraction of screens with any predicted point in the target.",
    "accuracy/macro": "Plain mean of accuracy/first over the cells that a benchmark's published average uses.",
    "answers/mean": "Mean number of predicted points over the responses that have any.",
    "answers/wrong_format": "Fraction of responses without a readable point, which count as incorrect.",
    "answers/outside": "Fraction of first points outside their screens, not counting refusals.",
    "answers/unusable": "Screens that could not be asked about, which count as incorrect.",
}
