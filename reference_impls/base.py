"""`WrapperTensor`: the base class of wrapper subclasses. Declare the parts once; the protocol follows.

A wrapper subclass holds no numbers itself. It has an outer shape, dtype and device, and inner tensors in which the
numbers live. A child declares

    inner_names           names of its inner tensors
    optional_inner_names  names of inner tensors that may be None
    attribute_names       names of the other values that it needs to work (primitives and dtypes only)

and makes the wrapper in `__new__`, which takes exactly those, in this order, and `outer_size` and `outer_stride` (None: as the
inner tensors say). What `__new__` is given is kept on the instance. Flatten, unflatten, detach, alias, clone, repr,
deepcopy and pickle are generated from the lists. Operators are added with `implements`:

    @MyTensor.implements(torch.ops.aten.t.default)
    def _(func, self):            # all arguments of the operator's schema, in its order, defaults filled in
        ...

What this file leaves out: what the numbers mean. `values.py` adds that for classes that can be dequantized.
"""

import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch._export.wrappers import mark_subclass_constructor_exportable_experimental
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from typing_extensions import Self

from reference_impls import schema

Handler = TypeVar("Handler", bound=Callable[..., Any])

aten = torch.ops.aten

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

# Registries: class -> operator -> handler. Only `implements*` write to them.
_OPERATORS: dict[type, dict[Any, Callable[..., Any]]] = {}
_FUNCTIONS: dict[type, dict[Any, Callable[..., Any]]] = {}


def _lookup(registry: dict[type, dict[Any, Callable[..., Any]]], cls: type, key: Any) -> Callable[..., Any] | None:
    """The handler of the first class in the MRO that has one.

    Looked up at call time: what a parent registers later reaches its children, and what a child registers never
    touches its parent.
    """
    for klass in cls.__mro__:
        table = registry.get(klass)
        if table is not None and key in table:
            return table[key]
    return None


