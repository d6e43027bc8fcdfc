"""Facts and snippets in the cards of exported policies."""

import json

from mmrl.recipes import find_recipe
from robotics.policies.policy_card import describe_policy, rendered_size
from tests.robotics.line_sim import LineSim
from tests.robotics.test_serving import tiny_policy


def test_the_snippet_of_a_policy_acts_and_its_facts_are_those_of_the_simulator(tmp_path):
    out, episodes = tmp_path / "out", tmp_path / "run/episodes"
    policy = tiny_policy(LineSim())
    policy.export(out)
    episodes.mkdir(parents=True)
    (episodes / "a.protocol.json").write_text(json.dumps({"simulator": {"control_hz": 10, "tasks": {"right": 12}}}))
    (episodes / "a.jsonl").write_text(json.dumps({"instruction": 'go "right"'}) + "\n")
    (out / "lerobot").mkdir()
    (out / "lerobot/config.json").write_text('{"type": "smolvla"}')
    found = describe_policy(find_recipe("robot_grpo").default_config(), policy, tmp_path / "run", out)
    made = {"folder": str(out)}
    exec(f"{found.load}\n{found.use}", made)
    assert made["choice"].actions.shape == (1, policy.chunk, policy.action_size)
    assert made["observation"].instructions == ('go "right"',)
    assert found.facts["control rate"] == "10 Hz"
    assert found.facts["horizon in control steps"] == "right 12"
    assert "layouts 0 to 49 of the split train" in found.facts["initial states"]
    card = (out / "lerobot/README.md").read_text()
    assert "library_name: lerobot" in card
    assert "get_policy_class('smolvla')" in card


def test_images_have_the_size_that_an_evaluation_described(tmp_path):
    config = find_recipe("robot_grpo").default_config()
    assert rendered_size(config, tmp_path) == (64, 64)
    (tmp_path / "episodes").mkdir()
    # as with sim.options.adapter {size: null}
    (tmp_path / "episodes/a.protocol.json").write_text(json.dumps({"simulator": {"image_size": [24, 32]}}))
    assert rendered_size(config, tmp_path) == (24, 32)
    config.sim.image_size = 0
    assert rendered_size(config, tmp_path) is None
