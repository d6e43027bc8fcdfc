"""Models whose chat template ends a turn with another token than the tokenizer's eos_token."""

import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import pytest

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import Action, ActionConfig, Observation, ParsedAnswer
from mmrl.agents.monitor import count_episodes
from mmrl.agents.rollout.episodes import Episode, Trajectory
from mmrl.agents.rollout.runner import check_dropped, note_overflow
from mmrl.agents.rollout.storage import replay_episode
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.data.task import TaskError
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.model.model_config import ModelConfig
from tests.agents.runs import run_config
from tests.agents.test_text import make_config
from tests.vlm.builders import make_task

END = "<|endoftext|>"
THIN = f"{Path(__file__).with_name('fake_envs.py')}:Thin"


@pytest.fixture(scope="module")
def other_end(language_model, tmp_path_factory):
    """A model whose template ends turns with END, at which its generation config does not stop."""
    folder = tmp_path_factory.mktemp("ends") / "model"
    shutil.copytree(language_model, folder)
    template = (folder / "chat_template.jinja").read_text()
    assert template.count("<|im_end|>") == 1
    (folder / "chat_template.jinja").write_text(template.replace("<|im_end|>", END))
    file = folder / "generation_config.json"
    stops = json.loads(file.read_text())
    stops["eos_token_id"] = stops["eos_token_id"][:1]
    file.write_text(json.dumps(stops))
    return folder


def test_given_answers_samples_and_exports_end_as_the_template_does(other_end, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "mmrl"):
        policy = load_policy(ModelConfig(path=str(other_end)))
    (record,) = caplog.records
    assert f"ends the assistant's turn with {END}, but the checkpoint does not stop there (<|im_end|>)" in (
        record.getMessage()
    )
    tokenizer = policy.processor.tokenizer
    prompt = policy.encode(make_task("one", "Sum?"))
    assert tokenizer.decode(policy.encode_answer(prompt, "8")) == f"8{END}"
    assert tokenizer.convert_ids_to_tokens(list(policy.eos_ids)) == [END, "<|im_end|>"]
    policy.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert set(saved["eos_token_id"]) == set(policy.eos_ids)


def test_episodes_go_on_behind_such_a_turn(other_end, tmp_path, closing):
    config = make_config(tmp_path, other_end)
    config.actions.on_parse_error = "noop"  # an untrained model rarely ends an answer
    recipe = closing(AgentRecipe(config))
    groups = recipe.run_groups(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    writer, task = recipe.writer(recipe.policy), AgentTask("t")
    played = replay_episode(task, [(Observation("one"), "a"), (Observation("two"), "b")], recipe.policy, writer)
    episodes = [episode for group in groups for episode in group]
    assert min(episode.trajectory.turns for episode in episodes) >= 2
    assert "overflow" not in {episode.ending for episode in episodes}
    text = recipe.policy.processor.tokenizer.decode(played.trajectory.ids)
    assert text == f"a{END}\n<|im_start|>user\ntwo{END}\n<|im_start|>assistant\nb{END}"


def test_a_turn_that_cannot_be_written_ends_the_run(language_model, tmp_path):
    """Only a length is an overflow: before, these episodes left the training without a word."""
    recipe = AgentRecipe(make_config(tmp_path, language_model))
    tokenizer = recipe.policy.processor.tokenizer
    tokenizer.chat_template = "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}" + (
        tokenizer.chat_template
    )
    try:
        with pytest.raises(UserError, match=r"a turn of the episode cannot be encoded .* the chat template of .* no"):
            recipe.run_groups(recipe.policy, recipe.train_tasks[:1], Streams(0), Step())
    finally:
        recipe.close()


def test_an_image_that_the_model_cannot_read_costs_its_episode_only(tiny_folders, tmp_path, monkeypatch, closing):
    monkeypatch.setattr(ActionConfig, "parse", lambda *given, **named: ParsedAnswer((Action("go"),)))
    config = run_config(AgentConfig, tmp_path, tiny_folders["qwen3_vl"], THIN, workers=1)
    recipe = closing(AgentRecipe(config))
    episodes = recipe.run_episodes(recipe.policy, recipe.train_tasks, range(4))
    assert [episode.ending for episode in episodes] == ["failed", "terminated"] * 2
    assert "unusable_image: " in episodes[0].reason
    assert "aspect ratio" in episodes[0].reason
    assert not episodes[0].overflows
    seen = Counter()
    count_episodes(seen, episodes)
    assert seen["failed"] == 2


def ended(turns, ending):
    episode = Episode(AgentTask("t"), trajectory=Trajectory(turns=turns), ending=ending)
    if ending == "overflow":
        note_overflow(episode, TaskError("prompt_too_long", "t", "turn 2 does not fit"))
    return episode


@pytest.mark.parametrize(
    ("counts", "stops"),
    [
        ({(1, "terminated"): 12, (1, "overflow"): 4}, True),
        ({(1, "terminated"): 11, (1, "overflow"): 4, (2, "truncated"): 1}, False),
        ({(1, "terminated"): 13, (1, "overflow"): 3}, False),
        ({(1, "terminated"): 17, (1, "overflow"): 4}, False),
        ({(1, "terminated"): 11, (1, "overflow"): 4, (2, "failed"): 1}, True),
    ],
)
def test_a_run_that_always_drops_its_longer_episodes_stops(counts, stops):
    episodes = [ended(*kind) for kind, count in counts.items() for _ in range(count)]
    if not stops:
        check_dropped(episodes)
        return
    with pytest.raises(UserError, match="beyond turn 1 was dropped, 4 of 16 in this step: t: turn 2 does not fit"):
        check_dropped(episodes)
