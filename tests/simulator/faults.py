"""Schedules: which job runs, and what goes wrong in it; a seed determines both."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

DEFAULT = "slime.rollout.sglang_rollout.generate_rollout"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
NUM_SETUPS = 97
"""Jobs of all seeds; few enough that their undisturbed runs can be cached."""


@dataclass(frozen=True)
class Setup:
    """A job."""

    is_async: bool = False
    rollout_function: str = DEFAULT
    num_rollout: int = 4
    batch: int = 2
    samples_per_prompt: int = 2
    over_sampling: int = 0
    partial: bool = False
    is_filtered: bool = False
    engines: int = 2
    trainer_ranks: int = 1
    fault_tolerance: bool = True
    recovery: str = "checkpoint"
    save_interval: int = 1
    async_save: bool = False
    keep_last: int | None = None
    update_interval: int = 1
    colocate: bool = False
    seconds_per_token: float = 0.2
    disk: bool = False
    """Weights go to the engines over a shared disk."""
    prefill: bool = False
    """The first engine prefills, the others decode."""
    broadcast: bool = False
    """Weights go to the engines by broadcast."""
    judge: bool = False
    """Another engine, of an untrained model, grades; it shares a GPU if the trainer is as large."""
    grace_s: float = 0.0
    """Seconds from SIGTERM to the end of a trainer's node, or of the driver."""

    @property
    def is_strict(self) -> bool:
        """Every token is generated with exactly the weights that train on it."""
        return not self.is_async and not self.partial and self.rollout_function == DEFAULT

    @property
    def is_exact(self) -> bool:
        """Which groups are trained does not depend on time."""
        return not self.over_sampling and not self.is_filtered and self.rollout_function == DEFAULT

    @property
    def discards(self) -> bool:
        return bool(self.over_sampling or self.is_filtered) and not self.partial


def setup_of(seed: int) -> Setup:
    rng = random.Random(seed % NUM_SETUPS)
    is_async = rng.random() < 0.4
    fully = is_async and rng.random() < 0.3
    partial = rng.random() < 0.4
    setup = Setup(
        is_async=is_async,
        rollout_function=FULLY_ASYNC if fully else DEFAULT,
        num_rollout=rng.choice((3, 4)),
        over_sampling=rng.choice((0, 0, 1, 2)),
        partial=partial or fully,
        is_filtered=rng.random() < 0.25,
        engines=rng.choice((1, 2, 2, 3)),
        trainer_ranks=rng.choice((1, 1, 2)),
        fault_tolerance=rng.random() < 0.8,
        recovery="checkpoint" if rng.random() < 0.75 else "off",
        save_interval=rng.choice((1, 1, 2, 3)),
        async_save=rng.random() < 0.25,
        keep_last=rng.choice((None, None, 1, 2)),
        update_interval=rng.choice((1, 1, 2)) if is_async and not fully else 1,
        colocate=not is_async and rng.random() < 0.3,
        seconds_per_token=rng.choice((0.05, 0.2, 1.0)),
        disk=rng.random() < 0.15,
    )
    prefill, judge = rng.random() < 0.2 and setup.engines > 1, rng.random() < 0.2 and setup.engines < 3
    ranks = 2 * setup.engines if judge and setup.colocate else setup.trainer_ranks
    broadcasts = not (setup.colocate or setup.disk) and rng.random() < 0.6
    grace_s = rng.choice((0.0, 20.0, 120.0))
    return replace(setup, prefill=prefill, judge=judge, trainer_ranks=ranks, broadcast=broadcasts, grace_s=grace_s)


@dataclass(frozen=True)
class Fault:
    """A fault, at the ``nth`` time that a site is passed (over all lives), or at a time."""

    kind: str
    site: str = ""
    nth: int = 0
    at_s: float = 0.0
    target: str = "self"
    """A role, or empty for the process that passes the site."""
    amount: float = 0.0
    """Duration in seconds, the factor of slowness, or the jump of the clock."""

    def __str__(self) -> str:
        where = f"at {self.site!r}, time {self.nth}" if self.site else f"after {self.at_s:.2f} s"
        amount = f" ({self.amount:g})" if self.amount else ""
        return f"{self.kind} {self.target}{amount} {where}"


