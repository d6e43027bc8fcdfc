"""Screens and browsers: coordinates, grounding answers and rewards, page environments, published benchmarks.

Importing the package loads none of them, only what is taken from it: `from mmrl.gui import Resize, point_reward`.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "mmrl.gui.grounding.aepo": ("AepoConfig", "AepoRecipe"),
    "mmrl.gui.grounding.rewards": ("AnswerRules", "PointScore", "point_reward"),
    "mmrl.gui.grounding.answers": ("ParsedPoints", "answer_text", "parse_answer"),
    "mmrl.gui.benchmarks.convert": ("Conversion", "convert"),
    "mmrl.gui.benchmarks.benchmark_copies": ("BenchmarkConfig", "load_benchmark", "validate"),
    "mmrl.gui.benchmarks.benchmark_recipe": ("GroundingEvaluation", "GroundingEvaluationConfig"),
    "mmrl.gui.browser.browser": ("Browser", "BrowserFailure", "BrowserSettings"),
    "mmrl.gui.grounding.coords": ("Box", "CoordinateSpace", "Resize", "from_original", "smart_resize", "to_original"),
    "mmrl.gui.grounding.grounding_tasks": ("GroundingSettings",),
    "mmrl.gui.grounding.grounding_sft": ("GroundingSftConfig", "GroundingSftRecipe"),
    "mmrl.gui.browser.page": ("Element", "GuardedPage", "read_elements"),
    "mmrl.gui.browser.miniwob": ("MiniWobEnv", "MiniWobSettings", "miniwob_tasks"),
    "mmrl.gui.browser.page_env": ("PageEnv", "PageEnvSettings", "PageVerdict", "WebAgentEnv"),
    "mmrl.gui.grounding.samples": (
        "AnyOf",
        "GroundingSample",
        "NoTarget",
        "Polygon",
        "Refusal",
        "Spot",
        "write_samples",
    ),
    "mmrl.gui.grounding.step_rewards": ("ExpectedStep", "StepScore", "gui_step_reward", "score_step"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
