"""Set up slime in the virtual environment ``.venv`` of this checkout: ``make setup``.

Uses the standard library and pip only. Without a GPU, SGLang's CUDA dependencies and CUDA builds of torch are kept
out; with one, the ``gpu`` extra is installed. When nothing changed since the last time it returns at once.

    python3 tools/setup.py [--gpu | --cpu] [--force] [--venv DIR]
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
OLDEST = (3, 11)
INPUTS = ("pyproject.toml", "tools/setup.py", *(f"requirements/{n}.txt" for n in ("lock", "no-deps", "sglang-cpu")))
SHOWN = ("torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers", "slime")
SMOKE_IMPORTS = "torch, ray, megatron.core, sglang_router, transformers, pydantic, aiohttp, slime"


class SetupError(Exception):
    """A step failed; the message says which, and what to do."""


def say(text):
    """Print one line at once: pip's own output must come after it."""
    print(f"[setup] {text}", flush=True)


def find_python():
    """Return an interpreter of Python 3.11 or newer (this one, when it is)."""
    if sys.version_info[:2] >= OLDEST:
        return sys.executable
    for minor in (13, 12, 11):
        if found := shutil.which(f"python3.{minor}"):
            return found
    raise SetupError(
        f"slime needs Python {OLDEST[0]}.{OLDEST[1]} or newer; {sys.executable} is {sys.version.split()[0]} and no "
        "python3.11, python3.12 or python3.13 is on the PATH. Install one (for example: apt install python3.11 "
        "python3.11-venv) and run: make setup PYTHON=python3.11"
    )


def has_gpu():
    """Return True if the NVIDIA driver reports at least one GPU."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return False
    result = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, timeout=60)
    return result.returncode == 0 and "GPU" in result.stdout


def run(command, step):
    """Run ``command``; raise SetupError naming ``step`` when it fails."""
    code = subprocess.call([str(c) for c in command], cwd=ROOT, stdin=subprocess.DEVNULL)
    if code:
        raise SetupError(f"{step} failed (exit status {code}); the reason is in the lines above")


def make_venv(venv, python):
    """Create the virtual environment unless a working one of a good version is there."""
    interpreter = venv / "bin" / "python"
    if interpreter.exists():
        probe = subprocess.run(
            [interpreter, "-c", "import pip, sys; print(*sys.version_info[:2])"], capture_output=True, text=True
        )
        if probe.returncode == 0 and tuple(map(int, probe.stdout.split())) >= OLDEST:
            return interpreter
        raise SetupError(f"{venv} holds no working Python >= 3.11 with pip: remove it and run make setup again")
    say(f"creating {venv}")
    result = subprocess.run([python, "-m", "venv", str(venv)], capture_output=True, text=True)
    if result.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        raise SetupError(
            f"{python} -m venv failed:\n{result.stdout}{result.stderr}On Debian and Ubuntu the module is a package of "
            "its own: apt install python3-venv"
        )
    return interpreter


class Pip:
    """pip of the virtual environment."""

    def __init__(self, interpreter):
        self.command = [interpreter, "-m", "pip", "--disable-pip-version-check", "--no-input"]

    def install(self, step, *arguments):
        """Install, telling the step and its time."""
        say(f"{step} ...")
        begin = time.monotonic()
        run([*self.command, "install", "--quiet", "--quiet", "--progress-bar", "off", *arguments], step)
        say(f"{step}: {time.monotonic() - begin:.0f} s")

    def plan(self, requirement):
        """Return pip's report on what installing ``requirement`` alone would fetch, or None when it cannot say."""
        arguments = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", requirement]
        result = subprocess.run([str(c) for c in [*self.command, *arguments]], capture_output=True, text=True)
        if result.returncode:
            return None
        try:
            return json.loads(result.stdout)["install"][0]
        except (ValueError, KeyError, IndexError):
            return None

    def version(self, package):
        """Return the installed version of ``package``, or None."""
        code = (
            "import sys; from importlib import metadata\n"
            "try: print(metadata.version(sys.argv[1]))\nexcept metadata.PackageNotFoundError: pass"
        )
        result = subprocess.run([self.command[0], "-c", code, package], capture_output=True, text=True, check=True)
        return result.stdout.strip() or None


