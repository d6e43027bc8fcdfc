import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from mmrl.runs.metrics import STAGES
from mmrl.runs.run_log import Stopwatch, peak_memory_mb, stopwatch
from mmrl.runs.tracking import Tracker, describe_metric, read_metrics
from mmrl.training.settings import CheckpointConfig, EvaluationConfig
from tests.training.toy import ToyRecipe


def test_stages_add_up_and_a_part_counts_in_its_whole():
    watch = Stopwatch(torch.device("cpu"))
    with watch.running(), stopwatch("rollout"):
        for _ in range(2):
            with stopwatch("decode"):
                time.sleep(0.02)
        time.sleep(0.01)
    times = watch.take()
    assert 0.04 <= times["decode"] < times["rollout"] - 0.009
    assert watch.take() == {}


def test_a_stage_that_fails_is_counted_and_the_watch_is_put_away():
    watch, started_s = Stopwatch(torch.device("cpu")), time.perf_counter()
    with pytest.raises(ValueError, match="no"), watch.running(), stopwatch("score"):
        raise ValueError("no")
    taken_s = time.perf_counter() - started_s
    with stopwatch("score"):
        time.sleep(0.2)
    assert 0 < watch.take()["score"] <= taken_s


def test_watches_do_not_see_one_another():
    outer, inner = Stopwatch(torch.device("cpu")), Stopwatch(torch.device("cpu"))
    with outer.running():
        with inner.running(), stopwatch("update"):
            pass
        with stopwatch("score"):
            pass
    assert outer.take().keys() == {"score"}
    assert inner.take().keys() == {"update"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_queued_on_a_gpu_counts_for_the_stage_that_queued_it():
    device = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=device)
    watch = Stopwatch(device)
    for _ in range(2):  # the first time loads kernels
        watch.take()
        with watch.running(), stopwatch("step"):
            with stopwatch("forward"):
                for _ in range(20):
                    matrix @ matrix
            with stopwatch("optimizer"):
                matrix.add_(0)
    times = watch.take()
    assert times["forward"] > 10 * times["optimizer"] > 0
    assert times["forward"] + times["optimizer"] == pytest.approx(times["step"], rel=0.05)


class PrefillingRecipe(ToyRecipe):
    def rollout(self, policy, tasks, streams, step):
        with stopwatch("prefill"):
            return super().rollout(policy, tasks, streams, step)

    def evaluate(self, policy, split, accelerator, step):
        with stopwatch("prefill"):
            time.sleep(0.05)
        return super().evaluate(policy, split, accelerator, step)


def test_steps_say_where_their_seconds_went(make_trainer):
    trainer = make_trainer(
        recipe=PrefillingRecipe,
        steps=3,
        epochs=2,
        micro_batch=4,
        evaluation=EvaluationConfig(every=1),
        checkpoint=CheckpointConfig(every=1),
    )
    trainer.log.tracker = Tracker(trainer.run_dir, strict=True)
    peak = peak_memory_mb(torch.device("cpu"))
    result = trainer.run()
    records = read_metrics(trainer.run_dir)
    for record in records:
        stages = [record.get(f"time/{stage}", 0.0) for stage in STAGES]
        parts = [record[f"time/{part}"] for part in ("forward", "backward", "optimizer")]
        assert 0 < sum(stages) <= record["time/step"]
        assert min(parts) > 0
        assert sum(parts) <= record["time/update"]
        assert min(record["time/old_logp"], record["time/ref_logp"]) > 0
        # prefills of the evaluation before the step are the evaluation's
        assert 0 < record["time/prefill"] <= record["time/rollout"]
        assert record["time/evaluate"] >= 0.05
        assert record["memory/peak_mb"] > 0.95 * peak
    assert records[0]["time/checkpoint"] == 0 < records[1]["time/checkpoint"]
    assert result["seconds"] == pytest.approx(sum(record["time/step"] for record in records))


def test_passes_that_a_run_does_not_need_take_no_time(make_trainer):
    trainer = make_trainer(steps=1, preset="dapo")
    trainer.log.tracker = Tracker(trainer.run_dir, strict=True)
    trainer.run()
    record = json.loads((trainer.run_dir / "metrics.jsonl").read_text())
    assert record["time/old_logp"] == record["time/ref_logp"] == 0
    assert all(describe_metric(f"time/{stage}") for stage in (*STAGES, "encode", "prefill", "decode"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_at_least_the_memory_in_use():
    block = torch.ones(64_000_000)  # 256 MB
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    peak = peak_memory_mb(torch.device("cpu"))
    # the system counts in lumps, which are small beside the block
    assert block.nbytes / 1e6 < resident < 1.05 * peak
    del block
    assert peak_memory_mb(torch.device("cpu")) > 0.95 * peak
