"""Run a study: every condition of a file over seeds, from one supervised checkpoint a seed, into the paper's tables.

    python -m slca.study configs/studies/support_control.yaml --seeds 0 1 2 [--config F.yaml ...] [--set a.b=c ...]
                         [--out DIR] [--only NAME ...] [--ranks N] [--at-once N] [--tables] [--columns NAME ...]
                         [--levels X ...]

The base is --config, then --set; a condition of the file is put over both (`slca/study_plan.py`).

DIR/sft/seed0 is the supervised run of a seed, DIR/<condition>/seed0 the RL run that goes on from it. A condition that
changes what SFT reads has a supervised run of its own, DIR/sft-<hash>. One with rl.enabled false is the supervised run
itself. Finished runs are skipped and cut-off ones gone on with, so the same command goes on after Ctrl-C or a kill.
Each run writes to log.txt in its folder. DIR/study.json has all numbers, tables.md and tables.csv the tables. Studies
may share a DIR: what they have in common is run once, the tables are those of the last, --tables makes another's again.

Runs follow one another on this machine, or --at-once N of them go side by side, each on its share of the cores: the
faster way for a small model, which gains little from a second core. Nothing is queued or sent to other machines.
"""
from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from slca.config import load_config
from slca.report import GLOSSARY
from slca.settings import Config
from slca.stats import build_tables, csv_text, markdown, run_record
from slca.study_plan import (
    ROOT,
    Job,
    Plan,
    StudyError,
    evaluation,
    evaluation_file,
    jobs,
    plan,
    read_json,
    read_study,
    refuse_other,
    seeds_there,
)


class Stopped(Exception):
    """The study was asked to end by this signal."""


# --- running ---------------------------------------------------------------------------------------------------------

def say(text: str) -> None:
    print(text, flush=True)  # a study's output is often sent to a file


