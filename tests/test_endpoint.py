"""The client of an OpenAI-compatible server: what it sends, what it tries again, what it gives up on, and when.

Against a real server (llama.cpp's, in process, on loopback), with any chat model in GGUF form:

    pip install xllamacpp && SLCA_GGUF=model.gguf pytest -m slow tests/test_endpoint.py
"""
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slca import endpoint
from slca.endpoint import Endpoint, EndpointError
from slca.judge import Reply, make_judge
from slca.responders import make_simulator
from slca.settings import JudgeConfig, LLMConfig, SimulatorConfig
from slca.simulator import is_failure


def said(text, **more):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]} | more


class Server(ThreadingHTTPServer):
    """Answers each request with the next step of `script` (the last one for ever): a function of the handler."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, *script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.seen, self.connections, self.now, self.most = list(script), [], 0, 0, 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # a client that hangs up is what some tests want


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.connections += 1

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "served"}, {"id": "other"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, self.asked = self.server, body
        with server.lock:
            server.seen.append((self.path, body, dict(self.headers)))
            step = server.script.pop(0) if len(server.script) > 1 else server.script[0]
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            step(self)
        finally:
            with server.lock:
                server.now -= 1

    def answer(self, data, status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def reply(text="hello", status=200, **headers):
    return lambda h: h.answer(json.dumps(said(text)).encode(), status, **headers)


def raw(data, status=200):
    return lambda h: h.answer(data, status)


def hangs(h):
    time.sleep(3)


def drips(h):
    """A byte every 50 ms: no single read takes long."""
    h.send_response(200)
    h.send_header("Content-Length", "1000")
    h.end_headers()
    for _ in range(60):
        h.wfile.write(b" ")
        h.wfile.flush()
        time.sleep(0.05)


def hangs_up(h):
    h.close_connection = True
    h.connection.close()


def closes_after(h):
    """Answers, and closes the connection without a word of it, as a server does with one that is long idle."""
    h.answer(json.dumps(said("first")).encode())
    h.close_connection = True


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(endpoint, "PAUSE", 0.01)
    servers = []

    def start(*script):
        servers.append(Server(*script))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


CHAT = [{"role": "user", "content": "hi \ud800 é"}]


def test_what_is_sent_and_read(serve, monkeypatch):
    monkeypatch.setenv("THE_KEY", "s3cret")
    server = serve(reply("hé"))
    assert Endpoint(server.url + "/", "m", "THE_KEY").chat(CHAT, 0.6, 40, seed=7) == "hé"
    path, body, headers = server.seen[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer s3cret"
    assert body == {"model": "m", "messages": CHAT, "temperature": 0.6, "max_tokens": 40, "seed": 7}
    assert Endpoint(server.url).chat(CHAT, 0, 1) == "hé" and server.seen[1][1]["model"] == "served"


@pytest.mark.parametrize("fault", ["status 500", "status 429", "hangs up", "no JSON", "hangs", "drips"])
def test_what_may_pass_is_tried_again(fault, serve):
    step = {"status 500": raw(b"busy", 500), "status 429": raw(b"", 429), "hangs up": hangs_up, "no JSON": raw(b"<p>"),
            "hangs": hangs, "drips": drips}[fault]
    server = serve(step, step, reply("at last"))
    start = time.time()
    assert Endpoint(server.url, "m", timeout_s=0.3, retries=2).chat(CHAT, 0, 8) == "at last"
    assert len(server.seen) == 3 and time.time() - start < 2

    server = serve(step)
    with pytest.raises(EndpointError):
        Endpoint(server.url, "m", timeout_s=0.3, retries=1).chat(CHAT, 0, 8)
    assert len(server.seen) == 2


@pytest.mark.parametrize("step, words", [
    (raw(b"no such model", 404), "status 404: no such model"), (raw(b'{"choices": []}'), "no choices"),
    (raw(b"[1]"), "no choices"), (raw(json.dumps(said(None)).encode()), "NoneType, not text")])
def test_what_cannot_pass_is_given_up_at_once(step, words, serve):
    server = serve(step)
    with pytest.raises(EndpointError, match=words):
        Endpoint(server.url, "m", retries=5).chat(CHAT, 0, 8)
    assert len(server.seen) == 1


def test_an_answer_has_a_largest_size(serve, monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_ANSWER", 1000)
    server = serve(reply("x" * 2000), reply("short"))
    asked = Endpoint(server.url, "m")
    with pytest.raises(EndpointError, match="more than 1000 bytes"):
        asked.chat(CHAT, 0, 8)
    assert asked.chat(CHAT, 0, 8) == "short"


def test_the_server_may_say_how_long_to_wait(serve, monkeypatch):
    slept = []
    monkeypatch.setattr(endpoint.time, "sleep", slept.append)
    server = serve(raw(b"", 503), reply("a", 429, **{"Retry-After": "7"}), reply("b", 429, **{"Retry-After": "999"}),
                   raw(b"", 500), reply("ok"))
    assert Endpoint(server.url, "m", retries=4).chat(CHAT, 0, 8) == "ok"
    assert slept == [0.01, 7, 30, 0.08]


def test_connections_are_kept_and_a_stale_one_costs_no_try(serve):
    server = serve(closes_after, reply("second"), reply("third"))
    asked = Endpoint(server.url, "m", retries=0)
    first = asked.chat(CHAT, 0, 8)
    time.sleep(0.1)  # the server's end is closed by now
    assert [first, asked.chat(CHAT, 0, 8), asked.chat(CHAT, 0, 8)] == ["first", "second", "third"]
    assert server.connections == 2 and len(server.seen) == 3


def test_many_at_a_time_in_order_and_no_more_than_allowed(serve):
    def echo(h):
        time.sleep(0.02)
        h.answer(json.dumps(said(f"you said {h.asked['messages'][0]['content']}")).encode())

    server = serve(echo)
    chats = [[{"role": "user", "content": str(i)}] for i in range(24)]
    texts = Endpoint(server.url, "m", concurrency=4).chat_all(chats, 0, 8, range(24))
    assert texts == [f"you said {i}" for i in range(24)]
    assert 1 < server.most <= 4 and server.connections <= 4
    assert {body["seed"] for _, body, _ in server.seen} == set(range(24))


def test_a_failed_request_costs_the_others_nothing(serve):
    def picky(h):
        text = h.asked["messages"][0]["content"]
        h.answer(json.dumps(said(text)).encode(), 400 if text == "1" else 200)

    asked = Endpoint(serve(picky).url, "m", concurrency=1)
    with pytest.warns(UserWarning, match="1 of 3 requests failed, the first: status 400"):
        texts = asked.chat_all([[{"role": "user", "content": str(i)}] for i in range(3)], 0, 8, [0, 1, 2])
    assert texts == ["0", None, "2"]


def test_a_server_that_names_no_model_is_asked_once_a_round(serve, monkeypatch):
    asked = []
    monkeypatch.setattr(Handler, "do_GET", lambda h: asked.append(1) or hangs(h))
    start = time.time()
    with pytest.warns(UserWarning, match="all 8 requests failed: no answer within"):
        texts = Endpoint(serve(reply()).url, timeout_s=0.2, retries=1).chat_all([CHAT] * 8, 0, 8, range(8))
    assert texts == [None] * 8 and len(asked) == 2 and time.time() - start < 1.5


def test_odd_headers_are_no_error_of_another_kind(serve):
    server = serve(lambda h: h.answer(b"", 429, **{"Retry-After": "\xb2"}), reply("ok"))
    assert Endpoint(server.url, "m", retries=1).chat(CHAT, 0, 8) == "ok"


def test_bad_addresses(monkeypatch):
    for url in ("127.0.0.1:8000/v1", "ftp://host/v1", "http://", "", "http://h:99999/v1", f"http://{'x' * 64}.org/v1"):
        with pytest.raises(ValueError, match="expected http"):
            Endpoint(url)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ValueError, match="NO_SUCH_KEY"):
        Endpoint("http://h/v1", key_env="NO_SUCH_KEY")
    for key in ("s3cret\nX: y", "s3crét", "  "):
        monkeypatch.setenv("ODD_KEY", key)
        with pytest.raises(ValueError, match="ODD_KEY") as error:
            Endpoint("http://h/v1", key_env="ODD_KEY")
        assert "s3cr" not in str(error.value)
    monkeypatch.setenv("ODD_KEY", " plain\n")
    assert Endpoint("http://h/v1", key_env="ODD_KEY").headers["Authorization"] == "Bearer plain"
    with pytest.raises(EndpointError):  # nobody listens
        Endpoint("http://127.0.0.1:9/v1", "m", retries=0, timeout_s=1).chat(CHAT, 0, 8)


@pytest.mark.slow
@pytest.mark.skipif("SLCA_GGUF" not in os.environ, reason="SLCA_GGUF names no model")
def test_a_real_server(tmp_path):
    """llama.cpp answers calls and rates replies; a second run reads the same words without asking.

    Without the memory it need not: how its batches fall changes rounding, and with it greedy answers.
    """
    xlc = pytest.importorskip("xllamacpp")
    params = xlc.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.port = os.environ["SLCA_GGUF"], 8192, 4, 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        params.port = free.getsockname()[1]
    server = xlc.Server(params)
    at = LLMConfig(url=f"{server.listening_address}/v1", temperature=0.0, max_new_tokens=64, concurrency=4,
                   cache=str(tmp_path))
    tool = {"function": {"name": "get_time", "description": "time in a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
    calls = [({"name": "get_time", "arguments": {"city": city}}, [tool]) for city in ("Oslo", "Lima", "Quito", "Rome")]
    found = []
    for _ in range(2):
        simulator = make_simulator(SimulatorConfig(responder="http", llm=at))
        found.append(simulator.respond_all([*calls, ({"name": "get_time", "arguments": {}}, [tool])]))
        assert not any(map(is_failure, found[-1])) and "missing required argument" in found[-1][4]
    assert found[0] == found[1] and len(set(found[0])) > 2
    assert simulator.responder.writer.take_counts() == {"asked": 0, "cached": 4, "tokens": 0, "seconds": 0.0}
    judge = make_judge(JudgeConfig(kind="http", llm=at))
    rating, = judge.rate([Reply("What time is it in Oslo?", ['{"time": "12:30"}'], "It is 12:30 in Oslo.")])
    assert rating is None or 0 <= rating <= 1  # a small model need not keep to the form
    with pytest.warns(UserWarning, match="1 of 1 requests failed, the first: status 4"):
        assert Endpoint(at.url, "m", retries=0).chat_all([[{"role": "nobody", "content": 3}]], 0, 8, [0]) == [None]
