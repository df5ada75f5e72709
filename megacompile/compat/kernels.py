"""Kernels of our own: composite operators traced with symbolic sizes, products of experts, and
products that accumulate in a wider dtype.

The C++ of some composite operators reads sizes as ints: a graph traced with it is right for these
sizes only. The kernels here keep sizes symbolic, and call the same operators as the C++ in the same
order (but for products, torch's Python decompositions round differently):

    aten.upsample_nearest2d.vec(x, None, [2.0, 2.0])
    -> aten.upsample_nearest2d.default(x, [2*h, 2*w], 2.0, 2.0)

They use a dispatch key that is enabled only in `SymbolicFakes` and in `torch.export`, where the C++
runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._decomp.decompositions import matmul
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import register_op_impl
from torch.nn import functional

from megacompile.compat.operators import define_operator

_KEY = DispatchKey.PreDispatch
_KEYS = DispatchKeySet(_KEY)
_AUTOCAST = (DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA)
_UPSAMPLING = ("aten::upsample_", "aten::_upsample_")
_INCLUDE: Any = torch._C._IncludeDispatchKeyGuard
_EXCLUDE: Any = torch._C._ExcludeDispatchKeyGuard
_ATEN_KERNELS = torch.library.Library("aten", "IMPL")
_aten = torch.ops.aten


def _define_composites(wanted: Callable[[], bool]) -> None:
    """Register the composite kernels; they call `wanted` at each call, in its thread."""
    _put(_aten.matmul.default, _matmul, wanted)  # up to torch 2.12 the C++ reads the sizes
    for name in _upsampling():
        if name.endswith(".vec"):
            packet = getattr(_aten, name.removesuffix(".vec"))
            _put(packet.vec, _upsample(packet.default), wanted)


def _upsampling() -> list[str]:
    """Names, with overloads, of the upsampling operators and of their backwards."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return [name.removeprefix("aten::") for name in names if name.startswith(_UPSAMPLING)]