class WrapperTensor(torch.Tensor):
    """Base class of wrapper subclasses; see the module's docstring for what a child declares."""

    inner_names: ClassVar[tuple[str, ...]] = ()
    optional_inner_names: ClassVar[tuple[str, ...]] = ()
    attribute_names: ClassVar[tuple[str, ...]] = ()

    @torch._disable_dynamo
    @mark_subclass_constructor_exportable_experimental
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, value in _bound_to_new(type(self), args, kwargs).items():
            if not hasattr(torch.Tensor, name):  # the wrapper itself shows its dtype
                self.__dict__[name] = value

    # --- the parts -------------------------------------------------------------------------------------------

    @property
    def inner_tensors(self) -> dict[str, torch.Tensor]:
        """The inner tensors that are present, by name, in declaration order."""
        names = (*self.inner_names, *self.optional_inner_names)
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes, by name, in declaration order."""
        return {name: getattr(self, name) for name in self.attribute_names}

    def rebuilt(self, inner: dict[str, torch.Tensor], **changes: Any) -> Self:
        """A tensor of the same class and attributes (but for `changes`) around other inner tensors."""
        return type(self)(**inner, **{**self.attributes, **changes})

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> Self:
        """`rebuilt` around `function(inner)` of each inner tensor."""
        return self.rebuilt({name: function(tensor) for name, tensor in self.inner_tensors.items()}, **changes)

    def attributes_of_copy(self) -> dict[str, Any]:
        """The attributes that differ in a copy, which shares no memory with anything. None by default."""
        return {}

    # --- protocol of traceable wrapper subclasses ------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return list(self.inner_tensors), self.attributes

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner_tensors: dict[str, torch.Tensor],
        context: dict[str, Any],
        outer_size: torch.Size | None,
        outer_stride: tuple[int, ...] | None,
    ) -> Self:
        return cls(**inner_tensors, **context, outer_size=outer_size, outer_stride=outer_stride)

    def _stable_hash_for_caching(self) -> str:
        """A key for torch's compile cache that is the same in every process."""
        inner = [(n, t.dtype, tuple(t.shape), t.stride()) for n, t in self.inner_tensors.items()]
        text = repr((type(self).__module__, type(self).__qualname__, sorted(self.attributes.items()), inner))
        return hashlib.sha256(text.encode()).hexdigest()

    # --- dispatch --------------------------------------------------------------------------------------------

    @classmethod
    def implements(cls, operators: OpOverload | Iterable[OpOverload]) -> Callable[[Handler], Handler]:
        """Register a handler, `handler(func, *all arguments in the schema's order)`, for aten operators."""
        return _register(_OPERATORS, cls, operators)

    @classmethod
    def implements_torch_function(cls, functions: Callable | Iterable[Callable]) -> Callable[[Handler], Handler]:
        """Register a replacement for python-level functions (`F.linear`, `torch.Tensor.tolist`).

        The handler is called with the caller's arguments: give it the signature of the function it replaces.
        """
        return _register(_FUNCTIONS, cls, functions)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(_is_familiar(t) or _acts_below_functions(t) for t in types):
            return NotImplemented
        handler = _lookup(_FUNCTIONS, cls, func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(_is_familiar(t) for t in types):
            return NotImplemented
        arguments = schema.bind(func, args, kwargs or {})
        handler = _lookup(_OPERATORS, cls, func)
        if handler is None:
            return cls._fallback(func, arguments)
        if schema.returns_alias(func):
            return _view(handler, func, arguments)
        return handler(func, *arguments)

    @classmethod
    def _fallback(cls, func: OpOverload, arguments: tuple[Any, ...]) -> Any:
        """What happens to an operator without a handler: its definition in other operators, or a refusal."""
        # Under inference_mode operators such as reshape and chunk arrive here undecomposed.
        if func._can_decompose():
            result = func.decompose(*arguments)
            if result is not NotImplemented:
                return result
        raise NotImplementedError(
            f"{cls.__name__} does not implement {func}. To add it: @{cls.__name__}.implements(torch.ops.{func}), on a "
            f"function that takes (func, {', '.join(p.name for p in func._schema.arguments)})."
        )

    # --- copies, pickles, text -------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                f"Only leaf tensors can be deep-copied; this {type(self).__name__} is the result of an operation. "
                "Call .detach() first."
            )
        with torch.no_grad():
            result = self.mapped(lambda inner: copy.deepcopy(inner, memo))
        result.requires_grad_(self.requires_grad)
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(self._extra_state(), memo))
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __copy__(self) -> Self:
        result = self.mapped(lambda inner: inner)
        result.requires_grad_(self.requires_grad)
        result.__dict__.update(self._extra_state())
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Only the class itself is named, so that torch.load(weights_only=True) needs nothing else to be allowed.
        names = (*self.inner_names, *self.optional_inner_names, *self.attribute_names)
        state = {"requires_grad": self.requires_grad, "extra": self._extra_state()}
        return type(self), tuple(getattr(self, name) for name in names), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.requires_grad_(state["requires_grad"])
        self.__dict__.update(state["extra"])

    def _extra_state(self) -> dict[str, Any]:
        """What users (and nn.Parameter) attached to the instance."""
        declared = {*self.inner_names, *self.optional_inner_names, *self.attribute_names}
        return {name: value for name, value in self.__dict__.items() if name not in declared}

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        parts = [f"shape={tuple(self.shape)}", f"dtype={self.dtype}", f"device='{self.device}'"]
        parts += [f"{name}={tuple(t.shape)} {t.dtype}" for name, t in self.inner_tensors.items()]
        parts += [f"{name}={value!r}" for name, value in self.attributes.items() if name != "dtype"]
        if self.requires_grad:
            parts.append("requires_grad=True")
        return f"{type(self).__name__}({', '.join(parts)})"


