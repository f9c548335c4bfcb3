"""Tensors that many blocks share, until one of them changes its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


class Loan:
    """What one block has of a shared content: all tensors that show it, and after the first write a copy of its own."""

    def __init__(self, content: torch.Tensor) -> None:
        self._content: torch.Tensor | None = content
        self._tensors: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def show(self, tensor: torch.Tensor) -> Lent:
        """`tensor`, which shows the content, as one of this loan."""
        lent: Any = torch.Tensor._make_subclass(Lent, tensor, tensor.requires_grad)  # pyright: ignore
        lent.loan = self
        self._tensors[id(lent)] = lent
        return lent

    def end(self) -> None:
        """Have the block's tensors show a copy of the content from here on."""
        content, self._content = self._content, None
        if content is None:
            return
        own = content.clone().untyped_storage()
        with _C._DisableTorchDispatch(), torch.no_grad():
            for tensor in list(self._tensors.values()):
                if _shows(tensor, content):
                    tensor.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())


class Lent(torch.Tensor):
    """A tensor of a loan. What is computed from it is an ordinary tensor; views of it are of the same loan.

    PyTorch's schemas say which operations write. Whatever gives out the memory itself counts as a write.
    """

    loan: Loan
    __torch_function__ = _C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            tensor.loan.end()
        with _C._DisableTorchDispatch():
            result = func(*args, **kwargs)
            return _views(result, [*_lent(args), *_lent(list(kwargs.values()))])

    # Reading, where PyTorch's bindings take no subclass

    def tolist(self) -> Any:
        return self._plain().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self._plain())

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = memo[id(self)] = self._copy()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)

    # The memory itself

    def data_ptr(self) -> int:
        self.loan.end()
        return super().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        self.loan.end()
        return super().untyped_storage()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        self.loan.end()
        return self._plain().numpy(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self.loan.end()
        return self._plain().__dlpack__(*args, **kwargs)

    def plain(self) -> torch.Tensor:
        """An ordinary tensor that shows the same memory, to be read."""
        return self._plain().detach()

    def _plain(self) -> torch.Tensor:
        with _C._DisableTorchDispatch():
            return self.detach().as_subclass(torch.Tensor).requires_grad_(self.requires_grad)

    def _copy(self) -> torch.Tensor:
        copy = self._plain().detach().clone()
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(copy, self.requires_grad)
        return copy.requires_grad_(self.requires_grad)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Lent]:
    schema = func._schema
    if schema.is_mutable:
        for number, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[number] if number < len(args) else kwargs.get(argument.name)
                yield from _lent(given)


def _lent(value: Any) -> Iterator[Lent]:
    if isinstance(value, Lent):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in cast("Sequence[Any]", value):
            yield from _lent(item)


def _views(result: Any, given: list[Lent]) -> Any:
    if isinstance(result, torch.Tensor):
        if not isinstance(result, Lent) and result.layout == torch.strided:
            owner = next((tensor for tensor in given if _shows(tensor, result)), None)
            return result if owner is None else owner.loan.show(result)
    elif isinstance(result, (tuple, list)):
        return type(result)(_views(item, given) for item in cast("Sequence[Any]", result))
    return result


def _shows(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    storages: Any = (torch.Tensor.untyped_storage(tensor), torch.Tensor.untyped_storage(other))
    return storages[0]._cdata == storages[1]._cdata


def lend(content: torch.Tensor) -> Lent:
    """`content` for one block, which may do with it what it likes."""
    return Loan(content).show(content)
