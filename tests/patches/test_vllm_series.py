"""The shipped series against the vLLM that it was cut from: always on a copy, never on the installed tree."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from packaging.version import Version

from sparsekv.patches.foreign import foreign_series
from sparsekv.patches.operations import apply, revert, verify
from sparsekv.patches.series import Patch, Series, bundled_series, series_for
from sparsekv.patches.tree import VllmTree
from sparsekv.profiles.errors import SparsekvError

SPEC = util.find_spec("vllm")
INSTALLED = Path(SPEC.origin).parent if SPEC and SPEC.origin else None
needs_vllm = pytest.mark.skipif(
    INSTALLED is None or VllmTree(INSTALLED).version != Version("0.31.0"), reason="needs the vLLM that the series was cut from"
)
(SERIES,) = bundled_series()
TARGETS = sorted({target.path for patch in SERIES.patches for target in patch.entry.targets})


@pytest.fixture
def copy(tmp_path: Path) -> VllmTree:
    """The installed package: its `v1` is copied, the rest are links to it."""
    assert INSTALLED is not None
    root = tmp_path / "vllm"
    root.mkdir()
    for item in INSTALLED.iterdir():
        if item.name not in ("v1", "__pycache__", "_version.py"):
            (root / item.name).symlink_to(item)
    shutil.copytree(INSTALLED / "v1", root / "v1", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(INSTALLED / "_version.py", root)
    return VllmTree(root.resolve())


def code_of(source: bytes, qualified: str) -> CodeType:
    code = compile(source, "x.py", "exec")
    for name in qualified.split("."):
        code = next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)
    return code


@needs_vllm
def test_cut_from_the_installed_version(copy: VllmTree, snapshot: Callable[..., Any]) -> None:
    installed = {path: hashlib.sha256((INSTALLED / path).read_bytes()).hexdigest() for path in TARGETS}
    before = snapshot(copy.root / "v1")
    outcome = apply(copy, [SERIES])
    assert list(outcome.changed) == list(dict.fromkeys(t.path for p in SERIES.patches for t in p.entry.targets))
    assert not any(any(offsets) for plan in outcome.plan.patches for offsets in plan.offsets.values())
    assert verify(copy, [SERIES]) == []
    last = {target.path: target.after for patch in SERIES.patches for target in patch.entry.targets}
    assert {path: copy.state(path).sha256 for path in TARGETS} == last
    assert {path: hashlib.sha256((INSTALLED / path).read_bytes()).hexdigest() for path in TARGETS} == installed
    revert(copy)
    assert snapshot(copy.root / "v1") == before


@needs_vllm
@pytest.mark.parametrize("patch", SERIES.patches, ids=lambda patch: patch.name)
def test_seam_shows_in_the_code(copy: VllmTree, patch: Patch) -> None:
    """What the plug-in asks a running vLLM: does this function's code use that name?"""
    seam = patch.entry.seam
    assert seam is not None
    module, function = seam.function.split(":")
    path = module.removeprefix("vllm.").replace(".", "/") + ".py"
    before = code_of(copy.state(path).content, function)
    apply(copy, [SERIES])
    after = code_of(copy.state(path).content, function)
    assert seam.uses not in (*before.co_names, *before.co_varnames)
    assert seam.uses in (*after.co_names, *after.co_varnames)


PROBE = """
import json
from contextlib import contextmanager
from types import SimpleNamespace as Fake
import torch, vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

class OwnSpec(FullAttentionSpec):
    pass

class OwnManager(FullAttentionManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.block_pool = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=16)
        self._null_block = self.block_pool.null_block

def spec(cls):
    return cls(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)

KVCacheSpecRegistry.register(OwnSpec, OwnManager, uniform_type_base_spec=OwnSpec)
found = {"builtin": KVCacheSpecRegistry.get_manager_class(spec(FullAttentionSpec)) is FullAttentionManager}

config = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec(OwnSpec))])
kv = KVCacheManager(config, max_model_len=64, scheduler_block_size=16, hash_block_size=16, max_in_flight_tokens=64)
own = kv.coordinator.single_type_managers[0]
asked = []
own.find_longest_cache_hit = lambda **kwargs: (asked.append(kwargs["block_pool"]), (([],), 0))[1]
kv.coordinator.find_longest_cache_hit([], 0)
found["own pool"] = asked == [own.block_pool]

own.block_pool.get_new_blocks(4)
found["usage"] = kv.usage
kv.block_pool.get_new_blocks(75)
found["fuller device pool"] = kv.usage

class Config:
    cache_config = Fake(block_size=640)
    parallel_config = None
    def __post_init__(self):
        self.cache_config.block_size = 128

@contextmanager
def handshake(*args, **kwargs):
    yield Fake(inputs=[], outputs=[])

config = Config()
with EngineCoreProc._perform_handshakes(Fake(_perform_handshake=handshake), "ipc://x", b"", True, config, None):
    pass
found["block size"] = config.cache_config.block_size
print("RESULT", json.dumps([vllm.__file__, found]))
"""


