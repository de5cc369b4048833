"""The port is free."""

from __future__ import annotations

from ..check import Check, Findings, error, ok
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    host, port = (machine.profile.server.host, machine.profile.server.port) if machine.profile else ("127.0.0.1", 8000)
    reason = machine.host.bindable(host, port)
    if reason is None:
        yield ok(f"{host} port {port} is free")
    elif machine.host.listening("127.0.0.1" if host in ("0.0.0.0", "::") else host, port):
        yield error(
            f"port {port} is taken: something answers there", reason, remedy=f"ss -ltnp 'sport = :{port}'; or --set server.port={port + 1}"
        )
    else:
        yield error(
            f"the server cannot listen on {host} port {port}", reason, cause="an address that is not this machine's, or a port below 1024"
        )


CHECK = Check("server.port", "Server", "whether the port is free", _run)
