"""Episodes of a real tiny model in real environment processes, as rollouts and as runs."""

import contextlib
import json

import numpy as np
import pytest
import torch

from mmrl.agents.agent_evaluation import AgentEvaluationConfig
from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe, AgentRewardConfig
from mmrl.agents.environments.agent_tasks import TaskSetConfig
from mmrl.agents.environments.environment import Action, ActionConfig, Observation, ParsedAnswer
from mmrl.agents.rollout.conversation import OMITTED, ConversationConfig, Writer
from mmrl.agents.rollout.episodes import AgentPayload, EpisodeConfig
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.training.run import train
from mmrl.training.trainer import collect_metrics
from tests.agents.runs import run_config
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.builders import build_for_vllm, needs_vllm, through_vllm

pytestmark = pytest.mark.usefixtures("every_answer_acts")


def make_config(folder, model, **changes) -> AgentConfig:
    parts = {
        "eval_data": {"heldout": TaskSetConfig(seeds=3, first_seed=100)},
        "conversation": ConversationConfig(system="Walk. {actions}"),
        "evaluation": AgentEvaluationConfig(records=2, videos=1),
    }
    config = run_config(AgentConfig, folder, model, **parts | changes)
    config.validate()
    return config


def roll(config, tasks=2):
    with contextlib.closing(AgentRecipe(config)) as recipe:
        rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:tasks], Streams(0), Step())
        with torch.no_grad():
            logp = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp
        return rollouts, recipe.score(rollouts, Step()), logp, recipe


@pytest.mark.slow
def test_run_leaves_a_whole_folder(tmp_path, folder):
    run_dir = train(RECIPES["agent"], make_config(tmp_path, folder))
    assert json.loads((run_dir / "result.json").read_text())["status"] == "done"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert 1 <= rows[0]["episode/turns"] <= 15
    assert rows[0]["policy/ratio_mean"] == 1.0
    assert rows[0]["sim/dropped"] == 0
    assert len(list((run_dir / "videos").glob("*.mp4"))) >= 1
    samples = [json.loads(line) for line in (run_dir / "samples/step-000002/train.jsonl").open()]
    assert samples[0]["response"].startswith("[turn 1]")


def test_rollouts_hold_all_turns(tmp_path, folder):
    rollouts, scored, logp, _ = roll(make_config(tmp_path, folder))
    payload = AgentPayload.of(rollouts)
    assert (rollouts.num_rows, rollouts.num_groups, len(payload.prompts)) == (6, 2, 2)
    assert_equal_up_to_rounding(logp, rollouts.logp_old)
    for row, episode in enumerate(payload.episodes):
        turns = rollouts.turn[row][rollouts.mask[row] > 0]
        assert sorted(set(turns.tolist())) == list(range(episode.trajectory.turns))
        assert len(payload.inserts[row]) == episode.trajectory.turns - 1
        assert float(rollouts.extras["decision_reward"][row].sum()) == pytest.approx(episode.total)
        assert float(scored.reward[row]) == pytest.approx(episode.total)
        for place in torch.nonzero(rollouts.extras["decision_reward"][row]).flatten().tolist():
            assert rollouts.mask[row, place] == 1
    assert all(not contexts for contexts in payload.contexts), "the group's episodes begin with one picture"


@pytest.mark.slow
@needs_vllm
def test_vllm_samples_the_turns(tmp_path, monkeypatch):
    config = make_config(tmp_path, build_for_vllm(tmp_path / "model", monkeypatch), kwargs={"length": 4})
    config.sampler = through_vllm(5)
    rollouts, _, logp, recipe = roll(config)
    assert recipe.samples_elsewhere
    assert int(rollouts.turn.max()) >= 2
    assert float(((logp - rollouts.logp_old).abs() * rollouts.mask).max()) < 1e-5


def test_episodes_do_not_depend_on_concurrent_ones(tmp_path, folder):
    few, many = (roll(make_config(tmp_path / str(n), folder, workers=n))[0] for n in (2, 6))
    assert torch.equal(AgentPayload.of(few).response_ids, AgentPayload.of(many).response_ids)
    assert_equal_up_to_rounding(few.logp_old, many.logp_old)


