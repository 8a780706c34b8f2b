"""A model whose sequences are split over processes; `ops/context_parallel.py` is what they exchange."""

import torch.distributed as dist

from lineartime.layers.residual import Mixer
from lineartime.models.heads import LanguageModel
from lineartime.ops.context_parallel import ContextGroup


def set_context_parallel(model: LanguageModel, group: "dist.ProcessGroup | None") -> None:
    """Have the processes of a group hold every sequence together, an equal slice each, in the order of their ranks.

    From then on rank r of N passes its slice of every sequence, ids [B, T / N] from token r T / N on, to `model(ids)`,
    `model.loss` and `model.total_loss`, and gets the logits or the losses of its own tokens; all ranks have to call together.
    What it gets in parameters' gradients is its share: the sum over the ranks is the gradient of the sum of their losses.
    Slices are equal, and whole chunks; masks and packed documents are refused. Streaming is not split.

    Args:
        model: of FLASH layers, with the same parameters in all processes.
        group: the processes; None for a model that holds whole sequences again.

    Raises:
        ValueError: for other mixers, which read more than sums of their sequence, and in a process outside the group.
    """
    context = None
    if group is not None:
        if dist.get_rank(group) < 0:
            raise ValueError("This process is not in the group: call set_context_parallel in those that are.")
        context = ContextGroup(group.group_name, dist.get_rank(group), dist.get_world_size(group))
    mixers = [layer for layer in model.modules() if isinstance(layer, Mixer)]
    for mixer in mixers:
        if context is not None and not mixer.splits_context:
            raise ValueError(
                f"The model is made of {type(mixer).__name__}, which needs its whole sequence in one process: only FLASH can "
                "be split over several."
            )
    model.backbone.context = context
    for mixer in mixers:
        mixer.context = context
