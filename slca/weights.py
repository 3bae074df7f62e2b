"""A model folder <-> Policy: `config.json` and safetensors, one file or shards with an index, keys strictly checked.

What is saved loads in other tools (transformers, vLLM). Left out: pickled `.bin` files, quantised weights, writing
shards, and everything about optimisers and resuming.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .lora import merged_state
from .model import ModelConfig, Policy
from .tokenizer import Tokenizer, read_json, write_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def load_policy(
    folder: str | os.PathLike, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Policy:
    """The policy in a folder, its weights converted to `dtype`.

    Every parameter must be in the files with its shape and nothing else may be, but for rotary buffers (recomputed
    here) and, where `config.json` ties the head, an `lm_head.weight` equal to the embedding.
    FileNotFoundError: folder, config, weights or a shard are not there. ValueError: config or keys are wrong, naming
    the file and the first few keys.
    """
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):  # no memory and no random draws: every tensor is replaced below
        policy = Policy(config)
    wanted = {name: tuple(p.shape) for name, p in policy.state_dict().items()}
    files = _weight_files(folder)
    source, where = folder / (INDEX if len(files) > 1 or SINGLE not in files else SINGLE), {}
    wrong, not_float = [], []
    for file, names in files.items():
        with _open(folder / file) as f:
            held = set(f.keys())
            names = held if names is None else names
            _refuse(f"{folder / file}: the index promises tensors that are not in it", names - held)
            _refuse(f"{folder / file}: holds tensors that the index does not place in it", _real(held - names))
            for name in _real(names):
                tensor, where[name] = f.get_slice(name), file
                shape = tuple(tensor.get_shape())
                if name in wanted and shape != wanted[name]:
                    wrong.append(f"{name} {list(shape)} for {list(wanted[name])}")
                if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    not_float.append(f"{name} ({tensor.get_dtype()})")
    extra = where.keys() - wanted.keys()
    redundant_head = config.tie_word_embeddings and HEAD in extra
    hint = "; config.json does not tie the head" if HEAD in wanted and HEAD not in where else ""
    _refuse(f"{source}: missing keys{hint}", wanted.keys() - where.keys())
    _refuse(f"{source}: unexpected keys", extra - ({HEAD} if redundant_head else set()))
    _refuse(f"{source}: wrong shapes", wrong)
    _refuse(f"{source}: not floating point", not_float)

    def read(name: str) -> Tensor:
        with _open(folder / where[name]) as f:
            return f.get_tensor(name)

    if redundant_head and not torch.equal(read(HEAD), read(EMBEDDING)):
        raise ValueError(f"{source}: config.json ties the head, but {HEAD} differs from {EMBEDDING}")
    state = {}
    for file in files:
        with _open(folder / file) as f:
            for name in (n for n in wanted if where[n] == file):
                # A copy, always: what safetensors hands out may be a window on the file.
                state[name] = f.get_tensor(name).to(device=device, dtype=dtype, copy=True)
    policy.load_state_dict(state, strict=True, assign=True)
    return policy


def save_policy(policy: Policy, folder: str | os.PathLike, tokenizer: Tokenizer | None = None) -> None:
    """Write `config.json` and `model.safetensors` (and the tokenizer's files) into a folder, made if need be.

    Adapters are merged into the weights. Of a sharded policy: `lora.merged_state` on all ranks, `save_state` on rank 0.
    A file appears complete or not at all, the weights last: a folder without them is an unfinished one.
    """
    save_state(policy.config, merged_state(policy), folder, tokenizer)


def save_state(
    config: ModelConfig, state: dict[str, Tensor], folder: str | os.PathLike, tokenizer: Tokenizer | None = None
) -> None:
    """`save_policy` for whole weights gathered elsewhere, under the names of `Policy.state_dict()`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    raw = config.to_hf()
    raw["torch_dtype"] = str(state[EMBEDDING].dtype).removeprefix("torch.")
    if tokenizer is not None:
        tokenizer.save(folder)
        if tokenizer.stop_ids:
            raw["eos_token_id"] = tokenizer.stop_ids[0]
    write_json(folder / "config.json", raw)
    part = folder / f".{SINGLE}.{os.getpid()}.part"
    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in state.items()}, part, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk
        part.unlink(missing_ok=True)
        raise OSError(f"{part}: {error}") from error
    os.replace(part, folder / SINGLE)


def read_config(folder: Path) -> ModelConfig:
    """The shape of a folder's policy. FileNotFoundError: no folder or config.json; ValueError: it cannot be used."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder")
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    raw = read_json(path)
    _refuse(f"{path}: missing keys", [key for key in NEEDED if key not in raw])
    if "quantization_config" in raw:
        raise ValueError(f"{path}: quantization_config: quantised weights are not read")
    try:
        return ModelConfig.from_hf(raw)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error


def _weight_files(folder: Path) -> dict[str, set[str] | None]:
    """Weight file -> the tensors to take from it, None for all. One whole file wins over an index, as elsewhere."""
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX} in this folder")
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(f, str) for f in places.values()):
        raise ValueError(f"{path}: weight_map is missing or not a mapping of tensor names to files")
    files: dict[str, set[str] | None] = {}
    for name, file in places.items():
        files.setdefault(file, set()).add(name)
    _refuse(f"{path}: shards outside the folder", [f for f in files if Path(f).name != f])
    gone = [f for f in files if not (folder / f).is_file()]
    if gone:
        raise FileNotFoundError(f"{path}: missing shards: {_few(gone)}")
    return files


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file, or a damaged one ({error})") from error


def _real(names: set[str]) -> set[str]:
    """Without the rotary frequencies that old checkpoints carry: they follow from the config."""
    return {name for name in names if not name.endswith("rotary_emb.inv_freq")}


def _refuse(what: str, names: Iterable[str]) -> None:
    if names := sorted(names):
        raise ValueError(f"{what}: {_few(names)}")


def _few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
