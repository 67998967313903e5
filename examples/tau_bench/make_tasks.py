"""Write the tasks of a domain of tau2-bench as prompt data.

python -m examples.tau_bench.make_tasks --domain retail --split train --out /data/tau2/retail_train.jsonl

The customer's first message comes from the environment, so that rows have an empty prompt and the task's number.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.quickstart.make_data import write
from examples.tau_bench.tau2_world import agent_gym


def make_tasks(out: Path, *, domain: str, split: str | None, category: str | None = None) -> int:
    """Write the file; return how many tasks there are. ``split`` is one of tau2-bench's, None for all tasks."""
    agent_gym()  # says what is missing
    from tau2.run import load_tasks

    tasks = load_tasks(domain, task_split_name=split)
    out.parent.mkdir(parents=True, exist_ok=True)
    more = {"category": category, "domain": domain} if category else {}
    write(out, ({"prompt": "", "metadata": {"task_id": str(task.id), **more}} for task in tasks))
    return len(tasks)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--domain", default="retail", help="airline, retail or telecom (default: %(default)s)")
    parser.add_argument("--split", help="train, test or base (default: all tasks)")
    parser.add_argument("--category", help="written to the rows: func_call for tool_orchestra")
    options = parser.parse_args()
    tasks = make_tasks(options.out, domain=options.domain, split=options.split, category=options.category)
    print(f"{tasks} tasks in {options.out}")


if __name__ == "__main__":
    main()
