"""Machines that are not there: network namespaces on a bridge, each behind a link of a given speed.

    with Namespaces(4) as net:
        net.limit(1e9)                   # bits per second, up and down, for each of them
        net.start(0, ["python", ...])    # a process that sees nothing but its own interface

Every namespace has one interface, `eth0`, a veth pair whose other end is on a bridge. A token
bucket (tc tbf) on either end limits what the namespace sends and what it receives, as a network
card with that speed would. Whatever happens inside `with`, all of it is removed afterwards; what a
killed run left behind is removed by the next.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

INTERFACE = "eth0"
# The bucket holds 50 microseconds' worth or one large packet: short messages must feel the limit.
_BURST_SECONDS = 50e-6
_LEAST_BURST = 1 << 16
_LARGEST_PACKET = "32768"
# As long may the queue before the bucket be; TCP keeps it shorter by itself.
_QUEUE_SECONDS = 0.2


class NetworkError(RuntimeError):
    """What is missing to make namespaces, in one sentence."""


def missing() -> str | None:
    """Return why namespaces cannot be made here, or None if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need {tool} (of iproute2), which is not installed"
    if os.geteuid() != 0:
        return "network namespaces and rate limits need root: run it with sudo"
    name = f"gh{os.getpid()}t"
    try:
        _do("ip", "netns", "add", name)
        _do("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p")
        _do("tc", "qdisc", "add", "dev", name, *_bucket(1e9))
    except NetworkError as error:
        return f"this system does not let us make links with a rate limit: {error}"
    finally:
        _quietly("ip", "link", "del", name)
        _quietly("ip", "netns", "del", name)
    return None


class Namespaces:
    """Some namespaces on one bridge, and the processes in them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._name = f"gh{os.getpid()}"
        self._processes: list[subprocess.Popen[str]] = []
        self._before: dict[int, Any] = {}
        self._limited = False

    def __enter__(self) -> "Namespaces":
        _remove_leftovers()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, _interrupt)
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def namespace(self, rank: int) -> str:
        """Return the name of a namespace."""
        return f"{self._name}-{rank}"

    def _outer(self, rank: int) -> str:
        return f"{self._name}v{rank}"

    def _make(self) -> None:
        bridge = f"{self._name}b"
        _do("ip", "link", "add", bridge, "type", "bridge")
        _do("ip", "link", "set", bridge, "up")
        for rank in range(self.count):
            space, outer = self.namespace(rank), self._outer(rank)
            _do("ip", "netns", "add", space)
            _do(
                "ip",
                "link",
                "add",
                outer,
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                space,
            )
            _do("ip", "link", "set", outer, "master", bridge, "up")
            address = f"10.77.{rank // 250}.{rank % 250 + 1}/16"
            _do("ip", "-n", space, "addr", "add", address, "dev", INTERFACE)
            # Packets that fit into the bucket whole: cutting them up would cost a core.
            _do("ip", "-n", space, "link", "set", INTERFACE, "up", "gso_max_size", _LARGEST_PACKET)
            _do("ip", "-n", space, "link", "set", "lo", "up")

    def limit(self, rate: float | None, delay: float = 0.0) -> None:
        """Let every namespace send and receive `rate` bits per second; None is no limit.

        A delay, in seconds, is put before what each one sends, where the kernel has netem.
        """
        if rate is not None and not rate > 0:  # tc may take it for a very fast one.
            raise NetworkError(f"a rate must be above 0 bits per second, got {rate}")
        for rank in range(self.count):
            inside = ("tc", "-n", self.namespace(rank), "qdisc")
            outside = ("tc", "qdisc")
            for where, device in ((inside, INTERFACE), (outside, self._outer(rank))):
                if self._limited:
                    _do(*where, "del", "dev", device, "root")
                if rate is not None:
                    _do(*where, "add", "dev", device, *_bucket(rate))
            if rate is not None and delay:
                wait = ("netem", "delay", f"{delay * 1e6:.0f}us", "limit", "100000")
                try:
                    _do(*inside, "add", "dev", INTERFACE, "parent", "1:1", "handle", "10:", *wait)
                except NetworkError as error:
                    raise NetworkError(f"a delay needs netem in the kernel: {error}") from None
        self._limited = rate is not None

    def dropped(self) -> int:
        """Return how many packets the buckets have dropped since the limit was set."""
        shown = [_do("tc", "-s", "qdisc", "show", "dev", self._outer(r)) for r in range(self.count)]
        shown += [
            _do("tc", "-n", self.namespace(r), "-s", "qdisc", "show", "dev", INTERFACE)
            for r in range(self.count)
        ]
        return sum(int(n) for text in shown for n in re.findall(r"dropped (\d+)", text))

    def start(self, rank: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Start a process in a namespace; it is ended with it at the latest."""
        inside = ["ip", "netns", "exec", self.namespace(rank), *command]
        # In a session of its own, since Ctrl-C is for us: we end the processes.
        # A signal between the start and the list would leave a process that nobody ends.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process = subprocess.Popen(
                inside,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, masked) and None,
                **options,
            )
            self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        return process

    def _remove(self) -> None:
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            for process in self._processes:
                process.kill()
                process.wait()
            for rank in range(self.count):
                _quietly("ip", "link", "del", self._outer(rank))
                _quietly("ip", "netns", "del", self.namespace(rank))
            _quietly("ip", "link", "del", f"{self._name}b")
            for number, handler in self._before.items():
                signal.signal(number, handler)
            _told_to_stop.clear()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)


_told_to_stop: list[int] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    _told_to_stop.append(number)
    raise KeyboardInterrupt


def _stop_if_told() -> None:
    """Raise after a child was started: Python drops what is raised while it forks."""
    if _told_to_stop:
        raise KeyboardInterrupt


def _bucket(rate: float) -> tuple[str, ...]:
    burst = max(_LEAST_BURST, int(rate / 8 * _BURST_SECONDS))
    queue = burst + int(rate / 8 * _QUEUE_SECONDS)
    return (
        *("root", "handle", "1:", "tbf", "rate", f"{rate:.0f}bit"),
        *("burst", str(burst), "limit", str(queue)),
    )


def _remove_leftovers() -> None:
    """Remove what runs that were killed could not."""
    for kind, verb in (("netns", "list"), ("link", "show")):
        found = _do("ip", "-o", kind, verb)
        for name, pid in re.findall(r"\b(gh(\d+)(?:-\d+|b|v\d+|tp?))\b", found):
            if not Path(f"/proc/{pid}").exists():
                _quietly("ip", kind, "del", name)


def _do(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True)
    _stop_if_told()
    if ran.returncode != 0:
        said = " ".join((ran.stderr or ran.stdout).split())
        raise NetworkError(f"`{' '.join(command)}` failed: {said}")
    return ran.stdout


def _quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True)
