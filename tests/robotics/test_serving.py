"""`mmrl serve`: openpi's protocol over a real websocket, several robots, bad messages, a policy that raises."""

import asyncio
import contextlib
import http.client
import re
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("msgpack", reason="needs pip install 'mmrl-suite[serve]'")
pytest.importorskip("websockets", reason="needs pip install 'mmrl-suite[serve]'")

import msgpack
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from mmrl.errors import UserError
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.episodes.payload import EpisodeSetConfig, list_episodes
from robotics.policies.base.action_policy import ActionChoice, ActionPolicy
from robotics.policies.base.action_statistics import ActionRange, ActionStatistics
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.small import SmallVlaConfig, SmallVlaPolicy
from robotics.serving import PolicyServer, ServeConfig
from robotics.serving.messages import LARGEST_MESSAGE, BadMessageError
from robotics.serving.messages import pack as own_pack
from robotics.serving.messages import unpack as own_unpack
from robotics.serving.observations import ObservationFormat
from robotics.serving.opening import ServedPolicy
from robotics.sim.interface import RobotInterface
from tests.robotics.line_sim import LineSim
from tests.robotics.openpi_messages import pack, unpack

ROOT = Path(__file__).parents[2]


class StatePolicy(ActionPolicy):
    """Chooses the first state entry as every action; a state of 9 makes it raise, one of 8 not a number."""

    chunk, action_size, decisions = 3, 2, 1

    def __init__(self):
        super().__init__()
        self.rows = []
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def act(self, batch, generator, temperature=1.0, greedy=False):
        self.entered.set()
        assert self.go_on.wait(30)
        self.rows.append(len(batch))
        if (batch.state == 9).any():
            raise ZeroDivisionError("nine")
        first = torch.where(batch.state[:, :1] == 8, torch.nan, batch.state[:, :1])
        noise = 0 if greedy else torch.randn(len(batch), 1, generator=generator)
        actions = (first + noise)[:, None].expand(-1, self.chunk, self.action_size)
        return ActionChoice(actions, actions, torch.zeros(len(batch), 1))

    def log_probs(self, batch, decisions, temperature=1.0):
        raise NotImplementedError

    bc_loss = save_pretrained = load_weights = log_probs


class PastPolicy(StatePolicy):
    """Takes three consecutive observations from two cameras and records its inputs."""

    past, views = 2, 1

    def __init__(self):
        super().__init__()
        self.given = []

    def act(self, batch, generator, temperature=1.0, greedy=False):
        self.given.append(batch)
        return super().act(batch, generator, temperature, greedy)


def tiny_policy(sim):
    encoder = EncoderConfig(image_size=(32, 32), state_size=2, width=32, heads=2, layers=1, channels=8, keypoints=4)
    return SmallVlaPolicy.build(SmallVlaConfig(1, 4, encoder=encoder), sim.tasks().values())


@contextlib.contextmanager
def running(policy, *, image_size=None, state_size=2, token="", **options):
    served = ServedPolicy.from_policy(policy, ServeConfig(**options), image_size, state_size)
    server, started = PolicyServer(served, port=0, token=token), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(started.set)))
    thread.start()
    assert started.wait(30)
    try:
        yield server
    finally:
        if isinstance(policy, StatePolicy):
            policy.go_on.set()
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def robot(server):
    with connect(f"ws://127.0.0.1:{server.port}", compression=None, max_size=None) as connection:
        connection.metadata = unpack(connection.recv(timeout=30))
        yield connection


def ask(connection, message):
    connection.send(message if isinstance(message, bytes | str) else pack(message))
    reply = connection.recv(timeout=30)
    return reply if isinstance(reply, str) else unpack(reply)


def seen(first=0.5, **changes):
    message = {"observation/state": np.array([first, 0.0], np.float32), "prompt": "go right"} | changes
    return {name: value for name, value in message.items() if value is not None}


