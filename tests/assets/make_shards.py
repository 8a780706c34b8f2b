"""Write the shards in `shards.zip` by the formats' own writers: python make_shards.py, in an environment that has them.

megatron-core 0.16.1, mosaicml-streaming 0.13.0, litdata 0.2.76 and webdataset 1.0.2; their ids and texts are in expected.json.
"""

import json
import shutil
import sys
import types
from pathlib import Path

import numpy as np

OUT = Path(__file__).parent / "shards"
RANDOM = np.random.default_rng(7)
IDS = [RANDOM.integers(1, 256, int(length)).tolist() for length in RANDOM.integers(3, 40, 24)]
TEXTS = [f"Document {number}: naïve 日本 {'word ' * (number % 7)}." for number in range(24)]


def megatron() -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    (OUT / "megatron").mkdir(parents=True)
    for dtype in (np.uint16, np.int32):
        prefix = str(OUT / "megatron" / f"{dtype.__name__}_text_document")
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for number, ids in enumerate(IDS):  # every third document is two sequences
            lengths = [len(ids) // 2, len(ids) - len(ids) // 2] if number % 3 == 0 else [len(ids)]
            builder.add_document(torch.tensor(ids), lengths)
        builder.finalize(f"{prefix}.idx")


def mds() -> None:
    vision = types.ModuleType("streaming.vision")  # which needs torchvision
    for name in ("StreamingADE20K", "StreamingCIFAR10", "StreamingCOCO", "StreamingImageNet"):
        setattr(vision, name, None)
    sys.modules["streaming.vision"] = vision
    from streaming.base.format.mds.writer import MDSWriter

    def write(name: str, kind: str, values: list[object], compression: str | None = None) -> None:
        columns = {"id": "int", "text" if kind == "str" else "tokens": kind, "url": "str"}
        with MDSWriter(out=str(OUT / name), columns=columns, compression=compression, size_limit=1200) as writer:
            for number, value in enumerate(values):
                writer.write(dict(zip(columns, (number, value, f"url {number}"), strict=True)))

    short = [np.array(ids, np.uint16) for ids in IDS]
    write("mds-any", "ndarray", short)
    write("mds-uint16-zstd", "ndarray:uint16", short, "zstd")
    write("mds-fixed", "ndarray:int32:3", [np.array(ids[:3], np.int32) for ids in IDS])
    write("mds-bytes", "bytes", [np.array(ids, np.int64).tobytes() for ids in IDS])
    write("mds-text", "str", TEXTS)
    write("mds-text-zstd", "str", TEXTS, "zstd")


def litdata() -> None:
    from litdata.streaming.writer import BinaryWriter

    for name, samples in {"litdata": TEXTS, "litdata-columns": [{"n": 1, "text": text} for text in TEXTS]}.items():
        (OUT / name).mkdir()
        writer = BinaryWriter(str(OUT / name), chunk_size=15)
        for number, sample in enumerate(samples):
            writer[number] = sample
        writer.done()
        writer.merge()


def webdataset() -> None:
    from webdataset import ShardWriter

    (OUT / "webdataset").mkdir()
    with ShardWriter(str(OUT / "webdataset" / "%03d.tar"), maxcount=15, verbose=0) as writer:
        for number, text in enumerate(TEXTS):
            parts = {"txt": text, "json": {"n": number}} if number < 15 else {"json": {"text": text}}
            writer.write({"__key__": f"{number:04d}", **parts})


if __name__ == "__main__":
    OUT.mkdir()
    (OUT / "expected.json").write_text(json.dumps({"ids": IDS, "texts": TEXTS}))
    for make in (megatron, mds, litdata, webdataset):
        make()
    shutil.make_archive(str(OUT), "zip", OUT)
    shutil.rmtree(OUT)
