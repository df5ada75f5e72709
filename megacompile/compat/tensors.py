"""Tensors and the devices that hold them."""

from __future__ import annotations

import functools
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from megacompile.host_memory import available_bytes

# For subclasses that only dispatch.
NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl  # torch 2.11 to 2.15


def storage_key(tensor: torch.Tensor) -> int:  # torch 2.11 to 2.15
    """Equal for tensors that share memory; valid while one of them lives."""
    return hash(StorageWeakRef(tensor.untyped_storage()))


def wrapper(
    cls: type[torch.Tensor], like: torch.Tensor, device: torch.device
) -> Any:  # torch 2.11 to 2.15
    """A tensor of a wrapper subclass: the looks of `like` on another device, and no data."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=0,
        dtype=like.dtype,
        device=device,
        requires_grad=like.requires_grad,
    )


def is_wrapper_class(cls: type) -> bool:  # torch 2.11 to 2.15
    """True if tensors of a class are wrappers, which can be taken apart and put together again."""
    return issubclass(cls, torch.Tensor) and is_traceable_wrapper_subclass_type(cls)


def flatten_wrapper(tensor: Any) -> tuple[list[str], Any]:  # torch 2.11 to 2.15
    """The names of the tensors that a wrapper is made of, and what else it is made from."""
    names, context = tensor.__tensor_flatten__()
    return list(names), context


def unflatten_wrapper(
    cls: Any, parts: dict[str, torch.Tensor], context: Any, shape: Any, stride: Any
) -> torch.Tensor:  # torch 2.11 to 2.15
    """A wrapper over `parts`, by their names."""
    made: torch.Tensor = cls.__tensor_unflatten__(parts, context, torch.Size(shape), tuple(stride))
    return made


def outside_inference_mode() -> AbstractContextManager[None]:  # torch 2.11 to 2.15
    """For its duration, new tensors are ordinary ones. In C: nothing is left where a signal raises.

    `torch.inference_mode(False)` does the same in Python.
    """
    context: AbstractContextManager[None] = torch._C._InferenceMode(False)
    return context


def storage_users(tensor: torch.Tensor) -> int:  # torch 2.11 to 2.15
    """Number of tensors that share this tensor's storage, itself included."""
    storage = tensor.untyped_storage()
    # one user is `storage` itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def storage_uses(storages: Iterable[torch.UntypedStorage]) -> list[int]:  # torch 2.11 to 2.15
    """Number of tensors, and of these objects, that share each storage."""
    return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]


# The classes of tensors that have memory and no will of their own.
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  # torch 2.11 to 2.15


def tensor_guards(
    examples: Sequence[torch.Tensor],
) -> Callable[[Sequence[torch.Tensor]], bool]:  # torch 2.11 to 2.15
    """A function that is true of tensors which are like these, one by one, as Dynamo's guards ask
    it: class, dtype, device, shape, strides, layout, does it require grad? In C."""
    if not examples:
        return lambda tensors: not tensors
    new: Any = torch._C._dynamo.guards.TensorGuards  # whose stub has other lists
    guards = new(
        *examples,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in examples],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in examples],
    )
    return lambda tensors: bool(guards.check(*tensors))


def is_alone(tensor: torch.Tensor) -> bool:  # torch 2.11 to 2.15
    """True if a dense tensor fills its storage, and no other tensor shares that."""
    storage = tensor.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    return users == 2 and storage.nbytes() == tensor.nbytes  # one of them is `storage` itself


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:  # torch 2.11 to 2.15
    """`version` of each."""
    return list(map(_VERSION, tensors))


_VERSION = operator.attrgetter("_version")


def version(tensor: torch.Tensor) -> int:  # torch 2.11 to 2.15
    """Number of times that a tensor's memory was changed in place, by any of its views."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:  # torch 2.11 to 2.15
    """The tensor that autograd takes a view for a view of; None for one that is no view."""
    return tensor._base


def post_accumulate_hooks(
    param: torch.Tensor,
) -> list[Callable[[torch.Tensor], None]]:  # torch 2.11 to 2.15
    """The user's `register_post_accumulate_grad_hook` hooks of a parameter."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def gradient_hooks(param: torch.Tensor) -> bool:  # torch 2.11 to 2.15
    """True if the user called `register_hook` on a parameter."""
    return bool(param._backward_hooks)


