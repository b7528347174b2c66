"""Exchanges by the names that benchmarks have for them."""

from tf_dgc import exchanges


def make(name, num_workers):
    """Return an exchange: `star N` has N servers, `star all` as many as workers."""
    if name.startswith("star "):
        shards = name.removeprefix("star ")
        return exchanges.Star(num_workers if shards == "all" else int(shards))
    return exchanges.get(name)
