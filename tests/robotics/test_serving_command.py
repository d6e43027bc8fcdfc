"""`mmrl serve` from the command line: policies that it serves, refusals, Ctrl-C, and the real openpi-client."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("msgpack", reason="needs pip install 'mmrl-suite[serve]'")
pytest.importorskip("websockets", reason="needs pip install 'mmrl-suite[serve]'")

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from mmrl.cli import main
from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.report.export import export_run
from mmrl.training.run import train
from mmrl.vlm.model.model_config import ModelConfig
from robotics.methods.robot_recipe import RobotParts
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.action_statistics import ActionRange
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.flow import FlowActionPolicy, FlowPolicyConfig
from robotics.policies.gaussian import GaussianActionPolicy, GaussianPolicyConfig
from robotics.policies.small import SmallVlaConfig, SmallVlaPolicy
from robotics.policies.vlm import VlmActionConfig, VlmActionPolicy
from robotics.serving import ServeConfig, open_served_policy
from robotics.serving.queue import choose_chunks
from tests.robotics.line_demos import demonstrate
from tests.robotics.line_sim import LineSim
from tests.robotics.openpi_messages import pack, unpack
from tests.robotics.test_cloning import clone
from tests.robotics.test_robot_recipes import grpo
from tests.robotics.test_serving import tiny_policy
from tests.robotics.tiny_models import save_tiny_vlm
from tests.signals import start_program

ROOT = Path(__file__).parents[2]
REAL_CLIENT = os.environ.get("MMRL_OPENPI_PYTHON") or (
    sys.executable if importlib.util.find_spec("openpi_client") else ""
)
"""Python of an environment with openpi-client (tried: 0.1.2 with numpy 1.26.4), mujoco and gymnasium."""


def needs_real_client(test):
    """Interpreter for tests with openpi's client, which requires numpy below 2."""
    missing = "needs pip install openpi-client mujoco gymnasium, here or for the Python in MMRL_OPENPI_PYTHON"
    return pytest.mark.slow(pytest.mark.skipif(not REAL_CLIENT, reason=missing)(test))


def test_run_export_and_checkpoint_open(tmp_path):
    config = grpo(tmp_path / "run")
    config.trainer.steps = 2
    run = train(find_recipe("robot_grpo"), config)
    served = open_served_policy(run, ServeConfig())  # a module of the user's own, its sizes from the simulator
    assert served.format.describe().keys() == {"observation/image", "observation/state", "prompt"}
    assert served.about["source"].endswith("step-000002")
    assert open_served_policy(run, ServeConfig(), step=2).about["recipe"] == "robot_grpo"
    export_run(find_recipe("robot_grpo"), config, run, tmp_path / "out")
    with pytest.raises(UserError, match="must be served from its run folder"):
        open_served_policy(tmp_path / "out", ServeConfig())
    tiny_policy(LineSim()).save_pretrained(tmp_path / "saved")
    saved = open_served_policy(tmp_path / "saved", ServeConfig())
    assert (saved.format.image_size, saved.format.state_size, saved.policy.training) == ((32, 32), 2, False)
    with pytest.raises(UserError, match="not a run folder"):
        open_served_policy(tmp_path / "saved", ServeConfig(), step=2)


def test_policies_of_every_kind_open_with_their_inputs(tmp_path):
    texts = list(LineSim().tasks().values())
    encoder = EncoderConfig(image_size=None, state_size=2, width=32, heads=2, layers=1)
    flow = FlowActionPolicy.build(FlowPolicyConfig(1, 4, encoder=encoder), texts)
    gaussian = GaussianActionPolicy.build(GaussianPolicyConfig(1, 4, encoder=encoder), texts)
    vlm = VlmActionPolicy.from_model(
        ModelConfig(path=str(save_tiny_vlm(tmp_path / "tiny"))), VlmActionConfig(1, 4, bins=32)
    )
    for policy, image_size, state_size in ((flow, None, 2), (gaussian, None, 2), (vlm, (None, None), None)):
        folder = tmp_path / type(policy).__name__
        policy.save_pretrained(folder)
        served = open_served_policy(folder, ServeConfig(prompt=texts[0]))
        assert (served.format.image_size, served.format.state_size) == (image_size, state_size)
        rows = PolicyInputs.concat([served.format.example()] * 2)
        chunks = choose_chunks(served, rows, torch.Generator().manual_seed(0))
        assert [chunk.actions.shape for chunk in chunks] == [(4, 1)] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is neither a run folder (config.yaml) nor a robot policy (policy.json)"),
        (["nowhere", "temprature=1"], "did you mean 'temperature'?"),
        (["nowhere", "max_batch=0"], "max_batch"),
        (["nowhere", "image_key=prompt"], "the names must differ"),
    ],
)
def test_usage_errors_are_one_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err


@dataclass
class Served:
    """`mmrl serve` in a separate process."""

    program: subprocess.Popen[str]
    port: int
    lines: list[str]
    """Output before it was ready."""


