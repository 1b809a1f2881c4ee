"""What the lab needs, checked before anything is built; each refusal says what is missing and what works without it."""

from __future__ import annotations

import glob
import os
import shutil
import sys
from importlib.util import find_spec

from backbeat.errors import InputError, MissingPartError
from backbeat.lab.mps import CONTROL, find_control

BACKENDS = ("gloo", "nccl")
_REST = "`backbeat predict`, `plan` and `report` work without it"


def check_requirements(backend: str) -> None:
    """Refuse, in one line, to start a lab that this machine cannot run."""
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}: the lab runs {' or '.join(BACKENDS)}")
    if sys.platform != "linux":
        raise MissingPartError(f"the lab needs Linux (network namespaces), this is {sys.platform}; {_REST}")
    missing = [name for module, name in (("torch", "PyTorch"), ("pyroute2", "pyroute2")) if find_spec(module) is None]
    if missing:
        install = "pip install -e '.[torch,lab]' in the checkout"
        raise MissingPartError(f"the lab needs {' and '.join(missing)}: {install}; {_REST}")
    if os.geteuid() != 0:
        # sudo has a PATH of its own, on which a virtual environment is not.
        raise MissingPartError(
            f"the lab needs root, to make network namespaces: run `sudo $(which backbeat) …`; {_REST}"
        )
    if backend == "nccl":
        _check_gpu()


def _check_gpu() -> None:
    without = "--backend gloo works without it"
    if not (glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/proc/driver/nvidia") or shutil.which("nvidia-smi")):
        raise MissingPartError(f"--backend nccl needs an NVIDIA GPU and none is visible; {without}")
    if find_control() is None:
        raise MissingPartError(
            f"--backend nccl needs {CONTROL} (it comes with the NVIDIA driver), so that nodes can share the GPU; "
            f"{without}"
        )
