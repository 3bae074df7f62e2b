"""The OpenAI-compatible server: what clients of it see, what it refuses, and that nothing keeps it from serving on.

A tiny policy learns three dialogues by heart, so that calls, parallel calls and replies come from a real sampler. What
HTTP alone decides (limits, hang-ups, queues, shutdown) is shown with an agent that plays a script.
"""
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch

from slca import serve, wire
from slca.agent import Agent, PromptTooLong, Reply, read_reply
from slca.completions import ApiError, Visible, message_of, read_request
from slca.config import FOREIGN, checkpoint_config
from slca.data.task import Task
from slca.data.vocabulary import world_tokenizer
from slca.endpoint import Endpoint
from slca.model import ModelConfig, new_policy
from slca.optim import optimizers
from slca.serve import Server
from slca.settings import SFTConfig
from slca.sft import demonstration_row, sft_step
from slca.weights import save_policy

TOOL = {"type": "function", "function": {"name": "find_stock", "description": "share price", "parameters": {
    "type": "object", "required": ["symbol"], "properties": {"symbol": {"type": "string"}}}}}
ONE, TWO, HELLO = "What is the share price of Bakedo?", "And those of Bakedo and Lumira?", "Hello: 你好 🙂 é."
LONG_S = 60  # far more than any step of these takes, also on a busy machine


def user(text):
    return {"role": "user", "content": text}


def call(symbol):
    return {"name": "find_stock", "arguments": {"symbol": symbol}}


def block(symbol):
    return f"<tool_call>\n{json.dumps(call(symbol))}\n</tool_call>"


def tells(*calls, **results):
    """The turns after the user's: calls, their results, a reply."""
    return [{"role": "assistant", "content": "", "tool_calls": list(calls)},
            *({"role": "tool", "content": r} for r in results.values()),
            {"role": "assistant", "content": ", ".join(f"{k} {v}" for k, v in results.items()) + "."}]


TASKS = [Task("one", [user(ONE)], [TOOL], [], [], demonstration=tells(call("Bakedo"), Bakedo="41")),
         Task("two", [user(TWO)], [TOOL], [], [],
              demonstration=tells(call("Bakedo"), call("Lumira"), Bakedo="41", Lumira="17")),
         Task("hello", [user("Say hello.")], [], [], [], demonstration=[{"role": "assistant", "content": HELLO}])]


@pytest.fixture(scope="module")
def tok():
    return world_tokenizer(examples=150)


@pytest.fixture(scope="module")
def policy(tok):
    """Knows TASKS by heart."""
    policy = new_policy(ModelConfig("qwen2", tok.size, 48, 96, 2, 4, 2))
    steps, cfg = optimizers(policy, "muon", 0.01, 0.0, (0.9, 0.95), 3e-3), SFTConfig()
    rows = [demonstration_row(task, tok, "blocks", 0.0, 1000) for task in TASKS]
    for _ in range(70):
        sft_step(policy, steps, rows, 1.0, cfg, tok.size, "fp32", 1000)
    return policy.requires_grad_(False)


@pytest.fixture(scope="module")
def server(policy, tok):
    """The learnt policy, served."""
    agent = Agent(policy, tok)
    server = started(agent, tok)
    yield server
    server.close(0)
    agent.close()


class Script:
    """An agent whose turn is `say(messages)`: told a token at a time, `ended` by its stop. `gate` holds turns up."""

    parallel = "blocks"

    def __init__(self, tok, say, ended=True):
        self.tok, self.say, self.ended, self.asked = tok, say, ended, []
        self.gate, self.cancelled = threading.Event(), 0
        self.gate.set()

    def reply(self, messages, tools, *, on_text, cancelled, prefix, **asked):
        self.asked.append({"messages": messages, "tools": tools, "prefix": prefix} | asked)
        text = self.say(messages)
        ids = self.tok.encode(text)
        if on_text:
            told = ""
            for k in range(1, len(ids) + 1):
                new = self.tok.decode(ids[:k])
                piece = "" if new.endswith("\ufffd") and k < len(ids) else new[len(told):]
                on_text(piece, ids[k - 1:k], [-0.5])
                told += piece
                if k == 1:
                    self._wait(cancelled)
        else:
            self._wait(cancelled)
        if on_text:
            on_text("", [self.tok.stop_ids[0]], [-0.25])
        ids += [self.tok.stop_ids[0]]
        return Reply(prefix + text, *read_reply(prefix + text), ids, [-0.5] * (len(ids) - 1) + [-0.25], self.ended,
                     7, 3)

    def _wait(self, cancelled):
        while not self.gate.wait(0.01):
            if cancelled.is_set():
                self.cancelled += 1
                return


def started(agent, tok, **more):
    server = Server(agent, tok, "mine", **more)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


@pytest.fixture
def play(tok):
    """play(say, ...) -> (a server on a `Script`, the script)."""
    servers = []

    def start(say=lambda _: "Fine.", ended=True, **more):
        script = Script(tok, say, ended)
        servers.append(started(script, tok, **more))
        return servers[-1], script

    yield start
    for server in servers:
        server.agent.gate.set()
        server.close(0)


