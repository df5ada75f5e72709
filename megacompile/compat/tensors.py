"""Tensors and the devices that hold them."""

from __future__ import annotations

import functools
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from megacompile.compat.patches import replace
from megacompile.host_memory import available_bytes

_C: Any = torch._C  # its stubs leave these out

# For subclasses that only dispatch.
NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl


def storage_key(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share memory; valid while one of them lives."""
    return hash(StorageWeakRef(tensor.untyped_storage()))


def wrapper(cls: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> Any:
    """A wrapper subclass without data: shape, strides and dtype of `like`, on `device`."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=0,
        dtype=like.dtype,
        device=device,
        requires_grad=like.requires_grad,
    )


def is_wrapper_class(cls: type) -> bool:
    """True for a wrapper subclass: its tensors can be flattened and unflattened."""
    return issubclass(cls, torch.Tensor) and is_traceable_wrapper_subclass_type(cls)


def flatten_wrapper(tensor: Any) -> tuple[list[str], Any]:
    """(names of a wrapper's inner tensors, context for `__tensor_unflatten__`)."""
    names, context = tensor.__tensor_flatten__()
    return list(names), context


# `torch.inference_mode(False)` in C: a signal that raises does not leave the mode changed.
outside_inference_mode: Callable[[], AbstractContextManager[None]] = functools.partial(
    _C._InferenceMode, False
)


def storage_users(tensor: torch.Tensor) -> int:
    """Number of tensors that share this tensor's storage, itself included."""
    storage = tensor.untyped_storage()
    # one user is `storage` itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def storage_uses(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """Use count of each storage: tensors that share it, and these objects."""
    return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]


def dense_strides(shape: Sequence[Any], order: Iterable[int]) -> tuple[Any, ...]:
    """Strides of a tensor without gaps, with dimensions in `order`, innermost first."""
    found: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in order:
        found[dim] = step
        step = step * shape[dim]
    return tuple(found)


# The tensor classes that have memory and override nothing.
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def tensor_guards(examples: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """A predicate in C: true if tensors match these one by one, as Dynamo's guards check: class,
    dtype, device, shape, strides, layout, requires_grad."""
    if not examples:
        return lambda tensors: not tensors
    new: Any = torch._C._dynamo.guards.TensorGuards  # its stub has other lists
    guards = new(
        *examples,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in examples],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in examples],
    )
    return lambda tensors: bool(guards.check(*tensors))


def is_alone(tensor: torch.Tensor) -> bool:
    """True if a dense tensor fills its storage, and no other tensor shares it."""
    return storage_users(tensor) == 1 and tensor.untyped_storage().nbytes() == tensor.nbytes


# Number of in-place changes of a tensor's memory, through any of its views.
version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


# The base of a view, for autograd; None for a tensor that is no view.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")


# The user's hooks of a parameter: `register_hook`, and `register_post_accumulate_grad_hook`.
gradient_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")
post_accumulate_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)

# A context in which torch treats tensor subclasses of this thread as plain tensors.
without_torch_function: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunctionSubclass

# False in `without_torch_function`, for this thread.
torch_function_enabled: Callable[[], bool] = _C._is_torch_function_enabled

# The state of this thread's `__torch_function__`; `NO_SUBCLASSES` in `without_torch_function`.
torch_function_state: Callable[[], Any] = _C._get_torch_function_state
set_torch_function_state: Callable[[Any], None] = _C._set_torch_function_state
NO_SUBCLASSES = _C._TorchFunctionState.SUBCLASSES_DISABLED

# The attribute that `mark_static_address` sets on a tensor.
STATIC_INPUT = "_dynamo_static_input_type"


def own_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A storage that starts at a tensor's data, in the same memory; the tensor must outlive it."""
    count = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel():
        return torch.UntypedStorage(0, device=tensor.device)
    at = tensor.data_ptr(), tensor.device, count * tensor.element_size()
    storage: Any = torch._C._construct_storage_from_data_pointer(*at)
    return storage  # type: ignore[no-any-return]


