"""Decoding beside llama.cpp and GPT-NeoX of transformers: `python benchmarks/peers.py` (40 to 60 minutes on 2 idle cores).

All have random weights, as many as flash-tiny with a vocabulary of 4,096, or flash-base. A context is read in batches; then the
packages take turns to draw tokens for half a second, each with its own default sampling: with one thread and with two, on an
otherwise idle machine and beside one and two processes that never wait. Every 16 tokens, llama.cpp, which is a Llama, and
GPT-NeoX go back to their position. FLASH runs on, over whole chunks. Of 16 bits, llama.cpp has float16, and the others bf16.

llama.cpp needs llama-cpp-python, which pip compiles for this processor, and gguf. A package that is not installed is left out,
and a line says so. Raw results are written after every model and format: after an interruption, `--resume` measures the others.
"""

# Peers may be absent.
# mypy: disable-error-code="import-not-found, import-untyped"

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import RESULTS, save

import lineartime
from lineartime.generation import PromptState, generate, read_prompt
from lineartime.units import markdown_table, three_digits

OURS, LLAMA, NEOX = "lineartime", "llama.cpp", "GPT-NeoX"
MISSING = {
    "llama_cpp": f"{LLAMA} is left out, because llama-cpp-python is not installed: CMAKE_ARGS=-DGGML_NATIVE=ON pip install "
    "llama-cpp-python",
    "gguf": f"{LLAMA} is left out, because gguf, which writes its models, is not installed: pip install gguf",
    "transformers": f"{NEOX} is left out, because transformers is not installed: pip install 'lineartime[hf]'",
}
FORMATS, POSITIONS, THREADS, BUSY = ("fp32", "16 bits"), (100, 4096, 16384), (1, 2), (0, 1, 2)
BATCH = 512
"""Tokens of a context that are read together."""
BURST = 16
"""Tokens after which a growing cache is cut."""
PAUSE = 0.05
"""Seconds between turns: the threads of a step spin for a while after it."""
WARM_UP = 0.6
"""Seconds of a turn before it is measured: for so long, a decoder may go on with the threads that the turn before needed."""
Row = dict[str, Any]


class Size(NamedTuple):
    """A preset of FLASH with a vocabulary, and the Transformer with as many weights."""

    preset: str
    vocabulary: int
    width: int
    layers: int


SIZES = {each.preset: each for each in (Size("flash-tiny", 4096, 256, 4), Size("flash-base", 32000, 768, 12))}


class Ours:
    """FLASH, as `lineartime.generate` continues a text."""

    def __init__(self, size: Size, form: str) -> None:
        model: Any = lineartime.build(size.preset, vocab_size=size.vocabulary).eval()
        self.model = model if form == "fp32" else model.bfloat16()
        self.state: PromptState | None = None

    def read(self, tokens: list[int]) -> None:
        """Read more of the context."""
        self.state = read_prompt(self.model, tokens, self.state)
        self.drawn = generate(self.model, [0], 10**9, state=self.state)
        self.step()
        self.step()  # which prepares the decoder

    def step(self) -> None:
        """Draw a token, and read it."""
        next(self.drawn)

    def rewind(self) -> None:
        """Go back to the end of the context, if steps from there on would take longer."""

    def use_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)


class NeoX:
    """GPT-NeoX of transformers, with the sampling that is the default of its `generate`, without what that adds to a token."""

    def __init__(self, size: Size, form: str) -> None:
        from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM

        options = {"hidden_size": size.width, "intermediate_size": 4 * size.width, "num_attention_heads": size.width // 64}
        options |= {"num_hidden_layers": size.layers, "max_position_embeddings": POSITIONS[-1] + BATCH}
        config = GPTNeoXConfig(vocab_size=size.vocabulary, tie_word_embeddings=True, **options)
        self.model: Any = GPTNeoXForCausalLM(config).eval().to(torch.float32 if form == "fp32" else torch.bfloat16)
        self.cache: Any = DynamicCache(config=config)

    @torch.no_grad()
    def decode(self, ids: torch.Tensor) -> None:
        likeliest = self.model(ids[None], past_key_values=self.cache, logits_to_keep=1).logits[0, -1].float().topk(50)
        self.token = likeliest.indices[likeliest.values.softmax(-1).multinomial(1)]

    def read(self, tokens: list[int]) -> None:
        for part in torch.tensor(tokens).split(BATCH):
            self.decode(part)
        self.position = self.cache.get_seq_length()

    def step(self) -> None:
        self.decode(self.token)

    def rewind(self) -> None:
        if longer := self.cache.get_seq_length() - self.position:
            self.cache.crop(-longer)

    def use_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)