@pytest.mark.parametrize("kept", [1, 2])
def test_training_uses_the_window_of_images(tmp_path, folder, kept, monkeypatch):
    monkeypatch.setattr(ActionConfig, "parse", lambda self, text, cut=False, tools=(): ParsedAnswer((Action("right"),)))
    conversation = ConversationConfig(system="", history_images=kept)
    rollouts, _, logp, _ = roll(make_config(tmp_path, folder, conversation=conversation, kwargs={"length": 4}))
    payload = AgentPayload.of(rollouts)
    assert_equal_up_to_rounding(logp, rollouts.logp_old)
    assert [len(own) for own in payload.contexts] == [4 - kept] * 6
    for number, context in enumerate(payload.contexts[0], 1):
        pictures = [leaf for leaf in context.prompt.parts if "image_grid_thw" in leaf.media]
        assert len(pictures) == kept
        assert context.prompt.text.count(OMITTED) == number
        assert "step 0" in context.prompt.text, "the text stays"


def test_a_screen_that_is_seen_again_is_encoded_once(tmp_path, folder):
    recipe = AgentRecipe(make_config(tmp_path, folder))
    recipe.close()
    writer = Writer(recipe.policy, recipe.config.conversation, "Walk.")
    door, wall = (Observation("look", (np.full((56, 56, 3), grey, np.uint8),)) for grey in (10, 200))
    again = Observation("look", (door.images[0].copy(),))

    def follow(observation, note=""):
        conversation = writer.begin(recipe.train_tasks[0], door)
        writer.answer(conversation, [7, recipe.policy.eos_ids[0]])
        return writer.follow(conversation, observation, note)

    first = follow(door)
    assert follow(again) is first
    others = [
        follow(wall),
        follow(door, "What?"),
        follow(Observation("listen", door.images)),
        follow(Observation("look")),
    ]
    assert len({first, *others}) == 5
    assert not torch.equal(first.media["pixel_values"], others[0].media["pixel_values"])


def test_different_first_images_get_separate_prompts(tmp_path, folder):
    rollouts, _, logp, _ = roll(make_config(tmp_path, folder, kwargs={"twins": False}, workers=1))
    payload = AgentPayload.of(rollouts)
    assert sum(bool(own) and own[0].start == 0 for own in payload.contexts) == 4, "all but the first of each group"
    assert_equal_up_to_rounding(logp, rollouts.logp_old)


def test_failed_episodes_are_left_out_and_counted(tmp_path, folder):
    config = make_config(tmp_path, folder, kwargs={"fail_at": 2})
    rollouts, scored, _, recipe = roll(config, tasks=4)
    episodes = AgentPayload.of(rollouts).episodes
    failed = torch.tensor([episode.ending == "failed" for episode in episodes])
    assert 0 < int(failed.sum()) < len(failed)
    assert bool(torch.isnan(scored.reward[failed]).all())
    assert float(rollouts.mask[failed].sum()) == 0
    sound = [[not bad for bad in failed[scored.group == group].tolist()] for group in range(scored.num_groups)]
    for group, own in enumerate(sound):
        finite = torch.isfinite(scored.reward[scored.group == group]).tolist()
        assert finite == (own if sum(own) > 1 else [False] * len(own)), "a single result has nothing to compare with"
    metrics = collect_metrics(recipe, rollouts, Step())
    assert metrics["sim/dropped"] >= int(failed.sum())
    assert metrics["sim/crashed"] >= int(failed.sum())
    assert list((tmp_path / "run/failures").glob("environment-*.txt"))


