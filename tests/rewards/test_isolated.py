import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mmrl.rewards import RewardConfig, RewardSum, TrainerState, isolated
from mmrl.rewards.calling import RewardFailure
from mmrl.workers.wire import Message
from tests.programs import is_alive, wait_until
from tests.signals import interrupts_heeded

USER = str(Path(__file__).with_name("user_functions.py"))
ROWS = ["a", "bad", "bb", "ccc"]


@pytest.fixture
def make(closing):
    def build(function, workers=1, **options):
        return closing(RewardSum([RewardConfig("mine", f"{USER}:{function}", **options)], workers=workers))

    return build


def score(rewards, rows=ROWS, **columns):
    result = rewards.score(["q"] * len(rows), rows, columns)
    return result.terms["mine"], result


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        ("raises_on_bad", "raised", "RuntimeError: cannot score bad"),
        ("exits_on_bad", "raised", "SystemExit: 3"),
        ("hangs_on_bad", "timeout", "after 1 s"),
        ("killed_on_bad", "crashed", "SIGKILL"),
        ("hard_exits_on_bad", "crashed", "exit code 7"),
    ],
)
@pytest.mark.parametrize("rows", ["auto", "independent"])
def test_only_the_offending_row_is_lost(make, hanging, function, kind, message, rows):
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


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_list", "returned the one value 1.0, expected a list of 4 numbers, one per row"),
        ("mean_length", "returned 1 value for 4 rows, expected a list of 4 numbers, one per row"),
        ("drops_bad", "returned 3 values for 4 rows"),
    ],
)
def test_another_number_of_values_than_rows_fails_every_row_and_is_not_tried_again(make, function, message, isolate):
    """Scored alone, each row would get a value with another meaning."""
    values, result = score(make(function, isolate=isolate))
    assert all(math.isnan(value) for value in values)
    assert result.errors == {"mine/wrong_length": 4}
    assert message in result.examples["mine/wrong_length"]
    assert "[value] * len(completions)" in result.examples["mine/wrong_length"]


def test_a_function_that_compares_rows_is_given_all_that_can_be_scored(make):
    """One row raises: the others are compared with each other, not each with itself alone."""
    values, result = score(make("length_above_mean_or_raise"), ["a", "bad", "bb", "ccc"])
    assert [values[0], *values[2:]] == [-1.0, 0.0, 1.0]
    assert result.errors == {"mine/raised": 1}


def test_what_the_first_call_raised_is_what_is_shown(make, hanging, caplog):
    _, result = score(make("raises_for_the_batch"))
    assert result.errors == {"mine/raised": 4}
    assert "KeyError: 'no judge'" in result.examples["mine/raised"]
    trace = result.traces["mine/raised"]
    assert trace.startswith("Traceback (most recent call last):")
    assert "_ask_the_judge" in trace
    assert "calling.py" not in trace
    with caplog.at_level("WARNING", logger="mmrl"):
        values, result = score(make("raises_for_several"))
    assert values == [1.0] * 4
    assert "all 4 rows failed, but separate calls succeeded: ValueError: one at a time" in caplog.text
    assert "rows: together" in caplog.text
    # a function that is only slow would lose every row with rows: together
    with caplog.at_level("WARNING", logger="mmrl"):
        score(make("hangs_for_several", timeout_s=1.0))
    assert "raise timeout_s if it compares rows" in caplog.text


@pytest.mark.parametrize("isolate", [True, False])
def test_async_functions_are_awaited(make, isolate):
    assert score(make("async_length", isolate=isolate))[0] == [1.0, 3.0, 2.0, 3.0]
    values, result = score(make("async_raises_on_bad", isolate=isolate))
    assert [values[0], *values[2:]] == [1.0, 1.0, 1.0]
    assert "ValueError: bad" in result.examples["mine/raised"]
    assert "asyncio" not in result.traces["mine/raised"]