class Forwarding:
    """Sends SIGINT and SIGTERM on to the processes begun in its `with`; it ends with Stopped where one came."""

    def __init__(self):
        self.asked: list[int] = []
        self.running: list[subprocess.Popen] = []
        self.lock = threading.RLock()

    def __enter__(self) -> Forwarding:
        self.before = {number: signal.signal(number, self._send) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _send(self, number: int, frame) -> None:
        with self.lock:
            self.asked.append(number)
            for process in self.running:
                process.send_signal(number)

    def add(self, process: subprocess.Popen) -> None:
        with self.lock:
            self.running.append(process)
            for number in self.asked:  # those that came before it was there
                process.send_signal(number)

    def __exit__(self, kind, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.asked and kind is None:
            raise Stopped(signal.Signals(self.asked[0]).name)


def run_process(command: Sequence[str], log: Path, forwarding: Forwarding, done: Callable[[], bool] = lambda: False,
                cores: Sequence[int] = ()) -> int:
    """Run a command with its output added to the log -> its exit status; 0 where it is done by then.

    cores: those it may use; none: all. A signal makes it save a checkpoint; it is waited for. The log stays locked as
    long as the process lives, so one that another study left behind, killed alone, is waited for.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        waited = False
        while not _locked(file) and not forwarding.asked:
            if not waited:
                say(f"    waits for a process of another study, which still writes to {log}")
            waited = True
            time.sleep(0.2)  # not in the lock: a signal ends the wait
        if forwarding.asked:
            return 1
        if waited and done():
            return 0
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        # a session of its own: Ctrl-C reaches it through `forwarding` alone, and once
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                                   env=os.environ | {"TQDM_MININTERVAL": "60"})
        forwarding.add(process)
        if cores:
            with suppress(OSError):  # cores that were taken away since
                os.sched_setaffinity(process.pid, cores)
        return process.wait()


def _locked(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def run_all(todo: Sequence[Job], at_once: int = 1) -> list[str]:
    """Run what is not done, in order, `at_once` side by side -> labels of what failed. One failure does not end the
    others. Raises Stopped.
    """
    times: dict[str, list[float]] = {}
    for job in todo:
        if job.kind != "evaluate" and job.done():
            times.setdefault(job.kind, []).append(wall(job, 0.0))
    failed, bad = [], set()
    waiting, running = list(enumerate(todo, 1)), {}  # running: future -> (head, job, cores, start)
    free = [sorted(os.sched_getaffinity(0))[k::at_once] for k in range(at_once)] if at_once > 1 else [()]

    def fail(head: str, job: Job, why: str, more: str = "") -> None:
        say(f"{head}: {more or why}")
        failed.append(f"{job.label}: {why}")
        if job.kind != "evaluate":
            bad.add(job.folder)

    with Forwarding() as forwarding, ThreadPoolExecutor(at_once) as pool:
        while waiting or running:
            for i, job in list(waiting):
                head = f"[{i}/{len(todo)}] {job.label}"
                before = [*(j for n, j in waiting if n < i), *(r[1] for r in running.values())]
                if job.done():
                    say(f"{head}: finished already")
                elif bad.intersection(job.needs):
                    fail(head, job, "not run", "not run, as what it goes on from failed")
                elif forwarding.asked or not free or any(j.folder in job.needs for j in before if j.kind != "evaluate"):
                    continue  # what it goes on from is not there yet, or there is no room
                else:
                    say(f"{head}: {'goes on' if job.log.exists() else 'begins'}, output in {job.log}")
                    cores = free.pop()
                    future = pool.submit(run_process, job.command, job.log, forwarding, job.done, cores)
                    running[future] = head, job, cores, time.time()
                waiting.remove((i, job))
            if not running:
                break  # asked to end
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                head, job, cores, start = running.pop(future)
                free.append(cores)
                try:
                    code = future.result()
                    why = "" if job.done() else f"exit status {code}"
                except OSError as error:
                    why = str(error)
                if forwarding.asked and why:
                    continue  # it saved a checkpoint and ended
                if why:
                    fail(head, job, why, f"FAILED ({why}); the end of {job.log}:\n{tail(job.log)}")
                    continue
                times.setdefault(job.kind, []).append(wall(job, time.time() - start))
                left = [sum(times[j.kind]) / len(times[j.kind]) if j.kind in times else None
                        for j in (*(r[1] for r in running.values()), *(j for _, j in waiting)) if not j.done()]
                known = sum(x for x in left if x is not None) / at_once
                more = "more than " if None in left else "about "
                togo = f"; {len(left)} to go, {more}{duration(known)}" if left else ""
                say(f"{head}: {duration(time.time() - start)}{togo}")
    return failed


def wall(job: Job, measured: float) -> float:
    """Seconds of a finished run, those before it was gone on with too."""
    return measured if job.kind == "evaluate" else read_json(job.folder / "summary.json").get("wall_s", measured)


def duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, indented; of a progress bar only what is left of it."""
    text = log.read_bytes().decode("utf-8", "replace") if log.is_file() else ""  # bytes: \r is not a new line here
    shown = [line.split("\r")[-1].rstrip() for line in text.split("\n")]
    return "\n".join(f"    {line}" for line in [line for line in shown if line][-lines:])


# --- results ---------------------------------------------------------------------------------------------------------

def collect(study: dict, planned: Plan, columns: Sequence[str], levels: Sequence[float],
            base: Config) -> dict[str, dict[int, dict]]:
    """Condition -> seed -> what its finished run left; with what `evaluate` measured on it as it is asked now."""
    found: dict[str, dict[int, dict]] = {}
    for name, by_seed in planned.items():
        for seed, runs in by_seed.items():
            if not runs[-1].finished():
                continue
            record = run_record(runs[-1].folder, runs[-1].stage, columns, levels)
            if study["evaluate"] and evaluation(study["evaluate"], runs[-1], base, [], []).done():
                measured = read_json(evaluation_file(runs[-1], study["evaluate"]))
                record["evaluate"] = ({"toucan": measured["metrics"]} if measured.get("metrics") else
                                      {k: e["metrics"] for k, e in measured.get("conditions", {}).items()})
            found.setdefault(name, {})[seed] = record
    return found


def write_tables(study: dict, runs: Mapping[str, Mapping[int, dict]], root: Path) -> str:
    """study.json, tables.md and tables.csv in the study's folder -> the Markdown."""
    tables = build_tables(runs, study["reference"])
    seeds = {name: " ".join(map(str, by_seed)) for name, by_seed in runs.items()}
    note = "; ".join(f"{name}: {shown}" for name, shown in seeds.items())
    note = (f"Paper: table {', '.join(map(str, study['paper']))}. " if study["paper"] else "") + (
        "Mean ± standard deviation over seeds; differences with 95 % t-intervals over paired seeds. "
        f"Finished runs, by seed: {note or 'none'}.")
    text = markdown(study["title"], note, tables)
    record = {k: study[k] for k in ("title", "paper", "reference", "evaluate")} | {
        "conditions": {name: {"settings": tree, "runs": {str(s): r for s, r in runs.get(name, {}).items()}}
                       for name, tree in study["conditions"].items()}, "tables": tables}
    for name, content in (("study.json", json.dumps(record, ensure_ascii=False)), ("tables.md", text),
                          ("tables.csv", csv_text(tables))):
        part = root / f"{name}.tmp"  # a killed study leaves no half of it
        part.write_text(content, encoding="utf-8")
        part.replace(root / name)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit status: 1 where a run failed, 130 where the study was stopped."""
    args = arguments(argv)
    study = read_study(args.study)
    if args.catalogue:
        if (study["evaluate"] or {}).get("suite") != "distractors":
            raise StudyError(f"--catalogue: expected a study with suite: distractors, found {args.study}")
        study["evaluate"]["catalogue"] = args.catalogue
    for kind, names, allowed in (("--only", args.only, study["conditions"]), ("--columns", args.columns, GLOSSARY)):
        if unknown := [n for n in names if n not in allowed]:
            raise StudyError(f"{kind} {' '.join(unknown)}: expected names of {', '.join(allowed)}")
    files = args.config or [str(ROOT / "configs" / "tiny.yaml")]
    base = load_config(files, args.set)
    root = Path(args.out or Path("runs") / Path(args.study).stem).resolve()
    every = sorted(seeds_there(root, list(study["conditions"])) | set([] if args.tables else args.seeds))
    planned = plan(study, args.study, base, root, every)
    failed, status = [], 0
    refuse_other([run for by_seed in planned.values() for runs in by_seed.values() for run in runs])
    if not args.tables:
        chosen = {name: planned[name] for name in (args.only or planned)}
        for key, hint in (("catalogue", "; name one with --catalogue FILE"), ("data", "")):
            if (file := (study["evaluate"] or {}).get(key)) and not Path(file).exists():
                raise StudyError(f"{file}: no such {key}{hint}")
        first = {name: [run.name for run in by_seed[args.seeds[0]] if run.stage == "after_sft"]
                 for name, by_seed in chosen.items()}
        for sft in dict.fromkeys(n for names in first.values() for n in names):
            say(f"{sft}: the supervised run of {', '.join(name for name in first if sft in first[name])}")
        try:
            failed = run_all(list(jobs(study, chosen, base, files, args.set, args.seeds, args.ranks)),
                             args.at_once)
        except (Stopped, KeyboardInterrupt) as stopped:
            say(f"stopped by {stopped or 'SIGINT'}; the same command goes on")
            status = 130
    runs = collect(study, planned, args.columns, args.levels, base)
    if args.tables and not runs:
        raise StudyError(f"{root}: no finished run of {args.study} there")
    if runs:
        print(f"\n{write_tables(study, runs, root)}\nin {root}: tables.md, tables.csv, study.json")
    if failed:
        print("failed:\n  " + "\n  ".join(failed))
    return status or int(bool(failed))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m slca.study", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", metavar="STUDY.yaml")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    parser.add_argument("--config", nargs="+", action="extend", metavar="F.yaml",
                        help="the base, merged left to right; default: configs/tiny.yaml")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="a.b=c", help="settings of the base")
    parser.add_argument("--out", metavar="DIR", help="the study's folder; default: runs/ and the file's name")
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="NAME", help="run these conditions")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes of a run (torchrun)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N",
                        help="runs side by side, each on 1/N of the cores (Linux)")
    parser.add_argument("--tables", action="store_true", help="run nothing: tables of what is finished in DIR")
    parser.add_argument("--columns", nargs="+", action="extend", default=[], metavar="NAME",
                        help="columns of metrics.jsonl to average over the RL steps")
    parser.add_argument("--levels", nargs="+", type=float, default=[0.7, 0.8, 0.9], metavar="X",
                        help="success levels of the convergence table; default: 0.7 0.8 0.9")
    parser.add_argument("--catalogue", metavar="FILE", help="tools of the distractors, instead of the study's")
    args = parser.parse_args(argv)
    args.seeds = sorted(set(args.seeds))
    if min(args.seeds) < 0 or args.ranks < 1:
        parser.error("--seeds: expected numbers from 0 on; --ranks: from 1 on")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if not 1 <= args.at_once <= cores:
        parser.error(f"--at-once: expected 1 to {cores}, the cores it may divide")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:  # configuration and study errors among them
        raise SystemExit(f"error: {error}") from error