def test_metadata_and_answers_are_those_of_openpi():
    with running(StatePolicy()) as server, robot(server) as connection:
        assert connection.metadata["observation"] == {
            "observation/state": {"dtype": "float32", "shape": [2]},
            "prompt": {"dtype": "text", "default": None},
        }
        assert connection.metadata["actions"] == {
            "dtype": "float32",
            "shape": [3, 2],
            "units": "environment",
            "low": [-1.0] * 2,
            "high": [1.0] * 2,
        }
        first, second = ask(connection, seen(0.5)), ask(connection, seen(0.25))
    assert first["actions"].dtype == np.float32
    np.testing.assert_array_equal(first["actions"], np.full((3, 2), 0.5, np.float32))
    np.testing.assert_array_equal(second["actions"], np.full((3, 2), 0.25, np.float32))
    assert "prev_total_ms" not in first["server_timing"]
    assert second["server_timing"]["prev_total_ms"] >= first["server_timing"]["infer_ms"]
    assert second["server_timing"]["infer_ms"] >= second["policy_timing"]["infer_ms"] > 0
    assert second["policy_timing"]["batch_size"] == 1


@pytest.mark.parametrize(("units", "scale"), [("environment", [0.15, 3.0]), ("normalised", [1.0, 1.0])])
def test_answers_are_in_the_units_of_the_environment_unless_others_are_asked_for(units, scale):
    policy = StatePolicy()
    policy.action_bounds = ActionRange((-0.15, -3.0), (0.15, 3.0))
    with running(policy, action_units=units) as server, robot(server) as connection:
        assert connection.metadata["actions"]["high"] == scale
        for first, expected in ((0.5, 0.5), (7.0, 1.0)):  # beyond the bounds, simulators clip too
            actions = ask(connection, seen(first))["actions"]
            np.testing.assert_allclose(actions, np.tile(np.multiply(expected, scale), (3, 1)), rtol=1e-6)
            assert actions.dtype == np.float32


def test_a_served_episode_is_that_of_an_evaluation():
    sim = LineSim()
    policy = tiny_policy(sim)
    policy.statistics = ActionStatistics.from_arrays(np.linspace(-1.5, 0.9, 50)[:, None])
    policy.interface = RobotInterface()  # as after training in a simulator
    (episode,) = list_episodes(EpisodeSetConfig(tasks=["left"], layouts=1), sim.tasks(), sim.layouts())
    settings = ActingSettings(scale="bounds_q99")
    wanted = run_episodes(policy, sim, [episode], settings, torch.Generator(), greedy=True).actions[0]
    observation = sim.reset([episode]).observation
    with running(policy, image_size=(32, 32)) as server, robot(server) as connection:
        while len(sim.live):
            message = {
                "observation": {"image": observation.images[0], "state": observation.state[0]},  # nested, too
                "prompt": episode.instruction,
            }
            result = sim.step_chunk(ask(connection, message)["actions"][None])
            observation = result.observation
    assert len(wanted) == sim.elapsed[0]
    np.testing.assert_array_equal(observation.state, run_to_end(sim, episode, wanted))


def run_to_end(sim, episode, actions):
    sim.reset([episode])
    return sim.step_chunk(actions[None]).observation.state


STATE = "observation/state"
BAD = [
    (seen(**{STATE: None}), "observation/state is missing; expected float32 (2,). The message has: prompt"),
    (seen(**{STATE: np.zeros(3)}), "observation/state is float64 (3,); expected float32 (2,)"),
    (seen(**{STATE: [0.0, 1.0]}), "observation/state is a list of 2; expected an array float32 (2,)"),
    (seen(**{STATE: np.array([0, np.inf])}), "observation/state is not finite in the entries [1]"),
    (seen(**{STATE: np.array(["a", "b"])}), "observation/state is an array of the dtype '<U1'"),
    (seen(prompt=None), "prompt is missing; expected the instruction as a text"),
    (seen(prompt=7), "prompt is the int 7; expected a text"),
    (seen(endpoint="fly"), "endpoint is the text 'fly'; must be infer (or missing) or reset"),
    ({}, "The message has: nothing"),
    ([1, 2], "the message is a list of 2; expected a dictionary"),
    (np.zeros(2), "the message is float64 (2,); expected a dictionary"),
    ("hello", "the message is the text 'hello'; expected bytes"),
    (b"\xc1", "the message of 1 bytes is not msgpack"),
    (b"", "the message of 0 bytes is not msgpack"),
    (pack(seen())[:-3], "is not msgpack"),
    (
        pack({STATE: {b"__ndarray__": True, b"data": b"1234", b"dtype": "<f4", b"shape": [2]}, "prompt": ""}),
        "observation/state is an array of the shape [2] and dtype <f4 with 4 bytes",
    ),
]


