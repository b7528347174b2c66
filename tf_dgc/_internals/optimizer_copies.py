"""Copies of Keras's optimizers, attribute by attribute; some names are private.

A copy through the config would lose whatever a class leaves out of it.
"""

import collections
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving.keras_saveable import KerasSaveable

_Optimizer = keras.optimizers.Optimizer

# What Keras and TensorFlow keep about an object: a copy gets these from Keras's own
# constructor, and they are about its own variables and its own strategy.
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
_OF_TENSORFLOW = "_self_"  # how TensorFlow's bookkeeping begins
_OURS = "_tf_dgc_"
_NAMES, _METHODS = "_tf_dgc_name_references", "_tf_dgc_replaced_methods"
# Not searched for references to an optimizer: a model may well hold one.
_NOT_SEARCHED = (
    *(type, types.ModuleType, KerasSaveable, keras.Variable),
    *(tf.Module, tf.Tensor, tf.Variable, tf.distribute.Strategy),
)

_CONTAINERS = (list, dict, set, tuple, collections.OrderedDict, collections.defaultdict)


class NameReference(NamedTuple):
    """A function that reads an optimizer by a name of its module.

    Attributes:
        attribute: attribute of the optimizer that holds the function.
        function: the function.
        name: the name.
        optimizer: the optimizer that was copied.
    """

    attribute: str
    function: Any
    name: str
    optimizer: keras.optimizers.Optimizer

    @property
    def holds(self) -> bool:
        """Whether the name still stands for the optimizer that was copied."""
        return self.function.__globals__.get(self.name) is self.optimizer


def copy_optimizer(
    optimizer: keras.optimizers.Optimizer,
    prepare: Callable[[keras.optimizers.Optimizer], None] = lambda _: None,
) -> keras.optimizers.Optimizer:
    """Return an unbuilt copy, with variables of its own in the current strategy.

    Every attribute is copied, whatever the config says. Lists, dictionaries, sets and
    tuples are copied with all that they hold; variables that the constructor added are
    created anew with the same value; any other value is the same object in both, also
    variables of a model. What refers to the optimizer refers to the copy instead:
    methods, `functools.partial`, and functions that close over it.

    Args:
        optimizer: optimizer to be copied, unbuilt; it is not changed.
        prepare: function of the copy that replaces its variables, called before
            attributes are copied.

    Raises:
        ValueError: for an attribute that refers to the optimizer in another way.
    """
    twin = object.__new__(type(optimizer))
    translation = _Translation(optimizer, twin)
    rate = optimizer._learning_rate
    is_variable = isinstance(rate, keras.Variable)
    _Optimizer.__init__(
        twin, float(_value(rate)) if is_variable else lambda: 0.0, name=optimizer.name
    )
    prepare(twin)
    if calls := _value(optimizer._iterations):
        twin._iterations.assign(calls)
    translation.know(optimizer._iterations, twin._iterations)
    if is_variable:
        translation.know(rate, twin._learning_rate)
    for variable in constructor_variables(optimizer):
        translation.know(variable, _create_again(twin, variable))
    if not is_variable:
        translation.note_names(rate, "learning_rate")
        twin._learning_rate = translation.translate(rate, "learning_rate")
    for name, value in attributes(optimizer).items():
        translation.note_names(value, name)
        _Optimizer.__setattr__(twin, name, translation.translate(value, name))
    remarks = vars(twin)  # neither Keras nor TensorFlow is to look inside
    remarks[_NAMES] = translation.name_references
    remarks[_METHODS] = replaced_methods(optimizer)
    return twin


def replaced_methods(optimizer: keras.optimizers.Optimizer) -> set[str]:
    """Return the methods that the user replaced on the object, not in its class.

    Those of a copy are those of the original: this package replaces some as well.
    """
    of_original = vars(optimizer).get(_METHODS)
    return methods_of_instance(optimizer) if of_original is None else of_original


def methods_of_instance(optimizer: keras.optimizers.Optimizer) -> set[str]:
    """Return the methods that were replaced on the object, by whomever."""
    kind = type(optimizer)
    return {n for n in vars(optimizer) if callable(getattr(kind, n, None))}


def name_references(optimizer: keras.optimizers.Optimizer) -> tuple[NameReference, ...]:
    """Return what functions of a copy read of the optimizer that was copied."""
    return tuple(vars(optimizer).get(_NAMES, ()))


