"""Creates the task and the optimizer of a spec."""

import dataclasses

import keras
from tasks.cifar import Cifar10
from tasks.penn import Penn
from tasks.small_by_recipe import Mnist, Shakespeare

import tf_dgc
from registered import plan
from tf_dgc import compressors

TASKS = {task.name: task for task in (Cifar10, Penn, Mnist, Shakespeare)}


def make_task(spec, data):
    """Return the task of a run.

    Args:
        spec: `specs.Spec` of the run.
        data: folder of the data sets.
    """
    settings = spec.settings
    task = TASKS[spec.task](
        data, settings.get("tuning", False), **settings.get("model", {})
    )
    task.recipe = dataclasses.replace(task.recipe, **settings.get("recipe", {}))
    return task


def make_optimizer(spec, task):
    """Return the optimizer of a run; call this in the scope of the strategy.

    `dense` is Keras's own optimizer. `dgc` takes `warmup_epochs` in addition to its
    arguments (0 for no warm-up; by default the recipe's). `dgc_for_steps` derives the
    sparsity from the number of steps.
    """
    sgd = task.recipe.sgd(spec.steps)
    options = _optimizer_arguments(spec.settings.get("method", {}))
    if spec.method == "dense":
        return sgd
    if spec.method == plan.FOR_STEPS:
        return tf_dgc.dgc_for_steps(sgd, spec.steps, **options)
    if spec.method != "dgc":
        compressor = compressors.METHODS[spec.method](**options)
        arguments = _optimizer_arguments(spec.settings.get("optimizer", {}))
        return tf_dgc.CompressedOptimizer(sgd, compressor, **arguments)
    sparsity = options.pop("sparsity", 0.999)
    epochs = options.pop("warmup_epochs", task.recipe.warmup_epochs)
    steps = round(epochs * task.steps_per_epoch(spec.workers))
    if steps:
        sparsity = tf_dgc.schedules.WarmupSparsity(steps, sparsity)
    return tf_dgc.DGCOptimizer(sgd, sparsity, **options)


# Fields of `Corrections` by their names in rows.
_CORRECTIONS = {
    "momentum_correction": "momentum",
    "factor_masking": "factor_masking",
    "adam_correction": "adam",
    "rate_correction": "scale_before_accumulation",
}


def _optimizer_arguments(settings):
    """Convert a row's settings to an optimizer's arguments."""
    options = dict(settings)
    fields = {
        field: options.pop(name)
        for name, field in _CORRECTIONS.items()
        if name in options
    }
    if fields:
        options["corrections"] = tf_dgc.Corrections(**fields)
    return options


def shapes(spec):
    """Return the shapes of the trainable variables, without reading data."""
    keras.utils.set_random_seed(0)
    return [tuple(v.shape) for v in make_task(spec, None).model().trainable_variables]