@pytest.fixture(scope="module")
def shared():
    with running(StatePolicy()) as server:
        yield server


@pytest.mark.parametrize(("message", "said"), BAD, ids=[said[:50] for _, said in BAD])
def test_bad_messages_are_refused_by_name_and_the_next_is_answered(shared, message, said):
    with robot(shared) as connection:
        reply = ask(connection, message)
        assert isinstance(reply, str)
        assert reply.startswith("message rejected: ")
        assert said in reply
        assert ask(connection, seen(0.5))["actions"][0, 0] == 0.5


def test_images_of_another_shape_are_refused():
    read = ObservationFormat((32, 48), None, ServeConfig(image_key="images/front", prompt="go"))
    good = np.zeros((32, 48, 3), np.uint8)
    assert read.read({"images/front": good}).images.shape == (1, 32, 48, 3)
    for image in (good.transpose(2, 0, 1), good[:16], good.astype(np.float32), good[..., :1]):
        with pytest.raises(BadMessageError, match=r"images/front is \w+ \(.*; expected uint8 \(32, 48, 3\), RGB"):
            read.read({"images/front": image})
    any_size = ObservationFormat((None, None), None, ServeConfig(prompt="go"))
    assert any_size.read({"observation/image": good[:7]}).images.shape == (1, 7, 48, 3)


VIEW, IMAGE = "observation/wrist_image", "observation/image"


