"""The Ray cluster that ``ray start`` advertises on this machine, where it is surely this user's.

Its address is in a file that any user of the machine can write, and whoever is asked at that address gets the job's
code, flags and secret.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import psutil
from ray._private.utils import get_ray_address_file

from slime.utils.private_folder import problem_of

logger = logging.getLogger(__name__)


def own_cluster() -> str | None:
    """Return the address of this user's cluster here; None where none is, and with a warning where one is not his."""
    file = Path(get_ray_address_file(None))
    try:
        address = _read(file)
        _check_servers(address)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, psutil.Error) as error:
        logger.warning(
            "The Ray cluster of %s is not joined: %s. To join it all the same, give its address by RAY_ADDRESS.",
            file,
            error,
        )
        return None
    return address


def _read(file: Path) -> str:
    """Return what the file says, which no other user can have written."""
    _check(file.parent.lstat(), file.parent)
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, encoding="ascii") as opened:
        found = os.fstat(descriptor)
        _check(found, file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no file")
        return opened.read(256).strip()


def _check_servers(address: str) -> None:
    """Check that this user runs Ray's servers at an address, and owns their sockets."""
    raylet = next((words for words in _own_raylets() if words.get("--gcs-address") == address), None)
    if raylet is None:
        raise FileNotFoundError(f"no raylet of user {os.geteuid()} belongs to {address}")
    session = Path(raylet["--session_dir"])
    sockets = [Path(raylet[name]) for name in ("--raylet_socket_name", "--store_socket_name")]
    for path in (session, sockets[0].parent, *sockets):
        _check(path.lstat(), path)
    host, _, port = address.rpartition(":")
    if raylet["--node_ip_address"] != host.strip("[]"):
        return  # this user's raylet has joined a head on another machine
    for listener in psutil.net_connections("tcp"):
        if listener.status == psutil.CONN_LISTEN and listener.laddr.port == int(port):
            user = None if listener.pid is None else psutil.Process(listener.pid).uids().effective
            if user != os.geteuid():
                raise PermissionError(f"another user's server listens at port {port}")


def _own_raylets() -> list[dict[str, str]]:
    """Return the flags of each raylet that this user runs."""
    found = []
    for process in psutil.process_iter(["uids", "cmdline"]):
        words, users = process.info["cmdline"] or [""], process.info["uids"]
        if os.path.basename(words[0]) == "raylet" and users and set(users) == {os.geteuid()}:
            found.append(dict(word.partition("=")[::2] for word in words))
    return found


def _check(found: os.stat_result, path: Path) -> None:
    if problem := problem_of(found):
        raise PermissionError(f"{path} {problem}")
