"""Options that nothing would read are refused before a run, each with the option that keeps it from being read."""

import pytest

from mmrl.config import fill
from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.rewards.reward_config import RewardConfig
from mmrl.rewards.sum import RewardSum

QUESTIONS = ["model.path=m", "data.path=d.jsonl", "rewards=[{name: exact}]"]
PAIRS = ["model.path=m", "data.path=d.jsonl"]
AGENT = ["model.path=m", "environment.factory=rooms.py:Rooms"]
IMAGES = [*QUESTIONS[:2], "rewards=[{name: jpeg_compressibility}]", "heldout_rewards=[{name: jpeg_incompressibility}]"]
TEACHER = [*QUESTIONS, "teacher.path=t"]


@pytest.mark.parametrize(
    ("recipe", "needed", "option", "makes_sense"),
    [
        ("vlm", QUESTIONS, "trainer.final_learning_rate=1e-7", "trainer.schedule=linear"),
        ("vlm", QUESTIONS, "reference.ema_decay=0.5", "reference.kind=ema"),
        ("vlm", [*QUESTIONS, "evaluation.samples=0"], "evaluation.temperature=0.5", "evaluation.samples=1"),
        ("vlm", [*QUESTIONS, "objective.preset=ppo"], "objective.advantage.truncation=mask", None),
        ("papo", QUESTIONS, "papo.annealing_ratio=0.3", "papo.schedule=annealing"),
        ("papo", QUESTIONS, "papo.gamma_end=0.1", "papo.schedule=annealing"),
        ("tspo", [*PAIRS[1:], "features.path=f", "answerer.kind=oracle"], "data.budgets=[8]", None),
        ("reg_grpo", QUESTIONS, "augmentation.probe_samples=8", "augmentation.measure=probe"),
        ("distil", TEACHER, "distil.beta=0.3", "distil.divergence=1.0"),
        ("distil", TEACHER, "distil.target_key=given", "distil.on_policy=0.5"),
        ("preference", PAIRS, "completion_key=text", "objective.preset=kto"),
        ("preference", PAIRS, "chosen_score_key=points", None),
        ("agent", AGENT, "evaluation.temperature=0.5", "evaluation.samples=2"),
        ("agent", [*AGENT, "actions.format=text"], "actions.strict=true", "actions.format=tag"),
        ("agent", [*AGENT, "actions.format=text"], "actions.max_actions=3", "actions.format=tag"),
        ("agent", [*AGENT, "data.file=tasks.jsonl"], "data.seeds=5", "data.file=null"),
        ("agent_revision", AGENT, "actions.max_actions=3", None),
        ("digirl", AGENT, "reward.format=0.5", None),
        ("digirl", AGENT, "reward.invalid_turn=-0.5", None),
        ("digirl", AGENT, "episode.overflow.reward=-0.5", None),
        ("agent_clone", AGENT, "episode.overflow.reward=-0.5", None),
        (
            "agent",
            [*AGENT, "episode.overflow.result=failed"],
            "episode.overflow.reward=-1",
            "episode.overflow.result=truncated",
        ),
        ("digirl", AGENT, "digirl.lam=0.3", "digirl.advantage=paper"),
        ("digirl", [*AGENT, "digirl.step_filter=false"], "digirl.threshold=0.4", "digirl.step_filter=true"),
        (
            "digirl",
            [*AGENT, "digirl.instruction_filter=false"],
            "digirl.quantile=0.4",
            "digirl.instruction_filter=true",
        ),
        ("archer", AGENT, "reward.environment=2", None),
        ("awm", IMAGES, "awm.power=0.5", "awm.weighting=ghuber"),
        ("awm", IMAGES, "sampler.negative_prompt=blurry", "sampler.eval_guidance=4"),
        ("awm", [*IMAGES, "awm.ema_coef=0"], "awm.ema_limit=0.5", "awm.off_policy=true"),
        ("robot_distil", ["teacher.path=t"], "distil.beta=0.0", "distil.divergence=1.0"),
    ],
)
def test_an_option_without_a_reader_is_refused(recipe, needed, option, makes_sense):
    if find_recipe(recipe).target.startswith("diffusion."):
        pytest.importorskip("diffusers")
    given = [
        *needed,
        {"digirl.lam=0.3": "digirl.advantage=code", "awm.power=0.5": "awm.weighting=t"}.get(option, "seed=0"),
    ]
    fill(find_recipe(recipe).load_defaults(), given, "here")
    with pytest.raises(UserError, match=f"{option.partition('=')[0].split('.')[-1]}|remove reward"):
        fill(find_recipe(recipe).load_defaults(), [*given, option], "here")
    if makes_sense is not None:
        fill(find_recipe(recipe).load_defaults(), [*given, option, makes_sense], "here")


@pytest.mark.parametrize("limit", [{"timeout_s": 3.0}, {"memory_mb": 100.0}, {"workers": 2}, {"batch_timeout_s": 9.0}])
def test_limits_of_a_reward_that_runs_here_are_refused(limit):
    with pytest.raises(UserError, match=f"{next(iter(limit))} is .*, but the reward runs in this process"):
        RewardSum([RewardConfig(name="exact", **limit)])
