"""The config of an optimizer: what Keras saves, and compares between workers."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from tf_dgc.arguments import show

# --- Exclusions: variables that the user wants to be sent whole, as Keras names such.


class Exclusions:
    """Which variables `exclude_from_compression` was called with.

    Attributes:
        paths: paths of single variables.
        names: regular expressions, of which one has to be found in a variable's path.
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
        if isinstance(var_names, str) or not all(
            isinstance(name, str) for name in var_names or ()
        ):
            raise ValueError(
                "`var_names` must be a list of texts, of which one has to be found in "
                'a variable\'s path, for example `["embedding", "logits/kernel"]`. '
                f"Received: var_names={show(var_names)}"
            )
        for name in var_names or ():
            _check_pattern(name)
        unnamed = [v for v in var_list or () if not hasattr(v, "path")]
        if unnamed:
            raise ValueError(
                "`var_list` must be a list of a model's variables, for example "
                f"`model.layers[0].weights`. Received: {show(unnamed[0])}"
            )
        self.paths.update(v.path for v in var_list or ())
        self.names.update(var_names or ())

    def __contains__(self, variable: keras.Variable) -> bool:
        found = any(re.search(name, variable.path) for name in self.names)
        return found or variable.path in self.paths

    def warn_of_unmatched(self, variables: Sequence[keras.Variable]) -> None:
        """Warn of what excludes none of the variables, which are compressed then.

        Args:
            variables: variables of the model.
        """
        known = [v.path for v in variables]
        found = [
            name for name in self.names if not any(re.search(name, p) for p in known)
        ]
        found += [path for path in self.paths if path not in known]
        if found:
            warnings.warn(
                "`exclude_from_compression` was called with what is in no path of a "
                "variable, so nothing is excluded by it. A model that is loaded may "
                "have other names; name its layers, or call it again for the loaded "
                f"one before the first step. Received: {sorted(found)}; the variables "
                f"are {known}",
                UserWarning,
                stacklevel=2,
            )

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"paths": sorted(self.paths), "names": sorted(self.names)}


def _check_pattern(name: str) -> None:
    try:
        re.compile(name)
    except re.error as error:
        raise ValueError(
            f"A name in `var_names` is no regular expression: {error}. For any letters "
            'write ".*", as in `["^encoder/.*/bias$"]`; "bias" is found anywhere. '
            f"Received: {show(name)}"
        ) from error


EXCLUDED = "excluded_from_compression"  # config key that is no argument


def parse_config(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Exclusions]:
    """Return the constructor's arguments of a config, and which variables it excludes.

    Args:
        config: dictionary of `collect`, perhaps from a file.
        custom_objects: classes by name, as Keras passes them.
    """
    config = dict(config)
    exclusions = Exclusions(**config.pop(EXCLUDED, {}))
    arguments = {
        key: keras.saving.deserialize_keras_object(value, custom_objects)
        if isinstance(value, dict)
        else value
        for key, value in config.items()
    }
    return arguments, exclusions
