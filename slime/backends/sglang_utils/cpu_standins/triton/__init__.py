"""Stand-in for triton in CPU engines, built from the stub that SGLang ships for macOS.

Kernels can be defined (``@triton.jit`` passes the function through) and are never compiled or run. SGLang installs its
stub itself only on Apple Silicon, so the few names that it sets there are repeated here. Importing this package replaces
itself in ``sys.modules`` by the stub module.
"""

import importlib.util
import sys
import types
from pathlib import Path


def _load_sglang_stubs() -> types.ModuleType:
    """Load ``sglang/_platform_stubs.py`` by path: importing ``sglang`` itself would import triton again."""
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        raise ImportError("The triton stand-in is for processes that run SGLang, and sglang is not installed.")
    path = Path(next(iter(sglang.submodule_search_locations))) / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded: this SGLang version keeps its triton stub somewhere else.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _install(stubs: types.ModuleType) -> None:
    sys.meta_path.insert(0, stubs._TritonFinder())

    def submodule(name: str, **attributes: object) -> types.ModuleType:
        module = stubs._make_mock(name)
        for key, value in attributes.items():
            setattr(module, key, value)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        return module

    def new_class(name: str, base: type = stubs._StubBase) -> type:
        return type(name, (base,), {"__module__": "triton"})

    class constexpr:  # noqa: N801 (triton's spelling)
        """Annotation and value wrapper, as ``tl.constexpr``."""

        def __init__(self, value: object = None) -> None:
            self.value = value

    submodule(
        "triton", __version__="3.0.0", cdiv=stubs._cdiv, next_power_of_2=stubs._next_power_of_2, Config=stubs._Config
    )
    submodule("triton.language", constexpr=constexpr)
    submodule("triton.language.extra")
    submodule("triton.language.extra.libdevice")
    submodule("triton.runtime")
    submodule("triton.runtime.jit", JITFunction=new_class("JITFunction"), KernelInterface=new_class("KernelInterface"))
    submodule("triton.runtime.cache", triton_key=stubs._triton_key)
    submodule(
        "triton.runtime.autotuner",
        OutOfResources=new_class("OutOfResources", Exception),
        PTXASError=new_class("PTXASError", Exception),
    )
    submodule("triton.runtime.driver")
    submodule("triton.compiler", CompiledKernel=new_class("CompiledKernel"))
    submodule("triton.compiler.compiler", ASTSource=new_class("ASTSource"), triton_key=stubs._triton_key)
    submodule("triton.testing")
    submodule("triton.tools")
    submodule("triton.tools.tensor_descriptor")
    submodule("triton.backends")
    submodule("triton.backends.compiler", GPUTarget=new_class("GPUTarget"))


_install(_load_sglang_stubs())
