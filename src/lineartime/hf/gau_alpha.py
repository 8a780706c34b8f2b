"""Fine-tuned models of GAU-alpha, with their heads, as models of transformers."""

from pathlib import Path

from lineartime.errors import LineartimeError
from lineartime.files import new_folder, read_plain
from lineartime.foreign.conversion import read_gau_alpha
from lineartime.foreign.gau_alpha import PACKAGE
from lineartime.foreign.weights import StateDict
from lineartime.hf.convert import CONFIG, quietly
from lineartime.hf.heads import (
    LineartimeForQuestionAnswering,
    LineartimeForSequenceClassification,
    LineartimeForTokenClassification,
    TaskModel,
)
from lineartime.hf.model import LineartimeConfig
from lineartime.hf.tokenizer import fast_tokenizer

_TUNED: dict[str, tuple[type[TaskModel], str]] = {
    "GAUAlphaForSequenceClassification": (LineartimeForSequenceClassification, "classifier"),
    "GAUAlphaForTokenClassification": (LineartimeForTokenClassification, "classifier"),
    "GAUAlphaForQuestionAnswering": (LineartimeForQuestionAnswering, "qa_outputs"),
}
"""The classes that ours can be, and the names of their heads."""


def convert_fine_tuned(source: Path, destination: str | Path, name: str) -> Path:
    """Save a fine-tuned model of GAU-alpha, of the class `name`, with its head for transformers; returns the destination.

    Raises:
        ArgumentError: for a destination that is not empty.
        LineartimeError: if the source is damaged, or has a head that ours cannot be.
    """
    theirs, problem = read_plain(source / CONFIG), None
    pooling = theirs.get("summary_type", "last") if name == "GAUAlphaForSequenceClassification" else None
    if name not in _TUNED:
        problem = f"holds a {name}, but only {', '.join(_TUNED)} can be converted"
    elif pooling not in (None, "first", "last", "mean") or (pooling and theirs.get("summary_activation")):
        problem = (
            "has a summary with parts of its own before the head, but only the first, last or mean vector can be converted"
        )
    if problem is not None:
        raise LineartimeError(f"{source} {problem}.")
    with new_folder("destination", Path(destination)) as folder:
        model, tokenizer, head = read_gau_alpha(source)
        (task, theirs_is), end, state = _TUNED[name], tokenizer.end_of_document, StateDict(head, PACKAGE)
        labels = {"num_labels": state.matrix(f"{theirs_is}.weight")[0]}
        labels |= {key: theirs[key] for key in ("id2label", "label2id", "problem_type") if theirs.get(key)}
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        made = task(LineartimeConfig.from_model_config(model.config, **ids, **labels, pooling=pooling))
        made.model.backbone = model.backbone
        layer = getattr(made, made.head)
        layer.load_state_dict({key: state.take(f"{theirs_is}.{key}", *x.shape) for key, x in layer.state_dict().items()})
        state.finish()
        pairs = fast_tokenizer(tokenizer, framed=True)
        pairs.model_input_names = [*pairs.model_input_names, "token_type_ids"]  # that of the second of a pair is 1
        with quietly():
            made.save_pretrained(folder)
            pairs.save_pretrained(folder)
    return Path(destination)
