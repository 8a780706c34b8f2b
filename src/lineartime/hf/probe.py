"""A generation of a few tokens, which shows whether a version of transformers that nobody has tested passes on the cache."""

import torch

from lineartime.hf.cache import CACHE
from lineartime.hf.config import LineartimeConfig
from lineartime.hf.language import LineartimeForCausalLM
from lineartime.hf.version import NEWEST, installed_transformers, unfit


def check_generation() -> None:
    """Raise LineartimeError if an untested version of transformers computes other logits with the cache than without it.

    A tested version costs nothing.
    """
    found, version = installed_transformers()
    if version <= NEWEST:
        return
    try:
        difference = _difference()
    except Exception as error:
        raise unfit(found, f"generating with the cache fails ({type(error).__name__}: {error})") from error
    if not difference < 1e-3:
        raise unfit(found, "logits with the cache differ from those without it")


@torch.no_grad()
def _difference() -> float:
    """The relative difference of a tiny model's logits, generated with the cache in two parts, from those without it."""
    with torch.random.fork_rng(devices=[]):
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
