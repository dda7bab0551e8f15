"""A simulated CUDA device. Its tensors report cuda:0, keep their values on the CPU, and do not mix with CPU tensors.

It finds tensors on the wrong device, mismatched dtypes and host-device synchronizations; it counts memory and can run
out of it. It does not cover kernels, streams or CUDA's rounding: each op computes what the CPU op does.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import softpick
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import qbench

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
GIB = 2**30
aten = torch.ops.aten
OUR_FOLDERS = [Path(str(package.__file__)).parent for package in (qbench, softpick)]

MOVES = {aten.copy_.default, aten.copy.default, aten._to_copy.default}  # between devices
# Indices of these may be on the CPU; a mask, or a CPU index, makes the host wait.
INDEX = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
# The host waits for a value, or for how many there are.
WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten._linalg_check_errors.default,
}
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.addmm_.default, aten.baddbmm.default}


class PretendedCuda:
    """What happened on the simulated device."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.syncs: Counter[str] = Counter()  # by what made the host wait, and where in our code
        self.asked: Counter[str] = Counter()  # functions of torch.cuda
        self.allocated = self.peak = self.allocations = 0
        self.fail: Callable[[int, int], bool] = lambda number, size: False  # given an allocation's number and bytes
        self._known: dict[int, int] = {}  # bytes of live storages

    def sync(self, what: str) -> None:
        """The host waits for the device."""
        self.syncs[f"{what} in {_our_line()}"] += 1

    def allocate(self, tensor: Tensor) -> None:
        """Count a new storage until it is released."""
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), storage._cdata
        if address in self._known or not size:
            return
        self.allocations += 1
        if self.fail(self.allocations, size) or self.allocated + size > self.memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self._known[address] = size
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def release(self, address: int) -> None:
        """The last tensor of a storage is gone."""
        self.allocated -= self._known.pop(address, 0)


_current: PretendedCuda | None = None

# Before a copy, torch asks the guard of the device type for the current device. A CPU build has none for CUDA.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {c10::DeviceType::CUDA, 0}; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
"""


def register_guard(folder: Path) -> None:
    """Register a guard with torch; compiles it into the folder if it is not there yet (3 s of g++)."""
    if torch.backends.cuda.is_built():
        torch._C._ensureCUDADeviceGuardSet()
        return
    library = folder / f"guard-{torch.__version__}.so"
    if not library.exists():
        own, torch_folder = folder / str(os.getpid()), Path(torch.__file__).parent
        own.with_suffix(".cpp").write_text(GUARD)
        command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder}/include", f"{own}.cpp", "-o", str(own)]
        subprocess.run([*command, f"-L{torch_folder}/lib", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"], check=True)
        own.rename(library)  # atomic: several processes may compile it
    ctypes.CDLL(str(library))


class OnCuda(torch.Tensor):
    """A tensor on the device; `elem` has its values."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> "OnCuda":
        options = {"dtype": elem.dtype, "layout": elem.layout, "device": CUDA}
        strides = {"strides": elem.stride(), "storage_offset": elem.storage_offset()}
        new = torch.Tensor._make_wrapper_subclass(cls, elem.size(), **strides, **options)
        new.elem = elem
        if _current is not None:
            _current.allocate(elem)
            _hold(elem, _current)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnCuda":
        return memo.setdefault(id(self), OnCuda(self.elem.clone()))

    def tolist(self) -> Any:
        _device().sync("tolist")
        return self.elem.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def untyped_storage(self) -> Any:
        return self.elem.untyped_storage()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_holders: dict[int, int] = {}  # how many tensors of each storage there are


def _hold(elem: Tensor, device: PretendedCuda) -> None:
    address = elem.untyped_storage()._cdata
    _holders[address] = _holders.get(address, 0) + 1

    def gone() -> None:
        _holders[address] -= 1
        if not _holders[address]:
            del _holders[address]
            device.release(address)

    weakref.finalize(elem, gone).atexit = False


def _device() -> PretendedCuda:
    assert _current is not None, "a tensor outlived its simulated device"
    return _current


def _our_line() -> str:
    """The innermost line of qbench or softpick that runs. Not by a folder's name: a clone has it too."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        for folder in OUR_FOLDERS:
            if path.is_relative_to(folder):
                return f"{path.relative_to(folder)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _leaves(value: Any) -> Iterator[Any]:
    """The values in nested tuples, lists and dictionaries; torch's pytree takes four times as long."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)([_map(function, item) for item in value])
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    return function(value)