class Llama:
    """A Llama in llama.cpp, by the functions that its own programs call, with the sampling that is their default."""

    def __init__(self, size: Size, form: str) -> None:
        import llama_cpp

        self.library, self.position = llama_cpp, 0
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "llama.gguf"
            write_llama(file, size, np.float32 if form == "fp32" else np.float16)
            options = {"n_ctx": POSITIONS[-1] + BATCH, "n_batch": BATCH, "flash_attn": True}  # as its own programs choose
            self.model = llama_cpp.Llama(str(file), verbose=False, **options)
        self.context = self.model.ctx
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for name, *values in (("top_k", 40), ("top_p", 0.95, 0), ("min_p", 0.05, 0), ("temp", 0.8), ("dist", 0)):
            part = getattr(llama_cpp, f"llama_sampler_init_{name}")(*values)
            llama_cpp.llama_sampler_chain_add(self.sampler, part)

    def decode(self, tokens: list[int]) -> None:
        array = (self.library.llama_token * len(tokens))(*tokens)
        if self.library.llama_decode(self.context, self.library.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama.cpp cannot decode: is its context full?")

    def read(self, tokens: list[int]) -> None:
        self.rewind()
        for start in range(0, len(tokens), BATCH):
            self.decode(tokens[start : start + BATCH])
        self.position += len(tokens)

    def step(self) -> None:
        self.decode([self.library.llama_sampler_sample(self.sampler, self.context, -1)])

    def rewind(self) -> None:
        self.library.llama_memory_seq_rm(self.memory, 0, self.position, -1)

    def use_threads(self, threads: int) -> None:
        self.library.llama_set_n_threads(self.context, threads, threads)


Package = Ours | NeoX | Llama


def write_llama(file: Path, size: Size, dtype: Any) -> None:
    """A Llama of random weights, without a tokenizer."""
    import gguf

    d, hidden = size.width, round(size.width / 6) * 16  # 8/3 of the width: three maps with as many weights as two of 4
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(POSITIONS[-1] + BATCH)
    writer.add_embedding_length(d)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(d // 64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    numbers = np.random.default_rng(0)
    maps = dict.fromkeys(["attn_q", "attn_k", "attn_v", "attn_output"], (d, d))
    maps |= {"ffn_gate": (hidden, d), "ffn_up": (hidden, d), "ffn_down": (d, hidden)}
    shapes = {f"blk.{block}.{name}": shape for block in range(size.layers) for name, shape in maps.items()}
    for name, shape in ({"token_embd": (size.vocabulary, d)} | shapes).items():
        writer.add_tensor(f"{name}.weight", (0.02 * numbers.standard_normal(shape)).astype(dtype))
    for name in ("output_norm", *(f"blk.{block}.{part}_norm" for block in range(size.layers) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(d, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def beside(busy: int) -> Iterator[None]:
    """So many other processes never wait."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(busy)]
    try:
        time.sleep(6 * PAUSE)  # they start
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def tokens_per_second(package: Package, threads: int, seconds: float) -> float:
    """The speed of a package after its warm-up."""
    time.sleep(PAUSE)
    package.use_threads(threads)
    each: list[float] = []
    begin, count = time.perf_counter() + WARM_UP, 0
    while not each or time.perf_counter() < begin + seconds:
        if count % BURST == 0:
            package.rewind()
        start, count = time.perf_counter(), count + 1
        package.step()
        if start >= begin:
            each.append(time.perf_counter() - start)
    return 1 / statistics.fmean(each)


def measured(packages: Mapping[str, Package], rounds: int, seconds: float) -> list[Row]:
    """The speeds of all rounds, for each number of threads and of busy processes."""
    settings = product(THREADS, BUSY)
    rows: list[Row] = [{"threads": n, "busy": m, "tokens_per_second": {name: [] for name in packages}} for n, m in settings]
    for turn in range(rounds):
        for busy in BUSY:
            with beside(busy):
                turns = [(row, name) for row in rows if row["busy"] == busy for name in packages]
                for row, name in turns[:: -1 if turn % 2 else 1]:
                    row["tokens_per_second"][name].append(tokens_per_second(packages[name], row["threads"], seconds))
    return rows


def over(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(rows: list[Row]) -> str:
    """Medians of tokens a second, our speed over that of each peer, and that of each package over its own beside none."""
    setting = ("preset", "format", "position", "threads")
    idle = {tuple(row[name] for name in setting): row["tokens_per_second"] for row in rows if row["busy"] == 0}
    names = list(dict.fromkeys(name for row in rows for name in row["tokens_per_second"]))
    lines = []
    for row in rows:
        speeds, alone = row["tokens_per_second"], idle[tuple(row[name] for name in setting)]
        cells = {name: f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in (*setting, "busy")}
        cells |= {name: three_digits(statistics.median(speeds[name])) if name in speeds else "-" for name in names}
        cells |= {f"over {name}": f"{over(speeds[OURS], speeds[name]):.2f}" if name in speeds else "-" for name in names[1:]}
        cells |= {f"{name} over idle": f"{over(speeds[name], alone[name]):.2f}" if name in speeds else "-" for name in names}
        lines.append(cells)
    return markdown_table(list(lines[0]), [list(cells.values()) for cells in lines], left=2)


def readme_sentence() -> str:
    """How much faster we are than llama.cpp in 16 bits with two threads at the first two positions, in the README's words."""
    rows: list[Row] = json.loads((RESULTS / "peers.json").read_text())["rows"]
    case = {"preset": "flash-tiny", "format": FORMATS[1], "threads": 2, "busy": 0}
    speeds = [row["tokens_per_second"] for row in rows if case.items() <= row.items()]
    first, second = (over(speed[OURS], speed[LLAMA]) for speed in speeds[:2])
    later = f"{second:.0f} times as many at {POSITIONS[1]:,}"
    return f"{first:.1f} times as many tokens a second at position {POSITIONS[0]}, and {later}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--positions", nargs="+", type=int, choices=POSITIONS, default=POSITIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--resume", action="store_true", help="keep what the results have, and measure the others")
    options = parser.parse_args()
    absent = {package: why for package, why in MISSING.items() if find_spec(package) is None}
    for why in absent.values():
        print(why, file=sys.stderr)
    kinds: dict[str, type[Package]] = {OURS: Ours}
    kinds |= {} if absent.keys() & {"llama_cpp", "gguf"} else {LLAMA: Llama}
    kinds |= {} if "transformers" in absent else {NEOX: NeoX}
    stored = RESULTS / "peers.json"
    rows: list[Row] = json.loads(stored.read_text())["rows"] if options.resume and stored.exists() else []
    known = {(row["preset"], row["format"]) for row in rows}
    for preset, form in product(options.presets, FORMATS):
        if (preset, form) in known:
            continue
        torch.manual_seed(0)
        packages = {name: kind(SIZES[preset], form) for name, kind in kinds.items()}
        numbers, before = np.random.default_rng(0), 0
        for position in sorted(options.positions):
            print(f"{preset}, {form}, position {position:,}: reading ...", file=sys.stderr, flush=True)
            tokens, before = numbers.integers(SIZES[preset].vocabulary, size=position - before).tolist(), position
            for package in packages.values():
                package.use_threads(THREADS[-1])
                package.read(tokens)
            found = measured(packages, options.rounds, options.seconds)
            rows += [{"preset": preset, "format": form, "position": position, **row} for row in found]
        save("peers", rows, table(rows))
        del packages, package  # before the next ones are made


if __name__ == "__main__":
    main()
