"""What nvidia-smi says about the GPUs. A field it does not state is None, never a default."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from .host import Host

MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """One card. Sizes in bytes, power in watts; `bus_id` as the kernel writes it (`0000:21:00.0`)."""

    index: int | None
    uuid: str
    name: str
    bus_id: str
    driver: str | None
    capability: str | None
    memory_total: int | None
    memory_used: int | None
    display: bool | None
    persistence: bool | None
    mig: bool | None
    ecc_errors: int | None
    link_gen: int | None
    link_gen_max: int | None
    link_width: int | None
    link_width_max: int | None
    power_limit: float | None
    power_default: float | None
    power_min: float | None
    power_max: float | None

    @property
    def label(self) -> str:
        return f"GPU {self.index if self.index is not None else '?'} ({short_name(self.name)}, {self.bus_id})"


class Trouble(enum.Enum):
    """Why there is no list of cards, or not a whole one."""

    MISSING = "nvidia-smi is not installed"
    TIMEOUT = "nvidia-smi did not answer"
    FAILED = "nvidia-smi failed"
    NONE_FOUND = "the driver finds no GPU"
    LOST = "a GPU was lost"


@dataclass(frozen=True)
class GpuList:
    """The cards that answered, and what went wrong."""

    gpus: tuple[Gpu, ...]
    trouble: Trouble | None = None
    message: str = ""


FIELDS = (
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "driver_version",
    "compute_cap",
    "memory.total",
    "memory.used",
    "display_active",
    "persistence_mode",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "power.limit",
    "power.default_limit",
    "power.min_limit",
    "power.max_limit",
)
_UNKNOWN_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field')


def query_gpus(host: Host, seconds: float = 8.0) -> GpuList:
    """Asks for all cards at once. Old drivers lack some fields: those are left out and come back as None."""
    fields = list(FIELDS)
    while True:
        answer = host.run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", seconds=seconds)
        refused = _UNKNOWN_FIELD.search(answer.stdout + answer.stderr)
        if not refused or refused[1] not in fields:
            break
        fields.remove(refused[1])
    if answer.failure == "timeout":
        return GpuList((), Trouble.TIMEOUT, f"no answer within {seconds:.0f} s")
    if answer.failure:
        return GpuList((), Trouble.MISSING)
    gpus, strange = [], []
    for line in answer.stdout.splitlines():
        # ", " separates fields; a decimal comma has no blank behind it.
        values = [value.strip() for value in line.split(", ")]
        if len(values) == len(fields) and dict(zip(fields, values, strict=True))["uuid"].startswith(("GPU-", "MIG-")):
            gpus.append(_gpu(dict(zip(fields, values, strict=True))))
        elif line.strip():
            strange.append(line.strip())
    message = "; ".join([*strange, *(line.strip() for line in answer.stderr.splitlines() if line.strip())])
    if answer.status != 0 and not gpus:
        return GpuList((), Trouble.FAILED, f"exit status {answer.status}: {message}")
    if not gpus:
        return GpuList((), Trouble.NONE_FOUND, message)
    return GpuList(tuple(gpus), Trouble.LOST if strange or answer.status != 0 else None, message)


def number(text: str | None) -> float | None:
    """A number with or without a unit, with a decimal point or comma; None for every kind of `[N/A]`."""
    match = re.fullmatch(r"(\d+(?:[.,]\d+)?)\s*[A-Za-z%]*", (text or "").strip())
    return float(match[1].replace(",", ".")) if match else None


def short_name(name: str) -> str:
    """A product name without the words that come and go with driver versions."""
    return " ".join(word for word in name.split() if word.lower() not in ("nvidia", "geforce", "tesla"))


def same_model(name: str, wanted: str) -> bool | None:
    """Whether two product names mean one model; a Ti, a laptop part or a D is another one. None if the name says nothing."""
    plain = short_name(name).lower()
    if plain in ("", "graphics device") or "graphics device" in plain:
        return None
    return plain == short_name(wanted).lower()


def _gpu(row: dict[str, str]) -> Gpu:
    def integer(key: str) -> int | None:
        value = number(row.get(key))
        return None if value is None else int(value)

    def size(key: str) -> int | None:
        value = number(row.get(key))
        return None if value is None else int(value) * MIB

    def switch(key: str) -> bool | None:
        return {"enabled": True, "yes": True, "disabled": False, "no": False}.get(row.get(key, "").lower())

    def text(key: str) -> str | None:
        value = row.get(key, "")
        return value if value and not value.startswith("[") else None

    # nvidia-smi pads the PCI domain to eight digits, the kernel to four.
    bus_id = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", row.get("pci.bus_id", "").lower())
    return Gpu(
        index=integer("index"),
        uuid=row["uuid"],
        name=row.get("name", ""),
        bus_id=bus_id,
        driver=text("driver_version"),
        capability=text("compute_cap"),
        memory_total=size("memory.total"),
        memory_used=size("memory.used"),
        display=switch("display_active"),
        persistence=switch("persistence_mode"),
        mig=switch("mig.mode.current"),
        ecc_errors=integer("ecc.errors.uncorrected.volatile.total"),
        link_gen=integer("pcie.link.gen.current"),
        link_gen_max=integer("pcie.link.gen.max"),
        link_width=integer("pcie.link.width.current"),
        link_width_max=integer("pcie.link.width.max"),
        power_limit=number(row.get("power.limit")),
        power_default=number(row.get("power.default_limit")),
        power_min=number(row.get("power.min_limit")),
        power_max=number(row.get("power.max_limit")),
    )
