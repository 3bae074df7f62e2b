"""Processor time of `python -m slca.data convert` on Toucan SFT rows, against reading and writing the same JSON alone.

    python tests/benchmarks/convert.py [--rows 10000] [--repeats 3]

One thread, one process; the start of Python is not counted. Prints seconds and their ratio, the best of the repeats.
"""
import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

from slca.data.__main__ import main as data_command

ROW = json.loads((Path(__file__).parents[1] / "data" / "toucan_sft_row.jsonl").read_text(encoding="utf-8"))


def seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def plain(source: Path, target: Path) -> None:
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as out:
        for line in lines:
            out.write(json.dumps(json.loads(line)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "rows.jsonl", Path(folder) / "out.jsonl"
        with source.open("w", encoding="utf-8") as file:
            for i in range(args.rows):
                file.write(json.dumps(ROW | {"uuid": f"u{i}"}) + "\n")

        def convert() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                assert data_command(["convert", str(source), str(target)]) == 0

        times = [(seconds(convert), seconds(lambda: plain(source, target))) for _ in range(args.repeats)]
        ours, theirs = (min(t[i] for t in times) for i in (0, 1))
        print(f"{args.rows} rows, {source.stat().st_size / 1e6:.0f} MB: convert {ours:.2f} s, "
              f"JSON alone {theirs:.2f} s, {ours / theirs:.1f} times as long")


if __name__ == "__main__":
    main()
