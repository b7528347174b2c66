"""Copies of Keras's optimizers, attribute by attribute; some names are private.

A copy through the config would lose whatever a class leaves out of it.
"""

import collections
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving.keras_saveable import KerasSaveable

_Optimizer = keras.optimizers.Optimizer

# Keras's bookkeeping of an object's variables and strategy: a copy gets its own from
# Keras's constructor.
_BOOKKEEPING = {
    "_variables",
    "_trainable_variables",
    "_trainable_variables_indices",
    "_tracker",
    "_iterations",
    "_learning_rate",
    "_distribution_strategy",
    "built",
}
_PREFIXES = ("_self_", "_tf_dgc_")  # of TensorFlow's bookkeeping, and of the package's
_NAME_REFERENCES = "_tf_dgc_name_references"
_REPLACED_METHODS = "_tf_dgc_replaced_methods"
_CONTAINERS = (list, dict, set, tuple, collections.OrderedDict, collections.defaultdict)
# Not searched for references to an optimizer: a model may well hold one.
_NOT_SEARCHED = (
    *(type, types.ModuleType, KerasSaveable, keras.Variable),
    *(tf.Module, tf.Tensor, tf.Variable, tf.distribute.Strategy),
)


class NameReference(NamedTuple):
    """A function, an attribute's value, that reads the original by a global name."""

    attribute: str  # attribute of the optimizer that holds the function
    function: Any
    name: str
    optimizer: keras.optimizers.Optimizer

    @property
    def holds(self) -> bool:
        """Whether the name still refers to the original optimizer."""
        return self.function.__globals__.get(self.name) is self.optimizer


def copy_optimizer(
    optimizer: keras.optimizers.Optimizer,
    prepare: Callable[[keras.optimizers.Optimizer], None] = lambda _: None,
) -> keras.optimizers.Optimizer:
    """Return an unbuilt copy, with variables of its own in the current strategy."""
    # Every attribute is copied, whatever the config contains; containers with their
    # items. Variables that the constructor added are created anew with the same value.
    # Any other value, such as a variable of a model, is the same object in both.
    # References to the optimizer in methods, `functools.partial` and closures refer to
    # the copy. `prepare` replaces the copy's variables before attributes are copied.
    twin = object.__new__(type(optimizer))
    rate = optimizer._learning_rate
    has_variable = isinstance(rate, keras.Variable)
    _Optimizer.__init__(
        twin, float(_value(rate)) if has_variable else lambda: 0.0, name=optimizer.name
    )
    prepare(twin)
    if iterations := _value(optimizer._iterations):
        twin._iterations.assign(iterations)
    copier = _Copier(optimizer)
    copier.add(optimizer, twin)
    copier.add(optimizer._iterations, twin._iterations)
    for variable in constructor_variables(optimizer):
        copier.add(variable, _copy_variable(variable, twin))
    if has_variable:
        copier.add(rate, twin._learning_rate)
    else:
        twin._learning_rate = copier.copy(rate, "learning_rate")
    values = attributes(optimizer)
    for name, value in values.items():
        _Optimizer.__setattr__(twin, name, copier.copy(value, name))
    if not has_variable:
        values = {"learning_rate": rate, **values}
    # Set without Keras's and TensorFlow's tracking, which would look inside.
    vars(twin)[_NAME_REFERENCES] = _find_name_references(optimizer, values)
    vars(twin)[_REPLACED_METHODS] = replaced_methods(optimizer)
    return twin


def name_references(optimizer: keras.optimizers.Optimizer) -> tuple[NameReference, ...]:
    """Return the functions of a copy that read the original by a global name."""
    return tuple(vars(optimizer).get(_NAME_REFERENCES, ()))


def replaced_methods(optimizer: keras.optimizers.Optimizer) -> set[str]:
    """Return the methods that the user replaced on the object, not in its class."""
    # For a copy, those of the original, because this package replaces some as well.
    of_original = vars(optimizer).get(_REPLACED_METHODS)
    return methods_of_instance(optimizer) if of_original is None else of_original


def methods_of_instance(optimizer: keras.optimizers.Optimizer) -> set[str]:
    """Return the methods that the user or this package replaced on the object."""
    kind = type(optimizer)
    return {n for n in vars(optimizer) if callable(getattr(kind, n, None))}


