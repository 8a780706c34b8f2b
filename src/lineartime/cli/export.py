"""`lineartime export`: export a model as a program of PyTorch or in ONNX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lineartime.cli.options import Checkpoint, Run
from lineartime.errors import ArgumentError
from lineartime.screen import Progress


@dataclass(frozen=True)
class ExportOptions:
    """The options of `lineartime export`."""

    run: Run
    file: Path
    """File to write, ending in .pt2, or .onnx for ONNX."""
    part: Literal["step", "text"] = "step"
    """step: the next token of streams of a causal model, with the state as input and output; text: a whole text at once."""
    format: Literal["program", "package", "onnx"] = "program"
    """program: for torch.export.load; package: the step, compiled by AOTInductor for this kind of machine; onnx: ONNX."""
    weights: Literal["own", "int8"] = "own"
    """int8 rounds the matrices of FLASH and writes them as int8 with a factor for each row; own leaves them as they are."""
    checkpoint: Checkpoint = None


def run(options: ExportOptions) -> None:
    """Export the model and print how to load it."""
    if options.part == "text" and options.format == "package":
        raise ArgumentError("format", "is package, but a package holds the step alone: use program or onnx, or `part=step`.")
    from lineartime.checkpoint import load_with_tokenizer
    from lineartime.export import checked_file, export_step, export_text, write_onnx, write_package, write_program
    from lineartime.models.language_model import CausalLM, MaskedLM, check_model

    checked_file(options.file, ".onnx" if options.format == "onnx" else ".pt2")  # before the slow part
    writers = {
        "program": (write_program, "for torch.export.load"),
        "package": (write_package, "compiled, for torch._inductor.aoti_load_package or AOTInductor's loader in C++"),
        "onnx": (write_onnx, "in ONNX"),
    }
    with Progress(f"exporting {options.run}"):
        model = load_with_tokenizer(options.run, checkpoint=options.checkpoint).model
        if options.weights == "int8":
            check_model(model, CausalLM, "have int8 weights").quantize()
        if options.part == "text":
            program = export_text(model)
            what = f"{'ids and mask' if isinstance(model, MaskedLM) else 'ids'} [B, T] to logits [B, T, V]"
        elif isinstance(model, MaskedLM):
            raise ArgumentError("part", "is step, but a masked language model reads whole texts: use `part=text`.")
        else:
            program, what = export_step(model), "a step of streams"
        write, how = writers[options.format]
        file = write(program, options.file)
    print(f"{file}: {what}, {how}")