@pytest.fixture
def command(tmp_path):
    """Starts `mmrl serve` on the folder of a policy, as a user does."""
    started = []

    def start(policy, folder=tmp_path / "saved") -> Served:
        if policy is not None:
            policy.save_pretrained(folder)
        arguments = [sys.executable, "-m", "mmrl.cli", "serve", str(folder), "--port", "0"]
        program = start_program(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
        started.append(program)
        lines = []
        for line in program.stdout:
            lines.append(line)
            found = re.match(r"serving at ws://127\.0\.0\.1:(\d+),", line)
            if found:
                return Served(program, int(found[1]), lines)
        raise AssertionError(program.communicate()[1])

    yield start
    for program in started:
        program.kill()
        program.communicate()


def test_ctrl_c_sends_robots_away_and_exits_130(command):
    served = command(tiny_policy(LineSim()))
    with connect(f"ws://127.0.0.1:{served.port}") as connection:
        connection.recv(timeout=30)
        served.program.send_signal(signal.SIGINT)
        with pytest.raises(ConnectionClosed, match="1001"):
            connection.recv(timeout=30)
    said, complaint = served.program.communicate(timeout=60)
    assert served.program.returncode == 130
    said_last = complaint.splitlines()[-1]
    assert said_last.startswith("mmrl: SIGINT: no longer serving; start again with: mmrl serve ")
    assert "Traceback" not in said + complaint
    assert any("protocol of openpi-client" in line for line in served.lines)
    assert "robot 1 was disconnected by the server: 0 responses" in said


@pytest.mark.slow
def test_the_run_of_a_cloned_policy_is_served(command, tmp_path):
    config = clone(tmp_path, demonstrate(tmp_path / "demos"), eval_data={})
    run = train(find_recipe("robot_clone"), config)
    served = command(None, run)
    with connect(f"ws://127.0.0.1:{served.port}") as connection:
        assert unpack(connection.recv(timeout=30))["recipe"] == "robot_clone"
        connection.send(pack({"observation/state": np.array([0.1, 0.5], np.float32), "prompt": "go right"}))
        answer = unpack(connection.recv(timeout=30))
    assert answer["actions"].shape == (config.model.chunk, 1)


def test_the_recipes_that_a_refusal_names_can_be_served(tmp_path):
    (tmp_path / "config.yaml").write_text("recipe: sft\nmodel: {path: x}\ndata: {path: x}\n", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"a run of the recipe sft; only policies of these recipes can be served: "
    ) as refusal:
        open_served_policy(tmp_path, ServeConfig())
    for name in str(refusal.value).rpartition(": ")[2].split(", "):
        assert issubclass(find_recipe(name).load_config_class(), RobotParts), name


PROGRAM = """
import sys
import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

client = WebsocketClientPolicy(host="127.0.0.1", port=int(sys.argv[1]))
observation = {
    "observation/image": np.zeros((32, 32, 3), np.uint8),
    "observation/state": np.zeros(2, np.float32),
    "prompt": "go left",
}
actions = client.get_server_metadata()["actions"]
assert (actions["shape"], actions["low"], actions["high"]) == ([4, 1], [-0.15], [0.45])
broker = ActionChunkBroker(client, action_horizon=2)
assert [broker.infer(observation)["actions"].shape for _ in range(3)] == [(1,)] * 3
broker.reset()
try:
    client.infer({"observation/state": np.zeros(3)})
except RuntimeError as error:
    assert "there is no observation/image" in str(error)
else:
    raise AssertionError("not refused")
answer = client.infer(observation)
assert answer["actions"].shape == (4, 1) and answer["actions"].dtype == np.float32
assert -0.15 <= answer["actions"].min() and answer["actions"].max() <= 0.45
assert client.infer({"endpoint": "reset"}) == {"status": "reset successful"}
print("ok")
"""


def run_real_client(program: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [REAL_CLIENT, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_real_client
def test_the_real_client(command):
    policy = tiny_policy(LineSim())
    policy.action_bounds = ActionRange((-0.15,), (0.45,))
    assert run_real_client(PROGRAM, str(command(policy).port)) == "ok\n"


@needs_real_client
def test_the_client_of_the_docs_drives_an_episode(command, backend):
    """The environment is in the client's process."""
    (text,) = re.findall(r"```python\n# my_client\.py\n(.*?)```", (ROOT / "docs/robot_policies.md").read_text(), re.S)
    encoder = EncoderConfig(state_size=10, width=32, heads=2, layers=1, channels=8, keypoints=4)
    policy = SmallVlaPolicy.build(SmallVlaConfig(5, 16, encoder=encoder), ["push the red cube to the green zone"])
    served = command(policy)
    said = run_real_client(text.replace("port=8000", f"port={served.port}"))
    assert re.match(r"(not )?solved \{'infer_ms': .*'prev_total_ms': ", said)
