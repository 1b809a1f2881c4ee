"""What runs on every rank: one model trained in each way, by turns.

A *side* is a way to train: `ddp` (torch's own), `tuned` (the same with the bucket size that was fastest of some),
`fsdp2` (torch's `fully_shard` on each layer, as its tutorial has it), `auto` (`parallelize(plan="auto")`), a strategy,
or a sharded strategy with the dtypes of its all-gathers and reduce-scatters, like `sharded:fp32:fp32`. `memory` is
`best` within a budget that holds a share of the activations, `auto_memory` the same by
`parallelize(plan="auto", memory=…)`, `auto_compressed` by `parallelize(plan="auto", compression="allow")`.

`auto` comes first, in a process that has trained nothing. All sides are predicted from the profile and the network that
it measured.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from backbeat.comm.agreement import RankStore
from backbeat.comm.communicators import Communicators
from backbeat.errors import BackbeatError, InputError, where_raised
from backbeat.measure.model.inputs import MeasureOptions
from backbeat.measure.model.launch_bound import LaunchTimes, launch_times
from backbeat.measure.model.profiler import measure as measure_profile
from backbeat.measure.model.training_step import Training, release
from backbeat.model import Mesh, Network, Plan, Prediction, Profile, Sharding, ShardUnit
from backbeat.model.files import decode, encode
from backbeat.model.framework import FRAMEWORKS
from backbeat.planners import SHARDED, STRATEGIES
from backbeat.planners.planned import planned as make_plan
from backbeat.runtime import parallelize
from backbeat.runtime.memory.activations import apply as apply_memory
from backbeat.runtime.parallel import parallelize as verb
from backbeat.runtime.parallel.apply_plan import apply_plan
from backbeat.runtime.parallel.trials import ExampleStep
from backbeat.steps.predict import predict
from validation.training.models import MODELS, Model

OPTIMIZER = "adamw"
WARM_UP = 3
ROUNDS = 4
LEAST_STEPS, MOST_STEPS = 2, 10
CAPS_MB = (1, 5, 10, 25, 50, 100)
"""Bucket sizes that `tuned` tries; DDP's own is 25."""
TUNING_STEPS = 4
MEMORY_SHARE = 0.6
"""Of what activations take, for `memory`."""
OWN = ("ddp", "tuned", "fsdp2", "auto", "memory", "auto_memory", "auto_compressed")
"""Sides that no strategy names."""


def check_side(name: str) -> None:
    strategy, *dtypes = name.split(":")
    if name in OWN or (strategy in STRATEGIES and not dtypes):
        return
    if strategy not in SHARDED or len(dtypes) != 2:
        raise InputError(f"{name!r} is no side: there are {', '.join(OWN)}, strategies, and strategies that shard with "
                         "two dtypes, like sharded:bf16:fp32")  # fmt: skip


@dataclass(kw_only=True)
class Side:
    """One way to train, as built."""

    name: str
    plan: Plan | None
    """What it is predicted by; None where that is not known."""
    build: Callable[[nn.Module], nn.Module]
    profile: Profile | None = None
    """Where it is predicted from another than the others' profile."""
    beside_bytes: int = 0
    """Of the device's memory that its profile holds of other sides."""
    training: Training | None = None
    found: dict[str, Any] = field(default_factory=dict)


class AutoSeen:
    """What `parallelize(plan="auto")` measured and took, kept for predictions."""

    def __init__(self) -> None:
        self.profile: Profile | None = None
        self.network: Network | None = None
        self.taken: Any = None

    def __enter__(self) -> AutoSeen:
        seen = self
        self._kept = verb.ParallelSearch

        class Search(verb.ParallelSearch):
            def _candidates(self, profile: Profile, network: Network, now: Any, *, units: bool = True) -> Any:
                seen.profile, seen.network = profile, network
                return super()._candidates(profile, network, now, units=units)

            def run(self) -> Any:
                seen.taken = super().run()
                return seen.taken

        verb.ParallelSearch = Search  # type: ignore[misc]
        return self

    def __exit__(self, *exception: object) -> None:
        verb.ParallelSearch = self._kept  # type: ignore[misc]


