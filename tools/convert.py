"""Convert checkpoints: Hugging Face ones to FP8, INT4, bf16 and Megatron's torch_dist, and that to Hugging Face.

    python -m tools.convert hf-to-fp8 /models/Qwen3-4B /models/Qwen3-4B-FP8
    python -m tools.convert hf-to-int4 /models/Qwen3-30B-A3B /models/Qwen3-30B-A3B-INT4 --group-size 128
    python -m tools.convert hf-to-int4 /models/Qwen3-30B-A3B /models/Qwen3-30B-A3B-GPTQ --calibration-data texts.jsonl
    python -m tools.convert to-bf16 /models/Qwen3-4B-FP8 /models/Qwen3-4B-bf16
    python -m tools.convert torch-dist-to-hf checkpoints exported --origin-hf-dir /models/Qwen3-4B
    python -m tools.convert hf-to-torch-dist /models/Qwen3-4B /models/Qwen3-4B_torch_dist

Files are written one by one and read back, and the directory appears when it is complete. A conversion that was killed
continues when it is started again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Arguments = argparse.Namespace


def add_fp8_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a conversion to FP8."""
    parser.add_argument("--strategy", choices=["block", "channel", "tensor"], default="block", help="what has a scale")
    parser.add_argument("--block-size", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="of block: 128 128")
    parser.add_argument("--scale-fmt", choices=["ue8m0"], help="scales are powers of two, for DeepGEMM on Blackwell")
    parser.add_argument("--max-workers", type=int, default=1, help="files in work at a time; memory is that of all")


def hf_to_fp8(source: Path, target: Path, options: Arguments, force: bool = False) -> None:
    """Write ``source`` in FP8. Raises ValueError for flags that exclude each other."""
    from slime.weights.quantization import Fp8
    from slime.weights.quantization.files import quantize_checkpoint

    block = tuple(options.block_size or (128, 128)) if options.strategy == "block" else None
    if options.block_size and block is None:
        raise ValueError(f"--block-size is for --strategy block, not {options.strategy}")
    if options.scale_fmt and options.strategy == "channel":
        raise ValueError("--scale-fmt is for --strategy block and tensor: compressed-tensors has no place for it")
    form = Fp8(block, options.strategy, ue8m0=options.scale_fmt == "ue8m0")  # type: ignore[arg-type]
    quantize_checkpoint(source, target, form, workers=options.max_workers, force=force)


def add_int4_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a conversion to INT4, of those of the older command those but symmetry."""
    from slime.weights.quantization.files import ONLY_EXPERTS

    parser.add_argument("--group-size", type=int, default=32, help="numbers of a row with one scale (default 32)")
    parser.add_argument(
        *("--ignore-rules",),
        nargs="+",
        default=list(ONLY_EXPERTS),
        help="modules not to quantize: parts of a path, or re:PATTERN; default: all but the routed experts",
    )
    parser.add_argument("--max-workers", type=int, default=1, help="files in work at a time; memory is that of all")


def add_calibration_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of GPTQ, of those of the older command those but the data and the group size."""
    parser.add_argument("--num-calibration-samples", type=int, default=256, help="windows of text (default 256)")
    parser.add_argument("--max-sequence-length", type=int, default=2048, help="tokens of a window (default 2048)")
    parser.add_argument(
        "--dampening-frac", type=float, default=0.01, help="added to the Hessian's diagonal, of its mean"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code of the checkpoint")


def hf_to_int4(source: Path, target: Path, options: Arguments, force: bool = False) -> None:
    """Write ``source`` in INT4, rounded to nearest, or by GPTQ with --calibration-data."""
    from slime.weights.quantization import Int4
    from slime.weights.quantization.files import quantize_checkpoint

    form = Int4(options.group_size, options.is_symmetric)
    if data := getattr(options, "calibration_data", None):
        from slime.weights.quantization.gptq import Calibration, gptq_checkpoint

        texts = Calibration(
            data=str(data),
            samples=options.num_calibration_samples,
            length=options.max_sequence_length,
            dampening=options.dampening_frac,
            trust_remote_code=options.trust_remote_code,
        )
        rules, workers = options.ignore_rules, options.max_workers
        gptq_checkpoint(source, target, form, rules, texts, workers=workers, force=force)
        return
    quantize_checkpoint(source, target, form, options.ignore_rules, workers=options.max_workers, force=force)


def to_bf16(source: Path, target: Path, options: Arguments, force: bool = False) -> None:
    """Write the quantized ``source`` in bf16."""
    from slime.weights.quantization.files import to_bf16 as write

    write(source, target, workers=getattr(options, "max_workers", 1), force=force)


def torch_dist_to_hf(source: Path, target: Path, options: Arguments, force: bool = False) -> None:
    """Write the Megatron checkpoint ``source`` as a Hugging Face one."""
    from slime.backends.megatron_utils.checkpoints.convert import Conversion, convert

    convert(Conversion(source, target, options.origin_hf_dir, add_missing=options.add_missing, force=force))


def hf_to_torch_dist(source: Path, target: Path, options: Arguments, force: bool = False) -> None:
    """Write the Hugging Face checkpoint ``source`` as a Megatron one, which --load and --ref-load take."""
    from slime.backends.megatron_utils.checkpoints.to_torch_dist import to_torch_dist

    to_torch_dist(source, target, force=force)


def run(work: Callable[..., None], source: Path, target: Path, options: Arguments, force: bool = False) -> None:
    """Do ``work``; exit with status 1 and one line when it cannot be done."""
    try:
        work(source, target, options, force)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(f"wrote {target}")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="CONVERSION")
    works = (hf_to_fp8, hf_to_int4, to_bf16, torch_dist_to_hf, hf_to_torch_dist)
    made = {}
    for work in works:
        command = commands.add_parser(work.__name__.replace("_", "-"), help=(work.__doc__ or "").splitlines()[0])
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path, help="appears when it is complete")
        command.add_argument("-f", "--force", action="store_true", help="replace target if it exists")
        command.set_defaults(work=work)
        made[work] = command
    add_fp8_flags(made[hf_to_fp8])
    add_int4_flags(made[hf_to_int4])
    made[hf_to_int4].add_argument("--asymmetric", dest="is_symmetric", action="store_false", help="with zero points")
    made[hf_to_int4].add_argument(
        "--calibration-data", metavar="FILE", help="round by GPTQ: .jsonl or .parquet with texts in a column text"
    )
    add_calibration_flags(made[hf_to_int4])
    made[to_bf16].add_argument("--max-workers", type=int, default=1, help="files in work at a time")
    made[torch_dist_to_hf].add_argument("--origin-hf-dir", type=Path, help="the model that training began with")
    made[torch_dist_to_hf].add_argument(
        "--add-missing", action="store_true", help="take tensors that the checkpoint lacks from --origin-hf-dir"
    )
    options = parser.parse_args(argv)
    run(options.work, options.source, options.target, options, options.force)


if __name__ == "__main__":
    main()
