"""Functions that users name by flag: looked up in one place, sync or async, and named in every error."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from slime.arguments.args import Args
from slime.rollout.cancelling import caller_is_cancelled
from slime.rollout.hooks.contracts import ENVIRONMENT, Contract, contracts_of
from slime.utils.async_utils import run
from slime.utils.misc import load_function
from slime.utils.types import Sample

_SHOWN = 8
"""So many samples are named in a message."""
_NO_LOOP = ("no running event loop", "There is no current event loop")


@dataclass(frozen=True)
class Hook:
    """A user's function. ``str`` gives flag, dotted path, file and line, for messages.

    Call it like the function, where blocking is right, or await ``awaited``. Whether the function is a coroutine
    function makes no difference: what it returns is awaited when that can be. Any error in it carries a note that
    names the hook and the samples among its arguments.
    """

    flag: str
    path: str
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.flag} {self.path!r} ({place_of(self.function)})"

    def __call__(self, *args: object, **kwargs: object) -> Any:
        with self.naming(args):
            return finish(self.function(*args, **kwargs))

    async def awaited(self, *args: object, **kwargs: object) -> Any:
        """Call the function on the event loop's thread."""
        with self.naming(args):
            result = self.function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

    async def awaited_off_loop(self, *args: object, **kwargs: object) -> Any:
        """Call a coroutine function on the event loop, a plain one, which may compute or block, in a new thread.

        An awaitable that a plain function returns is awaited on the event loop.
        """
        if self.is_async:
            return await self.awaited(*args, **kwargs)
        with self.naming(args):
            try:
                result = await in_thread(self.function, *args, **kwargs)
            except RuntimeError as e:
                if str(e).startswith(_NO_LOOP):
                    e.add_note("a plain function is called in a thread, where no event loop runs: make it `async def`")
                raise
            return await result if inspect.isawaitable(result) else result

    @contextlib.contextmanager
    def naming(self, *about: object) -> Iterator[None]:
        """Within the block, add to what is raised a note with this hook and the samples found in ``about``.

        A call of ``exit`` is an error as well: it would end the event loop. So is
        a CancelledError of the function's own, say from a task that its watchdog cancelled: it would be taken for a
        cancellation of the caller.
        """
        try:
            yield
        except Exception as e:
            note = f"in {self}{for_samples(about)}"
            if note not in getattr(e, "__notes__", ()):
                e.add_note(note)
            raise
        except SystemExit as e:
            raise RuntimeError(f"{self} called exit({e.code}){for_samples(about)}") from e
        except asyncio.CancelledError as e:
            if caller_is_cancelled():
                raise
            raise RuntimeError(
                f"{self} let a CancelledError out{for_samples(about)} though it was not cancelled: something that it "
                "awaited was cancelled"
            ) from e

    def returned(self, result: object, expected: str, *about: object) -> TypeError:
        """Return the error for a result that is not what was ``expected``."""
        return TypeError(f"{self} returned {_shown(result)}{for_samples(about)}; expected {expected}")

    def accepted(self, **offered: object) -> dict[str, Any]:
        """Return those of the keyword arguments that the function takes by name, all of them with ``**kwargs``."""
        parameters = self._parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return offered
        return {name: value for name, value in offered.items() if name in parameters}

    @functools.cached_property
    def is_async(self) -> bool:
        """True when the function is known to be a coroutine function."""
        return is_coroutine_function(self.function)

    def has_parameter(self, name: str) -> bool:
        """True when the function has a parameter of that very name."""
        return name in self._parameters

    @functools.cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function, follow_wrapped=False).parameters


def find_hook(args: Args, name: str) -> Hook | None:
    """Return the hook that ``args.<name>`` names, None when it names none. Raises as ``make_hook`` does."""
    path = getattr(args, name)
    return make_hook(path, name) if path else None


def find_hooks(args: Args, *names: str) -> list[Hook]:
    """Return the hooks that the attributes ``names`` of ``args`` name, each one or several or none."""
    paths = [(name, getattr(args, name) or []) for name in names]
    return [make_hook(path, name) for name, found in paths for path in ([found] if isinstance(found, str) else found)]


def make_hook(path: str, name: str, flag: str | None = None, load: Callable[[str], Any] | None = None) -> Hook:
    """Return the hook of the attribute ``name`` of the arguments at a dotted path.

    ``flag`` is for messages, where the path did not come from the flag of that name. ``load`` looks the path up in
    place of ``load_function``. Raises as ``load_function`` does, and TypeError for what cannot be called as the hook is
    going to be called.
    """
    if load is None or load is load_function:
        return checked_hook(path, contracts_of("manager")[name], flag or contracts_of("manager")[name].flag)
    return Hook(flag or contracts_of("manager")[name].flag, path, load(path))


@functools.cache
def checked_hook(path: str, contract: Contract, flag: str) -> Hook:
    """Return the hook at a dotted path, which can be called as ``contract`` declares. Raises as ``make_hook`` does."""
    hook = Hook(flag, path, load_function(path, flag))
    _check_call(hook, contract)
    return hook


