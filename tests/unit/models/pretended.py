"""A GPU that is none: tensors that say they are on `cuda:0`, and are computed on the CPU.

Like a real one it refuses to compute with tensors that are still on the CPU, so code that forgets to move one fails
here too. Numbers, kernels, memory and speed are the CPU's: of those only a real GPU tells.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

INDEXES = {Tensor.__getitem__, Tensor.__setitem__}  # what is there may be indexed from the CPU
ANSWERS = {Tensor.device.__get__: GPU, Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}
CROSSES = {Tensor.copy_, Tensor.data.__set__, torch._has_compatible_shallow_copy_type}
_move, _apply, _run = Tensor.to, nn.Module._apply, Thread.run


class OnGpu(Tensor):
    """A tensor on the CPU that denies it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in ANSWERS:
            return ANSWERS[function]
        if function is Tensor.__deepcopy__:
            return _copied(*args)
        if function in (Tensor.cpu, Tensor.numpy, Tensor.tolist):
            assert function is not Tensor.numpy, "numpy() is for tensors on the CPU"
            return function(_plain(args[0]))
        if function is Tensor.backward:  # what autograd saved and hands back is plain
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        indexes = function in INDEXES and isinstance(args[0], cls)
        if not indexes and function not in CROSSES:
            _each(_refuse, (args, kwargs))
        if kwargs.get("device") is not None:
            wanted = torch.device(kwargs["device"])
            made = function(*_each(_plain, args), **_each(_plain, kwargs) | {"device": CPU})
            return _each(_there, made) if wanted.type == GPU.type else made
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        return result if function in CROSSES else _each(_there, result)


def _there(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, OnGpu) else tensor.as_subclass(OnGpu)


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor) if isinstance(tensor, OnGpu) else tensor


def _refuse(tensor: Tensor) -> Tensor:
    """A number without dimensions may come from the CPU, as to a real GPU."""
    if not isinstance(tensor, OnGpu) and tensor.ndim:
        raise RuntimeError(f"expected all tensors on {GPU}, found one of shape {tuple(tensor.shape)} on the CPU")
    return tensor


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        memo[id(tensor)] = copied = _there(_plain(tensor).detach().clone()).requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            copied._is_param = True
        if tensor.grad is not None:
            copied.grad = tensor.grad.clone()
    made: Tensor = memo[id(tensor)]
    return made


def _each(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Of all tensors in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _each(change, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        changed = [_each(change, each) for each in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return value


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, which any thread may call."""
    asked = {"device": None, "dtype": None} | kwargs
    for each in args:
        if isinstance(each, Tensor):
            asked |= {"device": each.device, "dtype": each.dtype}
        elif isinstance(each, str | torch.device):
            asked["device"] = torch.device(each)
        elif isinstance(each, torch.dtype):
            asked["dtype"] = each
    there = isinstance(tensor, OnGpu)
    if asked["device"] is not None:
        there = torch.device(asked["device"]).type == GPU.type
    if not isinstance(tensor, OnGpu) and not there:
        return _move(tensor, *args, **kwargs)
    moved = _plain(tensor) if asked["dtype"] is None else _move(_plain(tensor), asked["dtype"])
    return _there(moved) if there else moved


def _applied(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply`, which `Module.to` is made of: parameters that moved stay the objects that they are."""
    _apply(module, function, recurse)
    if isinstance(function(torch.empty(0)), OnGpu):
        for parameter in module.parameters():
            if not isinstance(parameter, OnGpu):
                parameter.__class__, parameter._is_param = OnGpu, True
    return module


class _Mode(TorchFunctionMode):
    """What is made there from nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = None if function is torch._C._nn._parse_to else kwargs.get("device")  # that only reads arguments
        if device is None or torch.device(device).type != GPU.type or any(issubclass(each, OnGpu) for each in types):
            return function(*args, **kwargs)
        return _each(_there, function(*args, **{**kwargs, "device": CPU}))


def _ran(thread: Thread) -> None:
    """A mode is one thread's."""
    with _Mode():
        _run(thread)


CUDA = {"is_available": True, "is_bf16_supported": True, "memory_allocated": 0, "max_memory_allocated": 1 << 20}
CUDA |= {"synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None}
CUDA |= {"get_device_properties": SimpleNamespace(name="Pretended", total_memory=1 << 30, major=9, minor=0)}


@contextmanager
def gpu() -> Iterator[torch.device]:
    """While it is there, tensors and models move to it by `.to`, tied weights and all."""
    answers = {name: mock.Mock(return_value=value) for name, value in CUDA.items()}
    with (
        mock.patch.object(Tensor, "to", _to),
        mock.patch.object(nn.Module, "_apply", _applied),
        mock.patch.object(Thread, "run", _ran),
        mock.patch.multiple("torch.cuda", **answers),
        _Mode(),
    ):
        yield GPU
