"""What is known about the accuracy of the methods that are advised by default.

The figures are from `study/runs` and `study/rows` (docs/research/accuracy.md).
"""

_LOSSES = {
    ("float16", "language"): "as accurate as dense training in five runs",
    ("float16", "convolutional"): "0.5 points less accurate than dense in one run",
    ("power_sgd", "convolutional"): (
        "0.3 points less accurate than dense in three runs of 10,000 steps, and 1.4 "
        "points in one of 2,000"
    ),
    ("power_sgd", "language"): "1.4 % worse in loss than dense in 300 steps",
    ("dgc", "convolutional"): "as accurate as dense in 10,000 steps with a warm-up",
    ("dgc", "language"): (
        "1.4 to 9 % worse than dense in 5,000 to 10,000 steps; use `dgc_for_steps`"
    ),
}
_UNKNOWN = "compare its accuracy with dense training before you rely on it"


def accuracy_sentence(method: str, kind_of_model: str) -> str:
    """Return what is known about a method's accuracy; "" for dense."""
    name = method.partition(" ")[0]
    if name == "dense":
        return ""
    known = _LOSSES.get((name, kind_of_model))
    if known is None:
        return f"{method}: nothing is known for a model like this; {_UNKNOWN}."
    kind = {"language": "language", "convolutional": "small convolutional"}
    return f"{method}: {known}, on {kind[kind_of_model]} models; {_UNKNOWN}."
