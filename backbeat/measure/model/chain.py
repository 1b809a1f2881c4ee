"""Which modules of a model are the blocks of its chain, how one forward calls them, and the blocks compiled.

Candidates come from the containers: `Sequential` and `ModuleList` are opened, and so is every module that holds a stack
of repeated layers somewhere inside. What a block's input is, and whether the block writes into it, is seen by running
a forward, never guessed from names.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from backbeat.errors import InputError, nearest

if TYPE_CHECKING:
    from backbeat.measure.model.training_step import Training

_MARK = "_backbeat_block"
COMPILED_NOTE = (
    "torch.compile: each block a graph of its own, and so is what lies between; a block's forward time and activations "
    "are booked on its first gradient"
)
# Compiled blocks of one class share their code, and each of them may need a variant of its own.
_VARIANTS = 256


def block(module: nn.Module) -> nn.Module:
    """Mark a module as one block: it is never opened, and what holds it is. Returns the module."""
    setattr(module, _MARK, True)
    return module


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The candidates by name, in the order in which the model holds them; empty for a model without children."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> None:
        layers = is_stack(module)
        for name, child in module.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            if _opens(child, layers):
                walk(child, f"{prefix}{name}.")
            else:
                found[prefix + name] = child

    walk(model, "")
    return found


def is_container(module: nn.Module) -> bool:
    """Only holds its children: a list or a dict of them, or a `Sequential` that calls one after the other."""
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward and len(module) > 0
    return type(module) is nn.ModuleDict or isinstance(module, nn.ModuleList)


def is_stack(module: nn.Module) -> bool:
    """A container of two or more composite modules of one class, as the layers of a transformer are."""
    if not is_container(module):
        return False
    kinds = Counter(
        type(child) for child in module.children() if not is_container(child) and next(child.children(), None)
    )
    return bool(kinds) and max(kinds.values()) >= 2


def _opens(module: nn.Module, of_a_stack: bool) -> bool:
    if getattr(module, _MARK, False):
        return False
    if is_container(module) or any(getattr(inner, _MARK, False) for inner in module.modules()):
        return True
    # A layer of a stack is a block, whatever it holds itself: the experts of a mixture are not its chain.
    return not of_a_stack and any(is_stack(inner) for inner in module.modules())


def planned_module(
    modules: Mapping[str, nn.Module], where: str, name: str, made_for: str = "another model"
) -> nn.Module:
    """The module that a plan names at `where`. Refuses a name that the model does not have, and a list or a dict of
    modules, which is never called itself."""
    if name not in modules:
        raise InputError(
            f"{where} names {name!r}, which the model does not have{nearest(name, modules)}: the plan was made for "
            f"{made_for}; make one for this model with `backbeat profile` and `backbeat plan`"
        )
    module = modules[name]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        inside = [f"{name}.{child}" for child, _ in module.named_children()][:2]
        raise InputError(
            f"{where} names {name!r}, a {type(module).__name__}, which is never called itself: name its modules"
            + (f", like {' and '.join(inside)}" if inside else "")
        )
    return module


@dataclass(frozen=True)
class BlockCall:
    """How a forward called one block."""

    name: str
    calls: int
    chained: bool
    """Its first tensor is the very output of the block called before it, unchanged in between."""
    changes_input: bool
    """A tensor that entered it has been written into when it returns."""


class BlockHooks(ExitStack):
    """A context that tells where each block's forward begins and ends: subclasses say what to do there.

    Forwards that run inside backward, as those of checkpointed modules do, are backward's work and not told.
    """

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self._blocks = blocks

    def __enter__(self) -> Self:
        for name, module in self._blocks.items():
            self._hook(name, module)
        return self

    def begin(self, name: str, inputs: list[torch.Tensor]) -> None: ...

    def end(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None: ...

    def _hook(self, name: str, module: nn.Module) -> None:
        def begin(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not in_backward():
                self.begin(name, tensors_of((args, kwargs)))

        def end(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not in_backward():
                self.end(name, tensors_of((args, kwargs)), tensors_of(output))

        self.enter_context(module.register_forward_pre_hook(untraced(begin), with_kwargs=True, prepend=True))
        self.enter_context(module.register_forward_hook(untraced(end), with_kwargs=True))


class ChainRecorder(BlockHooks):
    """Builds the links of the forward that runs inside it."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__(blocks)
        self.links: dict[str, BlockCall] = {}
        """In the order of first call."""
        self._versions: list[int] = []
        self._last: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def begin(self, name: str, inputs: list[torch.Tensor]) -> None:
        self._versions = [version_of(tensor) for tensor in inputs]
        chained = bool(inputs) and any(
            reference() is inputs[0] and version == self._versions[0] for reference, version in self._last
        )
        before = self.links.get(name)
        # Where several calls share one name, no single block stands before it.
        self.links[name] = (
            BlockCall(name, 1, chained, changes_input=False)
            if before is None
            else replace(before, calls=before.calls + 1, chained=False)
        )

    def end(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if [version_of(tensor) for tensor in inputs] != self._versions:
            self.links[name] = replace(self.links[name], changes_input=True)
        self._last = [(weakref.ref(tensor), version_of(tensor)) for tensor in outputs]


def observe(blocks: dict[str, nn.Module], forward: Callable[[], Any]) -> tuple[BlockCall, ...]:
    """Run a forward and say how it called the blocks, in the order of first call. Blocks it never called are left out.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 1))
    >>> [(link.name, link.chained, link.changes_input) for link in observe(
    ...     find_blocks(model), lambda: model(torch.zeros(1, 2)))]
    [('0', False, False), ('1', True, True), ('2', True, False)]
    """
    with ChainRecorder(blocks) as recorder:
        forward()
    return tuple(recorder.links.values())


def untraced(hook: Any) -> Any:
    """The hook as torch.compile leaves it alone; nothing is loaded for it where nobody compiles."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested containers, registered classes (model outputs) included, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def in_backward() -> bool:
    """This thread is running a graph task of autograd."""
    return bool(torch._C._current_graph_task_id() != -1)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written into; inference tensors do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def is_compiled(model: torch.nn.Module) -> bool:
    """Compiled by the user, as a whole or in parts, so that hooks do not see its modules."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


@contextmanager
def compiled_blocks(training: Training) -> Iterator[Training]:
    """The same training with every block compiled; the model is as it was afterwards.

    Compiled as a whole, a model is one graph: backward hands over all gradients when it ends, and hooks inside see
    nothing. Here each block is a graph of its own, and so is what lies between blocks (loss included), as DDP cuts a
    compiled model at its buckets to overlap them. Hooks of blocks run between the graphs.
    """
    if is_compiled(training.model):
        raise InputError("the model is compiled already: drop --compile (compile_blocks), or give the plain one")
    blocks = graph_blocks(training.model)
    before = [(block, vars(block).get("forward")) for block in blocks.values()]
    config: Any = torch._dynamo.config
    try:
        with config.patch(recompile_limit=_VARIANTS, accumulated_recompile_limit=4 * _VARIANTS):
            for block in blocks.values():
                block.forward = _cut(torch.compile(block.forward, dynamic=False))  # type: ignore[method-assign]
            yield replace(training, loss=torch.compile(training.loss, dynamic=False))
    finally:
        for block, own in before:
            vars(block).pop("forward", None)
            if own is not None:
                block.forward = own
        torch._dynamo.reset()


def _cut(compiled: Any) -> Any:
    """The compiled forward as the graph around it does not take it in; `disable` unwraps compiled functions."""
    return torch.compiler.disable(lambda *args, **kwargs: compiled(*args, **kwargs))


def graph_blocks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The blocks of the chain; a model that has none is one itself."""
    return find_blocks(model) or {"": model}
