"""pi0.5, X-VLA and GR00T of lerobot at the table: its own `select_action`, an evaluation, training and a server.

The slow tests need an environment with lerobot, see `test_lerobot_peer.py`:

    lerobot-env/bin/pip install 'lerobot[dataset,pi,smolvla,xvla,groot]==0.6.1'
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.cli import main
from mmrl.errors import UserError
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.policies.base.action_policy import open_policy
from robotics.policies.lerobot import lerobot_server
from robotics.policies.lerobot.flow import LeRobotFlowConfig, LeRobotFlowPolicy
from robotics.policies.lerobot.gaussian import LeRobotPolicy, LeRobotPolicyConfig
from robotics.policies.policy_loading import ActionPolicyConfig, check_fit, load_action_policy
from robotics.serving.observations import ServeConfig
from robotics.serving.opening import open_served_policy
from robotics.serving.queue import choose_chunks
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim
from tests.robotics import lerobot_process, lerobot_vlas
from tests.robotics.lerobot_process import run_peer

KINDS = ("pi05", "xvla", "groot")
EPISODES = [EpisodeSpec("push", "", layout) for layout in (3, 8)]
RUN = """
recipe: robot_grpo
output_dir: {run}
sim: {{kind: tabletop, tasks: [push], views: [wrist], horizon: 15}}
model: {{kind: {model}, options: {{folder: {folder}, python: {python}, tokenizer: {tokenizer}}}}}
acting: {{n_action_steps: 5}}
reward: potential
data: {{tasks: [push], layouts: 4}}
eval_data: {{held_out: {{tasks: [push], split: held_out, layouts: 3}}}}
evaluation: {{every: 0, greedy: true, samples: 0, videos: 0}}
trainer: {{steps: 1, tasks_per_step: 2, samples_per_task: 4, learning_rate: 1.0e-3, threads: 1}}
tracking: {{quiet: true, tensorboard: false}}
"""


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_tokenizer_is_a_folder(tmp_path):
    options = LeRobotPolicyConfig("anything", tokenizer=str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"model\.options\.tokenizer is .*absent, which is not a folder"):
        LeRobotPolicy(options)


def test_a_tokenizer_reaches_the_other_side_and_its_way_of_acting_this_one(tmp_path, monkeypatch, caplog):
    (tmp_path / "service.py").write_text(
        "from tests.robotics.fake_lerobot import SlowWalk\n"
        "class Told(SlowWalk):\n"
        "    def hello(self):\n"
        "        return {**super().hello(), 'executed': 3, 'ensemble': 0.01}\n"
        "def make(folder, device, cameras, tokenizer):\n"
        f"    assert tokenizer == {str(tmp_path)!r}\n"
        "    return Told(folder, device, cameras)\n"
    )
    monkeypatch.setattr(lerobot_server, "SERVICE", tmp_path / "service.py")
    monkeypatch.setenv("PYTHONPATH", str(lerobot_process.PROJECT))
    with caplog.at_level("INFO", "mmrl"):
        LeRobotPolicy(LeRobotPolicyConfig("anything", tokenizer=str(tmp_path))).close()
    assert "predicts 4 control steps and in lerobot executes 3 of them" in caplog.text
    assert "averages its overlapping chunks in lerobot; here, set acting.ensemble: 0.01" in (caplog.text)


# Below: policies of the package itself.


@pytest.fixture(scope="module")
def built(lerobot, tmp_path_factory):
    """Folder of policies that lerobot built and saved."""
    folder = tmp_path_factory.mktemp("vlas")
    run_peer(lerobot, lerobot_vlas, "build", folder)
    return folder


@pytest.fixture(autouse=True)
def tiny(request, monkeypatch):
    """The service knows a tiny pi0.5."""
    if "built" in request.fixturenames:
        monkeypatch.setattr(lerobot_server, "SERVICE", Path(__file__).with_name("tiny_lerobot_service.py"))


def text_of(built, kind):
    return str(built / ("backbone" if kind == "groot" else "text"))


def configuration(tmp_path, built, kind, lerobot, model):
    path = tmp_path / "run.yaml"
    values = {"folder": built / kind, "python": lerobot, "tokenizer": text_of(built, kind), "model": model}
    path.write_text(RUN.format(run=tmp_path / "run", **values))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_choose_the_actions_of_lerobots_select_action(lerobot, built, kind, tmp_path):
    options = {"folder": str(built / kind), "python": lerobot, "tokenizer": text_of(built, kind)}
    seen, arrays = [], tmp_path / "arrays.npz"
    with open_sim(SimConfig(kind="tabletop", tasks=["push"], views=["wrist"], horizon=15)) as sim:
        policy = load_action_policy(ActionPolicyConfig(kind="lerobot", options=options), sim, 0)
        check_fit(policy, sim)
        predict = policy.predict
        policy.predict = lambda batch, seed: (seen.append((batch, seed)), predict(batch, seed))[1]
        settings = ActingSettings(n_action_steps=lerobot_vlas.EXECUTED)
        found = run_episodes(policy, sim, EPISODES, settings, seeded(4), greedy=True)
    policy.close()
    # each observation is repeated while its chunk is executed; select_action reads the first alone
    parts = {
        name: np.repeat([getattr(batch, name).numpy() for batch, _ in seen], lerobot_vlas.EXECUTED, 0)
        for name in ("images", "views", "state")
    }
    assert len(np.unique(parts["images"], axis=0)) == 3
    np.savez(arrays, **parts, seeds=[seed for _, seed in seen], tasks=seen[0][0].instructions)
    run_peer(lerobot, lerobot_vlas, "select", built / kind, text_of(built, kind), arrays)
    with np.load(arrays) as answers:
        wanted = answers["actions"].swapaxes(0, 1)
    assert np.abs(np.diff(wanted, axis=1)).max() > 0.01, "the actions hardly change"
    np.testing.assert_allclose(np.stack(found.actions), wanted.clip(-1, 1), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model"), [*((kind, "lerobot") for kind in KINDS), ("pi05", "lerobot_flow")])
def test_policies_are_evaluated_trained_and_served(lerobot, built, kind, model, tmp_path, capsys):
    config = configuration(tmp_path, built, kind, lerobot, model)
    assert main(["evaluate", config]) == 0
    assert "all tasks" in capsys.readouterr().out
    assert main(["train", config]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [row["optim/grad_norm"] > 0 for row in rows if "optim/grad_norm" in row] == [True]
    served = open_served_policy(tmp_path / "run", ServeConfig(prompt="push the red cube to the blue zone"))
    message = {
        "observation/image": np.full((64, 64, 3), 80, np.uint8),
        "observation/wrist_image": np.full((64, 64, 3), 30, np.uint8),
        "observation/state": np.linspace(-0.5, 0.5, 10).astype(np.float32),
    }
    row = served.format.read(message)
    actions = choose_chunks(served, row, seeded(3))[0].actions
    assert actions.shape == (5 if kind == "groot" else 8, 5)
    opened = open_policy(Path(served.about["source"]) / "model")
    np.testing.assert_array_equal(actions, choose_chunks(served, row, seeded(3))[0].actions)
    opened.close()
    served.policy.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_is_not_here_is_named(lerobot, built, kind):
    hub = lerobot_vlas.HUB[kind]
    with pytest.raises(UserError, match=rf"the tokenizer of {hub}, which is neither.*model\.options\.tokenizer.*gated"):
        LeRobotPolicy(LeRobotPolicyConfig(str(built / kind), python=lerobot))


@pytest.mark.slow
def test_weights_that_lerobot_does_not_read_are_refused(lerobot, built, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(built / "pi05", tmp_path / "pi05")
    file = tmp_path / "pi05/model.safetensors"
    weights = load_file(file)
    del weights["model.time_mlp_in.weight"]
    save_file(weights, file)
    options = {"python": lerobot, "tokenizer": text_of(built, "pi05")}
    with pytest.raises(UserError, match=r"the weights of .* do not belong to a pi05: .*time_mlp_in\.weight"):
        LeRobotPolicy(LeRobotPolicyConfig(str(tmp_path / "pi05"), **options))
    file.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"do not belong to a pi05: lerobot did not read them"):
        LeRobotPolicy(LeRobotPolicyConfig(str(tmp_path / "pi05"), **options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xvla", "groot"])
def test_heads_that_are_no_flow_of_velocities_are_refused(lerobot, built, kind):
    options = LeRobotFlowConfig(str(built / kind), python=lerobot, tokenizer=text_of(built, kind))
    with pytest.raises(UserError, match=rf"of type {kind}, which has no trainable flow head.*model\.kind lerobot"):
        LeRobotFlowPolicy(options)


@pytest.mark.slow
def test_a_groot_without_its_base_model_is_refused(lerobot, built, tmp_path):
    shutil.copytree(built / "groot", tmp_path / "groot")
    file = tmp_path / "groot/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_path": "nvidia/GR00T-N1.7-3B"}))
    options = LeRobotPolicyConfig(str(tmp_path / "groot"), python=lerobot, tokenizer=text_of(built, "groot"))
    with pytest.raises(UserError, match=r"is built on nvidia/GR00T-N1\.7-3B, base_model_path in its config\.json"):
        LeRobotPolicy(options)
