"""Moving averages of weights, which Keras's optimizers keep with `use_ema`."""

import keras


def update(optimizer: keras.optimizers.Optimizer) -> None:
    """Do with these averages what Keras does in a call that only accumulates.

    Args:
        optimizer: optimizer that keeps them.
    """
    variables = optimizer._trainable_variables
    optimizer._update_model_variables_moving_average(variables)
    if every := optimizer.ema_overwrite_frequency:
        keras.ops.cond(
            (optimizer.iterations + 1) % every == 0,
            lambda: optimizer._overwrite_model_variables_with_average_value(variables),
            lambda: None,
        )