def roles(setup: Setup) -> list[str]:
    engines = [f"{kind}{k}" for k in range(setup.engines + setup.judge) for kind in ("engine", "server")]
    routers = ["router", "router1"] if setup.judge else ["router"]
    return ["driver", "manager", *routers, *engines, *(f"trainer{k}" for k in range(setup.trainer_ranks))]


LASTS_S = (0.5, 3.0, 20.0, 90.0, 400.0, 4000.0, 4000.0, 4000.0)
"""The last one exceeds every deadline: a wait for it without a deadline would end the run."""


SHARE_OF_KIND = {"http": 0.4, "file": 0.25, "call": 0.35}
DISK_FAULTS = ("full", "ioerror", "half", "after")
WRONG_ANSWERS = ("refuse", "lose", "status", "garbage", "nonsense", "double")
"""Faults of a server's answer to one request; nonsense is JSON of another shape."""


def draw_fault(rng: random.Random, setup: Setup, sites: Mapping[str, tuple[int, int]], end_s: float) -> Fault:
    """Draw a fault; SIGTERM announces some deaths of trainer and driver."""
    fault = _draw_fault(rng, setup, sites, end_s)
    is_announced = rng.random() < 0.3 and fault.kind == "kill" and victim(fault).startswith(("trainer", "driver"))
    return replace(fault, kind="term") if is_announced else fault


def _draw_fault(rng: random.Random, setup: Setup, sites: Mapping[str, tuple[int, int]], end_s: float) -> Fault:
    """Draw a fault: first the kind of site (request, file or call), then the site, however often it is passed.

    Args:
        sites: by name, how often each was passed before the time at which a fault may strike, and until its end.
        end_s: end of that time, for faults that strike wherever the job is.
    """
    if rng.random() < 0.15 or not sites:
        kind = rng.choice(("kill", "kill", "hang", "slow", "cut", "clock"))
        return Fault(
            kind, at_s=round(rng.uniform(0, end_s), 3), target=rng.choice(roles(setup)), amount=_amount(rng, kind)
        )
    site = _draw_site(rng, sites)
    passed, last = sites[site]
    nth = rng.randint(passed + 1, last)
    if rng.random() < 0.35:  # another process is hit at that moment
        kind = rng.choice(("kill", "kill", "kill", "hang", "hang", "cut", "clock"))
        return Fault(kind, site, nth, target=rng.choice(roles(setup)), amount=_amount(rng, kind))
    if site.startswith("http"):
        kind = rng.choice((*WRONG_ANSWERS, "kill", "kill", "kill", "hang", "hang", "cut", "slow"))
    elif site.startswith("file"):
        kind = rng.choice(("kill", "half", "half", "after", "after", "ioerror", "full"))
    else:
        kind = rng.choice(("kill", "kill", "kill", "hang", "hang", "cut", "clock"))
    return Fault(kind, site, nth, amount=_amount(rng, kind))


def _draw_site(rng: random.Random, sites: Mapping[str, tuple[int, int]]) -> str:
    """Return a site; sites whose names differ only in a number, such as equal engines', count as one."""
    likes: dict[str, dict[str, list[str]]] = {}
    for site in sorted(sites):
        kind = site.partition(" ")[0]
        likes.setdefault(kind if kind in ("http", "file") else "call", {}).setdefault(
            re.sub(r"\d+", "#", site), []
        ).append(site)
    kind = rng.choices(list(likes), [SHARE_OF_KIND[kind] for kind in likes])[0]
    return rng.choice(rng.choice(list(likes[kind].values())))


