"""The machine of a measurement: processor, instruction sets, cores, memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")


def machine() -> dict[str, Any]:
    """Returns a description of this machine."""
    information = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _field(information, "model name") or platform.processor(),
        "family_model": _family(information),
        "features": feature_level(_field(information, "flags").split()),
        "cores": cores,
        "memory_bytes": _memory_bytes(),
        "system": platform.platform(),
        "load_before": os.getloadavg()[0],
    }


def feature_level(flags: list[str]) -> str:
    """Returns the instruction sets for matrix products that a processor has, best first."""
    known = {
        "amx_tile": "AMX",
        "avx512_bf16": "AVX-512 BF16",
        "avx512_vnni": "AVX-512 VNNI",
        "avx512f": "AVX-512",
        "avx2": "AVX2",
    }
    found = [name for flag, name in known.items() if flag in flags]
    return ", ".join(found) or "unknown"


def described(found: dict[str, Any]) -> str:
    """Returns a line about a machine."""
    return (
        f"{found['processor']}{found['family_model']}, {found['cores']} cores, "
        f"{found['memory_bytes'] / 2**30:.0f} GiB; {found['features']}"
    )


def _family(information: str) -> str:
    family, model = _field(information, "cpu family"), _field(information, "model")
    return f" (family {family}, model {model})" if family and model else ""


def _field(information: str, name: str) -> str:
    for line in information.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
