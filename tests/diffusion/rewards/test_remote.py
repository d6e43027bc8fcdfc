import base64
import contextlib
import io
import time

import numpy as np
import pytest
from PIL import Image

from diffusion.rewards.remote import read_score, unified_reward
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum


def pictures(count):
    return list(np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8))


def test_images_are_sent_as_png_and_scores_returned(chat_server):
    url, requests, answers = chat_server.url, chat_server.requests, chat_server.answers
    answers += ["Fine.\nFinal Score: 4", "final score: 2.5/5"]
    images = pictures(2)
    assert unified_reward(["a cat", "a {dog}"], images, url=url + "/", model="judge") == [0.8, 0.5]
    for request, prompt, image in zip(requests, ("a cat", "a {dog}"), images, strict=True):
        assert request.path == "/v1/chat/completions"
        assert (request.body["model"], request.body["temperature"]) == ("judge", 0)
        picture, text = request.body["messages"][0]["content"]
        assert f"for this prompt: {prompt}\n" in text["text"]
        kind, _, data = picture["image_url"]["url"].partition(",")
        assert kind == "data:image/png;base64"
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), image)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("Final Score: 5", 1.0), ("**Final Score:** 3", 0.6), ("Final Score: 1, no, Final Score: 2", 0.4)],
)
def test_last_score_counts(answer, score):
    assert read_score(answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "culprit"),
    [
        ("a nice picture", "has no 'Final Score: x'"),
        ("Final Score: 9", "9.0; must be between 0 and 5"),
        ("Final Score: -1", "must be between"),
        ((500, "out of memory"), "HTTP Error 500"),
        ((200, "<html>"), "not answer like a chat endpoint: JSONDecodeError"),
        ((200, '{"choices": []}'), "not answer like a chat endpoint: IndexError"),
        ((200, "[]"), "not answer like a chat endpoint: TypeError"),
        ((200, '{"choices": [{"finish_reason": "length", "message": {"content": null}}]}'), "used up max_tokens"),
        (
            (200, '{"choices": [{"finish_reason": "length", "message": {"content": " "}}]}'),
            "as reasoning models may; increase it",
        ),
    ],
)
def test_failures_raise(chat_server, answer, culprit):
    url, answers = chat_server.url, chat_server.answers
    answers.append(answer)
    with pytest.raises(RuntimeError, match=culprit):
        unified_reward(["a cat"], pictures(1), url=url)


def test_slow_and_absent_servers_raise(chat_server):
    url, answers = chat_server.url, chat_server.answers
    answers.append(0.6)
    with pytest.raises(TimeoutError):
        unified_reward(["a cat"], pictures(1), url=url, timeout_s=0.2)
    with pytest.raises(RuntimeError, match="cannot be queried"):
        unified_reward(["a cat"], pictures(1), url="http://127.0.0.1:9/v1", timeout_s=2)


def test_a_failure_costs_its_own_row_only(chat_server):
    url, answers = chat_server.url, chat_server.answers
    answers += ["Final Score: 4", "?", "Final Score: 4", "?", "Final Score: 3"]
    rewards = RewardSum([RewardConfig("judge", options={"url": url})], functions={"judge": unified_reward})
    result = rewards.score(["a", "b", "c"], pictures(3), {})
    assert result.total == [0.8, pytest.approx(float("nan"), nan_ok=True), 0.6]
    assert result.errors == {"judge/raised": 1}


def test_wrong_options_are_named():
    with pytest.raises(UserError, match="'localhost:1'; must start with http"):
        unified_reward([], [], url="localhost:1")
    with pytest.raises(UserError, match="must contain"):
        unified_reward([], [], url="http://localhost:1", question="how good is it?")


def drip(head):
    def write(stream):
        stream.write(head)
        with contextlib.suppress(OSError):
            for _ in range(600):
                stream.write(b"x")
                stream.flush()
                time.sleep(0.1)

    return write


@pytest.mark.parametrize("head", [b"", b"HTTP/1.0 200 OK\r\nX-Slow: ", b"HTTP/1.0 200 OK\r\n\r\n{"])
def test_a_server_that_drips_bytes_is_cut_off_after_the_one_limit(chat_server, head):
    url, answers = chat_server.url, chat_server.answers
    answers += [drip(head)]
    started = time.monotonic()
    with pytest.raises((TimeoutError, RuntimeError)) as raised:
        unified_reward(["a cat"], pictures(1), url=url, timeout_s=1.0)
    assert time.monotonic() - started < 30.0, "it would drip for a minute"
    if head:
        assert "did not complete an answer within 1 s" in str(raised.value)


def test_an_endless_answer_is_refused(chat_server):
    def endless(stream):
        stream.write(b"HTTP/1.0 200 OK\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                stream.write(b" " * (1 << 20))

    url, answers = chat_server.url, chat_server.answers
    answers += [endless]
    with pytest.raises(RuntimeError, match="larger than 4 MiB"):
        unified_reward(["a cat"], pictures(1), url=url, timeout_s=60.0)
