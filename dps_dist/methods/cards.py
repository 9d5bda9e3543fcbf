"""docs/methods.md, from what the methods say of themselves: `python -m dps_dist.methods.cards`."""

from collections.abc import Mapping
from importlib import import_module

from pydantic import BaseModel

from dps_dist import config, recipes
from dps_dist.methods import Method, build
from dps_dist.recipes import paper

HEAD = """# Methods

Written by `python -m dps_dist.methods.cards` from the files in `dps_dist/methods/` and their
settings in `dps_dist/config/methods.py`. p is the prediction (softmax of the logits z), y a label,
K the number of classes, sg what gets no gradient. `dps recipes --table` names the recipe of every
row of the paper's tables; a part such as `te` turns any recipe into that method:
`cifar10-resnet18-te-sym20`.

Three rows of the paper are not methods of training. **MixUp** is the baseline with
`augment.mix=mixup`. **TS** (temperature scaling) is `evaluate.temperature=true` with
`data.hold_out`: T is fitted on held-out samples by LBFGS, and `nll_ts`, `ece_ts` stand beside
`nll`, `ece`. **Ensemble** is `dps evaluate RUN RUN RUN`: the mean softmax of trained runs.
OT-Filter and DULC are only cited. So is CSOT: of its semi-supervised stage neither the weights of
the four losses nor SimSiam's heads nor the solver's stopping rule are known to us.

Where the paper combines KD with another method, `kd-mdca` and its like distil into a student whose
own loss (`method.task`) is that method's; teachers trained by it are a matter of `method.teachers`.
Losses of a whole batch (MMCE, MDCA, CRL's ranking) are taken over the images that a worker passes
at once, as batch norm is.
"""

_MIXES: Mapping[str, str] = {
    "all": "CutMix, CutOut, MixUp: the whole batch",
    "half": "CutMix, CutOut, MixUp: half of each batch",
    "none": "Not with CutMix, CutOut or MixUp",
}


def cards() -> str:
    """The whole page."""
    by_recipe: dict[str, str] = {name: recipes.load(name).method.name for name in paper.recipes()}
    return "\n".join([HEAD, *(_card(row, by_recipe) for row in config.METHODS)])


def _card(settings: type[BaseModel], by_recipe: dict[str, str]) -> str:
    name = settings.model_fields["name"].default
    module = import_module(f"dps_dist.methods.{name}")
    method = build(settings())
    text = (module.__doc__ or "").strip()
    facts = [f"Keeps {_kept(method)}.", f"{_MIXES[method.mixes]}."]
    if method.adapts:
        facts.append("Needs `data.hold_out`.")
    own = [recipe for recipe, method_name in by_recipe.items() if method_name == name]
    if own:
        more = f" and {len(own) - 3} more" if len(own) > 3 else ""
        facts.append(f"Recipes: {', '.join(f'`{row}`' for row in own[:3])}{more}.")
    listed = [f"- {fact}" for fact in facts]
    return "\n".join([f"## `{name}`", "", text, "", *listed, "", _table(settings)])


def _kept(method: Method) -> str:
    if method.evidence is not None:
        length = method.evidence.classes
        size = "2K + 2" if length is None else str(2 * length + 2)
        return f"{size} bytes a sample, in the sharded store"
    if method.recalls:
        return "the last batch: its second view, and 4K bytes of logits a sample of it"
    return "a few numbers" if method.state_dict() else "nothing"


def _table(settings: type[BaseModel]) -> str:
    of_store = config.Stored.model_fields
    fields = dict(sorted(settings.model_fields.items(), key=lambda item: item[0] in of_store))
    fields.pop("name")
    if not fields:
        return ""
    lines = [
        f"| `method.{key}` | {_shown(field.default)} | {field.description} |"
        for key, field in fields.items()
    ]
    return "\n".join(["| setting | default | |", "|---|---|---|", *lines, ""])


def _shown(default: object) -> str:
    return f"name={default.name}" if isinstance(default, BaseModel) else str(default)  # type: ignore[attr-defined]


if __name__ == "__main__":
    print(cards(), end="")
