"""Export models as torch.export programs: a whole text at once, or the next token of streams, with the state in and out.

Shapes: B batch or streams, T tokens, V vocabulary.
"""

import copy
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.utils import parametrize

from lineartime.errors import ArgumentError, LineartimeError, require_packages, typed_first_line
from lineartime.files import check_new, new_file
from lineartime.layers.dense import quantized
from lineartime.machine import compiler_missing, is_out_of_memory
from lineartime.models.language_model import CausalLM, Kind, LanguageModel, MaskedLM, check_model, decoded_layers

MAX_STREAMS = 2**16
"""The maximum batch size of a program."""
LONGEST = 2**20
"""The maximum length of a program's text, in tokens, unless the model reads less."""
SHORTEST = 3
"""The minimum length of a program's text, in tokens, of a model without chunks."""
EXPORTABLE = "FLASH with the memory sum, GAU and softmax attention can be exported."
"""The end of the exporters' error messages."""
MAX_ONNX_BYTES = 3 * 2**29
"""The maximum size of weights in an ONNX file. PyTorch would write more of them into a second file, beside the first."""
STATE = "state"
"""The metadata key under which a package holds the shapes of a stream's state."""


class _Step(nn.Module):
    """The step of streams as a pure function: ids [B, 1] and a state -> logits [B, 1, V], and the state after the token.

    The state is a list of tensors [B, ...], all zero before the first token. The given state is not modified.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        given = iter(state)
        logits, after = self.model.extend(ids, self.model.init_state(0).map(lambda _: next(given).clone()))
        return logits, list(after.tensors())


class _Rounded(nn.Module):
    """A matrix that a program holds in int8, with a factor for each row, and computes anew."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, rounded: Tensor, scale: Tensor) -> Tensor:
        return (rounded * scale[:, None]).to(self.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantized(weight)


def _as_decoded(model: Kind) -> Kind:
    """The model or, after `quantize`, a copy whose matrices are int8."""
    if not isinstance(model, CausalLM) or model.decoded_weights == "own":
        return model
    held = copy.deepcopy(model).requires_grad_(False)
    for layer in decoded_layers(held):
        parametrize.register_parametrization(layer, "weight", _Rounded(layer.weight.dtype))
    return held


def export_text(model: LanguageModel) -> ExportedProgram:
    """Export a program from ids, int64 [B, T] of any batch size, to logits [B, T, V], for texts of a chunk or more.

    Models without chunks read any T from `SHORTEST` on. A program refuses a shorter text: pad it, which changes no logit at its
    tokens if the model is causal, or gets the mask.

    The program of a masked language model also takes a mask, bool [B, T], True for real tokens. A causal model needs no mask
    for padding after a text. The program is plain PyTorch, whatever the backend, and needs nothing else. After `quantize`, it
    holds matrices in int8.

    Raises:
        LineartimeError: for a mixer whose code torch.export cannot trace for every length, or chunks that are longer than the
            texts that the model reads.
    """
    model = _as_decoded(check_model(model, LanguageModel, "be exported"))
    longest = min(LONGEST, model.config.longest_sequence or LONGEST)
    shortest = max(getattr(block.mixer, "chunk_size", None) or SHORTEST for block in model.backbone.blocks)
    if shortest >= longest:
        problem = f"An exported program reads texts of at least a chunk, {shortest} tokens, but this model at most {longest}"
        raise LineartimeError(f"{problem}: build it with a smaller chunk_size.")
    ids = torch.zeros(2, min(longest, 2 * shortest + 37), dtype=torch.long, device=next(model.parameters()).device)
    inputs = (ids, torch.ones_like(ids, dtype=torch.bool)) if isinstance(model, MaskedLM) else (ids,)
    sizes = {0: Dim("batch", min=1, max=MAX_STREAMS), 1: Dim("length", min=shortest, max=longest)}
    return _traced(model, model, inputs, (sizes,) * len(inputs), "for every batch size and length")


def export_step(model: CausalLM) -> ExportedProgram:
    """Export a program that continues any number of streams by a token, as `_Step` does. It needs nothing but PyTorch.

    Its `example_inputs` hold ids and state for two streams. After `quantize`, it holds matrices in int8.

    Raises:
        ArgumentError: for a model without a `constant_state`, such as one of GAU.
        LineartimeError: for a mixer whose code torch.export cannot trace for any number of streams.
    """
    model = _as_decoded(check_model(model, CausalLM, "continue a text"))
    growing = [block.mixer.title for block in model.backbone.blocks if not block.mixer.constant_state]
    if growing:
        found = f"is made of {growing[0]}, which has no step with a state of constant size that can be exported"
        raise ArgumentError("model", f"{found}: FLASH with the memory sum has one.")
    state = list(model.init_state(2).tensors())
    ids = torch.zeros(2, 1, dtype=torch.long, device=state[0].device)
    batch = {0: Dim("batch", min=1, max=MAX_STREAMS)}
    return _traced(model, _Step(model), (ids, state), (batch, [batch for _ in state]), "for every number of streams")


def _traced(model: LanguageModel, module: nn.Module, inputs: Any, shapes: Any, sizes: str) -> ExportedProgram:
    """The program of a module. An error of torch.export, of any kind, becomes a LineartimeError that names the mixer."""
    try:
        with torch.no_grad(), _quiet(), parametrize.cached():  # a tied embedding is computed once
            return torch.export.export(module, inputs, dynamic_shapes=shapes)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        mixers = " and ".join(dict.fromkeys(block.mixer.title for block in model.backbone.blocks))
        problem = f"torch.export cannot make a program of {mixers} {sizes} ({typed_first_line(error)})"
        raise LineartimeError(f"{problem}: {EXPORTABLE}") from None


def write_program(program: ExportedProgram, file: str | Path) -> Path:
    """Write a program for `torch.export.load`; LineartimeError if it cannot be written."""
    file, archive = checked_file(file, ".pt2"), BytesIO()  # PyTorch's writer of files ends the process if the disk is full
    with _writing(file) as partial:
        torch.export.save(program, archive)
        partial.write_bytes(archive.getbuffer())
    return file


def write_package(program: ExportedProgram, file: str | Path) -> Path:
    """Compile a step for this machine's kind of processor into a package that AOTInductor's loaders run, in C++ or Python.

    The package's metadata hold the shapes of the state for one stream.

    Raises:
        ArgumentError: unless `export_step` made the program.
        LineartimeError: without a compiler, or if the file cannot be written.
    """
    file, archive = checked_file(file, ".pt2"), BytesIO()  # as in write_program
    ids, *state = program.example_inputs[0]
    if len(state) != 1 or not isinstance(state[0], list):
        raise ArgumentError("program", "reads whole texts, but must be one of steps: export the model by export_step().")
    if missing := compiler_missing(ids.device):
        raise LineartimeError(f"A compiled program needs torch.compile's compiler, which is missing: {missing}.")
    shapes = [{"shape": [1, *x.shape[1:]], "dtype": str(x.dtype).removeprefix("torch.")} for x in state[0]]
    options = {"aot_inductor.metadata": {STATE: json.dumps(shapes)}}
    with _writing(file) as partial:
        torch._inductor.aoti_compile_and_package(program, package_path=archive, inductor_configs=options)
        partial.write_bytes(archive.getbuffer())
    return file


def write_onnx(program: ExportedProgram, file: str | Path, output: str = "logits") -> Path:
    """Write a program as ONNX; its inputs have the names of the arguments of the module, and `output` is its output.

    A program for texts has the inputs ids and, for a masked language model, mask; its output is logits. A program for steps has
    the inputs ids, state_0, state_1, ... and the outputs logits, next_state_0, ...

    Raises:
        LineartimeError: without onnxscript, for a program in bfloat16, with too many weights for one file or with operations
            that ONNX does not have, or if the file cannot be written.
    """
    file = checked_file(file, ".onnx")
    require_packages("onnxscript", extra="onnx", purpose="A program in ONNX")
    if any(tensor.dtype == torch.bfloat16 for tensor in program.state_dict.values()):
        raise LineartimeError("A program in bfloat16 has operations that onnxruntime lacks: export it in float32 or float16.")
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    if size > MAX_ONNX_BYTES:
        limit = f"A program in ONNX holds at most {MAX_ONNX_BYTES / 2**30:.1f} GiB of weights in a file"
        advice = "export the model in float16, or choose another `format`."
        raise LineartimeError(f"{limit}, but these have {size / 2**30:.1f} GiB: {advice}")
    inputs, last = list(program.graph_signature.user_inputs), program.example_inputs[0][-1]
    states = range(len(last) if isinstance(last, list) else 0)
    axes: list[dict[int, str]] = [{0: "batch", 1: "length"}, *({} for _ in inputs[1:])]  # the others have the axes of ids
    with _writing(file) as partial:
        try:
            torch.onnx.export(
                program.run_decompositions(),
                f=partial,
                input_names=inputs,
                output_names=[output, *(f"next_state_{place}" for place in states)],
                dynamic_shapes=axes,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        except ImportError as error:  # each onnxscript knows the PyTorch of its time
            why = f"onnxscript is too old or too new for PyTorch {torch.__version__} ({typed_first_line(error)})"
            raise LineartimeError(f"{why}: pip install -U 'lineartime[onnx]'.") from None
        except torch.onnx.OnnxExporterError as error:
            cause: Exception = error
            while isinstance(cause.__cause__, Exception):
                cause = cause.__cause__
            why = f"PyTorch cannot translate this program into ONNX ({typed_first_line(cause)})"
            raise LineartimeError(f"{why}: {EXPORTABLE}") from None
    return file


def checked_file(file: str | Path, suffix: str) -> Path:
    """Check the path of a program to write. Raises ArgumentError for another suffix or an existing file."""
    file = Path(file)
    if file.suffix != suffix:
        found = f"is {file}, but must end in {suffix}, the suffix of this format: rename it, or choose another `format`."
        raise ArgumentError("file", found)
    check_new("file", file)
    return file


@contextmanager
def _writing(file: Path) -> Iterator[Path]:
    """The temporary name of a file, which is renamed when it is complete."""
    with new_file("file", file) as partial, _quiet():
        try:
            yield partial
        except RuntimeError as error:  # raised by PyTorch's writer if the disk is full, and by a compiler that fails
            if is_out_of_memory(error):
                raise
            why = f"Cannot write {file} ({typed_first_line(error)})"
            raise LineartimeError(f"{why}: check the disk and the compiler.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of PyTorch and its ONNX exporter about their own code."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for kind in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        logging.disable(before)
