"""Commands of the study in the documentation have flags that its scripts know."""

import commands
import pytest


@pytest.mark.slow
def test_flags():
    """Values too where a block has the command; of those in sentences, names."""
    found = commands.of_scripts("study")
    assert len(found) > 30
    faults = commands.flag_faults([command for _, command in found])
    pairs = zip(found, faults, strict=True)
    assert [(place, *command, f) for (place, command), f in pairs if f] == []
