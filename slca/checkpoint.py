"""Checkpoints inside a stage: every rank writes its rows of every tensor, and a run goes on from them bit for bit.

A folder `checkpoints/rl-000120` holds, for each rank, a safetensors file with its rows of the weights and of the
optimisers' state, and state.json: stage, step, configuration, the files' sizes and CRCs, what else the stage needs. It
is written under another name, synchronised to disk and renamed, so it is there whole or not at all; what was damaged
later is found by its CRC and skipped. Any number of ranks can read what any number wrote. Nothing is pickled.

The other random numbers of a run are streams keyed by (seed, step, ...), so the step is their state; torch's global
generator, which nothing here draws from, is kept too. `python -m slca.checkpoint FOLDER OUT` exports the weights in
Hugging Face's layout.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from slca import ranks
from slca.lora import merged_tensors
from slca.model import ModelConfig, Policy
from slca.tokenizer import load_tokenizer
from slca.weights import save_state

NAME, FILE = re.compile(r"(sft|rl)-\d{6,}"), re.compile(r"rank-\d{5,}\.safetensors")
Optimizers = Sequence[torch.optim.Optimizer]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or not by this run."""


# --- what is saved ---------------------------------------------------------------------------------------------------

def tensors(policy: Policy, optimizers: Optimizers) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything that training changes; sharded ones as DTensors."""
    names = {p: name for name, p in policy.named_parameters()}
    yield from ((f"model.{name}", p.detach()) for p, name in names.items())
    for i, optimizer in enumerate(optimizers):
        for p, state in optimizer.state.items():
            yield from ((f"optim.{i}.{names[p]}.{key}", value) for key, value in state.items())
    yield "rng.torch", torch.get_rng_state()


def own_rows(count: int) -> tuple[int, int]:
    """(first, one past the last) of `count` rows that FSDP gives this rank: even pieces, the last ones shorter."""
    size = -(-count // ranks.world())
    return min(ranks.rank() * size, count), min((ranks.rank() + 1) * size, count)


# --- saving ----------------------------------------------------------------------------------------------------------

def save(root: Path, phase: str, step: int, policy: Policy, optimizers: Optimizers, tokenizer, config: dict,
         extra: dict, keep: int) -> Path:
    """Write root/<phase>-<step> and remove all but the last `keep` of that phase; all ranks take part.

    Raises OSError on every rank where one of them cannot write; an earlier checkpoint is then untouched.
    """
    final = root / f"{phase}-{step:06d}"
    part = root / f".{final.name}.unfinished"
    lead = ranks.rank() == 0
    _on_all(lambda: lead and _fresh(part))
    file = part / f"rank-{ranks.rank():05d}.safetensors"

    def shard() -> dict:
        own, rows = {}, {}
        for name, t in tensors(policy, optimizers):
            if isinstance(t, DTensor):
                own[name], rows[name] = t.to_local().detach().cpu().contiguous(), [own_rows(t.shape[0])[0], *t.shape]
            elif lead:
                own[name], rows[name] = t.cpu().contiguous(), [0, *t.shape]
        save_file(own, file, metadata={"rows": json.dumps(rows)})  # of each tensor: first row here, whole shape
        sync(file)
        return {"bytes": file.stat().st_size, "crc32": crc(file)}

    written = _on_all(shard)

    def finish() -> None:
        tokenizer.save(part)
        state = {"phase": phase, "step": step, "config": config, "model": policy.config.to_hf(), "extra": extra,
                 "files": {f"rank-{r:05d}.safetensors": w for r, w in enumerate(written)}}
        (part / "state.json").write_text(json.dumps({"crc32": _state_crc(state), "state": state}), encoding="utf-8")
        publish(part, final)
        there = by_step(root, phase)
        later = [p for p in there if _number(p) > step]  # passed over as damaged, or this step would not come now
        for old in later + there[:len(there) - len(later) - keep]:
            shutil.rmtree(old, ignore_errors=True)

    _on_all(lambda: lead and finish())
    return final


def by_step(root: Path, phase: str) -> list[Path]:
    """A phase's checkpoints, earliest first."""
    return sorted((p for p in root.glob(f"{phase}-*") if NAME.fullmatch(p.name)), key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def publish(part: Path, final: Path) -> None:
    """Rename a finished folder to the name that counts, once the disk has all of it."""
    for path in (*part.iterdir(), part):
        sync(path)
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)
    sync(final.parent)