def test_an_async_function_inside_a_running_loop(make):
    async def main():
        return score(make("async_length", isolate=False))[0]

    assert asyncio.run(main()) == [1.0, 3.0, 2.0, 3.0]


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("function", ["state_by_name", "state_by_kwargs"])
def test_the_trainer_state_and_the_tokens_are_given_as_trl_does(make, function, isolate):
    rewards = make(function, isolate=isolate)
    rewards.check_columns(["completion_ids"])
    state = TrainerState(global_step=3, max_steps=12, epoch=0.5)
    result = rewards.score(["q"] * 2, ["a", "b"], {"completion_ids": [[1, 2], [3]]}, state)
    assert result.total == [3 / 12 + 2, 3 / 12 + 1]


def test_numpy_arrays_are_lists_too(make):
    assert score(make("numpy_values"), ["a", "b", "c"])[0] == [0.0, 0.5, 1.0]


@pytest.mark.slow
def test_endless_hangs_end_within_bounds(make):
    values, result = score(make("hangs_always", timeout_s=0.2), ["x"] * 24)
    assert all(math.isnan(value) for value in values)
    assert result.errors == {"mine/timeout": 24}


def test_workers_are_kept_between_calls_and_replaced_after_a_kill(make):
    rewards = make("pid")
    first = score(rewards)[0][0]
    assert score(rewards)[0] == [first] * 4
    assert first != os.getpid()
    os.kill(int(first), signal.SIGKILL)
    wait_until(lambda: not is_alive(int(first)))
    values, result = score(rewards)
    assert values[0] not in (first, os.getpid())
    assert result.errors == {}


def test_rows_are_spread_over_workers(make):
    assert len(set(score(make("pid", workers=2, rows="independent"), ["x"] * 64)[0])) == 2


def test_a_stopped_worker_is_replaced(make, hanging):
    rewards = make("pid", timeout_s=1.0, workers=1)
    first = int(score(rewards)[0][0])
    hanging(first)
    os.kill(first, signal.SIGSTOP)
    values, result = score(rewards)
    assert result.errors == {}
    assert values[0] not in (first, os.getpid())
    assert not is_alive(first)


def test_functions_that_compare_rows_see_all_or_nothing(make):
    assert score(make("rank", rows="together"))[0] == [0.0, 2.0, 1.0, 3.0]
    values, result = score(make("rank_or_raise", rows="together"))
    assert all(math.isnan(value) for value in values)
    assert result.errors == {"mine/raised": 4}


def test_a_cell_that_cannot_be_sent_costs_its_own_row(make):
    sys.path.insert(0, str(Path(USER).parent))
    try:
        from user_functions import Unsendable
    finally:
        sys.path.pop(0)
    values, result = score(make("length"), cells=[1, Unsendable(), 3, 4])
    assert [values[0], *values[2:]] == [1.0, 2.0, 3.0]
    assert result.errors == {"mine/raised": 1}
    assert "a user_functions.Unsendable cannot be sent" in result.examples["mine/raised"]


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
    assert not any(is_alive(pid) for pid in pids)
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
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not is_alive(int(done.stdout))


