"""The BFCL V3 suite: the paper's out-of-domain benchmark of function calling, judged by the benchmark's own checkers.

    python evaluate.py --suite bfcl --checkpoint DIR --out FOLDER [--data DIR]
                       [--subset NAME ...] [--limit N] [--rows N]

The paper's protocol: native tool format, greedy, up to 8,192 tokens a reply (cut to what room the model has), parallel
calls on (`chat.parallel`: blocks, or the list that a policy of ours was trained on), dots in names turned into
underscores, no system message of the benchmark's. A multi-turn reply that calls is answered by the tool objects; a turn
ends with a reply without calls, and the item once a turn has called in more than 20 steps.

Where the benchmark and the paper's harness (evalscope) differ in multi-turn items, this is the benchmark: the harness
goes on with the next turn after the 20 steps, wraps results as {"response": ...}, and leaves the nested types of
functions that are held back as they are. It also drops system messages, and that is done here too.

Strict counts the calls of a reply whose <tool_call> blocks are all well formed. Lenient is a second score of the same
text: every call in it that can be read. Multi-turn items are run strictly, so they have no lenient score.

FOLDER gets result/slca-FC/ and score/slca-FC/ in the benchmark's own form (calls as {name: JSON text}, the form its
OpenAI handler reads), setting.json and summary.json. Results are saved as they come, and those that stand there are not
run again. Left out: the leaderboard's averages of averages; the paper's figures are means over items.
"""
from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from slca.agent import Agent, PromptTooLong, Reply, read_reply
from slca.evaluation.bfcl_checks import (
    DIGEST,
    LIVE,
    MODEL,
    MULTI_TURN,
    NON_LIVE,
    OTHERS,
    PAPER,
    Benchmark,
    is_multi_turn,
    language_of,
    open_benchmark,
    shown_tools,
)
from slca.evaluation.record import save, weights_sha256
from slca.settings import Config

MAX_TOKENS = 8192
GROUPS = {"AST Non-Live": NON_LIVE, "AST Live": LIVE, "Multi-Turn": MULTI_TURN, "Overall": PAPER}


def add_options(parser: argparse.ArgumentParser) -> None:
    more = parser.add_argument_group("suite bfcl")
    more.add_argument("--subset", nargs="+", choices=[*PAPER, *OTHERS], metavar="NAME",
                      help=f"default: the paper's 13 ({', '.join(PAPER)}); also, and never in the overall: "
                           f"{', '.join(OTHERS)}")


