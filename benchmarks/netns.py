"""Simulate machines: network namespaces on a bridge, each behind a link of a given speed.

    with Namespaces(4) as net:
        net.limit(1e9)                   # bits per second, up and down, for each namespace
        net.start(0, ["python", ...])    # a process that sees only its own interface

Every namespace has one interface, `eth0`, a veth pair whose other end is on a bridge. A token
bucket (tc tbf) on either end limits what the namespace sends and what it receives, as a network
card with that speed would. Everything is removed at the end of the `with` block, whatever happens
inside; what a killed run left behind is removed by the next run.
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
# The bucket holds 50 microseconds of the rate or one large packet: small enough that short messages
# are limited too.
_BURST_SECONDS = 50e-6
_MIN_BURST = 1 << 16
_LARGEST_PACKET = "32768"
# Longest queue in front of the bucket; TCP keeps it shorter by itself.
_QUEUE_SECONDS = 0.2


class NetworkError(RuntimeError):
    """A namespace or a link cannot be created or changed; the message is one sentence."""


def missing() -> str | None:
    """Return why namespaces cannot be created here, or None if they can."""
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
        return f"this system does not allow links with a rate limit: {error}"
    finally:
        _quietly("ip", "link", "del", name)
        _quietly("ip", "netns", "del", name)
    return None


class Namespaces:
    """Namespaces on one bridge, and the processes in them."""

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
            # Packets must fit into the bucket: splitting them up would keep a core busy.
            _do("ip", "-n", space, "link", "set", INTERFACE, "up", "gso_max_size", _LARGEST_PACKET)
            _do("ip", "-n", space, "link", "set", "lo", "up")

    def limit(self, rate: float | None, delay: float = 0.0) -> None:
        """Limit what every namespace sends and receives.

        Args:
            rate: Bits per second in each direction; None removes the limit.
            delay: Seconds to delay what each namespace sends; needs netem in the kernel.
        """
        if rate is not None and not rate > 0:  # tc may read it as a very fast rate
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
        """Return the number of packets dropped by the buckets since the limit was set."""
        outputs = [
            _do("tc", "-s", "qdisc", "show", "dev", self._outer(r)) for r in range(self.count)
        ]
        outputs += [
            _do("tc", "-n", self.namespace(r), "-s", "qdisc", "show", "dev", INTERFACE)
            for r in range(self.count)
        ]
        return sum(int(n) for text in outputs for n in re.findall(r"dropped (\d+)", text))

    def start(self, rank: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Start a process in a namespace; it is killed when the namespace is removed."""
        inside = ["ip", "netns", "exec", self.namespace(rank), *command]
        # In its own session, so that Ctrl-C reaches only this process, which then ends the others.
        # Signals wait until the process is listed: an unlisted one would never be ended.
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
            _stop_signals.clear()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)


_stop_signals: list[int] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    _stop_signals.append(number)
    raise KeyboardInterrupt


def _raise_if_stopped() -> None:
    """Raise now if a signal arrived: Python drops exceptions that are raised during a fork."""
    if _stop_signals:
        raise KeyboardInterrupt


def _bucket(rate: float) -> tuple[str, ...]:
    burst = max(_MIN_BURST, int(rate / 8 * _BURST_SECONDS))
    queue = burst + int(rate / 8 * _QUEUE_SECONDS)
    return (
        *("root", "handle", "1:", "tbf", "rate", f"{rate:.0f}bit"),
        *("burst", str(burst), "limit", str(queue)),
    )


def _remove_leftovers() -> None:
    """Remove what killed runs left behind."""
    for kind, verb in (("netns", "list"), ("link", "show")):
        listing = _do("ip", "-o", kind, verb)
        for name, pid in re.findall(r"\b(gh(\d+)(?:-\d+|b|v\d+|tp?))\b", listing):
            if not Path(f"/proc/{pid}").exists():
                _quietly("ip", kind, "del", name)


def _do(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True)
    _raise_if_stopped()
    if ran.returncode != 0:
        message = " ".join((ran.stderr or ran.stdout).split())
        raise NetworkError(f"`{' '.join(command)}` failed: {message}")
    return ran.stdout


def _quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True)
