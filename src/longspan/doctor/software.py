"""Versions of Python, PyTorch and its libraries, and whether they fit the driver and the GPU."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import metadata

import torch

import longspan
from longspan.doctor.finding import Finding
from longspan.hardware import may_have_gpu
from longspan.tracking.nvml import driver_version


def versions() -> dict[str, str]:
    """What should be the same on all ranks, by name; "none" for what is not there."""
    nccl = "none"
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "Python": platform.python_version(),
        "longspan": longspan.__version__,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or torch.version.hip or "none",
        "driver": (driver_version() or ("none", ""))[0],
        "NCCL": nccl,
        "Triton": _installed("triton") or "none",
    }


def check_software(found: dict[str, str]) -> Iterator[Finding]:
    """Whether the `versions()` of this rank fit each other."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu and may_have_gpu():
        if found["CUDA"] == "none":
            yield Finding(
                "GPU driver",
                "error",
                f"there is a GPU driver, but torch {torch.__version__} is a build for CPUs",
                "install a build of PyTorch for CUDA (pip install torch, without +cpu)",
            )
        else:
            yield Finding(
                "GPU driver",
                "error",
                f"torch for CUDA {found['CUDA']} sees no GPU, but there is a driver: {_reason()}",
                "compare with nvidia-smi; in a container, give it the GPUs (docker run --gpus all)",
            )
    if has_gpu:
        yield from _check_driver(found["CUDA"])
        yield from _check_architecture()
    for package, version in (("triton", found["Triton"]), ("nvidia-nccl-cu", found["NCCL"])):
        pinned = _pinned(package)
        if pinned and has_gpu and not version.startswith(pinned):
            name = "Triton" if package == "triton" else "NCCL"
            yield Finding(
                "libraries",
                "warning",
                f"{name} {version} is used, but torch {torch.__version__} comes with {pinned}",
                "reinstall torch with its dependencies; unset LD_PRELOAD and LD_LIBRARY_PATH if "
                "they name another one",
            )
    if has_gpu and found["Triton"] == "none":
        text = "Triton is not installed: the attention kernels for GPUs need it"
        yield Finding("libraries", "error", text, "pip install triton")


def _check_driver(cuda: str) -> Iterator[Finding]:
    driver = driver_version()
    if driver is None or torch.version.cuda is None:
        return
    version, supported = driver
    seen = f"driver {version} supports CUDA {supported}; torch was built for {cuda}"
    if int(supported.split(".")[0]) < int(cuda.split(".")[0]):
        advice = f"install a driver for CUDA {cuda}, or a PyTorch for CUDA {supported}"
        yield Finding("GPU driver", "error", seen, advice)
    else:
        yield Finding("GPU driver", "ok", seen)


def _check_architecture() -> Iterator[Finding]:
    """Whether torch has code for the GPU: of its own architecture, or PTX of an older one."""
    major, minor = torch.cuda.get_device_capability()
    built = torch.cuda.get_arch_list()
    same = [name for name in built if re.match(rf"sm_{major}\d", name)]
    older = [
        name
        for name in built
        if name.startswith("compute_") and int(re.sub(r"\D", "", name)) <= 10 * major + minor
    ]
    if built and not same and not older:
        yield Finding(
            "GPU driver",
            "error",
            f"the GPU is sm_{major}{minor}, but torch has code for {', '.join(built)}",
            "install a build of PyTorch for this GPU",
        )


def _reason() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001  whatever it is, it says why
        return str(error).strip().splitlines()[0]
    return "no reason is given"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _pinned(package: str) -> str | None:
    """The version of a package that torch's own metadata asks for."""
    for requirement in metadata.requires("torch") or []:
        if found := re.match(rf"{package}\w*\s*==\s*([\d.]+)", requirement):
            return found[1]
    return None
