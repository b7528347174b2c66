"""Every private name of TensorFlow and Keras that the package uses.

Tested with TensorFlow 2.19.1 to 2.21.0 and Keras 3.10.0 to 3.15.1. Changes instances
that belong to the caller, never classes or modules, except one function while a
strategy is created (`coordination.enabling_collectives_by`). Imports nothing of the
package.
"""
