"""How much memory there is: NVIDIA devices through NVML or nvidia-smi, else the machine's own."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from dflashcpp.errors import DflashError
from dflashcpp.memory.planning import Room

MIB = 1 << 20
_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "memory.reserved")
_TIMEOUT = 20.0


@dataclass(frozen=True)
class Gpu:
    """One device, memory in MiB. `reserved` is the driver's own share; `driver` its version."""

    index: int
    uuid: str
    name: str
    driver: str
    total: float
    used: float
    reserved: float
    processes: tuple[tuple[int, float], ...] = ()

    @property
    def free(self) -> float:
        return max(0.0, self.total - self.used - self.reserved)

    def of(self, pids: Sequence[int]) -> float | None:
        """MiB the processes `pids` hold here; None where the driver does not tell (containers, WSL)."""
        known = [mib for pid, mib in self.processes if pid in set(pids)]
        return sum(known) if known else None

    def room(self, residual: float = 0.0) -> Room:
        return Room(self.name, self.total, self.used, self.reserved, residual, "read from the device")


def gpus() -> list[Gpu]:
    """The NVIDIA devices of this machine; empty when there is none or no driver."""
    found = _by_nvml()
    return found if found is not None else _by_smi()


def host_room() -> Room:
    """The machine's memory, for runs on the CPU."""
    import psutil

    memory = psutil.virtual_memory()
    used = memory.total - memory.available
    return Room("system memory", memory.total / MIB, used / MIB, origin="read from the system")


def _by_nvml() -> list[Gpu] | None:
    """Through the driver's library; None when it is not there or does not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return [_nvml_device(pynvml, index, driver) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _nvml_device(nvml: object, index: int, driver: str) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        reserved = memory.reserved
    except (pynvml.NVMLError, AttributeError, TypeError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)  # counts the reserved part as used
        reserved = 0
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        running = []
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        driver=driver,
        total=memory.total / MIB,
        used=memory.used / MIB,
        reserved=reserved / MIB,
        processes=tuple(
            (process.pid, process.usedGpuMemory / MIB) for process in running if process.usedGpuMemory
        ),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _by_smi() -> list[Gpu]:
    if shutil.which("nvidia-smi") is None:
        return []
    devices = _query(["--query-gpu=" + ",".join(_FIELDS)])
    apps = _query(["--query-compute-apps=gpu_uuid,pid,used_memory"], needed=False)
    return [from_smi(row, apps) for row in devices]


def _query(arguments: list[str], *, needed: bool = True) -> list[list[str]]:
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DflashError(
            f"nvidia-smi did not answer: {error}", hint="say the memory yourself: --device-memory MIB"
        ) from error
    if done.returncode != 0:
        if not needed:
            return []
        said = (done.stdout + done.stderr).strip().splitlines()
        raise DflashError(
            f"nvidia-smi failed: {said[-1] if said else f'exit code {done.returncode}'}",
            hint="say the memory yourself: --device-memory MIB",
        )
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(done.stdout)) if row]


def from_smi(row: Sequence[str], apps: Sequence[Sequence[str]] = ()) -> Gpu:
    """A device from a row of nvidia-smi's CSV (`_FIELDS`) and the rows of its compute processes.

    `[N/A]` where a card does not tell; DflashError when the total is missing.
    """
    cells = dict(zip(_FIELDS, row, strict=False))
    total = _number(cells.get("memory.total", ""))
    if total is None:
        raise DflashError(
            f"nvidia-smi does not tell the memory of {cells.get('name', 'the device')}",
            hint="say it yourself: --device-memory MIB",
        )
    uuid = cells.get("uuid", "")
    mine = [(app[1], _number(app[2])) for app in apps if len(app) >= 3 and app[0] == uuid]
    return Gpu(
        index=int(cells.get("index") or 0),
        uuid=uuid,
        name=cells.get("name", ""),
        driver=cells.get("driver_version", ""),
        total=total,
        used=_number(cells.get("memory.used", "")) or 0.0,
        reserved=_number(cells.get("memory.reserved", "")) or 0.0,
        processes=tuple((int(pid), mib) for pid, mib in mine if mib is not None and pid.isdigit()),
    )


def _number(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None