class Rig:
    """One model on this rank, and the ways to train it."""

    def __init__(self, node: Any, model: Model, batch_size: int | None, precision: str) -> None:
        self.model, self.device, self.precision = model, node.device, precision
        world: Any = torch.distributed.group.WORLD
        self.ranks = RankStore(Communicators(world, node.device, 1), "sides")
        # The same weights on every rank, and a batch of its own. On the host, so that what is profiled has the GPU's
        # memory for itself.
        torch.manual_seed(0)
        self.plain = model.build()
        torch.manual_seed(1 + node.rank)
        batch = model.batch(batch_size or model.batch_size, node.device)
        how: dict[str, Any] = {"optimizer": OPTIMIZER, "precision": precision, "device": node.device}
        self.step = ExampleStep(batch=batch, loss=model.loss, **how)

    def copy(self) -> nn.Module:
        """The model, to be trained."""
        return copy.deepcopy(self.plain).to(self.device)

    def auto(self, budget_s: float, **options: Any) -> tuple[nn.Module, AutoSeen, float]:
        began = time.monotonic()
        with AutoSeen() as seen:
            trained = parallelize(
                self.copy(), plan="auto", example=(self.step.batch, self.step.loss), optimizer=OPTIMIZER,
                precision=self.precision, budget_s=budget_s, **options,
            )  # fmt: skip
        return trained, seen, time.monotonic() - began

    @property
    def tutorial_dtype(self) -> str:
        """What FSDP2 gathers. With BatchNorm it raises in bf16, and autocast alone is left."""
        norms = any(isinstance(one, _BatchNorm) for one in self.plain.modules())
        return "bf16" if self.precision == "bf16" and not norms else "fp32"

    def fsdp2(self, model: nn.Module) -> nn.Module:
        """As torch's tutorial: each layer, then the model; mixed precision where training has it."""
        low = self.tutorial_dtype == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
        for name in self.model.block_names(model):
            torch_fully_shard(model.get_submodule(name), mp_policy=policy)
        torch_fully_shard(model, mp_policy=policy)
        return model

    def training(self, trained: nn.Module) -> Training:
        return self.step.training(trained, self.step.make_optimizer(trained))

    def seconds(self, training: Training, steps: int) -> list[float]:
        """From the beginning of each step to that of the next, without waiting in between: as training runs."""
        clock = training.clock
        clock.reserve(5 * steps + 1)
        marks = [*(training.iterate().begin for _ in range(steps)), clock.mark()]
        clock.synchronize()
        return [clock.between(*pair) for pair in pairwise(marks)]

    def peak_bytes(self, training: Training) -> int:
        """Most that is allocated in one step, by this side and what was there before; 0 on a CPU."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.seconds(training, 1)
        return torch.cuda.max_memory_allocated(self.device) if on_gpu else 0

    @property
    def batch_bytes(self) -> int:
        return sum(one.nbytes for one in tree_leaves(self.step.batch) if isinstance(one, torch.Tensor))

    def slowest(self, seconds: list[float]) -> float:
        """The median step of the slowest rank."""
        return float(max(self.ranks.gather(median(seconds))))

    def fastest_cap(self) -> tuple[int, dict[str, float]]:
        """The bucket size of torch's DDP that is fastest, in MiB; and a step with each."""
        found = {}
        for cap in CAPS_MB:
            training = self.training(ddp(self.copy(), cap))
            self.seconds(training, WARM_UP)
            found[str(cap)] = self.slowest(self.seconds(training, TUNING_STEPS))
            del training
            release(self.device)
        return int(min(found, key=lambda cap: found[cap])), found


def ddp(model: nn.Module, cap_mb: int | None = None) -> nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap_mb)


def planned(name: str, profile: Profile, network: Network) -> Plan:
    """The plan of a strategy, with the dtypes that the side names."""
    if name == "memory":
        return make_plan(profile, network, "best", memory_bytes=memory_budget(profile))
    strategy, *dtypes = name.split(":")
    choices: dict[str, Any] = {}
    if strategy == "sharded":
        choices["torch_version"] = ".".join(torch.__version__.split(".")[:2])
    if not dtypes:
        return make_plan(profile, network, strategy, **choices)
    plan = make_plan(profile, network, strategy, reduce_dtype=dtypes[1], **choices)
    assert plan.sharding is not None
    sharding = msgspec.structs.replace(plan.sharding, param_dtype=dtypes[0])
    return msgspec.structs.replace(plan, sharding=sharding, predicted=None)


def memory_budget(profile: Profile) -> int:
    """Bytes that hold MEMORY_SHARE of the activations."""
    held = profile.memory
    if held is None or not held.peak_bytes:
        raise InputError(f"{profile.name} has no peak of memory: there is no budget to plan for")
    # The wrapper's buckets hold every gradient all the time.
    whole = held.steady_bytes + profile.total_bytes
    return int(whole + MEMORY_SHARE * (held.peak_bytes - held.steady_bytes))