def ask_before_export(ask: Callable[[Any], Any]) -> None:
    """Makes DLPack's C functions, which treat a tensor subclass as a plain tensor, export
    `ask(tensor)`."""

    def export(stock: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(ask(tensor), *args, **kwargs)

    for module, name in (
        (torch._C, "_to_dlpack"),
        (torch._C, "_to_dlpack_versioned"),
        (torch.utils.dlpack, "to_dlpack"),
        (torch, "to_dlpack"),
    ):
        replace(module, name, export)


def _metadata() -> frozenset[Any]:
    """Functions that read or set a tensor's metadata, not its elements."""
    tensor = torch.Tensor
    properties = (
        "shape dtype device layout ndim is_leaf grad_fn requires_grad grad _grad _version _base "
        "output_nr names is_cuda is_cpu is_sparse is_quantized is_meta is_mkldnn is_nested "
        "itemsize nbytes _backward_hooks _post_accumulate_grad_hooks retains_grad grad_dtype"
    )
    methods = (
        "size dim ndimension numel nelement stride storage_offset is_contiguous element_size "
        "is_floating_point is_complex is_signed is_conj is_neg is_inference is_pinned get_device "
        "type __len__ __hash__ register_hook register_post_accumulate_grad_hook retain_grad "
        "requires_grad_ has_names is_same_size is_set_to"
    )
    grad: Any = tensor.grad
    setters = "grad requires_grad _grad grad_dtype _backward_hooks"
    found = [getattr(tensor, name).__get__ for name in properties.split() if hasattr(tensor, name)]
    found += [getattr(tensor, name).__set__ for name in setters.split() if hasattr(tensor, name)]
    found += [getattr(tensor, name) for name in methods.split() if hasattr(tensor, name)]
    return frozenset([*found, grad.__delete__, torch.is_floating_point, torch.is_complex])


METADATA = _metadata()

_T: Any = torch.Tensor
# Functions that overwrite all of their first tensor without reading it.
OVERWRITING: frozenset[Any] = frozenset([_T.copy_, _T.zero_, _T.fill_, _T.data.__set__])


def in_transform() -> bool:
    """True if this call is inside a `torch.func` transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# True for a wrapper tensor of a `torch.func` transform, which has no memory.
is_of_transform: Callable[[torch.Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor

# `torch.utils.swap_tensors`, also for tensors with weak references (parameters of `nn.LSTM`).
exchange_memory: Callable[[torch.Tensor, torch.Tensor], None] = _C._swap_tensor_impl


def free_device_bytes(device: torch.device) -> int:
    """Device memory, bytes, that this process can still allocate within its limit."""
    if device.type != "cuda":
        return available_bytes()
    free, total = torch.cuda.mem_get_info(device)
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    share = float(torch.cuda.get_per_process_memory_fraction(device))
    return min(free, int(share * total) - reserved) + reserved - used


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first that is set


def end_allocation(device: torch.device, pool: Any) -> None:
    """Stop allocating from the pool of a CUDA graph whose capture failed, and release the pool; no
    error if that is done. Ending a capture that CUDA has invalidated raises before it does this."""
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


def end_random_capture() -> None:
    """End the capture state of the current device's generator after a capture that failed: torch
    2.11 leaves it in that state, in which drawing raises. The current stream must allow captures;
    one that ends resets the state."""
    graph = torch.cuda.CUDAGraph()
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an empty graph
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()


def use_expandable_segments() -> bool:
    """Enable expandable segments of the CUDA allocator in this process; true if they were enabled.
    Sets the environment variables too: code that does not support them (vLLM's memory pools) checks
    these. Changes nothing if the user configured the allocator (on torch 2.11, by the environment),
    or if memory was allocated: such code may have checked before."""
    configured = getattr(_C, "_accelerator_getAllocatorSettings", str)
    if any(os.environ.get(name) for name in _ALLOCATOR) or configured():
        return False
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    if any(torch.cuda.memory_stats(d).get("segment.all.allocated", 0) for d in devices):
        return False  # even if it was released since
    for name in _ALLOCATOR:
        os.environ[name] = "expandable_segments:True"
    _C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def release_device_cache(device: torch.device) -> None:
    """Return unused device memory to the driver: cuBLAS workspaces and torch's cache."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        _C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def release_pinned_cache(device: torch.device) -> None:
    """Return page-locked host memory in torch's cache to the system: Inductor copies tensors there
    while it tunes kernels that write in place."""
    if device.type == "cuda":
        _C._host_emptyCache()


def profiler_enabled() -> bool:
    """True if `torch.profiler` is recording in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def on_host() -> AbstractContextManager[Any]:
    """A context in which the default device is the CPU."""
    if _C._len_torch_function_stack() == 0:  # a default device is a mode, like `with device:`
        return nullcontext()
    return torch.device("cpu")


# A context in which no operation casts its inputs, even inside the caller's autocast.
without_autocast: Callable[[], AbstractContextManager[Any]] = _C._DisableAutocast