def probe(tree: VllmTree) -> dict[str, Any]:
    env = os.environ | {"PYTHONPATH": str(tree.root.parent), "PYTHONDONTWRITEBYTECODE": "1", "VLLM_PLUGINS": ""}
    run = subprocess.run([sys.executable, "-P", "-c", PROBE], env=env, capture_output=True, text=True, timeout=240, cwd=tree.root.parent)
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, run.stderr[-2000:]
    file, found = json.loads(line.removeprefix("RESULT "))
    assert Path(file).parent == tree.root
    return found


@needs_vllm
def test_what_the_patches_change(copy: VllmTree) -> None:
    """vLLM itself, before and after: each seam is closed without a patch and open with it."""
    assert probe(copy) == {"builtin": False, "own pool": False, "usage": 0.0, "fuller device pool": 1 - 24 / 99, "block size": 128}
    apply(copy, [SERIES])
    assert probe(copy) == {"builtin": True, "own pool": True, "usage": 0.5, "fuller device pool": 1 - 24 / 99, "block size": 640}


@needs_vllm
def test_on_top_of_another_series(copy: VllmTree) -> None:
    """Another series inserted a class and a knob of its own: found by name, and ours goes on top at an offset."""
    core = copy.root / "v1/engine/core.py"
    text = core.read_text()
    assert text.count("\n\nclass EngineCore:\n") == 1
    core.write_text(text.replace("\n\nclass EngineCore:\n", "\n\nclass _StallSentinel:\n    limit = 30.0\n\n\nclass EngineCore:\n"))
    assert foreign_series(copy) == {"HyperQwen": ["engine-stall-sentinel"]}
    outcome = apply(copy, [SERIES])
    (moved,) = (plan for plan in outcome.plan.patches if any(map(any, plan.offsets.values())))
    assert moved.offsets == {"v1/engine/core.py": (4,)}
    revert(copy)

    core.write_text(core.read_text().replace("        vllm_config.__post_init__()\n", "        vllm_config.__post_init__()  # theirs\n"))
    with pytest.raises(SparsekvError) as raised:
        apply(copy, [SERIES])
    assert raised.value.details == (
        "0003-keep-block-size-across-the-handshake: v1/engine/core.py: hunk 1 (line 1264): its old lines are not in the file",
        "also patched by HyperQwen (engine-stall-sentinel)",
    )


@pytest.mark.parametrize(
    ("version", "covered"),
    [
        ("0.31.0", True),
        ("0.31.0+cu130", True),
        ("0.31.1rc2.dev12+gabc123", True),
        ("0.31.0rc1", True),
        ("0.30.2", False),
        ("0.32.0", False),
        ("0.32.0rc1+cu130", False),
    ],
)
def test_version_range(version: str, covered: bool) -> None:
    if covered:
        assert series_for(Version(version), [SERIES]) is SERIES
    else:
        with pytest.raises(SparsekvError, match=r"no patches for vLLM .*: they cover vLLM ==0\.31\.\*"):
            series_for(Version(version), [SERIES])


def test_manifest_accounts_for_every_patch() -> None:
    series: Series = SERIES
    for patch in series.patches:
        entry = patch.entry
        assert all((entry.title, entry.why, entry.upstream, entry.retires_when, entry.without_it, entry.seam))
        assert all(target.before and target.after for target in entry.targets)
