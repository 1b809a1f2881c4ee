"""What is asked about: a model and a cluster, by name, file or object; and the GPU that computes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from backbeat.errors import InputError, nearest
from backbeat.importers.config_json import read_architecture
from backbeat.model import Network, Profile
from backbeat.model.accelerator import Accelerator, accelerator, accelerator_named
from backbeat.model.architecture import BUNDLED, Architecture
from backbeat.model.cluster import Cluster
from backbeat.model.files import bundled, checked, decode, read
from backbeat.model.specification import across_named

ModelInput = Profile | Architecture | str | os.PathLike[str] | Mapping[str, Any]
ClusterInput = Network | Cluster | str | os.PathLike[str]


def model_named(model: ModelInput) -> Profile | Architecture:
    """A profile or a shape: the object itself, a bundled name, a file, a folder with a config.json, or its dict.

    >>> model_named("llama-3-8b").layers, model_named("resnet50-b64-bf16-h200").batch_size
    (32, 64)
    """
    if isinstance(model, (Profile, Architecture)):
        return model
    if isinstance(model, Mapping):
        if "schema" not in model:
            return read_architecture(model)
        fields = {name: value for name, value in model.items() if name != "schema"}
        return checked(fields, Profile, "the model: ")
    if not isinstance(model, (str, os.PathLike)):
        raise InputError(f"model is a {type(model).__name__}: give a name, a config.json, or a Profile or its file")
    text, path = os.fspath(model), Path(model)
    if not text:
        raise InputError("the model's name is empty: give a bundled name, a config.json, or a profile's file")
    if text in BUNDLED:
        return read_architecture(text)
    if text in bundled(Profile) and not path.exists():
        return Profile.load(text)
    if path.is_dir():
        return read_architecture(path)
    if not path.exists():
        if text in bundled(Network):
            raise InputError(f"{text!r} is a bundled network: the model comes first, then the cluster")
        names = [*BUNDLED, *bundled(Profile)]
        advice = "check the path" if os.sep in text else "`backbeat zoo` lists what is bundled"
        raise InputError(f"{text!r} is neither a file nor a bundled model{nearest(text, names)}: {advice}")
    return _of_file(path)


def _of_file(path: Path) -> Profile | Architecture:
    raw = read(path)
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = None
    if isinstance(fields, dict) and "schema" not in fields:
        return read_architecture(path)
    return decode(raw, Profile, where=str(path))


def cluster_named(cluster: ClusterInput, across: Any = None, nics_per_node: int | None = None) -> Network:
    """A network, by its file or name, its nodes joined by another where that is said."""
    network = cluster.network if isinstance(cluster, Cluster) else cluster
    if not isinstance(network, Network):
        network = Network.load(network)
    if across is None:
        if nics_per_node is not None:
            raise InputError(f"nics_per_node is {nics_per_node}: it counts links of across: name what joins the nodes")
        return network
    between = across if isinstance(across, Network) else across_named(across)
    return network.joined_by(between, links=nics_per_node or 1)


def gpu_of(subject: Profile | Architecture, network: Network, cluster: ClusterInput, given: Any) -> Accelerator | None:
    """What computes: the GPU that was named, the network's own, or that of the profile."""
    own = accelerator(subject.device) if isinstance(subject, Profile) else None
    there = accelerator_named(given) if given is not None else cluster.gpu if isinstance(cluster, Cluster) else None
    if there is None and network.accelerator is not None:
        there = accelerator_named(network.accelerator)
    return there or own


def check_fixed(profile: Profile, given: Mapping[str, Any]) -> None:
    """Refuse what a measured profile fixes, asked otherwise."""
    again = f"profile {profile.name!r} fixes it: leave it out, or profile the model again"
    for name, own in (
        ("sequence", profile.sequence_length),
        ("precision", profile.precision),
        ("compile", profile.compiled),
        ("optimizer", profile.optimizer),
        ("lora", None),
    ):
        if name in given and given[name] != own:
            raise InputError(f"{name} is {given[name]!r}, not {own!r}: {again}")