def _put(operator: Any, kernel: Callable[..., Any], wanted: Callable[[], bool]) -> None:
    def run(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not wanted() or any(map(keys.has, _AUTOCAST)):  # autocast casts, and calls this again
            return operator.redispatch(keys.remove(_KEY), *args, **kwargs)
        with _EXCLUDE(_KEYS):
            return kernel(*args, **kwargs)

    name = operator.name().removeprefix("aten::")
    _ATEN_KERNELS.impl(name, run, _KEY.name, with_keyset=True)


def _matmul(a: Any, b: Any) -> Any:
    """LinearAlgebra.cpp: `_matmul_impl`, node by node."""
    if max(a.dim(), b.dim()) <= 2:
        return matmul(a, b)
    if a.dim() == b.dim() == 3 and a.shape[0] != b.shape[0]:
        a, b = (a.squeeze(0), b) if a.shape[0] == 1 else (a, b.squeeze(0))
    turned = a.dim() < b.dim()
    many, one = (b.mT, a.t() if a.dim() == 2 else a) if turned else (a, b)
    if one.dim() <= 2 and _folds(many, one, turned):
        sizes = many.shape
        rows = many.reshape(math.prod(sizes[:-1]), sizes[-1])
        product = torch.mm(rows, one) if one.dim() == 2 else torch.mv(rows, one)
        product = _aten._unsafe_view.default(product, [*sizes[:-1], *one.shape[1:]])
        return product.mT.contiguous() if turned and one.dim() == 2 else product
    batch = list(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    count, left = math.prod(batch), list(a.shape[-2:] if a.dim() > 1 else (1, a.shape[-1]))
    lefts = a.expand(*batch, *left).reshape(count, *left)
    rights = b.expand(*batch, *b.shape[-2:]).reshape(count, *b.shape[-2:])
    columns = list(b.shape[-1:]) if b.dim() > 1 else []
    product = torch.bmm(lefts, rights if columns else rights.unsqueeze(2))
    # not a view, in which a change in place would show
    product = product if columns else product.squeeze(-1)
    return _aten._unsafe_view.default(product, [*batch, *a.shape[-2:-1], *columns])


def _folds(many: Any, one: Any, turned: bool) -> bool:
    """LinearAlgebra.cpp: `should_fold`."""
    if one.requires_grad or (turned and one.dim() == 2):
        return bool(one.requires_grad)
    strides, sizes = many.stride(), many.shape
    return all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(many.dim() - 2))


def _upsample(operator: Any) -> Callable[..., Any]:
    """UpSample.h: `compute_output_size`, and one scale per dimension."""

    def run(x: Any, output_size: Any, *others: Any) -> Any:
        *align_corners, scales = others
        sizes = x.shape[2:]
        if (output_size is None) == (scales is None):  # the C++ raises
            return operator.overloadpacket.vec(x, output_size, *others)
        if output_size is None:
            output_size = [_scaled(n, s) for n, s in zip(sizes, scales, strict=True)]
        return operator(x, output_size, *align_corners, *(scales or [None] * len(sizes)))

    return run


def _scaled(size: Any, scale: float) -> Any:
    """`size * scale` as a double, truncated to an int."""
    up, down = scale.as_integer_ratio()
    if up < 1 << 32:  # int arithmetic is exact for any size
        return size * up // down
    return torch.sym_int(size * scale)


def _define_fakes(wanted: Callable[[Any], bool]) -> None:
    """Register fake kernels for operators that torch has none of for symbolic sizes; `wanted`: true
    if they apply in a FakeTensorMode."""

    def of_upsample(grad: Any, output_size: Any, input_size: Any, *_: Any, **__: Any) -> Any:
        return grad.new_empty(input_size).contiguous(memory_format=suggest_memory_format(grad))

    def of_shrink(grad: Any, x: Any, *_: Any) -> Any:
        return torch.empty_like(torch.broadcast_tensors(x, grad)[0])

    names = [name for name in _upsampling() if name.endswith("_backward")]
    shrinks = (_aten.hardshrink_backward.default, _aten.softshrink_backward.default)
    kernels: dict[Any, Callable[..., Any]] = dict.fromkeys(shrinks, of_shrink)
    kernels |= {getattr(_aten, name).default: of_upsample for name in names}

    def run(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if not wanted(mode):
            return NotImplemented
        with mode:
            return kernels[operator](*args, **kwargs)

    register_op_impl(kernels.__contains__)(run)


# --- products of experts
# An eager model of transformers runs torch.nn.functional.grouped_mm(x, weight, offs=offs), which
# torch cannot trace for all dtypes. So transformers shows Dynamo its `grouped_mm_fallback`, a loop
# over experts. The operator here calls torch's function, opaque to traces: the same bits.

_FALLBACK = "transformers::grouped_mm_fallback"


def eager_grouped_mm(target: Any, device: torch.device) -> Any:
    """The operator that replaces a captured one; None if it stays."""
    names = (getattr(target, "_qualified_op_name", None), getattr(target, "_name", ""))
    if _FALLBACK not in (names[0], names[1].partition(".")[0]):
        return None
    on_cuda = device.type == "cuda" and torch.cuda.is_available()
    if on_cuda and torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return _GROUPED_MM


def _gradients(gradient: Tensor, x: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """torch's own formulas: a transposed weight gets a transposed gradient."""
    of_x = functional.grouped_mm(gradient, weight.transpose(-2, -1), offs=offs).contiguous()
    if _is_transposed(weight):
        swapped = functional.grouped_mm(gradient.transpose(-2, -1), x, offs=offs)
        return of_x, swapped.contiguous().transpose(-2, -1)
    return of_x, functional.grouped_mm(x.transpose(-2, -1), gradient, offs=offs).contiguous()


def _is_transposed(weight: Tensor) -> bool:
    return weight.stride(-2) == 1 and weight.stride(-1) == weight.shape[-2]


def _shapes(gradient: Tensor, x: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    experts, rows, columns = weight.shape
    of_x = x.new_empty(x.shape)
    if _is_transposed(weight):
        return of_x, weight.new_empty((experts, columns, rows)).transpose(-2, -1)
    return of_x, weight.new_empty(weight.shape)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*_GROUPED_MM_BACKWARD(gradient, *context.saved_tensors), None)


_GROUPED_MM = define_operator(
    "grouped_mm(Tensor x, Tensor weight, Tensor offs) -> Tensor",
    lambda x, weight, offs: functional.grouped_mm(x, weight, offs=offs).contiguous(),
    lambda x, weight, offs: x.new_empty((x.shape[0], weight.shape[-1])),
)
_GROUPED_MM_BACKWARD = define_operator(
    "grouped_mm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor offs)"
    " -> (Tensor, Tensor)",
    _gradients,
    _shapes,
)
torch.library.register_autograd(
    _GROUPED_MM,
    _backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# --- matrix products that accumulate in a wider dtype


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool = False) -> None:
    """`total += a @ b`.

    Args:
        total: (M, N); of the dtype of `a` and `b`, or wider.
        a: (M, K).
        b: (K, N).
        first: `total = a @ b` without reading `total`, which may be uninitialized.
    """
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.device.type == "cpu":  # half-precision products are slow there anyway
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)
    elif _adds_to_wider(a.device, a.dtype):
        addmm: Any = torch.addmm
        addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)  # rounded each time


@functools.cache
def _adds_to_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """True if addmm adds a half-precision product to a float32 matrix in place, or writes it there,
    correctly: not every backend does."""
    addmm: Any = torch.addmm
    total = torch.full((16, 16), 1.0, device=device)
    factor = torch.full((16, 16), 1 / 1024, dtype=dtype, device=device)
    empty = torch.full((16, 16), float("nan"), device=device)
    try:
        addmm(total, factor, factor, out_dtype=torch.float32, out=total)
        addmm(empty, factor, factor, beta=0, out_dtype=torch.float32, out=empty)
    except (RuntimeError, TypeError):
        return False
    product = 16 / 1024**2
    return bool((total == 1 + product).all() and (empty == product).all())  # 1.0 in half precision