def was_added_by(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """Whether a variable that an optimizer tracks was added by `add_variable`."""
    # Keras also tracks other variables that are attributes, such as those of a model. A
    # variable of `add_variable` has the optimizer's name in its path.
    return optimizer.name in variable.path.split("/")[:-1]


def constructor_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Return the variables that the constructor added, but for rate and count."""
    scalars = {id(optimizer._iterations), id(optimizer._learning_rate)}
    tracked = [v for v in optimizer._variables if id(v) not in scalars]
    return [v for v in tracked if was_added_by(optimizer, v)]


def attributes(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return the attributes of an unbuilt optimizer that its user may have set."""
    of_package = methods_of_instance(optimizer) - replaced_methods(optimizer)
    values = dict(vars(optimizer))
    for kind in type(optimizer).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(optimizer, name):
                values[name] = getattr(optimizer, name)
    return {
        name: value
        for name, value in values.items()
        if name not in _BOOKKEEPING | of_package and not name.startswith(_PREFIXES)
    }


def differences(
    optimizer: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer
) -> list[str]:
    """Return the differences between two optimizers of a class, for errors."""
    # Names, learning rate, iterations and exclusions from weight decay are ignored.
    values, other_values = _compared_values(optimizer), _compared_values(other)
    comparison = _Comparison(optimizer, other)
    return [
        f"`{name}` is {value!r}"
        + (f", and would be {other_values[name]!r}" if name in other_values else "")
        for name, value in values.items()
        if name not in other_values
        or not comparison.are_equal(value, other_values[name])
    ]


def _compared_values(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    values = {
        name: value
        for name, value in attributes(optimizer).items()
        if name not in ("_lock", "name")
        and not name.startswith("_exclude_from_weight_decay")
    }
    variables = constructor_variables(optimizer)
    return {**values, **{v.name: _value(v) for v in variables}}


class _Comparison:
    def __init__(
        self, one: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer
    ):
        # Pairs that are equal, or that are being compared, in case of cycles.
        self._pairs = {(id(one), id(other))}

    def are_equal(self, one: Any, other: Any) -> bool:
        if one is other or (id(one), id(other)) in self._pairs:
            return True
        if isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            items, other_items = list(one.values()), [other[key] for key in one]
        elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
            items, other_items = list(one), list(other)
        elif type(one) is type(other) and _is_compared_by_items(one):
            if _code_of(one) is not _code_of(other):
                return False
            items, other_items = list(_items(one)), list(_items(other))
        else:
            return _are_equal_arrays(one, other)
        self._pairs.add((id(one), id(other)))
        return len(items) == len(other_items) and all(
            map(self.are_equal, items, other_items)
        )


def _is_compared_by_items(value: Any) -> bool:
    """Whether a value is code, or an object whose class defines no equality."""
    code = types.FunctionType, types.MethodType, functools.partial
    return isinstance(value, code) or type(value).__eq__ is object.__eq__


def _code_of(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        return value.__code__
    return value.__func__ if isinstance(value, types.MethodType) else None


def _are_equal_arrays(one: Any, other: Any) -> bool:
    try:
        return np.shape(one) == np.shape(other) and bool(np.all(one == other))
    except (TypeError, ValueError):  # they cannot be compared
        return False


class _Copier:
    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._optimizer = optimizer
        self._copies: dict[int, Any] = {}

    def add(self, original: Any, copy: Any) -> None:
        """Replace an object by its copy from now on."""
        self._copies[id(original)] = copy

    def copy(self, value: Any, attribute: str) -> Any:
        """Return the value of an attribute for the copy, or raise `ValueError`."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if _is_container(value):
            return _rebuild(value, lambda item: self.copy(item, attribute))
        if not self._refers(value):
            return value

        def copy(held: Any) -> Any:  # code shares all that does not refer
            return self.copy(held, attribute) if self._refers(held) else held

        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, copy(value.__self__))
        if type(value) is functools.partial:
            keywords = {key: copy(held) for key, held in value.keywords.items()}
            return functools.partial(
                copy(value.func), *map(copy, value.args), **keywords
            )
        if isinstance(value, types.FunctionType):
            return self._copy_function(value, copy)
        raise ValueError(
            "The optimizer is copied, and the copy cannot have an object that refers "
            f"to the original. Its attribute `{attribute}` holds such a "
            f"`{type(value).__name__}`. Let a method or a function of the optimizer "
            "refer to it instead, or set the attribute on `inner_optimizer` of what "
            "this constructor returns. Received: "
            f"inner={type(self._optimizer).__name__}(...)"
        )

    def _copy_function(
        self, function: types.FunctionType, copy: Callable[[Any], Any]
    ) -> types.FunctionType:
        cells = function.__closure__ or ()
        new_cells = [
            types.CellType() if any(map(self._refers, _contents(cell))) else cell
            for cell in cells
        ]
        twin = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            closure=tuple(new_cells),
        )
        self.add(function, twin)  # it may refer to itself
        for cell, new_cell in zip(cells, new_cells, strict=True):
            if new_cell is not cell:
                new_cell.cell_contents = copy(cell.cell_contents)
        twin.__defaults__ = tuple(map(copy, function.__defaults__ or ())) or None
        keywords = function.__kwdefaults__ or {}
        twin.__kwdefaults__ = {k: copy(v) for k, v in keywords.items()} or None
        twin.__dict__.update(function.__dict__)
        twin.__doc__, twin.__qualname__ = function.__doc__, function.__qualname__
        return twin

    def _refers(self, value: Any) -> bool:
        return any(id(held) in self._copies for held in _reachable(value))


def _copy_variable(
    variable: keras.Variable, twin: keras.optimizers.Optimizer
) -> keras.Variable:
    """Add a variable with the same value to the copy of its optimizer."""
    value = _value(variable)
    copy = _Optimizer.add_variable(
        twin,
        variable.shape,
        initializer=lambda shape, dtype=None: tf.constant(value, dtype, shape),
        dtype=variable.dtype,
        aggregation=variable.aggregation,
        name=variable.name,
    )
    copy.trainable = variable.trainable
    return copy


def _value(variable: keras.Variable) -> Any:
    with tf.init_scope():
        value = variable.numpy()
    return value.item() if value.ndim == 0 else value


def _is_container(value: Any) -> bool:
    """Whether a value is a plain list, dictionary, set or tuple, or Keras's wrapper."""
    if not isinstance(value, list | dict | set | tuple):
        return False
    is_wrapper = type(value).__module__.startswith(("keras.", "tensorflow."))
    return is_wrapper or hasattr(value, "_fields") or type(value) in _CONTAINERS


def _rebuild(value: Any, copy: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind with copied items."""
    if isinstance(value, dict):
        items = {key: copy(item) for key, item in value.items()}
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, items)
        is_ordered = isinstance(value, collections.OrderedDict)
        return collections.OrderedDict(items) if is_ordered else items
    if hasattr(value, "_fields"):
        return type(value)(*map(copy, value))
    kind = next(kind for kind in (list, set, tuple) if isinstance(value, kind))
    return kind(map(copy, value))


def _find_name_references(
    optimizer: keras.optimizers.Optimizer, values: dict[str, Any]
) -> list[NameReference]:
    return [
        NameReference(attribute, function, name, optimizer)
        for attribute, value in values.items()
        for function in _reachable(value)
        if isinstance(function, types.FunctionType)
        for name in _global_names(function.__code__)
        if function.__globals__.get(name) is optimizer
    ]


def _global_names(code: types.CodeType) -> set[str]:
    """Return the global names that code, and code within it, reads."""
    # Only for an error: a function that names the original optimizer would go on using
    # that one, and Python has no other way to tell which names a nested function reads.
    nested = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_global_names, nested))


def _reachable(value: Any) -> Iterator[Any]:
    """Yield a value and everything that it holds, directly or not."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if id(item) not in seen:
            seen.add(id(item))
            yield item
            pending.extend(_items(item))


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | set | tuple):
        yield from value
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            yield from _contents(cell)
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    elif not isinstance(value, _NOT_SEARCHED):
        yield from getattr(value, "__dict__", {}).values()
        call = vars(type(value)).get("__call__")
        if isinstance(call, types.FunctionType):
            yield call


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []
