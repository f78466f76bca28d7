"""Forms: how flat tensors make a structured value, such as the arguments of a model or its output.

    {"x": a, "flags": (True, None), "y": [b, c]}   <->   a, b, c   and the form   {"x": _, "flags": ..., "y": [_, _]}

A value is built of tuples, lists, dicts, namedtuples, dataclasses and all else that is registered with torch's pytree
(as transformers' ModelOutput is); its leaves are tensors, or constants: None, numbers, strings and the like.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree

Tensors = tuple[torch.Tensor, ...]
T = TypeVar("T")

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.Size)
_CONSTANTS += (torch.dtype, torch.device, torch.layout, torch.memory_format)  # type: ignore[assignment]

_NOTHING: Mapping[str, object] = {}

# Equal forms are one object, which compares at once; as many as a run may need.
_KNOWN: dict[Form, Form] = {}
_MOST = 1000


class FormError(ValueError):
    """A leaf, at a path of the value, is neither tensor nor constant."""

    def __init__(self, path: Sequence[str], leaf: object) -> None:
        self.path, self.leaf = tuple(path), leaf
        super().__init__(
            f"{''.join(path) or 'the value'} is {type(leaf).__name__}: expected tensors, numbers, strings and None, "
            f"in tuples, lists, dicts, namedtuples or dataclasses"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """Structure of a value: everything but its tensors.

    Equal for values that differ in their tensors alone; 1, 1.0 and True are different constants.

    >>> form, flat = Form.of({"x": torch.ones(2), "flag": True})
    >>> len(flat), form.assemble([3])
    (1, {'x': 3, 'flag': True})
    """

    spec: pytree.TreeSpec  # of the leaves
    constants: Mapping[int, object]  # leaves that are no tensors, by position
    _key: tuple[object, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)  # asked for with each microbatch

    def __post_init__(self) -> None:
        object.__setattr__(self, "_key", tuple((i, type(leaf), _exact(leaf)) for i, leaf in self.constants.items()))
        object.__setattr__(self, "_hash", hash((self.spec, self._key)))

    @classmethod
    def of(cls, value: object) -> tuple[Form, Tensors]:
        """The form of a value and its tensors; FormError for a leaf that is neither tensor nor constant."""
        return cls._of(value, _refused)

    @classmethod
    def of_output(cls, value: object) -> tuple[Form, Tensors]:
        """The same of a model's output: None replaces what is neither, such as a cache of keys and values."""
        return cls._of(value, _pruned)

    @classmethod
    def _of(cls, value: object, other: Callable[[pytree.TreeSpec, int, object], object]) -> tuple[Form, Tensors]:
        if isinstance(value, torch.Tensor):
            return _ONE_TENSOR, (value,)
        leaves, spec = pytree.tree_flatten(value)
        if any(map(_is_plain_dataclass, leaves)):
            leaves, spec = pytree.tree_flatten(_opened(value))
        constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        for i, leaf in constants.items():
            if not isinstance(leaf, _CONSTANTS):
                constants[i] = other(spec, i, leaf)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        form = cls(spec=spec, constants=constants)
        if len(_KNOWN) < _MOST:
            form = _KNOWN.setdefault(form, form)
        return form, tensors

    @property
    def num_tensors(self) -> int:
        return self.spec.num_leaves - len(self.constants)

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """Path of each tensor, as in ("[0]", ".mask", "['x']")."""
        return tuple(path for i, path in enumerate(_paths(self.spec)) if i not in self.constants)

    def assemble(self, flat: Sequence[Any]) -> Any:
        constants = self.constants
        if not constants:
            return flat[0] if self.spec.is_leaf() else pytree.tree_unflatten(list(flat), self.spec)
        tensors = iter(flat)
        leaves = [constants[i] if i in constants else next(tensors) for i in range(self.spec.num_leaves)]
        return pytree.tree_unflatten(leaves, self.spec)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Form):
            return NotImplemented
        return self._key == other._key and self.spec == other.spec

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return repr(self.assemble([Unquoted("_")] * self.num_tensors))


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a call: `call(f)` is f(*args, **kwargs)."""

    form: Form  # of (args, kwargs), the keywords in alphabetical order
    tensors: Tensors  # flat
    dims: tuple[int | None, ...]  # dimension of each that is the batch; None: all microbatches share the tensor

    @classmethod
    def of(cls, args: Sequence[object], kwargs: Mapping[str, object] = _NOTHING) -> Arguments:
        """Make it from positional arguments and keywords, with the batch in dimension 0 of each tensor that has one.
        Raises ValueError with the name of what is neither tensor nor constant."""
        try:
            form, tensors = Form.of((tuple(args), {name: kwargs[name] for name in sorted(kwargs)}))
        except FormError as error:
            raise ValueError(
                f"{argument_name(error.path)} is {type(error.leaf).__name__}: expected tensors, numbers, strings and "
                f"None, in tuples, lists, dicts, namedtuples or dataclasses{_instead(error.leaf)}"
            ) from None
        return cls(form, tensors, tuple(0 if x.dim() else None for x in tensors))

    @classmethod
    def of_example(cls, example: Sequence[object] | Mapping[str, object]) -> Arguments:
        return cls.of((), example) if isinstance(example, Mapping) else cls.of(example)

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each tensor, as in "input 0", "mask" or "states['x']"."""
        return tuple(map(argument_name, self.form.paths))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple([x.shape[dim] for x, dim in zip(self.tensors, self.dims, strict=True) if dim is not None])

    @property
    def num_samples(self) -> int:
        return next(iter(self.sizes), 0)

    def __str__(self) -> str:
        return shown_call(self.form, [(tuple(x.shape), x.dtype) for x in self.tensors])

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
        return Arguments(self.form, tuple(map(change, self.tensors)), self.dims)

    def cut(self, num_parts: int) -> list[Arguments]:
        """Microbatches: parts of each tensor whose sizes differ by at most one sample; shared tensors go to all."""
        columns = [
            [x] * num_parts if dim is None else cut_tensor(x, num_parts, dim)
            for x, dim in zip(self.tensors, self.dims, strict=True)
        ]
        rows = zip(*columns, strict=True) if columns else [()] * num_parts
        return [Arguments(self.form, row, self.dims) for row in rows]

    def call(self, function: Callable[..., T], tensors: Sequence[Any] | None = None) -> T:
        args, kwargs = self.form.assemble(self.tensors if tensors is None else tensors)
        return function(*args, **kwargs)


def _instead(leaf: object) -> str:
    if type(leaf).__name__ != "BlockMask":
        return ""
    return (
        "; of flex attention, a mask that is the same for all samples (B=None) as an attribute of the module that uses "
        "it, and one of each sample as a tensor for F.scaled_dot_product_attention(attn_mask=...)"
    )


def cut_tensor(x: torch.Tensor, num_parts: int, dim: int) -> list[torch.Tensor]:
    """Parts of a tensor along its dimension of the batch, whose sizes differ by at most one. They are contiguous where
    the batch is first in a contiguous tensor: elsewhere copies are made, so that a microbatch has the strides that
    shape inference gave it."""
    parts = torch.tensor_split(x, num_parts, dim=dim)
    return list(parts) if dim == 0 or x.is_meta else [part.contiguous() for part in parts]


def copied(value: object) -> object:
    """A nested value with tensors of its own, for code that may change them in place."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def tensors_in(*values: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def counted_changes(value: object) -> list[int]:
    """By tensor of a nested value, how often it was changed in place so far; those of inference mode do not count."""
    return [tensor._version for tensor in tensors_in(value) if not tensor.is_inference()]


def argument_name(path: Sequence[str]) -> str:
    """Name of a leaf of (args, kwargs) for people.

    >>> argument_name(("[0]", "[2]", ".mask")), argument_name(("[1]", "['x']", "[0]"))
    ('input 2.mask', 'x[0]')
    """
    kind, first, *inner = path
    return (f"input {first[1:-1]}" if kind == "[0]" else first[2:-2]) + "".join(inner)


def shown_call(form: Form, tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    """Arguments as in a call, for errors.

    >>> form, _ = Form.of(((torch.ones(1),), {"flag": True}))
    >>> shown_call(form, [((1,), torch.float32)])
    '((1,) torch.float32, flag=True)'
    """
    args, kwargs = form.assemble([Unquoted(f"{shape} {dtype}") for shape, dtype in tensors])
    return f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


class Unquoted(str):
    """A text whose repr has no quotation marks."""

    __slots__ = ()
    __repr__ = str.__str__


class _Fields(Generic[T]):
    """A dataclass that is not registered with pytree, opened: its fields are the children."""

    def __init__(self, value: T) -> None:
        self.type = type(value)
        self.values = {each.name: _opened(getattr(value, each.name)) for each in dataclasses.fields(value)}  # type: ignore[arg-type]


def _close(values: Iterable[Any], context: Any) -> object:
    """The dataclass; __init__ may take other arguments than its fields."""
    kind, names = context
    made = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(
    _Fields, lambda opened: (list(opened.values.values()), (opened.type, tuple(opened.values))), _close
)


def _is_plain_dataclass(leaf: object) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | torch.Tensor | torch.nn.Module)


def _opened(value: object) -> object:
    return pytree.tree_map(lambda leaf: _Fields(leaf) if _is_plain_dataclass(leaf) else leaf, value)


def _exact(constant: object) -> object:
    """Key that distinguishes constants of one type: -0.0 from 0.0, and nan is nan."""
    return repr(constant) if isinstance(constant, float | complex) else constant


def _refused(spec: pytree.TreeSpec, position: int, leaf: object) -> object:
    raise FormError(list(_paths(spec))[position], leaf)


def _pruned(spec: pytree.TreeSpec, position: int, leaf: object) -> object:
    # A number would be another one for another batch, and of one object alone nothing would be left.
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) or spec.is_leaf():
        _refused(spec, position, leaf)
    return None


def _paths(spec: pytree.TreeSpec) -> Iterator[tuple[str, ...]]:
    if spec.is_leaf():
        yield ()
        return
    for key, child in zip(_keys(spec), spec.children(), strict=True):
        for inner in _paths(child):
            yield (key, *inner)


def _keys(spec: pytree.TreeSpec) -> list[str]:
    kind, context = spec.type, spec.context
    if kind in (dict, OrderedDict):
        return [f"[{key!r}]" for key in context]
    if kind is defaultdict:
        return [f"[{key!r}]" for key in context[1]]
    if pytree.is_namedtuple_class(context):
        return [f".{name}" for name in context._fields]
    if kind is _Fields:
        return [f".{name}" for name in context[1]]
    return [f"[{i}]" for i in range(spec.num_children)]


_ONE_TENSOR = Form(spec=pytree.tree_structure(torch.empty(0)), constants={})