def any_hooked(params: Sequence[torch.Tensor]) -> bool:  # torch 2.11 to 2.15
    """True if any parameter has a hook of the user's that sees its gradient: `gradient_hooks`, or
    `post_accumulate_hooks`."""
    return any(map(_BEFORE, params)) or any_accumulate_hooks(params)


def any_accumulate_hooks(params: Iterable[torch.Tensor]) -> bool:  # torch 2.11 to 2.15
    """True if any parameter has `post_accumulate_hooks`."""
    return any(map(_BEHIND, params))


_BEFORE = operator.attrgetter("_backward_hooks")
_BEHIND = operator.attrgetter("_post_accumulate_grad_hooks")


def without_torch_function() -> AbstractContextManager[None]:  # torch 2.11 to 2.15
    """For its duration, tensor subclasses of this thread are treated as plain tensors."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def torch_function_enabled() -> bool:  # torch 2.11 to 2.15
    """Do tensor subclasses have their say in this thread? See `without_torch_function`."""
    return bool(torch._C._is_torch_function_enabled())


_C: Any = torch._C  # its stubs leave these out


def torch_function_state() -> Any:  # torch 2.11 to 2.15
    """The state of this thread's `__torch_function__`, for `set_torch_function_state`."""
    return _C._get_torch_function_state()


def set_torch_function_state(state: Any) -> None:  # torch 2.11 to 2.15
    """Set what `torch_function_state` gave, or `NO_SUBCLASSES`."""
    _C._set_torch_function_state(state)


# As in `without_torch_function`.
NO_SUBCLASSES = _C._TorchFunctionState.SUBCLASSES_DISABLED  # torch 2.11 to 2.15


def compares(func: Any) -> bool:  # torch 2.11 to 2.15
    """True if an operator is that of `a == b` of two tensors."""
    return func is torch.ops.aten.eq.Tensor


STATIC_INPUT = "_dynamo_static_input_type"  # where Dynamo notes it of a tensor: torch 2.11 to 2.15


def own_storage(tensor: torch.Tensor) -> torch.UntypedStorage:  # torch 2.11 to 2.15
    """A storage that begins where a tensor does, in the same memory: the tensor must outlive it."""
    count = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel():
        return torch.UntypedStorage(0, device=tensor.device)
    size = count * tensor.element_size()
    made: Any = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, size
    )
    return made  # type: ignore[no-any-return]


def converts_itself(cls: type[torch.Tensor]) -> bool:  # torch 2.11 to 2.15
    """True if a class of parameters has a `to` of its own."""
    return cls.to is not torch.Tensor.to


def ask_before_export(ask: Callable[[Any], Any]) -> None:  # torch 2.11 to 2.15
    """Makes DLPack's C functions export what `ask` returns for a tensor; None: the tensor itself.

    They take a tensor subclass for a plain tensor. Code that has imported one of them by its name
    before megacompile was imported calls it as it is.
    """
    for module, name in (
        (torch._C, "_to_dlpack"),
        (torch._C, "_to_dlpack_versioned"),
        (torch.utils.dlpack, "to_dlpack"),
        (torch, "to_dlpack"),
    ):
        stock = getattr(module, name)

        @functools.wraps(stock)
        def export(tensor: Any, *args: Any, stock: Any = stock, **kwargs: Any) -> Any:
            found = ask(tensor)
            return stock(tensor if found is None else found, *args, **kwargs)

        setattr(module, name, export)


def _metadata() -> frozenset[Any]:
    """Functions that look at what a tensor is, not at what it holds."""
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


METADATA = _metadata()  # torch 2.11 to 2.15


def _overwriting() -> frozenset[Any]:
    """Functions that give their first tensor other values, all of it, and do not look at it."""
    tensor: Any = torch.Tensor
    return frozenset([tensor.copy_, tensor.zero_, tensor.fill_, tensor.data.__set__])


OVERWRITING = _overwriting()  # torch 2.11 to 2.15


