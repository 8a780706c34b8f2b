"""How `Trainer` counts the targets of a step, by which it has the losses of accumulated batches divided."""

from collections.abc import Mapping
from functools import wraps
from typing import Any


def count_targets(own: type[Any]) -> None:
    """Let `Trainer` count the targets of models of this class as they do, by their method `targets`.

    By itself it counts labels, also of tokens that no token predicts, because padding or a prefix is before them, and none of
    a model for questions. Only `Trainer` knows all batches of a step, so a model cannot correct its count.
    """
    from transformers import Trainer  # which takes a second to import, and is imported already if it asks for this

    count = getattr(Trainer, "_get_num_items_in_batch", None)  # private, so that a later version may count elsewhere
    if count is None or hasattr(count, "of_lineartime"):
        return

    @wraps(count)
    def count_own(trainer: Any, batches: list[Any], device: Any) -> Any:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
        if isinstance(model, own) and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
            known = [isinstance(batch, Mapping) and "shift_labels" not in batch for batch in batches]
            pairs = zip(batches, known, strict=True)
            batches = [{"labels": model.targets(batch)} if counted else batch for batch, counted in pairs]
        return count(trainer, batches, device)

    count_own.of_lineartime = True  # type: ignore[attr-defined]
    Trainer._get_num_items_in_batch = count_own
