"""The versions of transformers that the adapter supports."""

import re

from lineartime.errors import LineartimeError, missing_extra
from lineartime.host import installed_version

OLDEST, NEWEST, NEXT_MAJOR = (5, 20), (5, 24), 6
"""The oldest and the newest version that the tests have passed with, and the first one that is refused unseen."""


def check_transformers() -> None:
    """Raise LineartimeError unless a supported version of transformers is installed."""
    found, version = _installed_transformers()
    if not OLDEST <= version < (NEXT_MAJOR, 0):
        raise LineartimeError(
            f"lineartime.hf needs transformers {_text(OLDEST)} or newer and below {NEXT_MAJOR}, but version {found} is "
            "installed: pip install 'lineartime[hf]'."
        )


def check_generation() -> None:
    """Raise LineartimeError if an untested version of transformers computes other logits with the cache than without it.

    A tested version costs nothing.
    """
    found, version = _installed_transformers()
    if version <= NEWEST:
        return
    problem, cause = "logits with the cache differ from those without it", None
    try:
        if _difference_of_logits() < 1e-3:
            return
    except Exception as error:
        problem, cause = f"generating with the cache fails ({type(error).__name__}: {error})", error
    raise LineartimeError(
        f"lineartime.hf was tested with transformers {_text(OLDEST)} to {_text(NEWEST)}, but version {found} is installed, "
        f"with which {problem}: pip install 'transformers<={_text(NEWEST)}.99'."
    ) from cause


def _difference_of_logits() -> float:
    """The relative difference of a tiny model's logits, generated with the cache in two parts, from those without it."""
    import torch

    from lineartime.hf.cache import CACHE
    from lineartime.hf.config import LineartimeConfig
    from lineartime.hf.language import LineartimeForCausalLM

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LineartimeConfig.from_preset("flash-tiny", n_blocks=1, d_model=8, d_qk=4, chunk_size=4, vocab_size=16)
        model = LineartimeForCausalLM(config).float().eval()
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=6, use_cache=False, **options)
    first = model.generate(ids, attention_mask=mask, max_new_tokens=3, **options)
    mask = torch.cat([mask, mask.new_ones(2, 3)], 1)
    rest = model.generate(first.sequences, attention_mask=mask, max_new_tokens=3, **{CACHE: first[CACHE]}, **options)
    wanted, given = torch.stack(whole.logits), torch.stack([*first.logits, *rest.logits])
    return float((given - wanted).abs().max() / wanted.abs().max())


def _installed_transformers() -> tuple[str, tuple[int, int]]:
    """The installed version of transformers, and its first two numbers; raises LineartimeError if there is none."""
    found = installed_version("transformers")
    if found is None:
        raise missing_extra("transformers", "hf", "lineartime.hf")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return found, (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