def check_hooks(args: Args) -> None:
    """Look up every hook of the rollout manager. Raises for the first that is not there or cannot be called.

    Replayed rollouts need none of the hooks of generation, whose modules may be missing where they are replayed.
    """
    from slime.arguments.files.environments import environments_of  # no reward worker needs what it imports

    replays = args.load_debug_rollout_data
    find_hooks(
        args, *(name for name, contract in contracts_of("manager").items() if not (replays and contract.generates))
    )
    for entry in environments_of(args).values() if not replays else []:
        checked_hook(entry.path, ENVIRONMENT, f"environment {entry.name!r}")
    for dataset in args.eval_datasets if not replays else []:
        for name in ("custom_generate_function_path", "custom_rm_path"):
            if path := getattr(dataset, name, None):
                make_hook(path, name, flag=f"--eval-config, data set {dataset.name!r}, {name}")


def _check_call(hook: Hook, contract: Contract) -> None:
    if not callable(hook.function):
        raise TypeError(
            f"{hook.flag} {hook.path!r} is a {type(hook.function).__name__}, expected {contract.what}: {contract.call}"
        )
    try:
        signature = inspect.signature(hook.function, follow_wrapped=False)  # that of the decorated function
    except (TypeError, ValueError):  # a built-in without a signature
        return
    try:
        offered = [name for name in contract.offered if name in signature.parameters]
        signature.bind(*[None] * contract.positional, **dict.fromkeys([*contract.keywords, *offered]))
    except TypeError as e:
        raise TypeError(
            f"{hook} cannot be called as the flag's function is: {e}. Expected {contract.call}, got "
            f"{getattr(hook.function, '__name__', 'fn')}{signature}"
        ) from None
    for method in contract.methods if inspect.isclass(hook.function) else ():
        found = getattr(hook.function, method, None)
        if found is None and not hasattr(hook.function, "__getattr__"):
            raise TypeError(f"{hook} has no method {method!r}; expected {contract.call}")
        if found is not None and is_coroutine_function(found):
            raise TypeError(f"{hook}: {method!r} is a coroutine function, but rollouts call it without await")


def describe(function: Callable[..., Any]) -> str:
    """Return what messages call a function: a hook with its flag and path, any other by its name and place."""
    if isinstance(function, Hook):
        return str(function)
    return f"{getattr(innermost(function), '__qualname__', function)} ({place_of(function)})"


def place_of(function: Callable[..., Any]) -> str:
    """Return ``file:line`` where a function or class is defined, or the module of one that has no source."""
    function = innermost(function)
    if not inspect.isroutine(function) and not inspect.isclass(function):
        function = type(function)
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):
        return f"module {getattr(function, '__module__', None) or 'unknown'}, no source"


def with_notes(error: BaseException) -> str:
    """Return the message of ``error`` and its notes, which name its origin."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def for_samples(values: object) -> str:
    """Return ``, for sample index=3 group_index=1`` of the samples in nested ``values``; nothing when there is none."""
    samples = list(_samples_in(values))
    if not samples:
        return ""
    if len(samples) == 1:
        return f", for sample index={samples[0].index} group_index={samples[0].group_index}"
    names = ", ".join(f"{s.index} of group {s.group_index}" for s in samples[:_SHOWN])
    return f", for {len(samples)} samples: index {names}{', ...' if len(samples) > _SHOWN else ''}"


def _samples_in(values: object) -> Iterator[Sample]:
    if isinstance(values, Sample):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _samples_in(value)


def _shown(result: object) -> str:
    if result is None:
        return "NoneType"
    text = repr(result)
    return f"{type(result).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def finish(result: object) -> Any:
    """Return ``result``, awaited if it can be, blocking until it is done.

    On the thread of an event loop, which cannot wait for itself, a loop in another thread awaits it.
    """
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(wait())
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(asyncio.run(wait()))
        except BaseException as e:  # noqa: BLE001  (raised again where it is awaited)
            answer.set_exception(e)

    # A daemon: a hook that hangs does not keep the process from its exit.
    threading.Thread(target=work, name="slime-asyncio-hook", daemon=True).start()
    return answer.result()


async def in_thread(function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Await ``function(*args, **kwargs)`` in a daemon thread: one that hangs keeps neither its waiter nor the exit.

    Unlike those of a pool, threads that call hooks which need a thread themselves never wait for each other.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: object, error: BaseException | None) -> None:
        if future.done():  # the caller was cancelled
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # a future does not take it
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as e:  # noqa: BLE001  (raised again where it is awaited)
            error = e
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"hook-{getattr(function, '__name__', '')}", daemon=True).start()
    return await future


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """True for coroutine functions, also wrapped, partial, or as the ``__call__`` of an object."""
    function = innermost(function)
    if inspect.iscoroutinefunction(function):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)


def innermost(function: Callable[..., Any]) -> Any:
    """Return the function within decorators and partial calls."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return function