def in_a_row(count, seed=0):
    """Observations of a robot with two cameras in its last control steps."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (2, count, 4, 5, 3), np.uint8)
    states = rng.uniform(-1, 1, (count, 2)).astype(np.float32)
    return {IMAGE: images[0], VIEW: images[1], STATE: states, "prompt": "go right"}


def of_step(message, step):
    return {name: part if isinstance(part, str) else part[step] for name, part in message.items()}


def test_observations_in_a_row_are_the_present_one_and_the_past():
    policy, message = PastPolicy(), in_a_row(3)
    with running(policy, image_size=(4, 5)) as server, robot(server) as connection:
        assert policy.given[0].past_state.shape == (1, 2, 2), "it was tried without a past"
        described = connection.metadata["observation"]
        assert described[IMAGE] == described[VIEW] == {"dtype": "uint8", "shape": [4, 5, 3], "n_obs_steps": 3}
        assert described[STATE] == {"dtype": "float32", "shape": [2], "n_obs_steps": 3}
        assert ask(connection, message)["actions"][0, 0] == message[STATE][2, 0]
        assert ask(connection, of_step(message, 1))["actions"][0, 0] == message[STATE][1, 0]
    row, alone = policy.given[1:]
    for given, present in ((row, 2), (alone, 1)):
        np.testing.assert_array_equal(given.images[0], message[IMAGE][present])
        np.testing.assert_array_equal(given.state[0], message[STATE][present])
        np.testing.assert_array_equal(given.views[0, 0], message[VIEW][present])
    np.testing.assert_array_equal(row.past_images[0], message[IMAGE][:2])
    np.testing.assert_array_equal(row.past_state[0], message[STATE][:2])
    np.testing.assert_array_equal(row.past_views[0, :, 0], message[VIEW][:2])
    assert alone.past_images is alone.past_state is alone.past_views is None


def test_other_numbers_of_observations_in_a_row_are_refused():
    read = ObservationFormat((4, 5), 2, ServeConfig(), views=1, past=2)
    message = in_a_row(3)
    expected = {
        IMAGE: r"uint8 \(2, 4, 5, 3\); expected uint8 \(4, 5, 3\) or \(3, 4, 5, 3\), oldest first, RGB",
        VIEW: r"uint8 \(2, 4, 5, 3\); expected uint8 \(4, 5, 3\) or \(3, 4, 5, 3\), oldest first, RGB",
        STATE: r"float32 \(2, 2\); expected float32 \(2,\) or \(3, 2\), oldest first",
    }
    for name, said in expected.items():
        with pytest.raises(BadMessageError, match=f"{name} is {said}"):
            read.read(message | {name: message[name][1:]})
        with pytest.raises(BadMessageError, match="some entries contain 3 observations in a row and others only one"):
            read.read(message | {name: message[name][0]})
    message[STATE][0, 1] = np.nan
    with pytest.raises(BadMessageError, match=rf"{STATE} is not finite in the entries \[1\]"):
        read.read(message)
    with pytest.raises(BadMessageError, match=rf"{STATE} is float32 \(3, 2\); expected float32 \(2,\)\."):
        ObservationFormat(None, 2, ServeConfig()).read(message)


def test_robots_with_and_without_a_past_are_not_answered_together():
    policy = PastPolicy()
    rows = [in_a_row(3), in_a_row(3, 1), of_step(in_a_row(3), 0), in_a_row(3, 2)]
    with running(policy, image_size=(4, 5)) as server, contextlib.ExitStack() as stack:
        robots = [stack.enter_context(robot(server)) for _ in rows]
        policy.rows.clear()
        policy.entered.clear()
        policy.go_on.clear()
        robots[0].send(pack(rows[0]))
        assert policy.entered.wait(30)
        for connection, message in zip(robots[1:], rows[1:], strict=True):
            connection.send(pack(message))
        while len(server._queue._waiting) < 3:
            time.sleep(0.01)
        policy.go_on.set()
        found = [unpack(connection.recv(timeout=30))["actions"][0, 0] for connection in robots]
    assert sorted(policy.rows) == [1, 1, 2]
    assert found == [np.atleast_2d(message[STATE])[-1, 0] for message in rows]


def test_own_messages_are_unpacked_as_packed():
    message = {"a": {"b": np.arange(6, dtype=">i2").reshape(2, 3)}, "t": "text", "x": 1.5, "e": np.zeros((0, 2))}
    found = own_unpack(own_pack(message))
    assert list(found) == ["a/b", "t", "x", "e"]
    np.testing.assert_array_equal(found["a/b"], message["a"]["b"])
    assert found["e"].shape == (0, 2)
    assert own_unpack(own_pack({"n": {b"__npgeneric__": True, b"data": 3, b"dtype": "<i8"}})) == {"n": 3}
    numbers = {"rate": np.float32(20), "step": np.int64(3), "last": np.bool_(True)}
    assert own_unpack(own_pack(numbers)) == {"rate": 20.0, "step": 3, "last": True}


def test_a_policy_that_raises_fails_its_own_message_only(caplog):
    policy = StatePolicy()
    with caplog.at_level("INFO", "mmrl"), running(policy) as server, robot(server) as one, robot(server) as other:
        assert ask(one, seen(9)) == "the policy gave no response: ZeroDivisionError: nine"
        assert ask(one, seen(9)) == "the policy gave no response: ZeroDivisionError: nine"
        assert ask(one, seen(8)) == "the policy gave no response: the policy chose actions that are not finite"
        assert ask(other, seen(0.25))["actions"][0, 0] == 0.25
        assert ask(one, seen(0.5))["actions"][0, 0] == 0.5
    logged = [record.getMessage() for record in caplog.records]
    assert logged.count("robot 1: the policy gave no response: ZeroDivisionError: nine") == 1
    assert sum("raise ZeroDivisionError" in line for line in logged) == 1
    assert any(line.startswith("robot 1 left: 1 responses, 3 rejected; policy median") for line in logged)
    assert any(line.startswith("2 robots: 2 responses, 3 rejected") for line in logged)


def test_robots_that_wait_together_are_answered_together_and_one_that_fails_fails_alone():
    policy = StatePolicy()
    firsts = [0.1, 0.2, 9, 0.4]
    with running(policy, max_batch=3) as server, contextlib.ExitStack() as stack:
        robots = [stack.enter_context(robot(server)) for _ in firsts]
        policy.rows.clear()
        policy.entered.clear()
        policy.go_on.clear()
        robots[0].send(pack(seen(firsts[0])))
        assert policy.entered.wait(30)  # the policy is busy with the first; the others wait for it
        for connection, first in zip(robots[1:], firsts[1:], strict=True):
            connection.send(pack(seen(first)))
        while len(server._queue._waiting) < 3:
            time.sleep(0.01)
        policy.go_on.set()
        replies = [connection.recv(timeout=30) for connection in robots]
    assert policy.rows == [1, 3, 1, 1, 1]
    assert "ZeroDivisionError" in replies[2]
    found = [unpack(reply)["actions"][0, 0] for place, reply in enumerate(replies) if place != 2]
    np.testing.assert_array_equal(found, np.array([0.1, 0.2, 0.4], np.float32))


def test_a_robot_that_leaves_while_it_waits_disturbs_nobody():
    policy = StatePolicy()
    with running(policy) as server, robot(server) as stays:
        policy.entered.clear()
        policy.go_on.clear()
        with robot(server) as leaves:
            leaves.send(pack(seen(0.1)))
            assert policy.entered.wait(30)
            leaves.close_socket()
        policy.go_on.set()
        assert ask(stays, seen(0.5))["actions"][0, 0] == 0.5


def test_reset_starts_a_robots_random_numbers_again_whatever_others_draw():
    with running(StatePolicy(), temperature=1.0) as server, robot(server) as one, robot(server) as other:
        drawn = [ask(one, seen())["actions"][0, 0], ask(other, seen())["actions"][0, 0]]
        drawn.append(ask(one, seen())["actions"][0, 0])
        assert ask(one, {"endpoint": "reset"}) == {"status": "reset successful"}
        again = [ask(one, seen())["actions"][0, 0] for _ in range(2)]
    assert again == [drawn[0], drawn[2]]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_message_that_is_too_large_ends_its_own_connection_only(shared):
    with robot(shared) as stays:
        with robot(shared) as connection, pytest.raises(ConnectionClosed, match="1009"):
            ask(connection, bytes(LARGEST_MESSAGE + 1))
        assert ask(stays, seen(0.5))["actions"][0, 0] == 0.5


NESTED = msgpack.packb({"p" * 50_000: {str(number): 0 for number in range(10_000)}})
MAPS = b"\x81\xa1a\xdc\x03\xe8" + (b"\xdc\x03\xe8" + b"\x80" * 1000) * 1000
BOMBS = [
    (NESTED, "more than 10000 entries"),
    (msgpack.packb({"p" * 50_000: {"a": 0}}), "an entry's name is longer than 256 characters"),
    (msgpack.packb({"a" * 200: {"b" * 100: 0}}), "an entry's name is longer than 256 characters"),
    (MAPS, "more than 10000 entries"),
    ((b"\x81\xa4" + b"key ") * 400 + b"\x01", "dictionaries nested more than 8 deep"),
    (seen(prompt="go " * 5000), "prompt has 15000 characters; at most 10000 are allowed"),
    (msgpack.packb({"observation/state": {b"__ndarray__": True, b"data": b"", b"dtype": "<f4", b"shape": [0] * 9000}}),
     "observation/state is an array of the shape"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "said"), BOMBS, ids=[said[-30:] for _, said in BOMBS])
def test_a_message_that_grows_when_it_is_read_is_refused_before_it_does(message, said, shared):
    data = message if isinstance(message, bytes) else pack(message)
    tracemalloc.start()
    try:
        with pytest.raises(BadMessageError, match=re.escape(said)):
            shared._read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6  # bytes; read whole they take up to 1000e6
    with robot(shared) as connection:
        assert said in ask(connection, data)
        assert ask(connection, seen(0.5))["actions"][0, 0] == 0.5


def test_messages_are_read_outside_the_loop(monkeypatch):
    with running(StatePolicy()) as server, robot(server) as slow, robot(server) as other:
        going, entered, read = threading.Event(), threading.Event(), server._served.format.read

        def wait(self, message):
            if message["prompt"] == "slow":
                entered.set()
                assert going.wait(30)
            return read(message)

        monkeypatch.setattr(ObservationFormat, "read", wait)
        slow.send(pack(seen(prompt="slow")))
        assert entered.wait(30)
        assert ask(other, seen(0.5))["actions"][0, 0] == 0.5
        going.set()
        assert unpack(slow.recv(timeout=30))["actions"][0, 0] == 0.5


def test_pages_in_a_browser_cannot_connect(shared):
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"ws://127.0.0.1:{shared.port}", origin="http://evil.example")


def test_a_token_is_asked_for():
    with running(StatePolicy(), token="s3cr3t") as server:
        place = f"ws://127.0.0.1:{server.port}"
        for header in ({}, {"Authorization": "Api-Key wrong"}, {"Authorization": ""}):
            with pytest.raises(InvalidStatus, match="401"):
                connect(place, additional_headers=header)
        for scheme in ("Api-Key", "Bearer"):
            with connect(place, additional_headers={"Authorization": f"{scheme} s3cr3t"}) as connection:
                assert unpack(connection.recv(timeout=30))["server"] == "mmrl"
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        client.request("GET", "/healthz")
        assert client.getresponse().status == 200


def test_texts_of_robots_are_escaped_in_the_log_and_their_lines_are_limited(caplog, monkeypatch):
    monkeypatch.setattr("robotics.serving.server.LINES_A_MINUTE", 4)
    with caplog.at_level("INFO", "mmrl"), running(StatePolicy()) as server:
        place = f"ws://127.0.0.1:{server.port}"
        with connect(place, user_agent_header="evil\x9b31m agent") as connection:
            connection.recv(timeout=30)
            ask(connection, seen(endpoint="\x1b[31mX\nfoo"))
            connection.close(code=4000, reason="x\nmmrl: error: FAKE LINE \x1b[31mred")
        for _ in range(5):
            with robot(server):
                pass
    about = [record.getMessage() for record in caplog.records if "robot " in record.getMessage()]
    assert len(about) == 4
    assert all(text.isprintable() for text in about)
    assert any("FAKE LINE" in text for text in about)


def test_health_and_plain_http(shared):
    for path, status in (("/healthz", 200), ("/", 426)):
        client = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=30)
        client.request("GET", path)
        assert client.getresponse().status == status


def test_what_the_policy_does_not_read_or_know_is_said_once(caplog):
    sim = LineSim()
    with caplog.at_level("INFO", "mmrl"), running(tiny_policy(sim), image_size=(32, 32)) as server:
        observation = sim.reset(list_episodes(EpisodeSetConfig(layouts=1), sim.tasks(), sim.layouts())).observation
        state, image = observation.state[0], observation.images[0]
        with robot(server) as connection:
            for _ in range(2):
                message = {"observation/image": image, "observation/wrist_image": image, "observation/state": state}
                assert ask(connection, message | {"prompt": "go upwards"})["actions"].shape == (4, 1)
            assert "has 40 words; at most 32" in ask(connection, message | {"prompt": "go " * 40})
    logged = [record.getMessage() for record in caplog.records]
    assert logged.count("robot 1 sends observation/wrist_image, which the policy does not use") == 1
    assert logged.count("robot 1: the policy does not know the words upwards") == 1


def test_a_taken_port_is_named(shared):
    served = ServedPolicy.from_policy(StatePolicy(), ServeConfig(), None, 2)
    with pytest.raises(UserError, match=f"port {shared.port}: the port is already in use; choose another --port"):
        asyncio.run(PolicyServer(served, port=shared.port).serve())
