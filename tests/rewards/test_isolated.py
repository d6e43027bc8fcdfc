import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mmrl.rewards import RewardConfig, RewardSum

USER = str(Path(__file__).with_name("user_functions.py"))
ROWS = ["a", "bad", "bb", "ccc"]


@pytest.fixture
def make():
    made = []

    def build(function, workers=1, **options):
        made.append(RewardSum([RewardConfig("mine", f"{USER}:{function}", **options)], workers=workers))
        return made[-1]

    yield build
    for rewards in made:
        rewards.close()


def score(rewards, rows=ROWS, **columns):
    result = rewards.score(["q"] * len(rows), rows, columns)
    return result.terms["mine"], result


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        ("raises_on_bad", "raised", "RuntimeError: cannot score bad"),
        ("exits_on_bad", "raised", "SystemExit: 3"),
        ("hangs_on_bad", "timeout", "after 1 s"),
        ("killed_on_bad", "crashed", "SIGKILL"),
        ("hard_exits_on_bad", "crashed", "exit code 7"),
        ("drops_bad", "wrong_length", "0 values for 1 rows"),
    ],
)
@pytest.mark.parametrize("rows", ["auto", "independent"])
def test_only_the_offending_row_is_lost(make, function, kind, message, rows):
    values, result = score(make(function, timeout_s=1.0, rows=rows))
    assert [values[0], *values[2:]] == [1.0, 1.0, 1.0]
    assert math.isnan(values[1])
    assert math.isnan(result.total[1])
    assert result.errors == {f"mine/{kind}": 1}
    assert message in result.examples[f"mine/{kind}"]


def test_odd_values_are_counted_by_kind(make):
    rows = ["fine", "nan", "inf", "none", "text", "list", "true"]
    values, result = score(make("odd_values"), rows)
    assert values[0] == 0.5
    assert values[6] == 1.0
    assert all(math.isnan(value) for value in values[1:6])
    assert result.errors == {"mine/nan": 2, "mine/not_a_number": 2, "sum/not_applicable": 1}


def test_no_list_is_an_error_for_every_row(make):
    _, result = score(make("no_list"))
    assert result.errors == {"mine/wrong_length": 4}
    assert "expected a list" in result.examples["mine/wrong_length"]


def test_numpy_arrays_are_lists_too(make):
    assert score(make("numpy_values"), ["a", "b", "c"])[0] == [0.0, 0.5, 1.0]


def test_hanging_for_ever_ends_within_bounds(make):
    rewards = make("hangs_always", timeout_s=0.2)
    start = time.monotonic()
    values, result = score(rewards, ["x"] * 64)
    assert time.monotonic() - start < 60.0, "the function alone sleeps longer than that"
    assert all(math.isnan(value) for value in values)
    assert result.errors == {"mine/timeout": 64}


def test_workers_are_kept_between_calls_and_replaced_after_a_kill(make):
    rewards = make("pid")
    first = score(rewards)[0][0]
    assert score(rewards)[0] == [first] * 4
    assert first != os.getpid()
    os.kill(int(first), signal.SIGKILL)
    wait_until(lambda: not alive(int(first)))
    values, result = score(rewards)
    assert values[0] not in (first, os.getpid())
    assert result.errors == {}


def test_rows_are_spread_over_workers(make):
    assert len(set(score(make("pid", workers=2, rows="independent"), ["x"] * 64)[0])) == 2


def test_a_stopped_worker_is_replaced(make):
    rewards = make("pid", timeout_s=2.0, workers=1)
    first = int(score(rewards)[0][0])
    os.kill(first, signal.SIGSTOP)
    values, result = score(rewards)
    assert result.errors == {}
    assert values[0] not in (first, os.getpid())
    assert not alive(first)


def test_functions_that_compare_rows_see_all_or_nothing(make):
    assert score(make("rank", rows="together"))[0] == [0.0, 2.0, 1.0, 3.0]
    values, result = score(make("rank_or_raise", rows="together"))
    assert all(math.isnan(value) for value in values)
    assert result.errors == {"mine/raised": 4}


def test_a_cell_that_cannot_be_sent_costs_its_own_row(make):
    sys.path.insert(0, str(Path(USER).parent))
    try:
        from user_functions import Unpicklable
    finally:
        sys.path.pop(0)
    values, result = score(make("length"), cells=[1, Unpicklable(), 3, 4])
    assert [values[0], *values[2:]] == [1.0, 2.0, 3.0]
    assert result.errors == {"mine/raised": 1}
    assert "this cell stays here" in result.examples["mine/raised"]


def test_output_of_a_function_does_not_disturb(make):
    assert score(make("prints"))[0] == [1.0] * 4


def test_from_several_threads(make):
    rewards = make("length", workers=2)
    found = {}

    def work(name):
        found[name] = score(rewards, ["x" * name] * 20)[0]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [float(name)] * 20 for name in range(1, 5)}


def test_in_process_functions_fail_row_by_row_too(make):
    values, result = score(make("raises_on_bad", isolate=False))
    assert [values[0], *values[2:]] == [1.0, 1.0, 1.0]
    assert result.errors == {"mine/raised": 1}
    assert "user_functions.py" in result.examples["mine/raised"]
    assert score(make("exits_on_bad", isolate=False))[1].errors == {"mine/raised": 1}
    assert score(make("pid", isolate=False))[0] == [float(os.getpid())] * 4


def test_close_leaves_no_process(make):
    rewards = make("pid", workers=2, rows="independent")
    pids = {int(value) for value in score(rewards, ["x"] * 64)[0]}
    rewards.close()
    assert not any(alive(pid) for pid in pids)
    assert not math.isnan(score(rewards)[0][0])


SCRIPT = """
import sys, time
from mmrl.rewards import RewardConfig, RewardSum
rewards = RewardSum([RewardConfig("pid", sys.argv[1] + ":pid"), RewardConfig("h", sys.argv[1] + ":hangs_on_bad")])
print(int(rewards.score(["q"], ["a"], {}).terms["pid"][0]), flush=True)
if sys.argv[2] == "hang":
    rewards.score(["q"], ["bad"], {})
"""


def test_no_worker_outlives_a_program_that_just_ends():
    command = [sys.executable, "-c", SCRIPT, USER, "end"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert not alive(int(done.stdout))


def test_no_worker_outlives_a_killed_program_even_while_it_hangs():
    command = [sys.executable, "-c", SCRIPT, USER, "hang"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        pid = int(program.stdout.readline())
        time.sleep(0.5)  # the worker is inside the hanging function by now
        assert alive(pid)
        program.kill()
    wait_until(lambda: not alive(pid))


def test_neither_rewards_nor_workers_import_torch():
    code = (
        "import sys, mmrl.rewards, mmrl.rewards.service, mmrl.workers.pool, mmrl.rewards.maths, mmrl.rewards.loading;"
        "heavy = {'torch', 'transformers', 'numpy', 'PIL', 'datasets'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
