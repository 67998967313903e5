r"""Prepare Geometry3K: ask for the answer in a box, and store the images in a form that every image loader takes.

python -m examples.geo3k_vlm.prepare --data geometry3k/train-00000-of-00001.parquet --out /data/geo3k/train.parquet

The rows of https://huggingface.co/datasets/hiyouga/geometry3k have ``problem``, with ``<image>`` in its text,
``answer`` and ``images``, as bytes or paths. So do those that are written, with images as ``data:image/png;base64``.
With ``--multi-turn`` they have the tool of ``examples.geo3k_vlm_multi_turn`` too, in the column ``tools``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.geo3k_vlm_multi_turn.geo3k import TOOL
from slime.utils.data import read_file
from slime.utils.processing_utils import encode_image_for_rollout_engine, process_vision_info

INSTRUCTION = "\n\nReason step by step, and put the final answer into \\boxed{}."


def prepared(row: dict[str, Any], *, multi_turn: bool) -> dict[str, Any]:
    """Return the row that is written. Raises ValueError when text and images do not belong together."""
    problem, count = row["problem"], row["problem"].count("<image>")
    parts = [{"type": "image", "image": image} for image in row["images"]]
    if count != len(parts):
        raise ValueError(f"{problem!r:.100} names {count} images with <image>, but has {len(parts)}")
    images = process_vision_info([{"role": "user", "content": parts}], None)["images"] or []
    made = {"problem": problem + INSTRUCTION, "answer": str(row["answer"])}
    made["images"] = [encode_image_for_rollout_engine(image) for image in images]
    return {**made, "tools": json.dumps([TOOL])} if multi_turn else made


def prepare(data: Path, out: Path, *, multi_turn: bool) -> int:
    """Write ``out``; return how many rows it has."""
    import pyarrow
    import pyarrow.parquet

    rows: Iterator[dict[str, Any]] = (prepared(row, multi_turn=multi_turn) for row in read_file(str(data)))
    table = pyarrow.Table.from_pylist(list(rows))
    out.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, out)
    return int(table.num_rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="parquet file to read")
    parser.add_argument("--out", type=Path, required=True, help="parquet file to write")
    parser.add_argument("--multi-turn", action="store_true", help="add the tool that checks an answer")
    options = parser.parse_args()
    print(f"{prepare(options.data, options.out, multi_turn=options.multi_turn)} rows in {options.out}")


if __name__ == "__main__":
    main()
