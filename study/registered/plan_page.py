"""The tables of study/plan.md, generated from the plan."""

import dataclasses
import pathlib

from tasks.recipes import RECIPES, Recipe

from registered import plan

PAGE = pathlib.Path(__file__).parents[1] / "plan.md"


def changes():
    """Return the dated changes since the first counted run, as Markdown."""
    return PAGE.read_text(encoding="utf-8").partition("## Changes\n")[2].strip()


def tables():
    """Return the tables of recipes and of runs, as Markdown."""
    return f"### Recipes\n\n{_recipes()}\n\n### Order\n\n{_order()}"


def markdown(headings, lines):
    """Return a Markdown table; cells are not escaped."""
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _recipes():
    fields = [field.name for field in dataclasses.fields(Recipe)]
    lines = [
        [name.replace("_", " "), *(_value(r, name) for r in RECIPES.values())]
        for name in fields
    ]
    lines.append(["steps", *(f"{plan.STEPS[task]:,}" for task in RECIPES)])
    return markdown(["", *RECIPES], lines)


def _value(recipe, name):
    value = getattr(recipe, name)
    if name == "stages":
        return ", ".join(f"x{f:g} at {share:.0%}" for share, f in value) or "cosine"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else value


def _order():
    lines, total = [], 0
    for group in plan.GROUPS:
        total += group.total_minutes
        model = ", ".join(f"{k}={v}" for k, v in (group.model or {}).items())
        lines.append(
            [
                group.task + (f" ({model})" if model else ""),
                group.workers,
                ", ".join(group.methods),
                ", ".join(map(str, group.seeds)),
                group.total_minutes,
                f"{total / 60:.1f}",
            ]
        )
    headings = ["task", "workers", "methods", "seeds", "minutes", "hours so far"]
    return markdown(headings, lines)