def ask(server, path="/v1/chat/completions", method="POST", data=None, headers=None, **body):
    """(status, JSON) of one exchange on a connection of its own; messages default to a greeting."""
    if data is None and method == "POST":
        data = json.dumps({"model": "mine", "messages": [user("hi")]} | body)
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=LONG_S)
    try:
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def streamed(server, **body):
    """The events of a stream, parsed; `[DONE]` checked and left out unless the last is an error."""
    data = json.dumps({"model": "mine", "messages": [user("hi")], "stream": True} | body)
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=LONG_S)
    connection.request("POST", "/v1/chat/completions", data)
    response = connection.getresponse()
    raw = response.read().decode()
    connection.close()
    assert response.status == 200 and response.headers["Content-Type"].startswith("text/event-stream")
    events = [event.removeprefix("data: ") for event in raw.split("\n\n")]
    assert events.pop() == ""
    if events[-1] == "[DONE]":
        events.pop()
    else:
        assert "error" in events[-1]
    return [json.loads(event) for event in events]


def joined(events, index=0):
    """A streamed choice as the message it adds up to, its finish reason, its log-probabilities."""
    message, reasons, logprobs = {"content": "", "reasoning_content": "", "tool_calls": []}, [], []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                assert not reasons
                delta = choice["delta"]
                for name in ("content", "reasoning_content"):
                    message[name] += delta.get(name) or ""
                message["tool_calls"] += delta.get("tool_calls", [])
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                logprobs += (choice["logprobs"] or {"content": []})["content"]
    reason, = reasons
    return message, reason, logprobs