def test_no_worker_outlives_a_killed_program_even_while_it_hangs(tmp_path):
    command = [sys.executable, "-c", SCRIPT, USER, "hang"]
    marks = tmp_path / "pids"
    variables = {**os.environ, "MMRL_TEST_HANGING": str(marks)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as program:
        pid = int(program.stdout.readline())
        wait_until(lambda: marks.exists() and marks.read_text().endswith("\n"))
        assert is_alive(pid)
        program.kill()
    wait_until(lambda: not is_alive(pid))


def test_neither_rewards_nor_workers_import_torch():
    code = (
        "import sys, mmrl.rewards, mmrl.rewards.reward_service, mmrl.workers.pool, mmrl.rewards.maths;"
        "import mmrl.rewards.reward_loading;"
        "heavy = {'torch', 'transformers', 'numpy', 'PIL', 'datasets'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_hanging_rows_fail_alone_in_any_number(make, hanging):
    rows = [f"bad {row}" if row % 8 in (0, 3, 4) else "good" for row in range(32)]
    values, result = score(make("hangs_on_some", timeout_s=1.0), rows)
    assert sum(value == 1.0 for value in values) == 20
    assert result.errors == {"mine/timeout": 12}


def test_good_rows_come_first_within_the_limit_of_a_batch(make, hanging):
    rows = ["good", *["bad"] * 3, *["good"] * 6]
    # enough for a busy machine to start a worker after each hang
    values, result = score(make("hangs_on_some", timeout_s=0.5, batch_timeout_s=120.0), rows)
    assert sum(value == 1.0 for value in values) == 7
    assert result.errors == {"mine/timeout": 3}


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        ("interrupt", "raised", "KeyboardInterrupt"),
        ("generator", "raised", "GeneratorExit"),
        ("exit", "raised", "SystemExit"),
        ("odd", "raised", "OddError: (its text is not available: __str__ raised GeneratorExit)"),
        ("float", "not_a_number", "returned a Odd, KeyboardInterrupt: oh"),
        ("tolist", "raised", "KeyboardInterrupt: in tolist"),
    ],
)
def test_whatever_a_function_raises_is_its_rows_failure_with_the_reason(make, row, kind, message):
    values, result = score(make("raises_what_it_is_told"), ["fine", row, "fine"])
    assert (values[0], values[2]) == (1.0, 1.0)
    assert result.errors == {f"mine/{kind}": 1}
    assert message in result.examples[f"mine/{kind}"]


def test_ctrl_c_in_the_main_program_is_no_failure_of_a_row(make):
    with interrupts_heeded(), pytest.raises(KeyboardInterrupt):
        score(make("raises_what_it_is_told", isolate=False), ["interrupt"])
    assert score(make("raises_what_it_is_told", isolate=False), ["generator"])[1].errors == {"mine/raised": 1}


def test_a_row_that_eats_memory_costs_itself_only(make):
    values, result = score(make("eats_memory_on_bad", timeout_s=60.0, memory_mb=300))
    assert [values[0], *values[2:]] == [1.0, 1.0, 1.0]
    assert result.errors == {"mine/memory": 1}
    assert "at most 300 MiB" in result.examples["mine/memory"]


def test_imports_do_not_count_against_the_first_call(make):
    assert score(make("imports_slowly", timeout_s=4.0))[1].errors == {}


@pytest.mark.parametrize("end", ["fine", "crash", "hang"])
def test_processes_left_in_a_separate_session_are_ended_too(make, end, tmp_path):
    rewards = make("leaves_daemons", timeout_s=5.0 if end == "hang" else 600.0)
    score(rewards, [end], pids=[str(tmp_path / "pids")])
    rewards.close()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert pids
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


DAEMONS = """
import sys
from mmrl.rewards import RewardConfig, RewardSum
rewards = RewardSum([RewardConfig("mine", sys.argv[1] + ":leaves_daemons", timeout_s=600.0)])
rewards.score(["q"], ["hang"], {"pids": [sys.argv[2]]})
"""


def test_nothing_outlives_a_killed_program(tmp_path):
    pids = tmp_path / "pids"
    with subprocess.Popen([sys.executable, "-c", DAEMONS, USER, str(pids)]) as program:
        wait_until(lambda: pids.exists() and pids.read_text())
        program.kill()
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))


@pytest.mark.parametrize(
    "reply",
    [
        {"outcomes": [1]},
        {"outcomes": [True]},
        {"outcomes": ["1.0"]},
        {"outcomes": [[1.0]]},
        {"outcomes": [1.0, 1.0]},
        {"outcomes": 5},
        {"outcomes": [{"kind": "unheard/of", "message": "x"}]},
        {"outcomes": [{"kind": ["raised"], "message": "x"}]},
        {"failure": {"kind": "raised", "message": ["x"]}},
        {"failure": None},
        {},
    ],
    ids=str,
)
def test_a_reply_of_wrong_types_is_a_failure(reply):
    found = isolated._outcomes(Message(reply, {}), "f", 1)
    assert isinstance(found, RewardFailure)
    assert found.kind == "crashed"
    assert "invalid reply from the worker" in found.message