def attributes(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return the attributes of an unbuilt optimizer, without Keras's bookkeeping.

    And without the methods that this package replaced on a copy.
    """
    of_package = methods_of_instance(optimizer) - replaced_methods(optimizer)
    slots = [
        name
        for kind in type(optimizer).__mro__
        for name in _names(vars(kind).get("__slots__", ()))
        if hasattr(optimizer, name)
    ]
    found = {**vars(optimizer), **{name: getattr(optimizer, name) for name in slots}}
    return {
        name: value
        for name, value in found.items()
        if name not in _BOOKKEEPING | of_package
        and not name.startswith((_OF_TENSORFLOW, _OURS))
    }


def constructor_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Return the variables that the constructor added, but for rate and count."""
    usual = {id(optimizer._iterations), id(optimizer._learning_rate)}
    tracked = [v for v in optimizer._variables if id(v) not in usual]
    return [v for v in tracked if was_added_by(optimizer, v)]


def was_added_by(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """Whether a variable that an optimizer tracks was added by `add_variable`.

    Keras tracks whatever variables an optimizer has as attributes, those of a model
    too; what `add_variable` creates has the optimizer's name in its path.
    """
    return optimizer.name in variable.path.split("/")[:-1]


def differences(
    optimizer: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer
) -> list[str]:
    """Return in what another optimizer differs, attribute by attribute, as errors say.

    But for names, learning rate and iterations, and for what is excluded from the decay
    of weights.

    Args:
        optimizer: optimizer, unbuilt.
        other: optimizer of the same class.
    """
    mine, others = _compared(optimizer), _compared(other)
    same = _Comparison(optimizer, other).are_same
    return [
        f"`{name}` is {value!r}"
        + (f", and would be {others[name]!r}" if name in others else "")
        for name, value in mine.items()
        if name not in others or not same(value, others[name])
    ]


def _compared(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return what is compared of an optimizer, by name."""
    own = {
        name: value
        for name, value in attributes(optimizer).items()
        if name not in ("_lock", "name")
        and not name.startswith("_exclude_from_weight_decay")
    }
    return {**own, **{v.name: _value(v) for v in constructor_variables(optimizer)}}


class _Comparison:
    """Compares values of two optimizers, which may refer to their own one.

    Args:
        one: an optimizer.
        other: another one.
    """

    def __init__(
        self, one: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer
    ):
        self._compared = {(id(one), id(other))}  # also while they are

    def are_same(self, one: Any, other: Any) -> bool:
        """Whether two values are alike."""
        if one is other or (id(one), id(other)) in self._compared:
            return True
        if isinstance(one, dict) and isinstance(other, dict):
            alike = one.keys() == other.keys()
            held = list(one.values()), [other.get(key) for key in one]
        elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
            alike, held = True, (list(one), list(other))
        elif type(one) is type(other) and _is_compared_by_parts(one):
            alike = _code_of(one) is _code_of(other)
            held = list(_held(one)), list(_held(other))
        else:
            return _are_equal(one, other)
        self._compared.add((id(one), id(other)))
        alike = alike and len(held[0]) == len(held[1])
        return alike and all(map(self.are_same, *held))


def _is_compared_by_parts(value: Any) -> bool:
    """Whether a value is code, or an object whose class does not say what is equal."""
    code = types.FunctionType, types.MethodType, functools.partial
    return isinstance(value, code) or type(value).__eq__ is object.__eq__


def _code_of(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        return value.__code__
    return value.__func__ if isinstance(value, types.MethodType) else None


def _are_equal(one: Any, other: Any) -> bool:
    """Whether values are equal, also of arrays and tensors."""
    try:
        return np.shape(one) == np.shape(other) and bool(np.all(one == other))
    except (TypeError, ValueError):  # they cannot be compared
        return False


def _names(slots: str | Iterable[str]) -> list[str]:
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _value(variable: keras.Variable) -> Any:
    with tf.init_scope():
        value = variable.numpy()
    return value.item() if value.ndim == 0 else value


def _create_again(
    twin: keras.optimizers.Optimizer, variable: keras.Variable
) -> keras.Variable:
    """Return a variable like one of the optimizer, with the same value, of its copy."""
    value = _value(variable)
    made = _Optimizer.add_variable(
        twin,
        variable.shape,
        initializer=lambda shape, dtype=None: tf.constant(value, dtype, shape),
        dtype=variable.dtype,
        aggregation=variable.aggregation,
        name=variable.name,
    )
    made.trainable = variable.trainable
    return made


class _Translation:
    """Translates values of an optimizer's attributes to those of its copy.

    Args:
        optimizer: optimizer that is copied.
        twin: the copy.

    Attributes:
        name_references: functions that read the optimizer by a name of their module.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, twin: keras.optimizers.Optimizer
    ):
        self._optimizer = optimizer
        self._known: dict[int, Any] = {id(optimizer): twin}
        self.name_references: list[NameReference] = []

    def know(self, variable: keras.Variable, own: keras.Variable) -> None:
        """Let a variable of the optimizer become one of the copy."""
        self._known[id(variable)] = own

    def translate(self, value: Any, attribute: str) -> Any:
        """Return the value that an attribute of the copy gets.

        Args:
            value: value of the optimizer's attribute.
            attribute: name of the attribute, for errors.

        Raises:
            ValueError: for an object that refers to the optimizer.
        """
        if id(value) in self._known:
            return self._known[id(value)]
        if _is_container(value):
            return _rebuild(
                value, functools.partial(self.translate, attribute=attribute)
            )
        if not self._refers(value):
            return value
        refer = functools.partial(self._refer, attribute=attribute)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, refer(value.__self__))
        if type(value) is functools.partial:
            arguments = map(refer, value.args)
            keywords = {key: refer(held) for key, held in value.keywords.items()}
            return functools.partial(refer(value.func), *arguments, **keywords)
        if isinstance(value, types.FunctionType):
            return self._function(value, refer)
        raise ValueError(
            "The optimizer is copied, and the copy cannot have an object that refers "
            f"to the original. Its attribute `{attribute}` holds such a "
            f"`{type(value).__name__}`. Let a method or a function of the optimizer "
            "refer to it instead, or set the attribute on `inner_optimizer` of what "
            "this constructor returns. Received: "
            f"inner={type(self._optimizer).__name__}(...)"
        )

    def _refer(self, value: Any, attribute: str) -> Any:
        """Return what takes a value's place within code, which shares all the rest."""
        return self.translate(value, attribute) if self._refers(value) else value

    def _function(
        self, function: types.FunctionType, refer: Callable[[Any], Any]
    ) -> types.FunctionType:
        """Return the same function, but for what it refers to."""
        cells = function.__closure__ or ()
        own = [
            types.CellType() if any(map(self._refers, _contents(cell))) else cell
            for cell in cells
        ]
        made = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            closure=tuple(own),
        )
        self._known[id(function)] = made  # it may refer to itself
        for cell, new in zip(cells, own, strict=True):
            if new is not cell:
                new.cell_contents = refer(cell.cell_contents)
        made.__defaults__ = tuple(map(refer, function.__defaults__ or ())) or None
        keywords = function.__kwdefaults__ or {}
        made.__kwdefaults__ = {k: refer(v) for k, v in keywords.items()} or None
        made.__dict__.update(function.__dict__)
        made.__doc__, made.__qualname__ = function.__doc__, function.__qualname__
        return made

    def _refers(self, value: Any) -> bool:
        """Whether a value holds the optimizer, or one of its variables."""
        return any(id(held) in self._known for held in _reached(value))

    def note_names(self, value: Any, attribute: str) -> None:
        """Note functions that read the optimizer by a name of their module.

        Args:
            value: value of the optimizer's attribute.
            attribute: name of the attribute.
        """
        functions = [f for f in _reached(value) if isinstance(f, types.FunctionType)]
        self.name_references += [
            NameReference(attribute, function, name, self._optimizer)
            for function in functions
            for name in _global_names(function.__code__)
            if function.__globals__.get(name) is self._optimizer
        ]


