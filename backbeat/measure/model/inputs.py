"""What the profiler was given, checked before it costs time: options, the model, the device and the batch, and in a
first iteration the loss, the optimizer, and which parameters get gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from backbeat.errors import InputError, MeasurementError, MissingPartError, where_raised
from backbeat.measure.model.launch_bound import ApplyMemory
from backbeat.measure.model.training_step import Training, is_out_of_memory
from backbeat.model.checks import at_least
from backbeat.model.profile import Dtype

if TYPE_CHECKING:
    from backbeat.comm.agreement import RankStore

_DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

MeasureTopK = Callable[[Training, int], tuple[float, float] | None]
"""Seconds of top-k per byte and per bucket, given the bytes of all gradients; None where memory is too short.
`backbeat.runtime.compressed.topk_speed.measure_topk`: measuring knows no runtime, so callers that have one hand it
in."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """How a model is measured, and what its profile says of it."""

    optimizer: torch.optim.Optimizer | str | None = None
    """`sgd` (with momentum), `adam` or `adamw` by name; `sgd` unless said. Of a factory, where it returns none."""
    precision: str = "fp32"
    device: str | torch.device | None = None
    """Where the model is unless said; a factory's model, on a GPU if there is one."""
    iterations: int = 30
    warmup: int = 10
    accumulation: int = 1
    """Micro-batches of one iteration."""
    batch_size: int | None = None
    """Samples of a micro-batch: as many as its first tensor has rows unless said."""
    name: str | None = None
    model_name: str | None = None
    time_limit_s: float | None = None
    """Fewer iterations (8 at least) where they would take longer."""
    accept_noise: bool = False
    """A measurement on a busy machine (`noise` says when) gets a note; otherwise it is refused."""
    compile_blocks: bool = False
    """Run every block under `torch.compile`, as `backbeat profile --compile` does."""
    keep: bool = True
    """Put the model back as it was, which takes copies."""
    command: str | None = None
    notes: Iterable[str] = ()
    topk_speed: MeasureTopK | None = None
    """Without it the profile does not say what top-k costs. `backbeat profile` hands it in, as the next."""
    apply_memory: ApplyMemory | None = None
    """Without it the profile does not say what recomputation costs the host of a GPU."""
    ranks: RankStore | None = None
    """Where several measure at once, they begin each series of iterations together, as the steps of training do: what
    they share, like a device or a host, is then shared alike. No rank waits long for one that does not
    come."""
    brief: bool = False
    """For a job that waits: the time limit may lower the number of all iterations to 9, and FLOPs are left out."""

    def __post_init__(self) -> None:
        for field in ("iterations", "warmup", "accumulation"):
            at_least(field, getattr(self, field), 1)


def check_model(model: object) -> None:
    """Refuse what cannot be profiled as one worker's model."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"the model is a {type(model).__name__}: it must be a torch.nn.Module")
    kind = type(model).__name__
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) or kind == "FullyShardedDataParallel":
        raise InputError(f"the model is wrapped in {kind}: profile the module inside it, on one worker (model.module)")
    if any(torch.nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise InputError("the model has lazy parameters without a shape: run one forward before profiling it")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise InputError(f"the model is spread over {', '.join(sorted(devices))}: profile a model on one device")


def trainable_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that get gradients; refuses a model without any."""
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not found:
        raise InputError("no parameter of the model has requires_grad: there are no gradients to time; unfreeze some")
    return found


def device_of(model: torch.nn.Module, device: str | torch.device | None) -> torch.device:
    """Where to measure: the device asked for, or the one the model is on."""
    if device is None:
        first = next(model.parameters(), None)
        where = torch.device("cpu") if first is None else first.device
    else:
        where = parse_device(device)
    if where.type == "meta":
        raise InputError("the model is on the meta device: give device='cpu' or 'cuda' and real weights, or --analytic")
    if str(where) == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())
    return where


def kept_random(device: torch.device) -> AbstractContextManager[None]:
    """Restores torch's random generators, the host's and those of a device that `device_of` found."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def parse_device(device: str | torch.device) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError:
        raise InputError(f"device is {device!r}: it must be cpu, cuda or cuda:N") from None
    if where.type not in ("cpu", "cuda"):
        raise InputError(f"device is {str(device)!r}: profiles are measured on cpu or cuda")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise MissingPartError(
                f"device {device}: this PyTorch ({torch.__version__}) sees no CUDA device; use --device cpu, "
                "install a CUDA build and driver, or compute the profile with --analytic"
            )
        if where.index is not None and where.index >= torch.cuda.device_count():
            raise InputError(f"device {device}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return where


def check_loss(loss: object) -> None:
    """Whatever `loss(model, batch)` returned must be something backward can start from."""
    if not isinstance(loss, torch.Tensor):
        hint = "; return its .loss" if isinstance(getattr(loss, "loss", None), torch.Tensor) else ""
        raise InputError(f"loss(model, batch) returned a {type(loss).__name__}: it must return one tensor{hint}")
    if loss.numel() != 1:
        raise InputError(
            f"loss(model, batch) returned a tensor of shape {tuple(loss.shape)}: backward starts from one number; "
            "take its .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise InputError(
            "loss(model, batch) needs no gradient: nothing trains; "
            "check that some parameter has requires_grad and that no torch.no_grad() or .detach() cuts it off"
        )


@dataclass(frozen=True)
class Gradients:
    """What backward gave gradients to, and what it did not."""

    names: list[str]
    parameters: list[torch.nn.Parameter]
    sizes: list[int]
    frozen: list[str]
    unused: list[str]

    @property
    def dtype(self) -> Dtype:
        """What most of their bytes are in; a gradient has its parameter's dtype."""
        bytes_in: Counter[Dtype] = Counter()
        for parameter, size in zip(self.parameters, self.sizes, strict=True):
            bytes_in[_DTYPES.get(parameter.dtype, "fp32")] += size
        return max(bytes_in, key=lambda name: bytes_in[name], default="fp32")

    @property
    def left_out(self) -> list[str]:
        """Notes on the parameters that are not among them."""
        kinds = {"frozen": self.frozen, "got no gradient": self.unused}
        return [f"left out, {why}: {', '.join(names)}" for why, names in kinds.items() if names]


def first_iteration(training: Training) -> Gradients:
    """Run forward, backward and update once. An error says what of it the user has to mend."""
    model = training.model
    training.optimizer.zero_grad(set_to_none=True)
    loss = _user_code("loss(model, batch)", training.plain_loss)
    check_loss(loss)
    _user_code("backward", training.scaled(loss).backward)
    del loss
    names, parameters, sizes, frozen, unused = [], [], [], [], []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if not parameter.requires_grad:
            frozen.append(name)
        elif gradient is None:
            unused.append(name)
        elif gradient.layout != torch.strided:
            raise InputError(
                f"the gradient of {name} is sparse: all-reduce carries dense gradients; "
                "build its embedding with sparse=False, or exclude it from data-parallel synchronisation"
            )
        else:
            names.append(name)
            parameters.append(parameter)
            sizes.append(gradient.nbytes)
    if not names:
        raise InputError("backward gave no parameter a gradient: the loss does not depend on the model's parameters")
    _user_code("the optimizer", training.update)
    return Gradients(names, parameters, sizes, frozen, unused)


def _user_code(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, (InputError, MeasurementError)):
            raise
        raise InputError(f"{what} raised {where_raised(error)}") from error


def map_batch(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with everything in it changed; containers keep their types, apart from those of `dict`."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_batch(item, change) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_batch(item, change) for item in batch)
    if isinstance(batch, dict) and not hasattr(batch, "to"):
        return {key: map_batch(item, change) for key, item in batch.items()}
    return change(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all that can move on the device."""
    return map_batch(batch, lambda item: item.to(device) if callable(getattr(item, "to", None)) else item)


def tensors_in(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return [tensor for item in batch for tensor in tensors_in(item)]
    return []


def samples_in(batch: Any) -> int | None:
    """The length of the first tensor that has one."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.dim() > 0 and tensor.shape[0]), None)


def sequence_length(batch: Any) -> int | None:
    """Tokens in one sample: the width of `input_ids`, or of a batch that begins with a matrix of integers.

    >>> sequence_length((torch.zeros(8, 512, dtype=torch.long), torch.zeros(8)))
    512
    >>> sequence_length((torch.zeros(8, 3, 32, 32), torch.zeros(8, 512, dtype=torch.long))) is None
    True
    """
    found = tensors_in(batch)
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        found = [batch["input_ids"]]
    if not found or found[0].dim() != 2 or found[0].dtype not in (torch.int64, torch.int32):
        return None
    return int(found[0].shape[1]) or None
