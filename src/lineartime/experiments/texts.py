"""The texts of an experiment: which one stands behind the name of each kind, and whether those that are given exist."""

from lineartime.data import load_corpus
from lineartime.errors import ArgumentError
from lineartime.experiments.config import TEXT_OPTIONS, ReproduceConfig
from lineartime.experiments.plan import Plan
from lineartime.runs.record import texts_of


def text_notes(plan: Plan) -> dict[str, str]:
    """For the name of each kind of text that the selected runs read, the text that they read, in words.

    Models whose speed is measured read no text.
    """
    notes: dict[str, str] = {}
    for entry in plan.entries if plan.experiment.kind != "latency" else ():
        name = entry.setting.text
        if plan.is_selected(entry):
            other = "" if getattr(plan.config, name) else f"; the option {name} gives another"
            notes[name] = f"text: {', '.join(texts_of(entry.options))}{other}"
    return notes


def check_given(config: ReproduceConfig) -> None:
    """Raise LineartimeError for a text that is given and does not exist."""
    for name in TEXT_OPTIONS:
        given = getattr(config, name)
        try:
            if given:
                load_corpus(given)
        except ArgumentError as error:
            raise ArgumentError(name, *error.predicate) from None