REPLACED: dict[Any, Callable[..., Any]] = {}  # ops without a CPU kernel: what computes them


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = list(_leaves((args, kwargs)))
    ours = [t for t in leaves if isinstance(t, OnCuda)]
    on_cpu = [t for t in leaves if isinstance(t, Tensor) and t.device.type == "cpu"]
    wanted = next((x for x in leaves if isinstance(x, torch.device)), None)
    _check_devices(func, args, ours, on_cpu)
    if func in MOVES:
        source = args[0] if func is aten._to_copy.default else args[1]
        result_on_cuda = wanted.type == "cuda" if wanted is not None else isinstance(args[0], OnCuda)
        if result_on_cuda != isinstance(source, OnCuda):
            _count_move(result_on_cuda, source, args, kwargs)
    else:
        result_on_cuda = wanted.type == "cuda" if wanted is not None else bool(ours)
        if ours and _waits(func, args):
            _device().sync(str(func))
    own, named = _map(_values, (args, kwargs))
    result = REPLACED.get(func, func)(*own, **named)

    def wrap(value: Any) -> Any:
        if type(value) is not Tensor or not result_on_cuda:
            return value
        same = [t for t in ours if t.elem is value]  # of an op in place
        return same[0] if same else OnCuda(value)

    return _map(wrap, result)


def _values(x: Any) -> Any:
    if isinstance(x, OnCuda):
        return x.elem
    return CPU if isinstance(x, torch.device) and x.type == "cuda" else x


def _check_devices(func: Any, args: Any, ours: list[OnCuda], on_cpu: list[Tensor]) -> None:
    """As with CUDA: tensors on two devices can be mixed only if one is a number, an index, or copied."""
    strangers = [t for t in on_cpu if t.dim()]
    if func in INDEX:
        strangers = [t for t in strangers if not any(t is index for index in args[1])]
    if ours and strangers and func not in MOVES:
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu"
        )
    if ours and func in PRODUCTS and not ours[0].is_floating_point():
        raise NotImplementedError(f'"{func}" not implemented for {ours[0].dtype} on CUDA')


def _waits(func: Any, args: Any) -> bool:
    if func in INDEX:
        indices = [t for t in args[1] if isinstance(t, Tensor)]
        masks = any(t.dtype in (torch.bool, torch.uint8) for t in indices)
        one_value = func is not aten.index.Tensor and args[2].numel() == 1  # CUDA fills these without counting
        return (masks and not one_value) or any(not isinstance(t, OnCuda) for t in indices)
    return func in WAITS


def _count_move(to_cuda: bool, source: Tensor, args: Any, kwargs: dict[str, Any]) -> None:
    """The host does not wait only for a non-blocking copy from pinned memory."""
    background = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
    if not (background and getattr(source if to_cuda else args[0], "pretends_pinned", False)):
        _device().sync("copy to the device" if to_cuda else "copy to the host")


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Function(TorchFunctionMode):
    """What never reaches the dispatcher: device names without a number, pinned memory, streams."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            args[0].pretends_pinned = True
            return args[0]
        if name == "record_stream":
            return None
        kwargs = {key: _numbered(value) for key, value in (kwargs or {}).items()}
        return func(*map(_numbered, args), **kwargs)


def _numbered(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CUDA
    return CUDA if isinstance(value, str) and value in ("cuda", "cuda:0") else value


@contextlib.contextmanager
def pretend(memory: int = 80 * GIB, capability: tuple[int, int] = (8, 0)) -> Iterator[PretendedCuda]:
    """A machine with one GPU with this much memory. Gradients are off: autograd needs a device with streams."""
    global _current
    device = PretendedCuda(memory)
    answers: dict[str, Callable[[], Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda: capability,
        "get_device_name": lambda: "pretended",
        "mem_get_info": lambda: (memory - device.allocated, memory),
        "memory_reserved": lambda: device.allocated,
        "memory_allocated": lambda: device.allocated,
        "max_memory_allocated": lambda: device.peak,
        "get_device_properties": lambda: SimpleNamespace(total_memory=memory, major=capability[0], minor=capability[1]),
    }
    answers |= dict.fromkeys(("_lazy_init", "set_device", "reset_peak_memory_stats", "empty_cache"), lambda: None)
    answers |= {"synchronize": lambda: device.sync("torch.cuda.synchronize")}

    def ask(name: str) -> Callable[..., Any]:
        def answer(*_: Any, **__: Any) -> Any:
            device.asked[name] += 1
            return answers[name]()

        return answer

    with contextlib.ExitStack() as stack:
        for name in answers:
            stack.enter_context(mock.patch.object(torch.cuda, name, ask(name)))
        for name in ("device", "Event", "current_stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.MagicMock()))
        # Wrappers do not support inference tensors; libraries may already have decorated functions with that mode.
        for name in ("__enter__", "__exit__"):
            stack.enter_context(mock.patch.object(torch.inference_mode, name, return_value=None))
        # nn.Module.to sets .data, which wrappers do not support, so it makes new parameters.
        future = torch.__future__
        stack.callback(future.set_overwrite_module_params_on_conversion, False)
        future.set_overwrite_module_params_on_conversion(True)
        # torch.tensor(…, device="cuda"): made on the CPU, then copied.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(torch.no_grad())
        stack.enter_context(_Function())
        stack.enter_context(_Dispatch())
        _current = device
        try:
            yield device
        finally:
            _current = None
