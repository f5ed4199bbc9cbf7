"""Addresses and ports of this host.  For requests see ``http_utils``."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket

from slime.utils import env
from slime.utils.errors import ProcessError

MAX_PORT = 65535
_PROBE_IPV4 = ("8.8.8.8", 80)
_PROBE_IPV6 = ("2001:4860:4860::8888", 80)


def _probed_ip(family: socket.AddressFamily) -> str | None:
    """Return the address of the outgoing interface; None if there is no route.

    Connecting a UDP socket sends nothing; it only makes the kernel pick a source address.
    """
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.settimeout(1.0)
            probe.connect(_PROBE_IPV6 if family == socket.AF_INET6 else _PROBE_IPV4)
            return probe.getsockname()[0]
    except OSError:
        return None


def _resolved_ip(hostname: str) -> str | None:
    try:
        return str(socket.getaddrinfo(hostname, None)[0][4][0])
    except OSError:
        return None


def get_host_info() -> tuple[str, str]:
    """Return ``(hostname, ip)`` by which other nodes reach this one.

    The address is the first available of ``SLIME_HOST_IP``, the outgoing interface (IPv6 first with
    ``SLIME_PREFER_IPV6``), the resolved host name, and loopback.
    """
    hostname = socket.gethostname()
    families = [socket.AF_INET, socket.AF_INET6]
    if env.prefer_ipv6():
        families.reverse()
    probed = (ip for family in families if (ip := _probed_ip(family)))
    return hostname, env.host_ip_override() or next(probed, None) or _resolved_ip(hostname) or loopback_address()


def loopback_address() -> str:
    """Return the loopback address, IPv6 with ``SLIME_PREFER_IPV6``."""
    return "::1" if env.prefer_ipv6() else "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return True for loopback addresses and ``localhost``; False for other names."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def get_current_node_ip() -> str:
    """Return the address by which other nodes reach this one, without brackets."""
    return get_host_info()[1].strip("[]")


def collective_address() -> str:
    """Return the address of this host that gloo uses: loopback if ``GLOO_SOCKET_IFNAME`` is ``lo``."""
    return loopback_address() if env.get_str("GLOO_SOCKET_IFNAME") == "lo" else get_current_node_ip()


def is_ipv6(host: str) -> bool:
    """Return True if ``host`` is an IPv6 address, with or without brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 6
    except ValueError:
        return False


def format_host(host: str) -> str:
    """Format ``host`` for a URL: IPv6 addresses in brackets, everything else unchanged."""
    return f"[{host.strip('[]')}]" if is_ipv6(host) else host


def format_host_port(host: str, port: int) -> str:
    """Format ``host:port`` for a URL."""
    return f"{format_host(host)}:{port}"


def http_url(host: str | None, port: int | None) -> str:
    """Return ``http://host:port``; unknown parts appear as "None"."""
    return f"http://{format_host(str(host))}:{port}"


def is_port_available(port: int) -> bool:
    """Return True if a server can listen on ``port`` on all interfaces, both IPv4 and IPv6."""
    if not 0 < port <= MAX_PORT:
        return False
    for family, host in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
                probe.listen(1)
        except OSError as error:
            if family == socket.AF_INET6 and error.errno not in (errno.EADDRINUSE, errno.EACCES):
                continue  # no IPv6 here
            return False
    return True


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Return the first port at or above ``start_port`` that begins ``consecutive`` free ports.

    Another process may take it before the caller does: bind soon, and retry with the next.
    """
    port = start_port
    while port + consecutive - 1 <= MAX_PORT:
        taken = next((p for p in range(port, port + consecutive) if not is_port_available(p)), None)
        if taken is None:
            return port
        port = taken + 1
    raise ProcessError(f"No {consecutive} consecutive free ports from {start_port} to {MAX_PORT} on this host.")


def find_available_port(base_port: int) -> int:
    """Return a free port above ``base_port``, searching from a random start so that processes rarely collide."""
    # Not the global generator: trainers seed it, and two jobs with the same seed would choose the same port.
    port = base_port + random.SystemRandom().randint(100, 1000)
    for _ in range(2000):
        if port > 60000:
            port = 1024 + port % 60000
        if is_port_available(port):
            return port
        port += 42
    raise ProcessError(f"No free port found above {base_port} in 2000 tries on this host.")
