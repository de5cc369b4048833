"""The model's folder is whole: every shard of the index is there and as long as its own header says."""

from __future__ import annotations

import json
from pathlib import Path

from sparsekv.profiles.units import gib

from ..check import Check, Findings, error, ok, skip
from ..machine import Machine

MAX_HEADER = 256 * 2**20


def _run(machine: Machine) -> Findings:
    folder = machine.model_folder
    if folder is None:
        yield skip("no profile, no model")
        return
    if not folder.is_dir():
        yield error(
            f"the model's folder is not there: {folder}",
            cause="not downloaded yet, or model.path is wrong",
            remedy="make demo"
            if machine.loaded and machine.loaded.name == "cpu-demo"
            else "set model.path to the folder that has config.json",
        )
        return
    if machine.model_config is None:
        yield error("config.json is missing or no JSON object", str(folder), remedy="download the model again")
        return
    shards, missing = _shards(folder)
    if missing:
        yield error(
            f"{len(missing)} of {len(shards) + len(missing)} shard(s) are missing",
            *missing[:5],
            cause="a download that was interrupted",
            remedy="download the model again; files that are whole are kept",
        )
    if not shards and not missing:
        pickles = [path.name for path in folder.glob("*.bin")] + [path.name for path in folder.glob("*.pt")]
        yield error(
            "there are no safetensors weights" + (", only pickle files, which can run code when they are loaded" if pickles else ""),
            *pickles[:5],
            remedy="take a safetensors version of the model",
        )
        return
    damaged = [f"{path.name}: {problem}" for path in shards if (problem := _damage(path))]
    if damaged:
        yield error(
            f"{len(damaged)} shard(s) are damaged",
            *damaged[:5],
            cause="a download that was interrupted",
            remedy="delete them and download again",
        )
    if not missing and not damaged:
        yield ok(f"{len(shards)} shard(s), {gib(sum(path.stat().st_size for path in shards))}")


def _shards(folder: Path) -> tuple[list[Path], list[str]]:
    """Files with weights that are there, and names of those that the index wants in vain."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
        names = sorted({str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError):
        return sorted(folder.glob("*.safetensors")), []
    inside = [name for name in names if "/" not in name and not name.startswith(".")]
    there = [folder / name for name in inside if (folder / name).is_file()]
    return there, sorted(set(names) - {path.name for path in there})


def _damage(path: Path) -> str | None:
    """What is wrong with a safetensors file; its data is not read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size):
                return "not a safetensors file"
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as problem:
        return problem.strerror or "cannot be read"
    except (ValueError, KeyError, TypeError, IndexError):
        return "its header is damaged"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"{size:,} bytes, should have {expected:,}"


CHECK = Check("model.files", "Model", "whether all weights are there and whole", _run, limit_s=30)