def pyproject(interpreter):
    """Return the ``project`` table (read by the environment's Python: this one may have no tomllib)."""
    code = "import json, tomllib; print(json.dumps(tomllib.load(open('pyproject.toml', 'rb'))['project']))"
    result = subprocess.run([interpreter, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def lines_of(path):
    """Return the requirements of a requirements file."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def install_torch(pip, requirement):
    """Install a CPU torch where the package index has one; say what comes where it has not. Return its version."""
    installed = pip.version("torch")
    wanted = requirement.split("==")[1]
    if installed and installed.split("+")[0] == wanted:
        return installed
    plan = pip.plan(requirement)
    if plan:
        needs = plan["metadata"].get("requires_dist") or []
        cuda = [n for n in needs if n.lower().startswith(("nvidia-", "cuda-", "triton")) and "extra ==" not in n]
        say(f"torch on offer: {plan['metadata']['version']}, a {'CUDA' if cuda else 'CPU'} build")
        if cuda:
            say(
                f"no CPU build is on offer: torch comes with {len(cuda)} CUDA packages, 3 GB or more in all, which "
                "this machine does not need. To avoid them, stop now (Ctrl-C), make pip see a CPU build (see "
                "'Start locally' on pytorch.org, platform CPU; PIP_EXTRA_INDEX_URL or pip.conf) and start again"
            )
    else:
        say(f"pip could not tell beforehand which build of {requirement} the index has")
    pip.install("installing torch", requirement, "-c", REQUIREMENTS / "lock.txt")
    return pip.version("torch")


def install_cpu(pip, project, venv):
    """Install everything without any CUDA package."""
    torch = next(d for d in project["dependencies"] if d.startswith("torch=="))
    frozen = venv / "torch-constraint.txt"
    frozen.write_text(f"torch=={install_torch(pip, torch)}\n")
    extras = project["optional-dependencies"]
    packages = project["dependencies"] + extras["dev"] + lines_of(REQUIREMENTS / "sglang-cpu.txt")
    constraints = ["-c", REQUIREMENTS / "lock.txt", "-c", frozen]
    pip.install(f"installing {len(packages)} packages and what they need", *constraints, *packages)
    without = lines_of(REQUIREMENTS / "no-deps.txt")
    pip.install(f"installing {', '.join(without)} without dependencies", "--no-deps", *without)
    pip.install("installing slime (editable)", "--no-deps", "--no-build-isolation", "-e", ".")


def install_gpu(pip):
    """Install everything with the CUDA packages that SGLang declares."""
    pip.install("installing the build tools", "setuptools>=77", "wheel")
    pip.install("installing slime with its gpu and dev extras", "-e", ".[gpu,dev]")


def fingerprint(gpu):
    """Return a hash of everything that decides what is installed."""
    digest = hashlib.sha256(f"gpu={gpu} root={ROOT}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def smoke_check(pip):
    """Import what matters and print the versions found."""
    say("checking that everything imports ...")
    run([pip.command[0], "-W", "ignore", "-c", f"import {SMOKE_IMPORTS}"], "importing the installed packages")
    versions = {name: pip.version(name) for name in SHOWN}
    if missing := [name for name, version in versions.items() if version is None]:
        raise SetupError(f"{', '.join(missing)} did not get installed: run make setup SETUP_FLAGS=--force")
    say(", ".join(f"{name} {version}" for name, version in versions.items()))


def main():
    """Set up; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", dest="gpu", action="store_true", default=None, help="install the CUDA packages")
    device.add_argument("--cpu", dest="gpu", action="store_false", help="install CPU packages only")
    parser.add_argument("--force", action="store_true", help="install again even when nothing changed")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the virtual environment (default: .venv)")
    options = parser.parse_args()
    venv = options.venv.absolute()
    gpu = has_gpu() if options.gpu is None else options.gpu
    stamp = venv / "slime-setup.txt"
    try:
        if not options.force and stamp.exists() and stamp.read_text() == fingerprint(gpu):
            return 0
        begin = time.monotonic()
        say(f"{'a GPU' if gpu else 'no GPU'} here: installing into {venv}, about {8 if gpu else 2} GB on disk")
        pip = Pip(make_venv(venv, find_python()))
        if gpu:
            install_gpu(pip)
        else:
            install_cpu(pip, pyproject(pip.command[0]), venv)
        smoke_check(pip)
        stamp.write_text(fingerprint(gpu))
        say(f"done in {time.monotonic() - begin:.0f} s")
    except SetupError as error:
        print(f"[setup] error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[setup] stopped; make setup continues where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    sys.exit(main())
