"""A chat endpoint for tests, on a free port of this machine."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace


@contextlib.contextmanager
def running_chat_server():
    """A server that answers each request with the next of `answers`.

    Answers are text; a message as a dict; (status, body); a status alone; seconds to wait before an empty answer; or a
    function that writes to the stream. Requests are kept with their path, body and authorization.
    """
    server = SimpleNamespace(url="", requests=[], answers=[])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append(SimpleNamespace(path=self.path, body=body, key=self.headers["Authorization"]))
            answer = server.answers.pop(0)
            with contextlib.suppress(OSError):
                if callable(answer):
                    answer(self.wfile)
                else:
                    self._send(answer)

        def _send(self, answer):
            if isinstance(answer, float):
                time.sleep(answer)
                answer = ""
            status, body = (
                answer if isinstance(answer, tuple) else (answer, "") if isinstance(answer, int) else (200, "")
            )
            if isinstance(answer, str | dict):
                message = {"content": answer} if isinstance(answer, str) else answer
                body = json.dumps({"choices": [{"message": message}]})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{listening.server_port}/v1"
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