def _on_all(work) -> list:
    """Do the work on every rank -> what each found. Where one fails to write, all raise OSError."""
    found = error = None
    try:
        found = work()
    except (OSError, SafetensorError) as problem:  # safetensors has its own for a full disk
        error = str(problem)
    everywhere = ranks.gather([found, error])
    if errors := [e for _, e in everywhere if e]:
        raise OSError(errors[0])
    return [f for f, _ in everywhere]


def _fresh(folder: Path) -> None:
    for left in folder.parent.glob(".*.unfinished"):  # of a run that was killed while it saved
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)


def sync(path: Path) -> None:
    """Wait until the disk has it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def crc(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            found = zlib.crc32(block, found)
    return found


def _state_crc(state: dict) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


# --- reading ---------------------------------------------------------------------------------------------------------

def read_state(folder: Path) -> dict:
    """state.json of a checkpoint whose files are all there, undamaged. Raises CheckpointError that says what is not."""
    try:
        found = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        state = found["state"]
        if found["crc32"] != _state_crc(state):
            raise CheckpointError("state.json is damaged")
        files, kinds = state["files"], {"files": dict, "config": dict, "extra": dict, "model": dict, "step": int}
        if not (all(type(state[key]) is kind for key, kind in kinds.items()) and files and state["step"] >= 0
                and all(FILE.fullmatch(name) for name in files)):
            raise CheckpointError("state.json is not that of a checkpoint")
        if {p.name for p in folder.glob("rank-*.safetensors")} != files.keys():
            raise CheckpointError("its files are not those that state.json names")
        for name, want in state["files"].items():
            path = folder / name
            if path.is_symlink() or path.stat().st_size != want["bytes"] or crc(path) != want["crc32"]:
                raise CheckpointError(f"{name} is damaged")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return state


def latest(root: Path, phase: str, say=print) -> tuple[Path, dict] | None:
    """The last good checkpoint of a phase and its state; damaged ones are named and passed over. Rank 0 looks."""
    found = None
    if ranks.rank() == 0:
        for folder in reversed(by_step(root, phase)):
            try:
                found = [str(folder), read_state(folder)]
                break
            except CheckpointError as error:
                say(f"checkpoint skipped: {error}")
    found = ranks.gather(found)[0]
    return (Path(found[0]), found[1]) if found else None


def load(folder: Path, policy: Policy, optimizers: Optimizers) -> None:
    """Fill policy and optimisers with a checkpoint's numbers, this rank's rows of them. Raises CheckpointError."""
    with _Shards(folder) as shards:
        wanted = dict(policy.named_parameters())
        for name, p in wanted.items():
            _local(p).copy_(shards.like(f"model.{name}", p))
        for i, optimizer in enumerate(optimizers):
            for name, p in wanted.items():
                prefix = f"optim.{i}.{name}."
                keys = [key.removeprefix(prefix) for key in shards.rows if key.startswith(prefix)]
                if keys:
                    device = "cpu" if getattr(optimizer, "offload", False) else p.device
                    optimizer.state[p] = {key: shards.state(prefix + key, p, device) for key in keys}
        torch.set_rng_state(shards.rows_of("rng.torch", None))


class _Shards:
    """The tensors of a checkpoint, whichever files their rows are in."""

    def __init__(self, folder: Path):
        self.folder, self.files = folder, []
        self.rows: dict[str, list[tuple]] = {}  # name -> (first row, file), and its whole shape

    def __enter__(self) -> _Shards:
        for path in sorted(self.folder.glob("rank-*.safetensors")):
            file = safe_open(path, "pt").__enter__()
            self.files.append(file)
            for name, (start, *shape) in json.loads(file.metadata()["rows"]).items():
                self.rows.setdefault(name, []).append((start, shape, file))
        return self

    def __exit__(self, *error) -> None:
        for file in self.files:
            file.__exit__(*error)

    def rows_of(self, name: str, wanted: tuple[int, int] | None) -> Tensor:
        """Rows [first, last) of a tensor, None: all of it."""
        if name not in self.rows:
            raise CheckpointError(f"{self.folder} holds no {name}")
        pieces = sorted(self.rows[name], key=lambda piece: piece[0])
        if wanted is None or not pieces[0][1]:  # a number has no rows
            wanted = (0, pieces[0][1][0] if pieces[0][1] else 1)
        found = []
        for start, shape, file in pieces:
            if not shape:
                return file.get_tensor(name)
            part = file.get_slice(name)
            a, b = max(wanted[0], start), min(wanted[1], start + part.get_shape()[0])
            if a < b or len(pieces) == 1:
                found.append(part[max(0, a - start):max(0, b - start)])
        return torch.cat(found) if found else file.get_tensor(name)[:0]

    def like(self, name: str, p: Tensor) -> Tensor:
        """This rank's part of a tensor that lies as the parameter p does."""
        rows = self.rows_of(name, own_rows(p.shape[0]) if isinstance(p, DTensor) else None)
        if rows.shape != _local(p).shape:
            raise CheckpointError(f"{self.folder}: {name} has shape {list(rows.shape)} here, not "
                                  f"{list(_local(p).shape)}")
        return rows

    def state(self, name: str, p: Tensor, device: torch.device | str) -> Tensor:
        """An optimiser's tensor for p: on the device and laid out as p where it has p's shape, else as it was saved."""
        if self.rows[name][0][1] != list(p.shape):
            return self.rows_of(name, None)
        rows = self.like(name, p)
        found = torch.zeros_like(p.detach(), dtype=rows.dtype, device=device)
        _local(found).copy_(rows)
        return found


