"""python -m slca.data inspect|convert|split FILE ...: look into files of rows, turn them into saved tasks, split them.

    python -m slca.data inspect rows.jsonl
    python -m slca.data convert dev.jsonl dialogues.jsonl tasks.jsonl --decompose
    python -m slca.data split kimi.jsonl oss.jsonl --out splits --heldout 3000 1000

Rows are streamed; only ids are kept. Files appear whole or not at all. A row that cannot be used is left out, counted
by its reason, and listed in OUT.dropped.jsonl with its file, row, field and what was expected. Exit code 1 with
"error: ..." where nothing can be used.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tqdm import tqdm

from slca.data.rows import DROPPED, BadRow, DataError, data_files
from slca.data.split import HELD_OUT, SFT_SHARE, SPLITS, assign, dialogue, multi_turn, refused
from slca.data.task import Task
from slca.data.toucan import KINDS, Read, read_tasks

SHOWN = 20  # reasons and subsets printed


def rows(args: argparse.Namespace, decompose: bool, what: str) -> Iterator[tuple[Path, Read]]:
    """(file, row read) over all files, with a progress bar on a terminal. Ids are unique over the files."""
    seen: Counter[str] = Counter()
    with tqdm(desc=what, unit=" rows", disable=None) as bar:
        for path in [file for name in args.files for file in data_files(name)]:
            for read in read_tasks(path, args.kind, decompose, args.tools, seen):
                yield path, read
                bar.update()


def write_task(file: IO[str], task: Task) -> None:
    file.write(json.dumps(vars(task)) + "\n")


@contextmanager
def published(*paths: Path) -> Iterator[list[IO[str]]]:
    """Files open for writing that take their names only when the block ends without an error.

    An empty list of dropped rows is not kept, nor one of an earlier run.
    """
    parts = [path.with_name(f".{path.name}.{os.getpid()}.part") for path in paths]
    try:
        with ExitStack() as stack:
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
            yield [stack.enter_context(part.open("w", encoding="utf-8")) for part in parts]
        for part, path in zip(parts, paths, strict=True):
            if part.stat().st_size or not path.name.endswith(DROPPED):
                os.replace(part, path)
            else:
                path.unlink(missing_ok=True)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


class Drops:
    """Dropped rows: counted by reason, the first of each kept, and each written down where a file is given."""

    def __init__(self, file: IO[str] | None = None):
        self.file, self.counts, self.first = file, Counter(), {}

    def add(self, error: DataError) -> None:
        field = re.sub(r"\[\d+\]", "[]", error.field)
        expected = re.sub(r"\d+", "N", error.expected.split(" (")[0])  # what differs from row to row stands in brackets
        reason = f"{field}: {expected}" if field else expected
        self.counts[reason] += 1
        self.first.setdefault(reason, error)
        if self.file:
            self.file.write(json.dumps({"file": error.file, "row": error.row, "field": error.field,
                                        "expected": error.expected}) + "\n")

    def show(self) -> None:
        print(f"dropped rows: {sum(self.counts.values())}")
        for reason, count in self.counts.most_common(SHOWN):
            first = self.first[reason]
            print(f"  {count:>7}  expected {reason} - first: {first.file}, row {first.row}")
        if len(self.counts) > SHOWN:
            print(f"  and {len(self.counts) - SHOWN} more reasons")

    def refuse_all(self, files: list[str]) -> None:
        """DataError that quotes the first dropped row."""
        first = next(iter(self.first.values()), None)
        raise DataError(", ".join(files), None, "", "at least one usable row" + (f"; the first: {first}" if first
                                                                                  else ""))


def inspect(args: argparse.Namespace) -> None:
    drops, total = Drops(), 0
    counts = {name: Counter() for name in ("kinds", "subsets", "gold form", "gold calls a task", "steps a task",
                                           "tools a task", "user turns a prompt")}
    having = Counter()
    for _, read in rows(args, args.decompose, "inspect"):
        total += 1
        counts["kinds"][read.kind or "unknown"] += 1
        if read.error:
            drops.add(read.error)
        if read.form:
            counts["gold form"][read.form] += 1
        for task in read.tasks:
            having["tasks"] += 1
            having["with a demonstration"] += bool(task.demonstration)
            having["with facts"] += bool(task.facts)
            having["without gold calls"] += not task.gold_calls
            counts["subsets"][task.subset or "none"] += 1
            counts["gold calls a task"][sum(map(len, task.gold_calls))] += 1
            counts["steps a task"][len(task.gold_calls)] += 1
            counts["tools a task"][len(task.tools)] += 1
            counts["user turns a prompt"][sum(m["role"] == "user" for m in task.messages)] += 1
    if not having["tasks"]:
        drops.refuse_all(args.files)
    print(f"rows: {total}")
    print("tasks: " + ", ".join(f"{count} {name}".removesuffix(" tasks") for name, count in having.items()))
    for name, counter in counts.items():
        if counter:
            print(f"{name}: {spread(counter) if all(isinstance(k, int) for k in counter) else listed(counter)}")
    drops.show()


def listed(counter: Counter) -> str:
    more = f", and {len(counter) - SHOWN} more" if len(counter) > SHOWN else ""
    return ", ".join(f"{name} {count}" for name, count in counter.most_common(SHOWN)) + more


def spread(counter: Counter) -> str:
    """Total, mean and range of a count, and how often each small value occurs."""
    total, n = sum(k * c for k, c in counter.items()), sum(counter.values())
    often = ", ".join(f"{k} in {counter[k]}" for k in sorted(counter)[:8])
    return f"{total} in all, mean {total / n:.2f}, {min(counter)} to {max(counter)} ({often}" + (
        ", ...)" if len(counter) > 8 else ")")


def convert(args: argparse.Namespace) -> None:
    out, total, tasks = Path(args.files.pop()), 0, 0
    if out.suffix != ".jsonl" or out.name.endswith(DROPPED) or out.is_dir():
        raise DataError(out, None, "", "an output name that ends in .jsonl")
    if any(file.resolve() == out.resolve() for name in args.files for file in data_files(name)):
        raise DataError(out, None, "", "an output that is none of the inputs")
    with published(out, out.with_suffix(f".{DROPPED}")) as (file, dropped):
        drops = Drops(dropped)
        for _, read in rows(args, args.decompose, "convert"):
            total += 1
            for task in read.tasks:
                write_task(file, task)
                tasks += 1
            if read.error:
                drops.add(read.error)
        if not tasks:
            drops.refuse_all(args.files)
    print(f"{out}: {tasks} tasks of {total} rows")
    drops.show()


def split(args: argparse.Namespace) -> None:
    folder = Path(args.out)
    counts, sizes = Counter(), {}  # sizes: dialogue -> (samples, of several turns)
    with published(*(folder / f"{name}.jsonl" for name in SPLITS), folder / DROPPED) as files:
        drops, outputs = Drops(files[-1]), dict(zip(SPLITS, files, strict=False))
        for path, read in rows(args, True, "first pass"):
            stage, why = refused(read, args.min_score)
            counts["rows"] += 1
            counts[stage] += 1
            if stage:
                drops.add(DataError(path, read.number, *why.args) if isinstance(why, BadRow) else why)
                continue
            name = dialogue(read, path)
            samples, many = sizes.get(name, (0, False))
            sizes[name] = (samples + len(read.tasks), many or multi_turn(read.tasks))
        if not sizes:
            drops.refuse_all(args.files)
        try:
            where = assign(sizes, tuple(args.heldout), args.sft_share, args.seed)
        except ValueError as error:
            raise DataError(", ".join(args.files), None, "", str(error)) from error
        written, held = Counter(), Counter()
        for path, read in rows(args, True, "second pass"):
            if not refused(read, args.min_score)[0]:
                to = where[dialogue(read, path)]
                for task in read.tasks:
                    write_task(outputs[to], task)
                written[to] += len(read.tasks)
                held[sizes[dialogue(read, path)][1]] += len(read.tasks) if to == "heldout" else 0
    relevant = counts["rows"] - counts["relevance"]
    print(f"rows {counts['rows']} -> relevant {relevant} -> well formed {relevant - counts['format']}, of "
          f"{len(sizes)} dialogues")
    left = written["sft"] + written["rl"]
    print(f"samples {left + written['heldout']} -> held out {written['heldout']} ({held[False]} + {held[True]}) -> "
          f"{left} = {written['sft']} SFT + {written['rl']} RL")
    drops.show()


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 0 was expected")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number in 0 to 1 was expected")
    return share


def _score(text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise argparse.ArgumentTypeError(f"{text!r}: a number was expected")
    return score


def parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--kind", choices=KINDS, default="auto", help="of the rows; auto: by each row's keys")
    common.add_argument("--tools", help="tool schemas of Seal-Tools or API-Bank rows (default: tool.jsonl or "
                        "tools.json beside the rows)")
    top = argparse.ArgumentParser("python -m slca.data", description=__doc__.split("\n")[0],
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="inspect|convert|split")
    for run, about in ((inspect, "print counts"), (convert, "write saved tasks: FILE ... OUT.jsonl"),
                       (split, "filter raw rows and write sft.jsonl, rl.jsonl, heldout.jsonl")):
        command = commands.add_parser(run.__name__, help=about, description=about, parents=[common])
        command.add_argument("files", nargs="+", metavar="FILE", help="a .jsonl, .json or .parquet file, or a folder")
        command.set_defaults(run=run)
        if run is not split:
            command.add_argument("--decompose", action="store_true", help="a task for every user turn that an "
                                 "assistant answers, not for the last alone; Toucan: from the second turn on where "
                                 "there are several")
            continue
        command.add_argument("--out", default=".", metavar="DIR", help="where the three files go (default: here)")
        command.add_argument("--heldout", type=_count, nargs=2, default=HELD_OUT, metavar=("SINGLE", "MULTI"),
                             help="samples of single-turn and multi-turn dialogues to hold out (default: 3000 1000)")
        command.add_argument("--sft-share", type=_share, default=SFT_SHARE, metavar="X",
                             help="share of SFT in the other samples (default: 4/7, the paper's)")
        command.add_argument("--min-score", type=_score, default=3.0, metavar="X",
                             help="lowest quality score, 1 to 5, of a row that states one (default: 3)")
        command.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0, or 1 for unusable input."""
    args = parser().parse_args(argv)
    if args.run is convert and len(args.files) < 2:
        print("error: convert: expected FILE ... OUT.jsonl", file=sys.stderr)
        return 1
    try:
        args.run(args)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