def raw(server, data, wait=LONG_S):
    """What the server answers to bytes, up to its end of the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=wait) as sock:
        sock.sendall(data)
        found = b""
        while piece := sock.recv(65536):
            found += piece
    return found


def until(condition):
    end = time.time() + LONG_S
    while not condition():
        assert time.time() < end, "it never came to be"
        time.sleep(0.01)


def calls_of(message):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []]


# ---- a policy that calls

def test_calls_parallel_calls_and_a_final_answer(server):
    status, first = ask(server, messages=[user(TWO)], tools=[TOOL], temperature=0)
    choice, = first["choices"]
    assert status == 200 and choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert calls_of(choice["message"]) == [("find_stock", {"symbol": s}) for s in ("Bakedo", "Lumira")]
    one, two = (c["id"] for c in choice["message"]["tool_calls"])
    assert one != two and first["object"] == "chat.completion" and first["model"] == "mine"
    used = first["usage"]
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    # results in another order than the calls: the ids say which is which
    messages = [user(TWO), choice["message"], {"role": "tool", "tool_call_id": two, "content": "17"},
                {"role": "tool", "tool_call_id": one, "content": [{"type": "text", "text": "41"}]}]
    _, then = ask(server, messages=messages, tools=[TOOL], temperature=0)
    assert then["choices"][0]["message"]["content"] == "Bakedo 41, Lumira 17."
    assert then["choices"][0]["finish_reason"] == "stop"
    assert then["usage"]["prompt_tokens_details"]["cached_tokens"] >= used["prompt_tokens"] - 1


def test_one_call_at_most_and_forced_calls(server):
    asked = {"messages": [user(TWO)], "tools": [TOOL], "temperature": 0}
    _, one = ask(server, **asked, parallel_tool_calls=False)
    assert calls_of(one["choices"][0]["message"]) == [("find_stock", {"symbol": "Bakedo"})]
    used = [one["usage"]["completion_tokens"] + 1]  # it has no <|im_end|>
    for choice in ("required", {"type": "function", "function": {"name": "find_stock"}}):
        _, found = ask(server, **asked | {"messages": [user(ONE)]}, tool_choice=choice)
        assert calls_of(found["choices"][0]["message"]) == [("find_stock", {"symbol": "Bakedo"})]
        assert found["choices"][0]["finish_reason"] == "tool_calls"
        used.append(found["usage"]["completion_tokens"])
    assert used[0] > used[1] > used[2]  # what is forced is not sampled
    _, none = ask(server, **asked, tool_choice="none", max_tokens=60)
    _, bare = ask(server, messages=[user(TWO)], temperature=0, max_tokens=60)
    assert none["choices"][0]["message"] == bare["choices"][0]["message"]
    assert none["usage"]["prompt_tokens"] == bare["usage"]["prompt_tokens"] < one["usage"]["prompt_tokens"]


@pytest.mark.parametrize("messages, tools", [([user(TWO)], [TOOL]), ([user("Say hello.")], None)])
def test_a_stream_adds_up_to_the_whole_answer(messages, tools, server):
    asked = {"messages": messages, "temperature": 0, "logprobs": True} | ({"tools": tools} if tools else {})
    _, whole = ask(server, **asked)
    events = streamed(server, **asked, stream_options={"include_usage": True})
    assert all(e["usage"] is None and e["object"] == "chat.completion.chunk" for e in events[:-1])
    assert len({e["id"] for e in events}) == 1 and events[0]["choices"][0]["delta"]["role"] == "assistant"
    kept = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-1]["usage"][k] for k in kept] == [whole["usage"][k] for k in kept]
    message, reason, logprobs = joined(events)
    choice = whole["choices"][0]
    assert message["content"] == (choice["message"]["content"] or "") and reason == choice["finish_reason"]
    assert calls_of(message) == calls_of(choice["message"])
    assert [c["index"] for c in message["tool_calls"]] == list(range(2 if tools else 0))
    assert [t["token"] for t in logprobs] == [t["token"] for t in choice["logprobs"]["content"]]
    assert [t["logprob"] for t in logprobs] == pytest.approx([t["logprob"] for t in choice["logprobs"]["content"]],
                                                             abs=1e-4)
    contents = [c["delta"].get("content") or "" for e in events for c in e["choices"]]
    assert not any("\ufffd" in c or "tool_call" in c or "{" in c for c in contents)
    assert tools or sum(map(bool, contents)) > 3


def test_log_probabilities_have_the_bytes_of_every_token(server, tok):
    _, found = ask(server, messages=[user("Say hello.")], temperature=0, logprobs=True)
    tokens = found["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(t["bytes"]) for t in tokens).decode() == HELLO + "<|im_end|>"
    assert len(tokens) == found["usage"]["completion_tokens"] and all(t["logprob"] <= 0 for t in tokens)
    assert any("\ufffd" in t["token"] for t in tokens)  # a part of a character alone
    whole = [i for i in range(tok.size) if "\ufffd" not in tok.decode([i])]
    assert len(whole) > 700 and all(server.token_bytes(i) == tok.decode([i]).encode() for i in whole)
    _, without = ask(server, messages=[user("Say hello.")], temperature=0)
    assert without["choices"][0]["logprobs"] is None


def test_sampling_is_fixed_by_the_seed(server):
    asked = {"messages": [user("Bakedo?")], "temperature": 2, "max_tokens": 12, "n": 3}
    texts = [[c["message"]["content"] for c in ask(server, **asked, **s)[1]["choices"]]
             for s in ({"seed": 5}, {"seed": 5}, {"seed": -6}, {}, {})]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    assert len({tuple(t) for t in texts}) == 4
    _, found = ask(server, messages=[user("Say hello.")], temperature=0, max_tokens=5, n=3)
    assert [(c["index"], c["finish_reason"]) for c in found["choices"]] == [(k, "length") for k in range(3)]
    assert found["usage"]["completion_tokens"] == 15


def test_32_at_once_say_what_each_says_alone(server):
    draw = random.Random(3)
    words = [ONE, TWO, "Say hello.", "price", "Lumira", "of", "and", "7", "é"]
    asked = [{"messages": [user(" ".join(draw.choices(words, k=draw.randint(1, 9))))], "temperature": 0,
              "max_tokens": draw.randint(5, 40), "tools": [TOOL] * draw.randint(0, 1)} for _ in range(32)]
    alone = [ask(server, **a)[1]["choices"][0] for a in asked]
    with ThreadPoolExecutor(32) as pool:
        together = [f[1]["choices"][0] for f in pool.map(lambda a: ask(server, **a), asked)]
    assert len({json.dumps(c["message"].get("content")) for c in alone}) > 8

    def plain(c):
        return c["finish_reason"], c["message"]["content"], calls_of(c["message"])

    assert [plain(c) for c in together] == [plain(c) for c in alone]


def test_stop_strings(server):
    for stop in ("好", ["zzz", "你好 "], " 🙂"):
        _, found = ask(server, messages=[user("Say hello.")], temperature=0, stop=stop)
        first = min(HELLO.index(s) for s in ([stop] if isinstance(stop, str) else stop) if s in HELLO)
        assert found["choices"][0]["message"]["content"] == HELLO[:first].strip()
        assert found["choices"][0]["finish_reason"] == "stop"
        message, reason, _ = joined(streamed(server, messages=[user("Say hello.")], temperature=0, stop=stop))
        assert (message["content"], reason) == (HELLO[:first].strip(), "stop")


def test_a_prompt_that_is_too_long(server):
    for stream in (False, True):
        status, found = ask(server, messages=[user("1 " * 5000)], stream=stream)
        assert status == 400 and found["error"]["code"] == "context_length_exceeded"
    _, found = ask(server, messages=[user("1 " * 2030)], max_tokens=10**9, temperature=0)  # room for few: it is cut
    assert found["usage"]["total_tokens"] <= 4096


# ---- the clients

def test_our_own_client(server):
    client = Endpoint(f"http://127.0.0.1:{server.server_port}/v1")
    assert client.chat_all([[user("Say hello.")]] * 3, 0.0, 64, range(3)) == [HELLO] * 3 and client.model == "mine"


def test_the_official_client(server):
    openai = pytest.importorskip("openai", reason="the official client is not installed (extra test)")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["mine"] and client.models.retrieve("mine").owned_by == "slca"
    messages = [{"role": "user", "content": TWO}]
    asked = {"model": "mine", "tools": [TOOL], "temperature": 0.0}
    first = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert first.finish_reason == "tool_calls"
    assert [json.loads(c.function.arguments) for c in first.message.tool_calls] == [{"symbol": "Bakedo"},
                                                                                   {"symbol": "Lumira"}]
    messages += [first.message, *({"role": "tool", "tool_call_id": c.id, "content": price}
                                  for c, price in zip(first.message.tool_calls, ("41", "17"), strict=True))]
    assert client.chat.completions.create(messages=messages, **asked).choices[0].message.content == \
        "Bakedo 41, Lumira 17."
    hello = {"model": "mine", "messages": [user("Say hello.")], "temperature": 0.0}
    whole = client.chat.completions.create(**hello, logprobs=True).choices[0]
    assert whole.message.content == HELLO
    assert b"".join(bytes(t.bytes) for t in whole.logprobs.content).decode() == HELLO + "<|im_end|>"
    parts, used = [], None
    for chunk in client.chat.completions.create(**hello, stream=True, stream_options={"include_usage": True}):
        parts += [c.delta.content or "" for c in chunk.choices]
        used = chunk.usage or used
    assert "".join(parts) == HELLO and used.completion_tokens == len(whole.logprobs.content)
    with client.chat.completions.stream(messages=[user(TWO)], **asked) as stream:  # the client's own adding up
        final = stream.get_final_completion().choices[0]
    assert [c.function.name for c in final.message.tool_calls] == ["find_stock"] * 2
    with pytest.raises(openai.BadRequestError, match="top_p") as error:
        client.chat.completions.create(**hello, top_p=0.5)
    assert error.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**hello | {"model": "other"})


# ---- what becomes of a turn's text

CASES = ["plain", "", " \n a b \n", block("a"), f"Let me look.\n{block('a')}", f"{block('a')}\n{block('b')} and that",
         f"<think>\nhm {block('t')}\n</think>\n\nso\n{block('a')}", "<think>hm</think>\nYes.", "<think>cut off",
         "a < b <to", "a <tool_cal", "<tool_call>\n{broken\n</tool_call>", "so <tool_call>\n{\"name\": \"f",
         f"{block('a')}<tool_call>\n{{\"name\"", "</tool_call> alone", "x </think> y", "1 <think>2</think> 3 <think>4",
         f'<tool_call>\n[{json.dumps(call("a"))}, {json.dumps(call("b"))}]\n</tool_call>', json.dumps(call("a")),
         "é 你好 🙂", "<think></think>x", "<thinking>a</thinking>b", "<think>a</thinking>b</think>c"]


def settled(tools=True, **body):
    ready = {"model": "mine", "messages": [user("hi")]} | ({"tools": [TOOL]} if tools else {})
    return read_request(ready | body, "mine", world())


def world(found=[]):  # noqa: B006 - made once
    return found[0] if found else found.append(world_tokenizer(examples=150)) or found[0]


@pytest.mark.parametrize("text, content, reasoning, calls", [
    ("hi ", "hi", None, 0), (block("a"), "", None, 1), (f"Look: {block('a')}", "Look:", None, 1),
    ("<think>\nhm\n</think>\n\nYes.", "Yes.", "hm", 0), ("<think>cut", "", "cut", 0),
    (f"<think>{block('a')}</think>No.", "No.", block("a"), 0),
    ("<tool_call>\n{broken\n</tool_call>", "<tool_call>\n{broken\n</tool_call>", None, 0),
    (f"{block('a')}\n<tool_call>\n{{broken", "", None, 1)])
def test_the_message_of_a_turn(text, content, reasoning, calls):
    found = message_of(text, settled(), False)
    assert (found[0], found[1], len(found[2])) == (content, reasoning, calls)


def test_without_tools_a_call_is_text():
    assert message_of(block("a"), settled(tools=False), True) == (block("a"), None, [])
    assert message_of(block("a"), settled(tool_choice="none"), True) == (block("a"), None, [])
    assert message_of(json.dumps(call("a")), settled(), False)[2] == []
    assert message_of(json.dumps(call("a")), settled(), True)[2] == [call("a")]


def test_what_is_shown_early_is_a_beginning_of_the_whole():
    draw = random.Random(0)
    pieces = ["<think>", "</think>", "<tool_call>", "</tool_call>", " ", "\n", "a", "<", "{", '"é🙂', block("q")]
    texts = CASES + ["".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(400)]
    early = 0
    for text in texts:
        for tools, lenient, size in ((True, False, 1), (True, True, 3), (False, True, 2), (True, False, 5)):
            wanted = settled(tools)
            whole, seen, deltas = message_of(text, wanted, lenient), Visible(wanted, lenient), []
            for at in range(0, len(text), size):
                deltas += seen.add(text[at:at + size])
            early += any("content" in d for d in deltas)
            if whole[2]:
                assert not any("<tool_call" in d.get("content", "") for d in deltas), text
            deltas += seen.rest(*whole)
            assert "".join(d.get("content", "") for d in deltas) == whole[0], text
            assert "".join(d.get("reasoning_content", "") for d in deltas) == (whole[1] or ""), text
            assert [d["tool_calls"][0]["function"]["name"] for d in deltas if "tool_calls" in d] == \
                [c["name"] for c in whole[2]]
    assert early > 300


@pytest.mark.parametrize("text", CASES)
def test_a_turn_is_the_same_streamed_and_whole(text, play):
    server, _ = play(lambda _: text)
    for tools in ({"tools": [TOOL]}, {}):
        choice = ask(server, **tools)[1]["choices"][0]
        message, reason, logprobs = joined(streamed(server, **tools, logprobs=True))
        assert message["content"] == (choice["message"]["content"] or "") and reason == choice["finish_reason"]
        assert calls_of(message) == calls_of(choice["message"])
        assert b"".join(bytes(t["bytes"]) for t in logprobs).decode() == text + "<|im_end|>"


def test_several_choices_of_a_stream(play):
    server, script = play(lambda _: f"{len(script.asked)} times")
    events = streamed(server, n=3, stream_options={"include_usage": True})
    assert len({joined(events, k)[0]["content"] for k in range(3)}) == 3
    assert events[-1]["usage"]["prompt_tokens"] == 7 and events[-1]["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 3}
    assert len({a["seed"] for a in script.asked}) == 3


def test_a_turn_that_ran_out_of_length(play):
    server, _ = play(lambda _: block("a"), ended=False)
    assert ask(server, tools=[TOOL])[1]["choices"][0]["finish_reason"] == "length"
    assert joined(streamed(server, tools=[TOOL]))[1] == "length"


# ---- what is asked

def test_messages_in_all_their_forms(play):
    server, script = play()
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in "ab"]
    status, _ = ask(server, temperature=0.5, max_tokens=9, seed=4, stop=["x"], user="me", metadata={}, top_p=1,
                    frequency_penalty=0.0, response_format={"type": "text"}, logit_bias=None, messages=[
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "x"},
        {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "B", "tool_call_id": "b"},
        {"role": "tool", "content": "A", "tool_call_id": "a"}, {"role": "assistant", "content": None}, user("go")])
    assert status == 200
    asked, = script.asked
    assert [(m["role"], m["content"]) for m in asked["messages"]] == [
        ("system", "Be brief."), ("user", "one\ntwo"), ("assistant", ""), ("tool", "A"), ("tool", "B"),
        ("assistant", ""), ("user", "go")]
    assert asked["messages"][2]["tool_calls"] == calls and asked["tools"] is None
    assert (asked["temperature"], asked["max_tokens"], asked["seed"], asked["stop"]) == (0.5, 9, 4, ("x",))
    ask(server, tools=[TOOL | {"function": TOOL["function"] | {"strict": True}}], max_tokens=9, max_completion_tokens=5)
    assert script.asked[1]["tools"] == [TOOL] and script.asked[1]["max_tokens"] == 5
    assert script.asked[1]["temperature"] == 1 and script.asked[1]["prefix"] == ""


def test_defaults_and_the_ends_of_ranges():
    found = settled(seed=-1, temperature=2, n=8, stop=["a"] * 4)
    assert 0 <= found.seed < 2**63 and found.max_tokens == 8192 and found.n == 8
    assert settled().seed != settled().seed
    assert settled(tool_choice="required").lead == "<tool_call>"
    named = settled(tool_choice={"type": "function", "function": {"name": "find_stock"}})
    assert named.one_call and re.match(r'<tool_call>\n{"name": "find_stock"', named.lead)


BAD = {
    "model": [5, [], {}], "messages": ["hi", [], {}, [5], [{}], [{"role": "nobody", "content": "x"}],
                                       [{"role": "user"}], [{"role": "user", "content": 5}],
                                       [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                                       [{"role": "user", "content": [{"type": "text"}]}],
                                       [{"role": "tool", "content": "x", "tool_call_id": "y"}],
                                       [{"role": "assistant", "tool_calls": [{"id": "y", "function": {"name": "f"}}]},
                                        *[{"role": "tool", "content": "x", "tool_call_id": "y"}] * 2],
                                       [{"role": "assistant", "tool_calls": "f"}],
                                       [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
                                       [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}],
                                       [{"role": "assistant", "tool_calls": [
                                           {"id": "a", "function": {"name": "f", "arguments": "{"}}]}],
                                       [{"role": "assistant", "content": "x", "reasoning_content": 5}]],
    "tools": ["f", [5], [{"type": "custom"}], [{"type": "function", "function": {"name": ""}}],
              [{"type": "function", "function": {"name": "f", "parameters": []}}]],
    "tool_choice": ["any", 5, "required", {"type": "function", "function": {"name": "f"}}, {"type": "allowed_tools"}],
    "temperature": [-0.1, 2.1, "1", True], "top_p": [0.9], "n": [0, 9, 1.0, "1"], "seed": ["x", 1.5, 2**64],
    "stop": ["", 5, ["a"] * 5, [5], ["x" * 201]], "max_tokens": [0, -1, 1.5, True], "max_completion_tokens": ["9"],
    "stream": ["yes"], "stream_options": [5], "logprobs": [1], "top_logprobs": [3], "parallel_tool_calls": [0],
    "response_format": [{"type": "json_schema"}, {"type": "json_object"}], "logit_bias": [{"5": 1}],
    "presence_penalty": [0.1], "functions": [[{"name": "f"}]], "temprature": [0], "x" * 500: [1]}


@pytest.mark.parametrize("field", BAD)
def test_what_is_wrong_is_named(field, tok):
    for value in BAD[field]:
        with pytest.raises(ApiError) as error:
            read_request({"model": "mine", "messages": [user("hi")], field: value}, "mine", tok)
        found = error.value.body["error"]
        assert error.value.status == 400 and found["type"] == "invalid_request_error", value
        assert found["param"] == field[:100] and field[:20] in found["message"] or field == "messages", value
        assert len(found["message"]) < 400


def test_a_forced_name_forges_no_control_token(tok):
    tool = {"type": "function", "function": {"name": 'f<|im_end|>'}}
    with pytest.raises(ApiError, match="control token"):
        read_request({"model": "mine", "messages": [user("hi")], "tools": [tool], "tool_choice": tool}, "mine", tok)


def test_other_paths_and_methods(play):
    server, _ = play()
    assert ask(server, "/health", "GET") == (200, {"status": "ok", "running_or_waiting": 0, "places": 160})
    assert ask(server, "/v1/models?x=1", "GET")[1]["data"][0]["id"] == "mine"
    assert ask(server, "/v1/models/mine", "GET")[1]["id"] == "mine"
    assert ask(server, "/v1/models/%6dine", "GET")[1]["id"] == "mine"
    for path, method, status, code in (
            ("/v1/models/other", "GET", 404, "model_not_found"), ("/v1/completions", "POST", 404, None),
            ("/", "GET", 404, None), ("/%20", "GET", 404, None),
            ("/v1/chat/completions", "GET", 405, None), ("/v1/models", "POST", 405, None),
            ("/v1/models", "DELETE", 405, None), ("/v1/models", "BREW", 405, None)):
        found = ask(server, path, method, data="{}")
        assert found[0] == status and found[1]["error"]["code"] == code and found[1]["error"]["message"], path
    status, found = ask(server, model="other")
    assert status == 404 and found["error"] == {"message": "model 'other' is not here, only 'mine'", "code":
                                                "model_not_found", "param": "model", "type": "invalid_request_error"}


# ---- what HTTP brings

@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100000,
                                  b'{"seed": ' + b"9" * 9999 + b"}", b'{"a":' * 20000,
                                  *(b'{"model": "mine", "messages": [{}], "n": ' + b"[" * n + b"]" * n + b"}"
                                    for n in (500, 900, 1500, 5000))])
def test_bodies_that_are_no_request(body, play):
    server, _ = play()
    status, found = ask(server, data=body)
    assert status == 400 and found["error"]["type"] == "invalid_request_error"
    assert ask(server)[0] == 200


def head(*lines, body=b""):
    return "\r\n".join(["POST /v1/chat/completions HTTP/1.1", "Host: x", *lines, "", ""]).encode() + body


BODY = json.dumps({"model": "mine", "messages": [user("hi")]}).encode()


@pytest.mark.parametrize("data, status", [
    (head("Content-Length: 99999999999"), 413), (head(f"Content-Length: {wire.MAX_BODY + 1}"), 413),
    (head("Content-Length: -5"), 400), (head("Content-Length: 5x"), 400), (head("Content-Length: ²"), 400),
    (head("Content-Length: 5", "Content-Length: 6"), 400), (head(), 411),
    (head("Transfer-Encoding: gzip"), 400),
    (head("Transfer-Encoding: chunked", "Transfer-Encoding: gzip", body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)),
     400),
    (head("Transfer-Encoding: chunked", "Content-Length: 5"), 400),
    (head("Transfer-Encoding: chunked", body=b"zz\r\n"), 400),
    (head("Transfer-Encoding: chunked", body=b"5\r\nabcdefgh"), 400),
    (head("Transfer-Encoding: chunked", body=b"ffffffff\r\n"), 413),
    (b"nonsense\r\n\r\n", 400), (b"GET / HTTP/9.9\r\n\r\n", 505), (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", 414),
    (head(*["X: y"] * 200), 431), (head("X: " + "y" * 70000), 431)])
def test_requests_that_are_none(data, status, play, monkeypatch):
    monkeypatch.setattr(wire, "LINGER_S", 0.3)
    server, script = play()
    answer = raw(server, data)
    first, _, rest = answer.partition(b"\r\n")
    assert first.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert json.loads(rest.split(b"\r\n\r\n")[1])["error"]["message"] and b"Connection: close" in rest
    assert not script.asked and ask(server)[0] == 200


def test_a_body_that_is_too_large_is_answered_although_it_comes(play):
    server, _ = play()
    status, found = ask(server, data=b"x" * (wire.MAX_BODY + 3 * 2**20))
    assert status == 413 and str(wire.MAX_BODY) in found["error"]["message"]
    assert ask(server, messages=[user("x" * 2**22)])[0] == 200


def test_chunked_bodies_and_kept_connections(play):
    server, script = play()
    chunked = head("Transfer-Encoding: chunked", body=b"%x;a=b\r\n%s\r\n%x\r\n%s\r\n0\r\nT: v\r\n\r\n" % (
        9, BODY[:9], len(BODY) - 9, BODY[9:]))
    last = head(f"Content-Length: {len(BODY)}", "Connection: close", body=BODY)
    bad = head("Content-Length: 2", body=b"{}")
    answers = raw(server, chunked + bad + chunked + last)  # one connection, sent ahead
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"400", b"200", b"200"] and len(script.asked) == 3
    old = raw(server, last.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b'"mine"', b'"mine", "stream": true').replace(
        b"Content-Length: %d" % len(BODY), b"Content-Length: %d" % (len(BODY) + len(', "stream": true'))))
    assert b"chunked" not in old and old.endswith(b"data: [DONE]\n\n")


def test_half_sent_requests_hold_up_nobody(play):
    server, script = play()
    whole = head(f"Content-Length: {len(BODY)}", body=BODY)
    socks = [socket.create_connection(("127.0.0.1", server.server_port), timeout=LONG_S) for _ in range(40)]
    for k, sock in enumerate(socks):
        sock.sendall(whole[:k * (len(whole) - 1) // 39])
    assert ask(server)[0] == 200 and len(server.open) >= 40  # while they are all still there
    for sock in socks:  # cut off
        sock.close()
    until(lambda: not server.open)
    assert len(script.asked) == 1 and ask(server)[0] == 200


def test_slow_requests_time_out(play, monkeypatch):
    monkeypatch.setattr(wire, "READ_S", 0.4)
    monkeypatch.setattr(wire, "IDLE_S", 0.4)
    server, script = play()
    whole = head(f"Content-Length: {len(BODY)}", body=BODY)
    assert raw(server, b"") == raw(server, whole[:30]) == b""  # idle; its head is not whole
    assert raw(server, whole[:-1]).startswith(b"HTTP/1.1 408 ")
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=LONG_S) as sock:  # a byte now and then
        try:
            for byte in whole:
                sock.sendall(bytes([byte]))
                time.sleep(0.02)
        except ConnectionError:
            pass
    until(lambda: not server.open)
    assert not script.asked


def test_a_client_that_hangs_up_frees_its_place(play):
    server, script = play()
    script.gate.clear()
    for stream in (False, True):
        data = json.dumps({"model": "mine", "messages": [user("hi")], "n": 2, "stream": stream}).encode()
        sock = socket.create_connection(("127.0.0.1", server.server_port), timeout=LONG_S)
        sock.sendall(head(f"Content-Length: {len(data)}", body=data))
        until(lambda: server.used == 2)
        sock.close()
        until(lambda: server.used == 0)
    until(lambda: server.answering == 0)
    assert script.cancelled == 4


def test_the_real_agent_frees_a_row_too(policy, tok):
    agent = Agent(policy, tok, rows=1)
    server = started(agent, tok)
    data = json.dumps({"model": "mine", "messages": [user("x")], "temperature": 2, "max_tokens": 4000}).encode()
    with socket.create_connection(("127.0.0.1", server.server_port)) as sock:
        sock.sendall(head(f"Content-Length: {len(data)}", body=data))
        until(lambda: server.used == 1)
        time.sleep(0.1)
    until(lambda: server.used == 0)
    assert ask(server, messages=[user("Say hello.")], temperature=0)[1]["choices"][0]["message"]["content"] == HELLO
    server.close(0)
    agent.close()


def test_the_queue_is_bounded(play):
    server, script = play(places=4)
    script.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, server) for _ in range(3)]
        until(lambda: server.used == 3)
        assert ask(server, n=2)[0] == 503  # it would need two places
        running.append(pool.submit(ask, server))
        until(lambda: server.used == 4)
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=LONG_S)
        connection.request("POST", "/v1/chat/completions", BODY)
        response = connection.getresponse()
        found = json.loads(response.read())
        assert response.status == 503 and response.headers["Retry-After"] == "1"
        assert found["error"]["type"] == "server_error"
        assert ask(server, "/health", "GET")[1]["running_or_waiting"] == 4
        script.gate.set()
        assert [f.result()[0] for f in running] == [200] * 4
        connection.request("POST", "/v1/chat/completions", BODY)  # the same connection is still good
        assert connection.getresponse().status == 200
        connection.close()


def test_connections_are_bounded(play, monkeypatch):
    monkeypatch.setattr(serve, "SPARE_CONNECTIONS", 0)
    server, _ = play(places=2)
    socks = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(2)]
    until(lambda: len(server.open) == 2)
    assert raw(server, b"").startswith(b"HTTP/1.1 503 ")
    for sock in socks:
        sock.close()
    until(lambda: not server.open)
    assert ask(server)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error, status", [(PromptTooLong("too long"), 400), (ZeroDivisionError("secret"), 500),
                                           (ValueError("secret"), 500)])
def test_errors_of_the_agent(error, status, stream, play, capfd):
    def fail(messages):
        raise error

    server, _ = play(fail)
    found = ask(server, stream=stream)
    assert found[0] == status and "secret" not in json.dumps(found[1])
    assert ("secret" in capfd.readouterr().err) == (status == 500)
    server.agent.say = lambda _: "Fine."
    assert ask(server)[0] == 200 and server.used == 0


def test_shutdown_lets_running_requests_end(play):
    server, script = play()
    script.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, server), pool.submit(streamed, server)]
        until(lambda: server.used == 2)
        closing = pool.submit(server.close, LONG_S)
        until(server.draining.is_set)
        time.sleep(0.1)
        script.gate.set()
        assert running[0].result()[0] == 200 and joined(running[1].result())[0]["content"] == "Fine."
        closing.result()
    with pytest.raises(OSError):
        ask(server)


def test_shutdown_ends_idle_connections(play):
    server, _ = play()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=LONG_S) as sock:
        until(lambda: server.open)
        server.close(LONG_S)
        assert sock.recv(1) == b"" and not server.open


def test_shutdown_cancels_what_does_not_end(play):
    server, script = play()
    script.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, server), pool.submit(streamed, server)]
        until(lambda: server.used == 2)
        time.sleep(0.3)  # the stream has begun
        start = time.time()
        server.close(0.2)
        assert time.time() - start < LONG_S / 2
        status, found = running[0].result()
        assert status == 503 and found["error"]["message"] == "shutting down"
        assert running[1].result()[-1]["error"]["message"] == "shutting down"
    until(lambda: script.cancelled == 2)


# ---- the command

def test_the_command(policy, tok, tmp_path):
    save_policy(policy, tmp_path / "after_rl", tok)
    command = [sys.executable, "-m", "slca.serve", "--checkpoint", str(tmp_path / "after_rl"), "--port", "0",
               "--threads", "1", "--rows", "2"]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        try:
            line = process.stdout.readline()
            url = re.fullmatch(r"after_rl at (http://127\.0\.0\.1:\d+/v1)\n", line).group(1)
            assert Endpoint(url).chat([user("Say hello.")], 0.0, 64) == HELLO
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_ctrl_c_ends_it_too(policy, tok, tmp_path, monkeypatch, capsys):
    save_policy(policy, tmp_path, tok)
    monkeypatch.setattr(sys, "argv", ["serve", "--checkpoint", str(tmp_path), "--port", "0", "--threads",
                                      str(torch.get_num_threads())])
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    made = []
    monkeypatch.setattr(serve, "Server", lambda *args: made.append(Server(*args)) or made[0])

    def client():
        until(lambda: made and "at http" in capsys.readouterr().out)
        made.append(ask(made[0], model=tmp_path.name, max_tokens=3))
        os.kill(os.getpid(), signal.SIGINT)

    try:
        thread = threading.Thread(target=client)
        thread.start()
        serve.main()
        thread.join()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert made[1][0] == 200 and made[0].draining.is_set()


@pytest.mark.parametrize("flags, words", [
    (["--port", "99999"], "error: "), (["--rows", "0"], "--rows: expected 1 or more"), (["--queue", "-1"], "--queue"),
    (["--checkpoint", "nowhere"], "error: ")])
def test_the_command_says_what_is_wrong(flags, words, policy, tok, tmp_path, monkeypatch, capsys):
    save_policy(policy, tmp_path, tok)
    monkeypatch.setattr(sys, "argv", ["serve", "--checkpoint", str(tmp_path), "--threads",
                                      str(torch.get_num_threads()), *flags])
    with pytest.raises(SystemExit) as error:
        serve.main()
    assert words in str(error.value) + capsys.readouterr().err


def test_the_form_of_a_run_is_taken_over(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "after_rl"
    checkpoint.mkdir(parents=True)
    assert checkpoint_config(checkpoint, foreign=FOREIGN).chat.parallel == "blocks"
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    assert checkpoint_config(checkpoint, foreign=FOREIGN).chat.parallel == "list"
    assert checkpoint_config(checkpoint, overrides=["seed=3"], foreign=FOREIGN).seed == 3