def _bound_to_new(cls: type[WrapperTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The declared inner tensors and attributes in a call of the constructor, defaults filled in."""
    names, defaults = _constructor_of(cls)
    return {**defaults, **dict(zip(names, args, strict=False)), **{n: v for n, v in kwargs.items() if n in names}}


@functools.cache
def _constructor_of(cls: type[WrapperTensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The declared names in the constructor's order, and the defaults of those that have one."""
    names = (*cls.inner_names, *cls.optional_inner_names, *cls.attribute_names)
    parameters = inspect.signature(cls.__new__).parameters
    if tuple(parameters)[1 : len(names) + 1] != names:
        raise TypeError(f"{cls.__name__}.__new__ must take cls and then {', '.join(names)}, in this order.")
    return names, {n: parameters[n].default for n in names if parameters[n].default is not inspect.Parameter.empty}


def _acts_below_functions(kind: type) -> bool:
    """Whether a foreign class leaves functions alone: then it gets its turn in __torch_dispatch__."""
    return getattr(kind.__torch_function__, "__func__", None) is torch.Tensor.__torch_function__.__func__


def _view(handler: Callable[..., Any], func: OpOverload, arguments: tuple[Any, ...]) -> Any:
    """Run the handler of a view operator and make its results aliases of `self` in torch's eyes."""
    # A view of a normal tensor is a normal tensor, also under inference_mode: torch couldn't share the version
    # counter with an inference tensor.
    with torch.inference_mode(arguments[0].is_inference()):
        result = handler(func, *arguments)
    return return_and_correct_aliasing(func, arguments, {}, result)


def _register(registry: dict[type, dict[Any, Any]], cls: type, keys: Any) -> Callable[[Handler], Handler]:
    keys = list(keys) if isinstance(keys, Iterable) else [keys]

    def decorate(handler: Handler) -> Handler:
        registry.setdefault(cls, {}).update(dict.fromkeys(keys, handler))
        return handler

    return decorate


def _is_familiar(kind: type) -> bool:
    """Whether an operand of this class may be handled here.

    Anything else is a foreign subclass (DTensor, say): its own handler must get its turn.
    """
    return kind in _PLAIN or issubclass(kind, (WrapperTensor, FakeTensor, FunctionalTensor))


# --- operators that are the same for every class ----------------------------------------------------------------


@WrapperTensor.implements([aten.detach.default, aten.alias.default])
def _alias(func: OpOverload, self: WrapperTensor) -> WrapperTensor:
    return self.mapped(func)


@WrapperTensor.implements(aten.clone.default)
def clone(func: OpOverload, self: WrapperTensor, memory_format: torch.memory_format | None) -> WrapperTensor:
    return self.mapped(lambda t: func(t, memory_format=memory_format), **self.attributes_of_copy())


@WrapperTensor.implements(aten._pin_memory.default)
def _pin_memory(func: OpOverload, self: WrapperTensor, device: torch.device | None) -> WrapperTensor:
    return self.mapped(lambda t: func(t, device), **self.attributes_of_copy())


@WrapperTensor.implements(aten.is_pinned.default)
def _is_pinned(func: OpOverload, self: WrapperTensor, device: torch.device | None) -> bool:
    return all(func(t, device) for t in self.inner_tensors.values())


# --- functions that would read or hand out the outer tensor's storage, where there is nothing -------------------


@WrapperTensor.implements_torch_function(torch.Tensor.share_memory_)
def _share_memory_(self: WrapperTensor) -> WrapperTensor:
    for tensor in self.inner_tensors.values():
        tensor.share_memory_()
    return self


@WrapperTensor.implements_torch_function(torch.Tensor.is_shared)
def _is_shared(self: WrapperTensor) -> bool:
    return all(tensor.is_shared() for tensor in self.inner_tensors.values())


@WrapperTensor.implements_torch_function(torch.Tensor.data_ptr)
def _data_ptr(self: WrapperTensor) -> int:
    """Null. Torch would add the storage offset to it, and a view would seem to have an address."""
    return 0


@WrapperTensor.implements_torch_function(torch.Tensor.data.__set__)
def _set_data(self: WrapperTensor, other: torch.Tensor) -> None:
    """`self.data = other`: torch would change the outer metadata only, and keep the old inner tensors."""
    if type(other) is not type(self):
        raise TypeError(
            f".data of a {type(self).__name__} can't be set to a {type(other).__name__}; convert it first, or replace "
            "the parameter."
        )
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(self, other)
    for name in (*self.inner_names, *self.optional_inner_names, *self.attribute_names):
        if name in self.__dict__:
            self.__dict__[name] = getattr(other, name)


def _refuse_storage(name: str, remedy: str) -> Callable[..., Any]:
    def refuse(self: WrapperTensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no memory of its own for {name}; {remedy}.")

    return refuse


for _function, _remedy in {
    torch.Tensor.numpy: "use .dequantize().numpy()",
    torch.Tensor.__array__: "use .dequantize().numpy()",
    torch.Tensor.__dlpack__: "export the inner tensors, or .dequantize()",
    torch.Tensor.set_: "use copy_()",
    torch.Tensor.resize_: "make a new tensor",
    torch.Tensor.resize_as_: "make a new tensor",
}.items():
    WrapperTensor.implements_torch_function(_function)(_refuse_storage(_function.__name__, _remedy))