def in_transform() -> bool:  # torch 2.11 to 2.15
    """True if a transform of `torch.func` is around this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_of_transform(tensor: torch.Tensor) -> bool:  # torch 2.11 to 2.15
    """True if a tensor is one of a transform's own, which has no memory."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def exchange_memory(a: torch.Tensor, b: torch.Tensor) -> None:  # torch 2.11 to 2.15
    """Exchanges two tensors, device and all; they stay the objects they are.

    `torch.utils.swap_tensors` does the same, and refuses tensors with weak references, as `nn.LSTM`
    has of its parameters.
    """
    torch._C._swap_tensor_impl(a, b)


# --- devices: free memory, the allocator, the default device


def free_device_bytes(device: torch.device) -> int:  # torch 2.11 to 2.15
    """Device memory that this process can still get, within the limit that it was given."""
    if device.type != "cuda":
        return available_bytes()
    free, total = torch.cuda.mem_get_info(device)
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    share = float(torch.cuda.get_per_process_memory_fraction(device))
    return min(free, int(share * total) - reserved) + reserved - used


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first that is set


def end_allocation(device: torch.device, pool: Any) -> None:  # torch 2.11 to 2.15
    """Stop allocating from the pool of a CUDA graph whose capture failed, and let the pool go:
    ending the capture does not get there if CUDA has invalidated it. No error if that has stopped
    already; the graph lets the pool go then."""
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


def end_random_capture() -> None:  # torch 2.11 to 2.15
    """Take the generator of the current device out of a capture that failed, on a stream that may
    be captured. torch 2.11 leaves it there, and every random number is an error then; a capture
    that ends takes it out."""
    graph = torch.cuda.CUDAGraph()
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an empty graph
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()


def use_expandable_segments() -> bool:  # torch 2.11 to 2.15
    """Turns expandable segments of the CUDA allocator on, for the process, where everybody can see
    it.

    Code that cannot do with it (vLLM's memory pools) asks the environment. So it is set there too,
    and not at all where the user set the allocator up, or where memory was taken from it already:
    a caller that did that has asked before. Torch 2.11 cannot say what a program has set (2.12
    can).
    """
    configured = getattr(_C, "_accelerator_getAllocatorSettings", str)
    if any(os.environ.get(name) for name in _ALLOCATOR) or configured() or _has_allocated():
        return False
    for name in _ALLOCATOR:
        os.environ[name] = "expandable_segments:True"
    _C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def _has_allocated() -> bool:
    """True if memory was ever taken from the CUDA allocator, even if it was given back since."""
    if not torch.cuda.is_initialized():
        return False
    devices = range(torch.cuda.device_count())
    return any(torch.cuda.memory_stats(d).get("segment.all.allocated", 0) for d in devices)


def give_cache_back(device: torch.device) -> None:  # torch 2.11 to 2.15
    """Return unused device memory to the driver: workspaces, and what is cached."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        _C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def give_pinned_cache_back(device: torch.device) -> None:  # torch 2.11 to 2.15
    """Give page-locked host memory that torch's allocator caches back to the system. Where a kernel
    is tuned that writes to a tensor in place, and device memory is short, Inductor copies that
    tensor there, in blocks of powers of two."""
    if device.type == "cuda":
        _C._host_emptyCache()


def profiler_enabled() -> bool:  # torch 2.11 to 2.15
    """True if `torch.profiler` is recording in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def on_host() -> AbstractContextManager[Any]:  # torch 2.11 to 2.15
    """For its duration, what names no device is on the CPU, whatever the default device is."""
    if _C._len_torch_function_stack() == 0:  # a default device is a mode, like `with device:`
        return nullcontext()
    return torch.device("cpu")


def without_autocast() -> AbstractContextManager[Any]:  # torch 2.11 to 2.15
    """For its duration, no operation casts what it reads, whatever autocast the caller is in."""
    guard: AbstractContextManager[Any] = _C._DisableAutocast()
    return guard


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:  # torch 2.11 to 2.15
    """On CUDA: a stream of its own for the duration, done at the end. On the CPU: nothing."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)) as _:
        yield
        torch.cuda.current_stream(device).synchronize()