def _local(p: Tensor) -> Tensor:
    return p.detach().to_local() if isinstance(p, DTensor) else p.detach()


# --- who may go on from it -------------------------------------------------------------------------------------------

FREE = ("threads", "shard", "micro_batch_tokens", "checkpoint", "log", "eval.every", "rl.steps", "rl.epochs",
        "rollout.max_rows", "rollout.keep_copy", "optim.offload", "model.checkpoint_blocks")


def refuse_other_config(folder: Path, theirs: dict, ours: dict) -> None:
    """Raises CheckpointError that names every key whose value differs, but those that change no number of the run."""
    a, b = _flat(theirs), _flat(ours)
    keys = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)
            and not any(k == free or k.startswith(f"{free}.") for free in FREE)]
    if keys:
        found = "; ".join(f"{k}: {a.get(k)!r} there, {b.get(k)!r} here" for k in keys)
        raise CheckpointError(f"{folder} belongs to another configuration ({found})")


def _flat(tree: dict, path: str = "") -> dict:
    found = {}
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        found |= _flat(value, name) if isinstance(value, dict) else {name: value}
    return found


def export(folder: Path, out: Path) -> None:
    """A checkpoint's weights (adapters merged), config and tokenizer in Hugging Face's layout, from any ranks."""
    found = read_state(folder)
    with _Shards(folder) as shards:
        state = {name.removeprefix("model."): shards.rows_of(name, None) for name in shards.rows
                 if name.startswith("model.")}
    state = merged_tensors(state, found["config"]["lora"]["alpha"])
    save_state(ModelConfig.from_hf(found["model"]), state, out, load_tokenizer(folder))


if __name__ == "__main__":
    try:
        if len(sys.argv) != 3:
            raise ValueError("usage: python -m slca.checkpoint FOLDER OUT")
        export(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
