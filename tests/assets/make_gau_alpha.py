"""Save a small model of the published package gau_alpha with what it computes: `python make_gau_alpha.py FOLDER`.

It ran once, in an environment of its own, for the package needs an old transformers: gau_alpha 0.0.3, transformers 4.44.2 and
torch. What it wrote is tests/assets/gau_alpha, to which test_gau_alpha.py holds the conversion.
"""

import sys
from pathlib import Path

import torch
from gau_alpha import (  # type: ignore[import-not-found]
    GAUAlphaConfig,
    GAUAlphaForMaskedLM,
    GAUAlphaForSequenceClassification,
)

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqr"]
SIZES = {"vocab_size": len(PIECES), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "attention_key_size": 8}
KINDS = {
    "published": {},
    "squared-relu": {"normalization": "squared_relu", "attention_scale": False, "use_bias": True},
    "fine-tuned": {"num_hidden_layers": 1, "summary_type": "first", "id2label": {0: "a", 1: "b", 2: "c"}},
}


def main() -> None:
    for name, changes in KINDS.items():
        torch.manual_seed(0)
        kind = GAUAlphaForSequenceClassification if name == "fine-tuned" else GAUAlphaForMaskedLM
        model = kind(GAUAlphaConfig(**{**SIZES, **changes})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()  # those it begins with hardly attend
            ids, types = torch.randint(1, SIZES["vocab_size"], (3, 13)), torch.randint(2, (3, 13))
            mask = (torch.arange(13) < torch.tensor([13, 4, 7])[:, None]).long()
            logits = model(ids, attention_mask=mask, token_type_ids=types).logits
        folder = Path(sys.argv[1]) / name
        model.save_pretrained(folder, safe_serialization=False)
        if name != "squared-relu":
            (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
        torch.save({"ids": ids, "types": types, "mask": mask, "logits": logits}, folder / "reference.pt")


if __name__ == "__main__":
    main()