def _is_container(value: Any) -> bool:
    """Whether a value is a list, dictionary, set or tuple, also as Keras wraps it.

    `isinstance` knows TensorFlow's wrappers too. What a user derives from these is an
    object like any other.
    """
    if not isinstance(value, list | dict | set | tuple):
        return False
    of_keras = type(value).__module__.startswith(("keras.", "tensorflow."))
    return of_keras or hasattr(value, "_fields") or type(value) in _CONTAINERS


def _rebuild(value: Any, translate: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind that holds what its entries become."""
    if not isinstance(value, dict):
        held = map(translate, value)
        if hasattr(value, "_fields"):
            return type(value)(*held)
        kind = next(kind for kind in (list, set, tuple) if isinstance(value, kind))
        return kind(held)
    entries = {key: translate(held) for key, held in value.items()}
    if isinstance(value, collections.defaultdict):
        return collections.defaultdict(value.default_factory, entries)
    ordered = isinstance(value, collections.OrderedDict)
    return collections.OrderedDict(entries) if ordered else entries


def _reached(value: Any) -> Iterator[Any]:
    """Return a value and all that it holds, directly or not."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if id(held) not in seen:
            seen.add(id(held))
            yield held
            waiting.extend(_held(held))


def _held(value: Any) -> Iterator[Any]:
    """Return what a value holds directly."""
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
    """Return what a cell of a closure holds; nothing before it is set."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names that code, and code within it, reads of its module."""
    within = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_global_names, within))