def tutorial_plan(names: Sequence[str], dtype: Any, profile: Profile, network: Network) -> Plan:
    """What FSDP2's tutorial does, as a plan: a unit a layer, gathered in this dtype and resharded after forward."""
    sharding = Sharding(
        mesh=Mesh(replicate=1, shard=network.workers), param_dtype=dtype, reduce_dtype="fp32",
        reduce_scatter_buffers=1, separate_reduce_scatter=False,
        units=tuple(ShardUnit(modules=(name,), reshard=True, prefetch=0) for name in names),
    )  # fmt: skip
    return msgspec.structs.replace(make_plan(profile, network, "fsdp"), sharding=sharding, predicted=None)


def measure(
    node: Any, *, model: str, batch_size: int | None, precision: str, sides: Sequence[str], seconds: float,
    budget_s: float,
) -> dict[str, Any] | None:  # fmt: skip
    """All sides of one model: what rank 0 knows; None from the others."""
    # What an earlier model left: wrapped models hold themselves.
    release(node.device)
    began = time.monotonic()
    rig = Rig(node, MODELS[model], batch_size, precision)
    trained, seen, search_s = rig.auto(budget_s)
    profile, network = _shared(rig.ranks, seen.profile, Profile), _shared(rig.ranks, seen.network, Network)
    plan = seen.taken.plan
    told = {"search_s": search_s, "words": seen.taken.words}
    built = [Side(name="auto", plan=plan, build=lambda _: trained, found=told)]
    for name in sides:
        built += [_side(name, rig, profile, network, budget_s)] if name != "auto" else []
    running = [one for one in built if _started(one, rig) and one.name in sides]
    expected_s = {one.name: rig.slowest(rig.seconds(one.training, 2)) for one in running if one.training is not None}
    turns: dict[str, list[float]] = {one.name: [] for one in running}
    for turn in range(ROUNDS):
        for one in running if turn % 2 == 0 else running[::-1]:
            assert one.training is not None
            steps = min(max(round(seconds / ROUNDS / expected_s[one.name]), LEAST_STEPS), MOST_STEPS)
            # Not timed: the first step after another side's.
            taken = rig.seconds(one.training, steps + 1)[1:]
            turns[one.name].append(rig.slowest(taken))
    for one in running:
        assert one.training is not None
        if one.training.clock.asynchronous:
            # What the host takes to issue a step, the device being idle: whether it could set the pace.
            usual = LaunchTimes.each(median, launch_times(one.training, rig.ranks.wait_for_others))
            one.found["host_s"] = max(rig.ranks.gather(usual.iteration_s))
        with torch.no_grad():
            one.found["loss"] = sum(rig.ranks.gather(float(one.training.plain_loss()))) / rig.ranks.size
    cases = [_case(one, turns.get(one.name, []), profile, network) for one in built if one.name in sides]
    rig.ranks.communicators.close()
    if node.rank != 0:
        return None
    return {
        "model": model, "batch_size": batch_size or MODELS[model].batch_size, "precision": precision,
        "took_s": time.monotonic() - began, "profile": encode(profile), "network": msgspec.to_builtins(network),
        "sides": cases,
    }  # fmt: skip


def _side(name: str, rig: Rig, profile: Profile, network: Network, budget_s: float) -> Side:
    """Not yet built; with its error where there is no plan."""
    if name in ("auto_memory", "auto_compressed"):
        own_budget = memory_budget(profile) if name == "auto_memory" else None
        return _searched(name, rig, budget_s, own_budget, **({} if own_budget else {"compression": "allow"}))
    if name == "ddp":
        return Side(name=name, plan=make_plan(profile, network, "ddp"), build=ddp)
    if name == "tuned":
        best, caps = rig.fastest_cap()
        plan = make_plan(profile, network, "ddp", bucket_bytes=best * 2**20)
        return Side(name=name, plan=plan, build=lambda model: ddp(model, best), found={"caps_s": caps, "cap_mb": best})
    if name == "fsdp2":
        plan = tutorial_plan(rig.model.block_names(rig.plain), rig.tutorial_dtype, profile, network)
        return Side(name=name, plan=plan, build=rig.fsdp2)
    own = _with_memory(rig) if name == "memory" else None
    text, error = None, None
    try:
        text = encode(planned(name, own or profile, network)).decode() if rig.ranks.rank == 0 else None
    except BackbeatError as raised:
        error = str(raised)
    text, error = rig.ranks.from_rank_0([text, error])
    if text is None:
        return Side(name=name, plan=None, build=ddp, found={"error": error})
    made = decode(text.encode(), Plan, where="rank 0's plan")
    return Side(name=name, plan=made, profile=own, build=lambda model: apply_plan(model, made))


def _searched(name: str, rig: Rig, budget_s: float, memory_bytes: int | None = None, **options: Any) -> Side:
    """`parallelize` with these options, which searches when the side is built."""
    side = Side(name=name, plan=None, build=ddp)

    def build(model: nn.Module) -> nn.Module:
        if memory_bytes is not None:
            # The other sides' stays beside it here, and not in training. A budget is the same on every rank.
            side.beside_bytes = max(0, *rig.ranks.gather(allocated_bytes(rig.device) - rig.batch_bytes))
            options["memory"] = memory_bytes + side.beside_bytes
        trained, seen, search_s = rig.auto(budget_s, **options)
        side.plan, side.profile = seen.taken.plan, _shared(rig.ranks, seen.profile, Profile)
        side.found |= {"search_s": search_s, "words": seen.taken.words, "options": options}
        return trained

    side.build = build
    return side


def _with_memory(rig: Rig) -> Profile:
    """A profile with what recomputing and offloading cost."""
    before = max(allocated_bytes(rig.device) - rig.batch_bytes, 0)
    model = rig.copy()
    options = MeasureOptions(
        optimizer=rig.step.make_optimizer(model), precision=rig.precision, iterations=8, warmup=3, time_limit_s=5.0,
        accept_noise=True, apply_memory=apply_memory, ranks=rig.ranks,
    )  # fmt: skip
    found = measure_profile(model, rig.step.batch, rig.step.loss, options).profile
    held = found.memory
    if held is not None:
        # What `auto` has built stays beside it here, and not in training.
        less = {name: getattr(held, name) - before for name in ("steady_bytes", "peak_bytes")}
        # Nodes that share a GPU share its link to the host.
        link = found.host_link and found.host_link.shared_by(rig.ranks.size)
        found = msgspec.structs.replace(found, memory=msgspec.structs.replace(held, **less), host_link=link)
    return _shared(rig.ranks, found, Profile)


def _started(side: Side, rig: Rig) -> bool:
    """Build it and warm it up; what fails on one rank is left out on all."""
    if "error" in side.found:
        return False
    error = None
    release(rig.device)
    before = allocated_bytes(rig.device)
    try:
        side.training = rig.training(side.build(rig.copy()))
        rig.seconds(side.training, WARM_UP - 1)
        peak = rig.peak_bytes(side.training)
    except Exception as raised:
        error = where_raised(raised)
    found = rig.ranks.failure(error)
    if found is not None:
        side.found["error"], side.training = found, None
        release(rig.device)
    elif rig.device.type == "cuda" and side.name != "auto":
        # What is allocated before is the other sides'; `auto` was built before any.
        side.found["peak_bytes"] = max(rig.ranks.gather(peak - before + rig.batch_bytes))
    return found is None


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def predict_side(profile: Profile, network: Network, plan: Plan) -> Prediction:
    """`ddp` and `tuned` are torch's own DDP, which adds nothing to a step that backbeat's wrapper does."""
    return predict(profile, network, plan, reduction=FRAMEWORKS["torch"] if plan.strategy == "ddp" else None)


def _case(side: Side, turns: list[float], profile: Profile, network: Network) -> dict[str, Any]:
    case: dict[str, Any] = {"side": side.name, **side.found, "turns_s": turns}
    if side.plan is None:
        return case
    case["plan"] = msgspec.to_builtins(side.plan)
    try:
        prediction = predict_side(side.profile or profile, network, side.plan)
        case |= {"predicted_s": prediction.iteration_s, "bound_s": prediction.bound_s}
        if prediction.peak_bytes is not None:
            case["predicted_peak_bytes"] = prediction.peak_bytes - side.beside_bytes
    except BackbeatError as error:
        case["not_predicted"] = str(error)
    return case


def _shared(ranks: RankStore, value: Any, kind: Any) -> Any:
    """Rank 0's."""
    text = ranks.from_rank_0(encode(value).decode() if ranks.rank == 0 else None)
    return decode(text.encode(), kind, where="rank 0's")
