"""Nobody but this machine reaches the server without a key, and the key is kept well."""

from __future__ import annotations

import ipaddress
import stat
from pathlib import Path

from ..check import Check, Findings, error, info, ok, skip, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if machine.profile is None:
        yield skip("no profile, no server")
        return
    server, environ = machine.profile.server, machine.host.environ
    local = is_loopback(server.host)
    key = (environ.get("SPARSEKV_API_KEY") or environ.get("VLLM_API_KEY") or "").strip()
    fine = True
    if server.api_key_file:
        path = Path(server.api_key_file)
        try:
            text, mode = path.read_text("utf-8").strip(), path.stat().st_mode
        except (OSError, UnicodeDecodeError):
            fine = False
            yield error(f"the key file cannot be read: {path}", remedy=f"(umask 077; openssl rand -hex 32 > {path})")
        else:
            key = key or text
            if not text:
                fine = False
                yield error(f"the key file is empty: {path}", remedy=f"(umask 077; openssl rand -hex 32 > {path})")
            if stat.S_IMODE(mode) & 0o077:
                fine = False
                yield error(f"others may read the key file: mode {stat.S_IMODE(mode):o}", remedy=f"chmod 600 {path}")
    if not local and not key:
        fine = False
        yield error(
            f"the server would listen on {server.host} without a key: anybody on the network could use it",
            remedy="set server.api_key_file, or server.host: 127.0.0.1",
        )
    elif not local:
        yield info(f"the server listens on {server.host}; /metrics, /tokenize and /health answer without the key")
    if key and len(key) < 16:
        yield warn("the key has fewer than 16 characters", remedy="openssl rand -hex 32")
    if fine:
        yield ok("reachable from this machine only" if local else f"listens on {server.host}, with a key")


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect. A name other than `localhost` counts as the network."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


CHECK = Check("server.exposure", "Server", "listen address, key and the key's file", _run)
