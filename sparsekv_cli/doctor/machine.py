"""What the checks look at: this machine, the profile if one is given, and facts that several checks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .gpus import Gpu, GpuList, query_gpus, same_model
from .host import Host
from .metrics import Scrape, scrape
from .probe import ProbeResult, run_probe

if TYPE_CHECKING:
    from sparsekv.patches.tree import VllmTree
    from sparsekv.profiles.loader import LoadedProfile
    from sparsekv.profiles.schema import Profile, Shape


@dataclass
class Machine:
    """Facts are read when a check first asks for them, and then kept."""

    host: Host = field(default_factory=Host)
    loaded: LoadedProfile | None = None
    url: str = ""
    """Address of a running server to look at."""
    measure: bool = True
    """Run the measurements on the GPUs, which take about half a minute and some memory of each card."""
    extra: tuple[str, ...] = ()
    """vLLM arguments given beside the profile."""

    @property
    def profile(self) -> Profile | None:
        return self.loaded.profile if self.loaded else None

    @property
    def needs_gpu(self) -> bool:
        """Without a profile, a GPU is what people come for."""
        return self.profile is None or self.profile.hardware.device == "cuda"

    @cached_property
    def gpu_list(self) -> GpuList:
        return query_gpus(self.host)

    @cached_property
    def visible(self) -> tuple[Gpu, ...]:
        """The cards that CUDA_VISIBLE_DEVICES leaves, in nvidia-smi's order; indices are taken as bus order."""
        chosen = self.host.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = self.gpu_list.gpus
        if chosen is None:
            return gpus
        wanted = [item.strip() for item in chosen.split(",") if item.strip()]
        return tuple(gpu for gpu in gpus if any(w == str(gpu.index) or (len(w) > 4 and gpu.uuid.startswith(w)) for w in wanted))

    @cached_property
    def cards(self) -> tuple[Gpu, ...]:
        """The cards that the profile would use: those of its model, as many as it says. All visible ones without a profile."""
        if self.profile is None:
            return self.visible
        hardware = self.profile.hardware
        fitting = [gpu for gpu in self.visible if hardware.gpu is None or same_model(gpu.name, hardware.gpu) is not False]
        return tuple(fitting[: hardware.gpus])

    @cached_property
    def probe(self) -> ProbeResult:
        """Measurements on the cards, made by a process of their own."""
        return run_probe(self.host, self.cards, self.row_bytes)

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Sizes of the rows that would cross the bus: the profile's, or those of all formats of a 256-wide head."""
        if self.profile is not None and self.shape is not None:
            return (self.profile.layout(self.shape).row_bytes,)
        return (256, 512, 1024)

    @cached_property
    def meminfo(self) -> dict[str, int]:
        """`/proc/meminfo` in bytes; empty if it cannot be read."""
        found = {}
        for line in (self.host.read("/proc/meminfo") or "").splitlines():
            name, _, rest = line.partition(":")
            parts = rest.split()
            if parts and parts[0].isdigit():
                found[name] = int(parts[0]) * (1024 if parts[-1] == "kB" else 1)
        return found

    @cached_property
    def memory_limit(self) -> tuple[int, int, str] | None:
        """The tightest cgroup limit around this process: limit, bytes in use, file. None if there is none."""
        tightest = None
        for group in self._cgroups:
            for folder, limit_name, used_name in (
                ("/sys/fs/cgroup" + group, "memory.max", "memory.current"),
                ("/sys/fs/cgroup/memory" + group, "memory.limit_in_bytes", "memory.usage_in_bytes"),
            ):
                limit, used = self._integer(f"{folder}/{limit_name}"), self._integer(f"{folder}/{used_name}")
                if limit is not None and limit < 2**60 and (tightest is None or limit < tightest[0]):
                    tightest = limit, used or 0, f"{folder}/{limit_name}"
        return tightest

    @cached_property
    def available(self) -> int | None:
        """Memory that a new process can have: what is free or can be freed, within the cgroup's limit."""
        free = self.meminfo.get("MemAvailable")
        if self.memory_limit is None:
            return free
        limit, used, _ = self.memory_limit
        return max(0, limit - used) if free is None else min(free, max(0, limit - used))

    @cached_property
    def kernel(self) -> str:
        """The kernel's release, `` if it is not stated."""
        words = (self.host.read("/proc/version") or "").split()
        return words[2] if words[:2] == ["Linux", "version"] and len(words) > 2 else ""

    @cached_property
    def is_wsl(self) -> bool:
        return "microsoft" in self.kernel.lower()

    @cached_property
    def container(self) -> str | None:
        """Which kind of container this runs in, if any."""
        for file, name in (("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")):
            if self.host.path(file).exists():
                return name
        if self.host.environ.get("KUBERNETES_SERVICE_HOST"):
            return "Kubernetes"
        return None

    @cached_property
    def metrics(self) -> Scrape:
        """What the running server says."""
        return scrape(self.url, self.host.environ.get("SPARSEKV_API_KEY") or self.host.environ.get("VLLM_API_KEY") or "")

    @cached_property
    def vllm(self) -> VllmTree | None:
        from sparsekv.patches.tree import installed_trees

        return next(iter(installed_trees()), None)

    @cached_property
    def model_folder(self) -> Path | None:
        return Path(self.profile.model.path) if self.profile else None

    @cached_property
    def model_config(self) -> dict[str, Any] | None:
        """The model's `config.json`; None if there is none that can be read."""
        import json

        if self.model_folder is None:
            return None
        try:
            config = json.loads((self.model_folder / "config.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return config if isinstance(config, dict) else None

    @cached_property
    def shape(self) -> Shape | None:
        """The model's shape: the profile's, else that of `config.json`, else None."""
        from sparsekv.profiles.model_shape import model_shape

        if self.profile is None:
            return None
        if self.profile.model.shape is not None or self.model_config is None:
            return self.profile.model.shape
        try:
            return model_shape(self.model_config)
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def _cgroups(self) -> list[str]:
        """Paths of this process's groups and of all groups around them, `` being the root."""
        found = {""}
        for line in (self.host.read("/proc/self/cgroup") or "").splitlines():
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            if controllers in ("", "memory"):
                parts = [part for part in path.split("/") if part and part != ".."]
                found.update("/" + "/".join(parts[: n + 1]) for n in range(len(parts)))
        return sorted(found)

    def _integer(self, path: str) -> int | None:
        text = (self.host.read(path) or "").strip()
        return int(text) if text.isdigit() else None
