"""Turn published long-context rows into those that run.sh reads.

python -m examples.memagent.prepare_data --out train.jsonl hotpotqa_train_32k.parquet

Rows have the document in ``context``; the question in ``prompt`` (a text or a chat) or, as RULER's, in ``input``; the
right answers in ``reward_model.ground_truth`` or ``answers``. Rows without a document are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.utils.data import read_file


def converted(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a ``.parquet``, ``.json`` or ``.jsonl`` file with ``messages``, ``label`` and ``metadata``."""
    for row in read_file(path):
        if not row["context"]:
            continue
        asked = row["prompt"] if row.get("prompt") else row["input"]
        question = asked if isinstance(asked, str) else asked[-1]["content"]
        right = row["reward_model"]["ground_truth"] if row.get("reward_model") else row["answers"]
        yield {
            "messages": [{"role": "user", "content": question}],
            "label": [right] if isinstance(right, str) else [str(one) for one in right],
            "metadata": {"context": row["context"]},
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="published files")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to write")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w") as out:
        for path in options.files:
            for row in converted(path):
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
