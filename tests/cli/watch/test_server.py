"""The server answers only who has the token, only under its own name, and only with files of the runs."""

import http.client
import json
import re

import pytest

from mmrl.cli.watch.server import HOST, PAGE


def ask(server, path, token=None, method="GET", **headers):
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=60)
    cookie = {} if token is None else {"Cookie": f"{server.cookie}={token}"}
    connection.request(method, path, headers={**cookie, **headers})
    response = connection.getresponse()
    response.body = response.read()
    connection.close()
    return response


def test_it_listens_on_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", [*PAGE, "/runs.json", "/curves.json", "/file?run=run&path=x", "/nothing"])
def test_without_the_token_nothing_is_shown(server, path):
    for token in (None, "", "wrong", server.token[:-1], "é"):
        assert ask(server, path, token and token.encode().decode("latin-1")).status == 403
    assert b"token" in ask(server, path).body


def test_the_token_of_the_address_becomes_a_cookie(server):
    entered = ask(server, server.address.partition(str(server.server_port))[2])
    assert (entered.status, entered.headers["Location"]) == (303, "/")
    cookie = entered.headers["Set-Cookie"]
    assert cookie.startswith(f"{server.cookie}={server.token};")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert ask(server, "/?token=wrong").status == 403
    assert ask(server, "/", server.token).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""])
def test_another_host_name_is_refused_even_with_the_token(server, host):
    named = host.format(port=server.server_port)
    assert ask(server, "/runs.json", server.token, Host=named).status == 403
    assert ask(server, f"/?token={server.token}", Host=named).status == 403
    assert ask(server, "/runs.json", server.token, Host=f"localhost:{server.server_port}").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server, method):
    assert ask(server, "/runs.json", server.token, method=method).status == 501


def test_the_page_loads_nothing_from_outside_and_runs_no_text(server):
    for path in PAGE:
        answer = ask(server, path, server.token)
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        text = answer.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"<script>|style=|\son\w+=\"", text)


def test_answers(server):
    overview = json.loads(ask(server, "/runs.json", server.token).body)
    assert [(run["name"], run["step"], run["steps"]) for run in overview["runs"]] == [("run", 3, 10)]
    curves = json.loads(ask(server, "/curves.json?runs=run%00other", server.token).body)
    assert [chart["title"] for chart in curves["charts"]] == ["Reward"]
    assert json.loads(ask(server, "/samples.json?run=run&step=1", server.token).body)["splits"] == {}
    for path in ("/samples.json?run=run&step=-1", "/samples.json?run=../run&step=1", "/file?run=run&path=config.yaml"):
        assert ask(server, path, server.token).status == 404


def test_an_answer_without_news_is_empty(server):
    first = ask(server, "/curves.json?runs=run", server.token)
    again = ask(server, "/curves.json?runs=run", server.token, **{"If-None-Match": first.headers["ETag"]})
    assert (again.status, again.body) == (304, b"")