def test_where_every_environment_fails_other_tasks_are_drawn(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(ActionConfig, "parse", lambda self, text, cut=False, tools=(): ParsedAnswer((Action("left"),)))
    with pytest.raises(NoUsableTasksError, match="no episode has a result"):
        roll(make_config(tmp_path, folder, kwargs={"fail_at": 1}))


def test_an_unreadable_answer_ends_the_episode_without_a_verdict_or_spends_the_turn(tmp_path, folder, monkeypatch):
    def never(self, text, cut=False, tools=()):
        return ParsedAnswer(error="no_action", detail="no tag")

    monkeypatch.setattr(ActionConfig, "parse", never)
    ends = make_config(tmp_path / "a", folder, actions=ActionConfig(format="tag"), reward=AgentRewardConfig(format=0.5))
    rollouts, scored, _, _ = roll(ends)
    assert [episode.ending for episode in AgentPayload.of(rollouts).episodes] == ["unreadable"] * 6
    assert [episode.last.text for episode in AgentPayload.of(rollouts).episodes] == ["step 0"] * 6, "nothing ran"
    assert scored.reward.tolist() == [-0.5] * 6
    assert scored.extras["decision_reward"].sum(1).tolist() == [-0.5] * 6
    spends = make_config(
        tmp_path / "b", folder, episode=EpisodeConfig(max_turns=2), reward=AgentRewardConfig(format=0.5)
    )
    rollouts, scored, _, _ = roll(spends)
    assert scored.reward.tolist() == [-1.0] * 6, "each of both answers costs a half"
    assert scored.reward_terms["format"].tolist() == [-2.0] * 6
    for row, episode in enumerate(AgentPayload.of(rollouts).episodes):
        paid = torch.nonzero(scored.extras["decision_reward"][row]).flatten().tolist()
        assert paid == episode.trajectory.last_tokens()
    payload = AgentPayload.of(rollouts)
    assert [episode.trajectory.turns for episode in payload.episodes] == [2] * 6
    assert [episode.ending for episode in payload.episodes] == ["truncated"] * 6
    assert all("could not be read: no tag" in own[0].prompt.text for own in payload.inserts)


def test_an_unreadable_answer_is_not_paid_for_what_the_turns_before_it_reached(tmp_path, folder, monkeypatch):
    def right_then_unreadable(self, text, cut=False, tools=()):
        turns.append(text)
        return ParsedAnswer((Action("right"),)) if len(turns) <= 6 else ParsedAnswer(error="no_action", detail="no tag")

    turns = []
    monkeypatch.setattr(ActionConfig, "parse", right_then_unreadable)
    ends = make_config(tmp_path, folder, actions=ActionConfig(format="tag"), workers=6, kwargs={"reports": True})
    rollouts, scored, _, _ = roll(ends)
    episodes = AgentPayload.of(rollouts).episodes
    assert [(episode.ending, episode.trajectory.turns) for episode in episodes] == [("unreadable", 2)] * 6
    assert scored.reward.tolist() == [0.0] * 6, "finish would have paid a third"
    assert [episode.success for episode in episodes] == [False] * 6, "the environment was not asked"


def test_a_conversation_that_does_not_fit_ends_before_its_turn_or_is_dropped(tmp_path, folder):
    """The tiny models have 512 positions; an image of 168 x 168 has 36 tokens or more."""
    limits = EpisodeConfig(max_turns=30)
    config = make_config(tmp_path, folder, kwargs={"length": 30, "side": 168}, episode=limits)
    rollouts, scored, logp, _ = roll(config)
    assert all(episode.overflows for episode in AgentPayload.of(rollouts).episodes)
    assert torch.isfinite(scored.reward).all()
    # every token that was sampled is scored again in one pass
    assert_equal_up_to_rounding(logp * rollouts.mask, rollouts.logp_old * rollouts.mask)
    limits.overflow.result = "failed"
    with pytest.raises(NoUsableTasksError, match="does not fit in the model's context"):
        roll(config)


def test_a_run_with_a_critic_over_turns(tmp_path, folder):
    objective = ObjectiveConfig(preset="ppo", advantage={"kind": "gae_turn"}, kl={"kind": "none"})
    run_dir = train(RECIPES["agent"], make_config(tmp_path, folder, objective=objective))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert all(row["loss/value"] > 0 for row in rows)


def test_training_tasks_may_not_be_evaluated_on(tmp_path, folder):
    config = make_config(tmp_path, folder)
    config.eval_data["heldout"].first_seed = 2
    with pytest.raises(UserError, match="also training tasks"):
        AgentRecipe(config)
    config.eval_data["heldout"].seen = True
    recipe = AgentRecipe(config)
    recipe.close()
    assert {task.seed for task in recipe.eval_tasks["heldout"]} & {task.seed for task in recipe.train_tasks} == {2, 3}
    config.data.seen = True
    with pytest.raises(UserError, match="seen is only for evaluation sets"):
        AgentRecipe(config)


def test_an_evaluation_names_the_code_in_the_options_of_its_environment(tmp_path, folder):
    judge = tmp_path / "judge.py"

    def setting(code):
        judge.write_text(code)
        options = {"judge": f"{judge}:judge"}
        config = make_config(tmp_path, folder, factory="tests.agents.small_grid:small_grid", kwargs=options, workers=1)
        with contextlib.closing(AgentRecipe(config)) as recipe:
            return recipe.measures(recipe.policy, "heldout", Step())[0].setting

    before, after = setting("def judge(): return 0\n"), setting("def judge(): return 1\n")
    assert before["named"].keys() == after["named"].keys() == {"kwargs.judge"}
    assert before["named"] != after["named"]
