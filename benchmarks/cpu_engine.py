"""CPU seconds of an engine on a machine without a GPU: slime's attention and sampler against SGLang's own.

Two engines serve the same random model, one with the plug-in's CPU attention and sampler, one without
(``SLIME_STOCK_CPU_ATTENTION=1``). The same requests go to each in turn, so that a change of load hits both alike. What
is counted is CPU time of all processes of an engine: HTTP server, scheduler and detokenizer.

    python -m benchmarks.cpu_engine --repeats 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from slime.backends.sglang_utils.engine import EngineProcess
from slime.servers.engine_client import EngineClient
from tests.support.engines import engine_args
from tools.tiny_model import make_tiny_checkpoint

MODELS = {
    "small": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 4096,
    },
    "wide": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 32768,
    },
}  # fmt: skip


def cpu_seconds(engine: EngineProcess) -> float:
    """Of the engine's processes so far."""
    root = psutil.Process(engine.pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def measure(engine: EngineProcess, client: EngineClient, case: tuple[int, ...], seed: int) -> float:
    """Return CPU milliseconds per generated token for one round of the case."""
    requests, prompt, answer = case
    client.flush_cache()
    before = cpu_seconds(engine)

    def generate(i: int) -> None:
        ids = [(seed * 7919 + i * 104_729 + k * 31) % 4000 for k in range(prompt)]
        params = {"max_new_tokens": answer, "temperature": 1.0, "ignore_eos": True}
        client.generate({"input_ids": ids, "sampling_params": params, "return_logprob": True}, timeout=600)

    with ThreadPoolExecutor(requests) as pool:
        list(pool.map(generate, range(requests)))
    return 1000 * (cpu_seconds(engine) - before) / (requests * answer)


def start(checkpoint: Path, root: Path, name: str, max_running: int) -> EngineProcess:
    """Start an engine; the environment decides which attention it has."""
    os.environ["SLIME_STOCK_CPU_ATTENTION"] = "1" if name == "stock" else "0"
    args = engine_args(checkpoint, sglang_max_running_requests=max_running, sglang_max_total_tokens=65536)
    engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path=root / f"{name}.log")
    engine.start()
    return engine


def compare(engines: dict[str, EngineProcess], case: tuple[int, ...], repeats: int) -> str:
    """Measure a case, the engines in turn; return the line of it."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(repeats + 1):
        names = list(engines)[:: 1 if seed % 2 else -1]
        for name in names:
            value = measure(engines[name], engines[name].client(timeout=600), case, seed)
            if seed:  # the first round warms up
                found[name].append(value)
    ratios = [a / b for a, b in zip(found["stock"], found["slime"], strict=True)]
    medians = {name: statistics.median(values) for name, values in found.items()}
    return (
        f"{case[0]:3d} x ({case[1]} + {case[2]}): {medians['stock']:.3f} {medians['slime']:.3f}; "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}), load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of every case (default: 5)")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--max-running", type=int, default=64, help="requests an engine runs at once (default: 64)")
    parser.add_argument(
        "--cases", default="1x32+96,8x32+96,32x32+96,64x32+96,32x512+256",
        help="requests at once x tokens of the prompt + tokens of the answer (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args()
    cases = [tuple(int(n) for n in case.replace("x", "+").split("+")) for case in options.cases.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        checkpoint = make_tiny_checkpoint(root / "model", **MODELS[options.model])
        engines = {name: start(checkpoint, root, name, options.max_running) for name in ("stock", "slime")}
        try:
            for engine in engines.values():
                engine.wait_ready()
            print("requests x (prompt + answer): CPU ms per generated token, stock and slime; stock / slime")
            for case in cases:
                print(compare(engines, case, options.repeats), flush=True)
        finally:
            for engine in engines.values():
                engine.stop()


if __name__ == "__main__":
    main()
