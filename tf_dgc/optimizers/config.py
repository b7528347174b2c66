"""The config of an optimizer, which Keras saves and workers compare."""

import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import keras

from tf_dgc.arguments import show


@dataclasses.dataclass(frozen=True)
class FrozenSettings:
    """Base of small objects that group arguments of an optimizer, saved by Keras."""

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Create an object from `get_config`'s dictionary."""
        return cls(**config)


EXCLUDED = "excluded_from_compression"  # config key that is no constructor argument


class Exclusions:
    """Variables that `exclude_from_compression` excludes.

    Attributes:
        paths: paths of single variables.
        names: regular expressions; a variable is excluded if one is found in its path.
    """

    def __init__(self, paths: Iterable[str] = (), names: Iterable[str] = ()):
        self.paths = set(paths)
        self.names = set(names)

    def add(
        self,
        var_list: Sequence[keras.Variable] | None,
        var_names: Sequence[str] | None,
    ) -> None:
        """Exclude more; see `CompressedOptimizer.exclude_from_compression`."""
        names, variables = var_names or (), var_list or ()
        if isinstance(names, str) or not all(isinstance(n, str) for n in names):
            raise ValueError(
                "`var_names` must be a list of regular expressions that are searched "
                'in the variables\' paths, for example `["embedding", "logits/kernel"]`'
                f". Received: var_names={show(var_names)}"
            )
        for name in names:
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(
                    f"A name in `var_names` is no regular expression: {error}. For any "
                    'letters write ".*", as in `["^encoder/.*/bias$"]`; "bias" is '
                    f"found anywhere. Received: {show(name)}"
                ) from error
        for variable in variables:
            if not hasattr(variable, "path"):
                raise ValueError(
                    "`var_list` must be a list of a model's variables, for example "
                    f"`model.layers[0].weights`. Received: {show(variable)}"
                )
        self.paths.update(v.path for v in variables)
        self.names.update(names)

    def update(self, other: "Exclusions") -> None:
        """Exclude what `other` excludes, too."""
        self.paths |= other.paths
        self.names |= other.names

    def __contains__(self, variable: keras.Variable) -> bool:
        path = variable.path
        return path in self.paths or any(re.search(name, path) for name in self.names)

    def warn_of_unmatched(self, variables: Sequence[keras.Variable]) -> None:
        """Warn of paths and names that exclude none of the model's variables."""
        paths = [v.path for v in variables]
        unmatched = [
            name for name in self.names if not any(re.search(name, p) for p in paths)
        ]
        unmatched += [path for path in self.paths if path not in paths]
        if unmatched:
            warnings.warn(
                "`exclude_from_compression` was called with names that match no "
                "variable, so they exclude nothing. A model that is loaded may have "
                "other names; name its layers, or call it again for the loaded one "
                f"before the first step. Received: {sorted(unmatched)}; the variables "
                f"are {paths}",
                UserWarning,
                stacklevel=2,
            )

    def get_config(self) -> dict[str, Any]:
        """Return the paths and names, sorted."""
        return {"paths": sorted(self.paths), "names": sorted(self.names)}


def parse_config(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Exclusions]:
    """Return the constructor's arguments and the exclusions of a config."""
    arguments = dict(config)
    exclusions = Exclusions(**arguments.pop(EXCLUDED, {}))
    for key, value in arguments.items():
        if isinstance(value, dict):
            arguments[key] = keras.saving.deserialize_keras_object(
                value, custom_objects
            )
    return arguments, exclusions
