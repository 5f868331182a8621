"""The machine of a measurement: processor, instruction sets, cores, memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")

_AMD, _INTEL = "AuthenticAMD", "GenuineIntel"
_MICROARCHITECTURES: dict[str, tuple[str, int, list[range]]] = {
    "Zen 3": (_AMD, 25, [range(0x00, 0x10), range(0x20, 0x60)]),
    "Zen 4": (_AMD, 25, [range(0x10, 0x20), range(0x60, 0x80), range(0xA0, 0xB0)]),
    "Skylake or Cascade Lake": (_INTEL, 6, [range(0x55, 0x56)]),
    "Ice Lake": (_INTEL, 6, [range(0x6A, 0x6B)]),
    "Sapphire Rapids": (_INTEL, 6, [range(0x8F, 0x90)]),
    "Emerald Rapids": (_INTEL, 6, [range(0xCF, 0xD0)]),
    "Granite Rapids": (_INTEL, 6, [range(0xAD, 0xAE)]),
}
"""{name of a design: maker, family, models} of usual servers."""


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


def processor(found: Mapping[str, Any]) -> str:
    """Returns the type of a processor: "AMD EPYC (Zen 4; family 25, model 17)"."""
    return f"{found['processor']}{found['family_model']}"


def described(found: Mapping[str, Any]) -> str:
    """Returns a line about a machine."""
    return (
        f"{processor(found)}, {found['cores']} cores, "
        f"{found['memory_bytes'] / 2**30:.0f} GiB; {found['features']}"
    )


def _family(information: str) -> str:
    family, model = _field(information, "cpu family"), _field(information, "model")
    if not family or not model:
        return ""
    name = _microarchitecture(_field(information, "vendor_id"), int(family), int(model))
    return f" ({name}family {family}, model {model})"


def _microarchitecture(vendor: str, family: int, model: int) -> str:
    """Returns the name of a design and "; ", such as "Zen 4; "; "": not known here.

    Source: arch/x86/include/asm/intel-family.h and arch/x86/kernel/cpu/amd.c of Linux.
    """
    for name, (maker, of_family, models) in _MICROARCHITECTURES.items():
        if (vendor, family) == (maker, of_family) and any(model in each for each in models):
            return f"{name}; "
    return ""


def _field(information: str, name: str) -> str:
    for line in information.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
