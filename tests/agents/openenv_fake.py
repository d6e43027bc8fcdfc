"""The messages of an OpenEnv server, spoken by a thread of this process; as openenv_server.py, without the package."""

import contextlib
import json
import threading

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response
from websockets.sync.server import serve

NUMBER = {"type": "integer", "description": "the guess"}
SCHEMA = {
    "type": "object",
    "properties": {"number": NUMBER, "note": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["number"],
    "additionalProperties": False,
}


class FakeServer:
    """`sessions` at most; `schema` is that of an action, `shown` more entries of observations."""

    def __init__(self, sessions=4, schema=SCHEMA):
        self.sessions, self.schema, self.shown, self.reward = sessions, schema, {}, None
        self.statuses = []
        """Statuses with which the next sessions are refused."""
        self.running, self.requests, self.lock = set(), [], threading.Lock()
        self.server = serve(self._talk, "127.0.0.1", 0, process_request=self._describe)
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.drop()

    def drop(self):
        """Close all sessions."""
        for socket in list(self.running):
            socket.close()

    def _describe(self, connection, request):
        if request.path == "/ws":
            refused = self.statuses and self.statuses.pop(0)
            return connection.respond(refused, "") if refused else None
        body = json.dumps({"action": self.schema}).encode()
        found = request.path == "/schema"
        headers = Headers({"Content-Length": str(len(body))})
        return Response(200 if found else 404, "OK" if found else "Not Found", headers, body)

    def _talk(self, socket):
        with self.lock:
            full = len(self.running) >= self.sessions
            if not full:
                self.running.add(socket)
        if full:
            socket.send(json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}))
            return
        goal = turns = 0
        with contextlib.suppress(ConnectionClosed):
            for raw in socket:
                message = json.loads(raw)
                self.requests.append(message)
                data, kind = message.get("data", {}), "observation"
                if message["type"] == "state":
                    kind, answer = "state", {"step_count": turns}
                elif message["type"] == "reset":
                    goal, turns = data["seed"] % 10, 0
                    answer = {"observation": {"text": "guess", **self.shown}, "reward": None, "done": False}
                elif type(data.get("number")) is not int:
                    problem = {"loc": ["number"], "msg": "Input should be a valid integer"}
                    kind, answer = "error", {"code": "VALIDATION_ERROR", "message": "Invalid", "errors": [problem]}
                elif data.get("note") == "stuck":
                    kind, answer = "error", {"code": "EXECUTION_ERROR", "message": "stuck"}
                else:
                    turns += 1
                    done = data["number"] == goal
                    seen = {"text": "yes" if done else str(turns), **self.shown}
                    reward = 1.0 if done and data.get("note") != "silent" else None
                    answer = {"observation": seen, "reward": reward, "done": done}
                if data.get("note") != "hang":
                    socket.send(json.dumps({"type": kind, "data": answer}))
        with self.lock:
            self.running.discard(socket)