def _amount(rng: random.Random, kind: str) -> float:
    if kind in ("hang", "cut", "full"):
        return rng.choice(LASTS_S)
    if kind == "slow":
        return rng.choice((5.0, 50.0))
    return rng.choice((-86400.0, -5.0, 5.0, 86400.0)) if kind == "clock" else 0.0


def draw_faults(seed: int, setup: Setup, sites: Counter[str], end_s: float) -> list[Fault]:
    rng = random.Random(seed * 31 + 7)
    count = rng.choice((1, 1, 1, 2, 2, 3, 5))
    everywhere = {site: (0, passed) for site, passed in sites.items()}
    faults = [draw_fault(rng, setup, everywhere, end_s) for _ in range(count)]
    if rng.random() < 0.2 and faults[0].site:  # two at one moment
        kind = rng.choice(("kill", "kill", "hang", "cut"))
        also = replace(faults[0], kind=kind, target=rng.choice(roles(setup)), amount=_amount(rng, kind))
        faults.insert(1, also)
    return faults


def strikes_recovery(seed: int) -> bool:
    """Return whether a seed's later faults strike while the job recovers from the first."""
    return random.Random(seed * 31 + 5).random() < 0.5


def first_of_recovery(seed: int, fault: Fault) -> Fault:
    """Return the fault from which such a seed recovers: usually a death."""
    is_death = random.Random(seed * 31 + 9).random() < 0.6
    return replace(fault, kind="kill", amount=0.0) if is_death else fault


def draw_faults_of_recovery(
    seed: int, setup: Setup, sites: Mapping[str, tuple[int, int]], new: Mapping[str, tuple[int, int]]
) -> list[Fault]:
    """Return one or two faults that strike while the job recovers from a seed's first fault.

    Args:
        sites: as in :func:`draw_fault`.
        new: sites that only the recovery passes, in replacement processes.
    """
    rng = random.Random(seed * 31 + 11)
    drawn = []
    for _ in range(rng.choice((1, 1, 2))):
        is_new, is_death = rng.random() < 0.6, rng.random() < 0.4
        fault = draw_fault(rng, setup, new if new and is_new else sites, 0.0)
        drawn.append(replace(fault, kind="kill", amount=0.0) if is_death else fault)
    return [fault for fault in drawn if fault.site]


def victim(fault: Fault) -> str:
    """Return the role that a fault hits; empty if unknown."""
    if fault.target != "self" and fault.kind not in WRONG_ANSWERS:
        return fault.target
    if fault.site.startswith("train "):
        return "trainer"
    return fault.site.split()[1].partition(".")[0] if fault.site else ""


def may_cost_an_engine(fault: Fault, setup: Setup) -> bool:
    """Return whether an engine may be replaced because of a fault."""
    if fault.kind == "clock" or fault.kind in DISK_FAULTS:
        return False
    return fault.kind not in ("kill", "term") or not victim(fault).startswith(("trainer", "driver", "manager"))


def are_too_many(faults: Sequence[Fault], max_recoveries: int) -> bool:
    """Return whether faults may need more recoveries of trainer and manager than are allowed per hour."""
    return sum(victim(fault).startswith(("trainer", "manager")) for fault in faults) > max_recoveries


def EXCUSES(fault: Fault, setup: Setup) -> bool:  # noqa: N802
    """Return whether a fault may end a run, which the same command then continues."""
    if fault.kind == "clock" or (fault.kind == "slow"):
        return False
    if fault.kind in DISK_FAULTS:
        return True
    role = victim(fault)
    if role.startswith("trainer"):
        if fault.kind == "term" and (setup.colocate or not setup.grace_s):
            return True
        return setup.recovery == "off" or fault.kind == "cut"
    if role.startswith(("engine", "server", "router")):
        # If a node is unreachable for longer than engines may take to start, it has no engine.
        return not setup.fault_tolerance or (fault.kind == "cut" and fault.amount >= 90)
    return True
