from __future__ import annotations

import os
import sys

import pytest

from backbeat.errors import InputError, MissingPartError
from backbeat.lab import setting


@pytest.fixture
def complete(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(setting, "find_spec", lambda name: name)
    return monkeypatch


def test_a_complete_machine_is_accepted(complete):
    setting.check_requirements("gloo")


def test_an_unknown_backend_is_refused(complete):
    with pytest.raises(InputError, match="'mpi'"):
        setting.check_requirements("mpi")


@pytest.mark.parametrize("missing", ["pyroute2", "torch"])
def test_missing_libraries_are_named_with_what_still_works(complete, missing):
    complete.setattr(setting, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(MissingPartError, match=r"pip install .*predict"):
        setting.check_requirements("gloo")


def test_all_missing_libraries_are_named_at_once(complete):
    complete.setattr(setting, "find_spec", lambda name: None)
    with pytest.raises(MissingPartError, match=r"PyTorch and pyroute2: pip install -e '\.\[torch,lab\]'"):
        setting.check_requirements("gloo")


def test_missing_root_is_named(complete):
    complete.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingPartError, match=r"root.*sudo \$\(which backbeat\)"):
        setting.check_requirements("gloo")


def test_a_missing_gpu_points_to_gloo(complete):
    complete.setattr(setting.glob, "glob", lambda pattern: [])
    complete.setattr(setting.os.path, "exists", lambda path: False)
    complete.setattr(setting.shutil, "which", lambda name, **_: None)
    with pytest.raises(MissingPartError, match="--backend gloo"):
        setting.check_requirements("nccl")


def test_a_missing_mps_daemon_points_to_gloo(complete):
    complete.setattr(setting.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    complete.setattr(setting, "find_control", lambda: None)
    with pytest.raises(MissingPartError, match="--backend gloo"):
        setting.check_requirements("nccl")