def suite(args: argparse.Namespace, cfg: Config, policy, tokenizer) -> dict:
    """Run, print the table, write FOLDER/summary.json and return what it holds.

    args: checkpoint, data, out, subset, limit, rows. Raises ValueError before any work where the package, an option or
    the folder does not fit.
    """
    if not args.out:
        raise ValueError("--suite bfcl: --out FOLDER is missing; results are kept there as they come")
    if args.temperature:
        raise ValueError(f"--temperature {args.temperature}: suite bfcl is greedy")
    for name in ("limit", "rows"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected 1 or more, found {value}")
    bench, out = open_benchmark(args.data), Path(args.out)
    setting = {"checkpoint_sha256": weights_sha256(args.checkpoint), "benchmark_sha256": DIGEST, "temperature": 0,
               "max_tokens": MAX_TOKENS, "max_len": policy.config.max_position_embeddings,
               "parallel": cfg.chat.parallel, "max_steps": bench.max_steps, "dtype": str(policy.head.dtype)}
    claim(out, setting)
    agent = Agent(policy, tokenizer, rows=args.rows, parallel=cfg.chat.parallel)
    try:
        summary = run(agent, bench, args.subset or list(PAPER), args.limit, args.rows, out)
    finally:
        agent.close()
    summary = {"suite": "bfcl", "checkpoint": str(args.checkpoint), "setting": setting} | summary
    save(out / "summary.json", summary)
    print(table(summary))
    return summary


def run(agent, bench: Benchmark, subsets: Sequence[str], limit: int | None, rows: int, out: Path) -> dict:
    """Run what is not done yet, all subsets in one pool, then score -> the summary's figures. agent: see `ask`."""
    entries = {s: bench.entries(s)[:limit] for s in dict.fromkeys(subsets)}
    done = {s: finished(result_file(out, s)) for s in entries}
    todo = [(s, e) for s in entries for e in entries[s] if e["id"] not in done[s]]
    stop, writing = threading.Event(), threading.Lock()
    result_file(out, "").parent.mkdir(parents=True, exist_ok=True)

    def work(subset: str, entry: Mapping) -> None:
        row = run_item(agent, bench, subset, entry, stop)
        with writing, result_file(out, subset).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        done[subset][row["id"]] = row

    with ThreadPoolExecutor(rows) as pool, tqdm(total=sum(map(len, entries.values())), desc="suite bfcl", unit="item",
                                                initial=sum(e["id"] in done[s] for s in entries for e in entries[s]),
                                                dynamic_ncols=True) as bar:
        jobs = [pool.submit(work, s, e) for s, e in todo]
        try:
            for job in as_completed(jobs):
                job.result()
                bar.update()
        except BaseException:  # an interrupt too: replies under way end, what waits is not begun
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    scores = {s: score_subset(bench, s, entries[s], done[s], out) for s in entries}
    return {"limit": limit, "subsets": scores, "groups": groups(scores)}


# --- one item --------------------------------------------------------------------------------------------------------

def run_item(agent, bench: Benchmark, subset: str, entry: Mapping, stop: threading.Event) -> dict:
    """The item's row of the result file. A prompt that is too long is an item's result; other errors are raised."""
    try:
        one = run_turns if is_multi_turn(subset) else run_call
        return {"id": entry["id"]} | one(agent, bench, subset, entry, stop)
    except PromptTooLong as error:
        return {"id": entry["id"], "result": f"Error during inference: {error}", "too_long": True}


def run_call(agent, bench: Benchmark, subset: str, entry: Mapping, stop: threading.Event) -> dict:
    tools = shown_tools(entry["function"], language_of(subset))
    reply, seconds = ask(agent, without_system(entry["question"][0]), tools, stop)
    return {"result": answer(reply), "text": reply.text, "malformed": reply.malformed, "cut": not reply.stopped,
            "input_token_count": reply.prompt_tokens, "output_token_count": len(reply.ids), "latency": seconds}


def run_turns(agent, bench: Benchmark, subset: str, entry: Mapping, stop: threading.Event) -> dict:
    """A dialogue with the tool objects. Each list holds one list a turn, with one value a step."""
    objects, functions, messages = bench.tool_objects(entry), list(entry["function"]), []
    row: dict = {key: [] for key in ("result", "text", "input_token_count", "output_token_count", "latency",
                                     "inference_log")}
    row |= {"malformed": False, "cut": False}
    tools = shown_tools(functions, language_of(subset))
    for number, asked in enumerate(entry["question"]):
        if held_back := entry["missed_function"].get(str(number)):
            functions += held_back
            tools = shown_tools(functions, language_of(subset))
            asked = [{"role": "user", "content": bench.added_functions}]
        asked = without_system(asked)
        messages += asked
        log = {"begin_of_turn_query": asked}
        turn: dict[str, list] = {key: [] for key in row if isinstance(row[key], list) and key != "inference_log"}
        calls: list[dict] = [{}]
        while calls and len(turn["result"]) <= bench.max_steps:
            reply, seconds = ask(agent, messages, tools, stop)
            calls = called(reply)
            results = [objects.call(c["name"], c["arguments"]) for c in calls]
            # the raw text, not the calls written anew: what the policy wrote is what it reads
            new = [{"role": "assistant", "content": reply.text}, *({"role": "tool", "content": r} for r in results)]
            messages += new
            log[f"step_{len(turn['result'])}"] = new
            for key, value in (("result", answer(reply)), ("text", reply.text), ("latency", seconds),
                               ("input_token_count", reply.prompt_tokens), ("output_token_count", len(reply.ids))):
                turn[key].append(value)
            row["malformed"] |= reply.malformed
            row["cut"] |= not reply.stopped
        for key, values in turn.items():
            row[key].append(values)
        row["inference_log"].append(log)
        if calls:  # forced to quit
            break
    return row


def ask(agent, messages: Sequence[dict], tools: Sequence[dict], stop: threading.Event) -> tuple[Reply, float]:
    """One reply and its seconds. agent: its `reply` is as `slca.agent.Agent.reply`."""
    start = time.perf_counter()
    reply = agent.reply(messages, tools, temperature=0.0, max_tokens=MAX_TOKENS, cancelled=stop)
    if stop.is_set():
        raise RuntimeError("stopped")  # cut short: not to be saved
    return reply, time.perf_counter() - start


def without_system(messages: Sequence[dict]) -> list[dict]:
    return list(messages[1:] if messages and messages[0]["role"] == "system" else messages)


def called(reply: Reply) -> list[dict]:
    """The reply's calls under the strict rule, dots in names turned into underscores."""
    try:
        json.dumps(reply.calls)
    except RecursionError:  # nested as deeply as Python reads, and deeper than it writes
        return []
    return [] if reply.malformed else renamed(reply.calls)


def renamed(calls: Iterable[dict]) -> list[dict]:
    return [{"name": c["name"].replace(".", "_"), "arguments": c["arguments"]} for c in calls]


def answer(reply: Reply) -> list[dict] | str:
    """The reply as result files hold it: [{name: arguments as JSON text}], or the text where nothing is called."""
    calls = called(reply)
    return [{c["name"]: json.dumps(c["arguments"])} for c in calls] if calls else reply.text


def saved_calls(result) -> list[dict]:
    """`answer`'s calls again."""
    calls = [next(iter(call.items())) for call in result] if isinstance(result, list) else []
    return [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls]


# --- scores ----------------------------------------------------------------------------------------------------------

def score_subset(bench: Benchmark, subset: str, entries: Sequence[dict], rows: Mapping[str, dict], out: Path) -> dict:
    """Write the subset's score file -> its counts.

    lenient_correct: None for multi-turn. too_long: prompts over the model's positions, wrong whatever is asked.
    malformed, cut: items with such a reply.
    """
    failures, lenient = [], 0
    for entry in entries:
        row = rows[entry["id"]]
        result, decoded = row["result"], None
        if row.get("too_long"):
            verdict = {"valid": False, "error": [result], "error_type": "prompt_too_long"}
        elif is_multi_turn(subset):
            decoded = [[saved_calls(step) for step in turn] for turn in result]
            verdict = bench.check_turns(entry, decoded)
        else:
            decoded = saved_calls(result)
            verdict = bench.check_calls(subset, entry, decoded)
            lenient += bench.check_calls(subset, entry, renamed(read_reply(row["text"], lenient=True)[2]))["valid"]
        if not verdict["valid"]:
            left_out = ["ground_truth"]
            if is_multi_turn(subset):
                verdict = {"error": {k: v for k, v in verdict.items() if k != "valid"}}
                left_out += ["function", "missed_function"]
            failures.append({"id": entry["id"], "model_name": MODEL, "test_category": subset, "valid": False,
                             **verdict, "prompt": {k: v for k, v in entry.items() if k not in left_out},
                             "model_result_raw": result, "model_result_decoded": decoded,
                             "possible_answer": entry.get("ground_truth")})
    n = len(entries)
    head = {"accuracy": (n - len(failures)) / n, "correct_count": n - len(failures), "total_count": n}
    path = out / "score" / MODEL / f"BFCL_v3_{subset}_score.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line, default=_text_of) for line in [head, *failures]), encoding="utf-8")
    items = [rows[e["id"]] for e in entries]
    found = {"accuracy": head["accuracy"], "correct": n - len(failures), "n": n,
             "lenient_correct": None if is_multi_turn(subset) else lenient}
    return found | {key: sum(bool(row.get(key)) for row in items) for key in ("too_long", "malformed", "cut")}


def _text_of(value) -> str:
    """Of a benchmark's own object; its text may have no end (a directory holds its parent)."""
    try:
        return str(value)
    except RecursionError:
        return f"{type(value).__name__}, too deep to be written"


def groups(scores: Mapping[str, dict]) -> dict[str, dict]:
    """AST Non-Live, AST Live, Multi-Turn, Overall: pooled over the items that were run; whole: it was all of them.

    lenient_correct: None where a part has none.
    """
    found = {}
    for name, members in GROUPS.items():
        parts = [scores[s] for s in members if s in scores]
        if parts:
            easy = [p["lenient_correct"] for p in parts]
            found[name] = {"accuracy": pooled((p["accuracy"], p["n"]) for p in parts),
                           "correct": sum(p["correct"] for p in parts), "n": sum(p["n"] for p in parts),
                           "lenient_correct": None if None in easy else sum(easy)}
            found[name]["whole"] = found[name]["n"] == sum(members.values())
    return found


def pooled(parts: Iterable[tuple[float, int]]) -> float:
    """Accuracies and their numbers of items -> the accuracy over all items, the paper's overall."""
    parts = list(parts)
    return sum(accuracy * n for accuracy, n in parts) / sum(n for _, n in parts)


def table(summary: Mapping) -> str:
    lines = [f"{'subset':<26}{'strict':>8}{'lenient':>9}{'items':>7}{'too long':>10}{'malformed':>11}{'cut off':>9}"]
    lines.append("-" * len(lines[0]))
    for name, s in summary["subsets"].items():
        lines.append(_line(name, s) + f"{s['too_long']:>10}{s['malformed']:>11}{s['cut']:>9}")
    lines.append("-" * len(lines[0]))
    for name, s in summary["groups"].items():
        of = sum(GROUPS[name].values())
        lines.append(_line(name, s) + ("" if s["whole"] else f"   pooled over what was run, of {of}"))
    return "\n".join(lines)


def _line(name: str, s: Mapping) -> str:
    lenient = "-" if s["lenient_correct"] is None else f"{s['lenient_correct'] / s['n']:.4f}"
    return f"{name:<26}{s['accuracy']:>8.4f}{lenient:>9}{s['n']:>7}"


# --- files -----------------------------------------------------------------------------------------------------------

def result_file(out: Path, subset: str) -> Path:
    return out / "result" / MODEL / f"BFCL_v3_{subset}_result.json"


def claim(out: Path, setting: Mapping) -> None:
    """Make the folder this setting's own. ValueError: it holds results of another one, or results of none."""
    path = out / "setting.json"
    if path.is_file():
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            differ = [key for key in setting if old.get(key) != setting[key]]
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}: expected the setting of a bfcl run") from error
        if differ:
            raise ValueError(f"{out}: holds results of another run, different in {', '.join(differ)}; name another "
                             "folder or remove this one")
    elif any((out / name).exists() for name in ("result", "summary.json")):
        raise ValueError(f"{out}: holds results, and no setting.json says what of; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    save(path, setting)


def finished(path: Path) -> dict[str, dict]:
    """Rows of a result file by id. A last line that a killed run left unfinished is cut off the file."""
    if not path.is_file():
        return {}
    data = path.read_bytes()
    whole = data[:data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    rows = {}
    for number, line in enumerate(whole.decode("utf-8").split("\n")[:-1], 1):
        try:
            row = json.loads(line)
            rows[row["id"]] = row
            row["result"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: line {number}: expected an object with id and result") from error
    return rows
