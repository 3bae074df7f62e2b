"""What a record of figures stands on, and how it is written: for suites that go on after a kill."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

WEIGHTS = ("*.safetensors", "*.json", "*.txt", "*.model")  # of a checkpoint, what its figures depend on


def weights_sha256(checkpoint: str | Path) -> str:
    """Over the contents of the checkpoint's files that a figure depends on."""
    digest = hashlib.sha256()
    for path in sorted({p for pattern in WEIGHTS for p in Path(checkpoint).glob(pattern) if p.is_file()}):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            for piece in iter(lambda file=file: file.read(2**24), b""):
                digest.update(piece)
    return digest.hexdigest()


def save(path: str | Path, record: Mapping) -> None:
    """In place of the old one in one step: a killed run leaves no half of it."""
    part = Path(f"{path}.tmp")
    part.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
    part.replace(path)
