"""The documentation's commands of the study use existing flags."""

import commands
import pytest


@pytest.mark.slow
def test_documented_flags_exist():
    """In blocks, values are checked too; in sentences, only names."""
    documented = commands.of_scripts("study")
    assert len(documented) > 30
    faults = commands.flag_faults([command for _, command in documented])
    pairs = zip(documented, faults, strict=True)
    assert [(place, *command, f) for (place, command), f in pairs if f] == []
