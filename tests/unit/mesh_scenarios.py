"""What the neutral mesh must do, each a function that a child runs with a toy JAX.

`test_mesh` runs them one by one; they live here, not in strings, to be looked at by the tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, TypeVar

import jax

from jaxcompat.mesh import neutral, scoped, scoped_coroutine

SHARDING: Any = jax.sharding
Step = tuple[str, Any]
T = TypeVar("T")


class Mine(Exception):
    """An error that nobody else raises."""


@contextlib.contextmanager
def caller_sets(name: str) -> Iterator[Any]:
    """Set a mesh as a user does."""
    mesh = SHARDING.Mesh(None, (name,))
    with (vars(jax).get("set_mesh") or SHARDING.use_mesh)(mesh):
        yield mesh


def seen() -> tuple[str, ...]:
    """Return the axes of the mesh that is set: () is none."""
    axes: tuple[str, ...] = SHARDING.get_abstract_mesh().axis_names
    return axes


class suspend:
    """Awaited, it gives a value to whoever drives the coroutine, and returns what is sent."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self.value)


def finishes(step: Callable[[], Any]) -> Any:
    """Return what a coroutine returns in its last step."""
    try:
        suspended = step()
    except StopIteration as stop:
        return stop.value
    raise AssertionError(f"it is not finished: {suspended!r}")


def raised(kind: type[BaseException], call: Callable[[], Any]) -> BaseException:
    """Return the error that a call raises."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"nothing was raised: {result!r}")


# --- calls ------------------------------------------------------------------------------------


def the_mesh_is_hidden_within_and_back_afterwards() -> None:
    with caller_sets("x") as mesh:
        with neutral():
            assert seen() == ()
        assert SHARDING.get_abstract_mesh() is mesh
    assert seen() == ()


def the_mesh_is_back_when_the_body_raises() -> None:
    with caller_sets("x") as mesh:
        with contextlib.suppress(Mine), neutral():
            raise Mine
        assert SHARDING.get_abstract_mesh() is mesh


def within_one_another_each_brings_back_what_it_found() -> None:
    with caller_sets("x") as mesh:
        with neutral():
            with neutral():
                assert seen() == ()
            assert seen() == ()
            with caller_sets("y"), neutral():
                assert seen() == ()
            assert seen() == ()
        assert SHARDING.get_abstract_mesh() is mesh


def without_a_mesh_nothing_is_done() -> None:
    with neutral():
        assert seen() == ()
    assert scoped(seen)() == ()
    assert SHARDING.set_to == []


def a_scoped_function_runs_without_the_mesh() -> None:
    with caller_sets("x") as mesh:
        assert scoped(seen)() == ()
        assert SHARDING.get_abstract_mesh() is mesh


def a_scoped_function_takes_and_returns_what_the_original_does() -> None:
    def original(a: int, *rest: int, key: int = 0, **others: int) -> Any:
        return a, rest, key, others

    with caller_sets("x"):
        assert scoped(original)(1, 2, 3, key=4, more=5) == (1, (2, 3), 4, {"more": 5})


def a_scoped_function_raises_what_the_original_does() -> None:
    error = Mine("as it is")

    def original() -> None:
        raise error

    with caller_sets("x") as mesh:
        assert raised(Mine, scoped(original)) is error
        assert SHARDING.get_abstract_mesh() is mesh
    assert error.__cause__ is None
    assert error.__context__ is None


def inside_a_trace_the_mesh_is_left_as_it_is() -> None:
    with caller_sets("x"):
        assert SHARDING.trace(scoped(seen))() == ("x",)
        assert scoped(seen)() == ()


def a_value_error_of_the_original_passes_through_a_trace() -> None:
    def original() -> None:
        raise ValueError("the original's own")

    with caller_sets("x"):
        for function in (scoped(original), SHARDING.trace(scoped(original))):
            assert str(raised(ValueError, function)) == "the original's own"


def jax_is_not_asked_for_names_that_it_lacks() -> None:
    with caller_sets("x"):
        assert scoped(seen)() == ()
    assert jax.asked == []


# --- coroutines: step by step -----------------------------------------------------------------


async def _three_steps(log: list[Any]) -> str:
    log.append(seen())
    log.append((await suspend("first"), seen()))
    log.append((await suspend("second"), seen()))
    return "done"


def each_step_is_neutral_and_the_mesh_is_back_between_them() -> None:
    log: list[Any] = []
    with caller_sets("x") as mesh:
        coroutine = scoped_coroutine(_three_steps)(log)
        assert coroutine.send(None) == "first"
        assert SHARDING.get_abstract_mesh() is mesh
        assert coroutine.send(1) == "second"
        assert SHARDING.get_abstract_mesh() is mesh
        assert finishes(lambda: coroutine.send(2)) == "done"
        assert SHARDING.get_abstract_mesh() is mesh
    assert log == [(), (1, ()), (2, ())]


def each_step_brings_back_the_mesh_that_is_set_when_it_begins() -> None:
    log: list[Any] = []
    coroutine = scoped_coroutine(_three_steps)(log)
    with caller_sets("x"):
        coroutine.send(None)
    with caller_sets("y") as mesh:
        coroutine.send(1)
        assert SHARDING.get_abstract_mesh() is mesh
    assert finishes(lambda: coroutine.send(2)) == "done"
    assert log == [(), (1, ()), (2, ())]


def a_coroutine_without_a_mesh_never_sets_one() -> None:
    log: list[Any] = []
    assert asyncio.run(_drive(scoped_coroutine(_sleeping)(log))) == "slept"
    assert log == [(), ()]
    assert SHARDING.set_to == []


async def _sleeping(log: list[Any]) -> str:
    log.append(seen())
    await asyncio.sleep(0)
    log.append(seen())
    return "slept"


async def _drive(coroutine: Coroutine[Any, Any, T]) -> T:
    return await coroutine


def nothing_runs_before_the_first_step() -> None:
    log: list[Any] = []
    with caller_sets("x"):
        coroutine = scoped_coroutine(_three_steps)(log)
        assert log == []
        coroutine.close()
    assert log == []


def inside_a_trace_a_coroutine_steps_with_the_mesh() -> None:
    log: list[Any] = []
    with caller_sets("x"):
        coroutine = scoped_coroutine(_three_steps)(log)
        assert SHARDING.trace(coroutine.send)(None) == "first"
        coroutine.close()
    assert log == [("x",)]


def an_error_thrown_in_is_handled_without_the_mesh_at_each_suspension() -> None:
    log: list[Any] = []

    async def original() -> str:
        for number in range(3):
            try:
                await suspend(number)
            except Mine as error:
                log.append((error.args, seen()))
        return "handled"

    with caller_sets("x") as mesh:
        coroutine = scoped_coroutine(original)()
        assert coroutine.send(None) == 0
        for number in (1, 2):
            assert coroutine.throw(Mine(number)) == number
            assert SHARDING.get_abstract_mesh() is mesh
        assert finishes(lambda: coroutine.throw(Mine(3))) == "handled"
        assert SHARDING.get_abstract_mesh() is mesh
    assert log == [((number,), ()) for number in (1, 2, 3)]


def an_error_thrown_in_and_not_handled_comes_back_as_it_is() -> None:
    error = Mine("thrown")
    with caller_sets("x") as mesh:
        coroutine = scoped_coroutine(_three_steps)([])
        coroutine.send(None)
        assert raised(Mine, lambda: coroutine.throw(error)) is error
        assert SHARDING.get_abstract_mesh() is mesh
    assert error.__cause__ is None
    assert error.__context__ is None


def close_runs_the_cleaning_up_without_the_mesh() -> None:
    log: list[Any] = []

    async def original() -> None:
        try:
            await suspend()
        except GeneratorExit:
            log.append(seen())
            raise
        finally:
            log.append(seen())

    with caller_sets("x") as mesh:
        coroutine = scoped_coroutine(original)()
        coroutine.send(None)
        coroutine.close()
        assert SHARDING.get_abstract_mesh() is mesh
    assert log == [(), ()]


def a_coroutine_that_is_dropped_cleans_up_without_the_mesh() -> None:
    log: list[Any] = []

    async def original() -> None:
        try:
            await suspend()
        finally:
            log.append(seen())

    with caller_sets("x") as mesh:
        coroutine = scoped_coroutine(original)()
        coroutine.send(None)
        del coroutine
        gc.collect()
        assert SHARDING.get_abstract_mesh() is mesh
    assert log == [()]


def an_error_that_was_handled_is_not_kept_alive() -> None:
    async def original() -> None:
        with contextlib.suppress(Mine):
            await suspend("first")
        await suspend("second")

    gc.disable()
    try:
        with caller_sets("x"):
            coroutine = scoped_coroutine(original)()
            coroutine.send(None)
            error = Mine()
            kept = weakref.ref(error)
            coroutine.throw(error)
            del error
            assert kept() is None
            coroutine.close()
    finally:
        gc.enable()


# --- coroutines: in a loop --------------------------------------------------------------------


def another_task_of_the_loop_keeps_its_mesh() -> None:
    ours: list[Any] = []
    others: list[Any] = []

    async def watch(log: list[Any], steps: int) -> None:
        for _ in range(steps):
            log.append(seen())
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(
            watch(others, 12),
            scoped_coroutine(watch)(ours, 5),
            scoped_coroutine(watch)(ours, 5),
            watch(others, 12),
        )

    with caller_sets("x"):
        asyncio.run(main())
    assert ours == [()] * 10
    assert others == [("x",)] * 24


def cancellation_is_the_coroutines_own_to_handle() -> None:
    log: list[Any] = []

    async def original() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append(seen())
            await asyncio.sleep(0)
            log.append(seen())
            raise
        return "not cancelled"

    async def main() -> None:
        task = asyncio.ensure_future(scoped_coroutine(original)())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        log.append((task.cancelled(), seen()))

    with caller_sets("x"):
        asyncio.run(main())
    assert log == [(), (), (True, ("x",))]


def a_cancellation_that_is_swallowed_is_swallowed() -> None:
    async def original() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "went on"

    async def main() -> str:
        task = asyncio.ensure_future(scoped_coroutine(original)())
        await asyncio.sleep(0)
        task.cancel()
        return await task

    with caller_sets("x"):
        assert asyncio.run(main()) == "went on"


def a_time_limit_ends_it() -> None:
    async def main() -> None:
        try:
            await asyncio.wait_for(scoped_coroutine(asyncio.sleep)(60), 0.01)
        except asyncio.TimeoutError:
            assert seen() == ("x",)
        else:
            raise AssertionError("it was not ended")

    with caller_sets("x"):
        asyncio.run(main())


def a_scoped_coroutine_within_another_brings_back_the_callers_mesh() -> None:
    log: list[Any] = []

    async def outer() -> str:
        log.append(seen())
        result = await scoped_coroutine(_sleeping)(log)
        log.append(seen())
        return result

    async def main() -> str:
        result = await scoped_coroutine(outer)()
        assert seen() == ("x",)
        return result

    with caller_sets("x"):
        assert asyncio.run(main()) == "slept"
    assert log == [()] * 4


# --- threads ----------------------------------------------------------------------------------


def _is_set() -> bool:
    """Say whether a mesh is set in this thread, be it the neutral one."""
    return SHARDING.get_abstract_mesh() in SHARDING.set_to


def the_scope_follows_into_the_threads_that_are_started_in_it() -> None:
    """What is compiled ahead there must be compiled under the mesh that is set here."""

    async def original() -> bool:
        return await asyncio.to_thread(scoped(_is_set))

    async def main() -> tuple[bool, bool]:
        within = await scoped_coroutine(original)()
        return within, await original()

    with caller_sets("x"):
        assert asyncio.run(main()) == (True, False)


def the_scope_does_not_follow_into_another_thread() -> None:
    found: list[bool] = []
    with caller_sets("x"), neutral():
        before = len(SHARDING.set_to)
        thread = threading.Thread(target=lambda: found.append(scoped(_is_set)()))
        thread.start()
        thread.join()
        # Python 3.14 can be told to give each thread its starter's context.
        if not getattr(sys.flags, "thread_inherit_context", 0):
            assert found == [False]
            assert len(SHARDING.set_to) == before


def the_scope_ends_with_the_function() -> None:
    with caller_sets("x"):
        scoped(seen)()

    async def main() -> bool:
        return await asyncio.to_thread(scoped(_is_set))

    assert asyncio.run(main()) is False


def the_scope_ends_with_the_coroutine_also_when_it_raises() -> None:
    async def original() -> None:
        raise Mine

    async def main() -> bool:
        with caller_sets("x"), contextlib.suppress(Mine):
            await scoped_coroutine(original)()
        return await asyncio.to_thread(scoped(_is_set))

    assert asyncio.run(main()) is False


def the_scope_is_not_left_open_between_steps() -> None:
    async def main() -> bool:
        task = asyncio.ensure_future(scoped_coroutine(asyncio.sleep)(0.05))
        await asyncio.sleep(0)
        found = await asyncio.to_thread(scoped(_is_set))
        await task
        return found

    with caller_sets("x"):
        assert asyncio.run(main()) is False


# --- as the original, whatever is done to it --------------------------------------------------

ERRORS: dict[str, Callable[[], BaseException]] = {
    "Mine": lambda: Mine("mine"),
    "ValueError": lambda: ValueError("a value"),
    "StopIteration": lambda: StopIteration("stop"),
    "StopAsyncIteration": lambda: StopAsyncIteration("stop"),
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "RuntimeError": lambda: RuntimeError("at run time"),
}


async def play(program: list[Step], meshes: list[Any]) -> Any:
    """Do what the program says: a coroutine of any shape."""
    meshes.append(seen())
    last: Any = None
    for what, value in program:
        if what == "await":
            last = await suspend((value, last))
        elif what == "await and swallow":
            try:
                last = await suspend((value, last))
            except BaseException as error:
                last = ("swallowed", type(error).__name__, error.args)
        elif what == "await and replace":
            try:
                last = await suspend((value, last))
            except BaseException as error:
                raise ERRORS[value]() from error
            finally:
                meshes.append(seen())
        elif what == "raise":
            raise ERRORS[value]()
        else:
            return (value, last)
        meshes.append(seen())
    return last


async def play_for_another(program: list[Step], meshes: list[Any]) -> Any:
    """Await a coroutine, and do nothing else."""
    return await play(program, meshes)


def drive(coroutine: Coroutine[Any, Any, Any], schedule: list[Step]) -> list[Any]:
    """Do what the schedule says to a coroutine, and return all that came out of it."""
    came: list[Any] = []
    for what, value in [*schedule, ("close", None)]:
        before = SHARDING.get_abstract_mesh()
        try:
            if what == "send":
                came.append(("yielded", coroutine.send(value if came else None)))
            elif what == "throw":
                came.append(("yielded", coroutine.throw(ERRORS[value]())))
            else:
                coroutine.close()
                came.append("closed")
        except StopIteration as stop:
            came.append(("returned", stop.value))
        except BaseException as error:
            came.append(("raised", *_described(error)))
        assert SHARDING.get_abstract_mesh() is before
    return came


def _described(error: BaseException) -> tuple[Any, ...]:
    cause = error.__cause__ and type(error.__cause__).__name__
    context = error.__context__ and type(error.__context__).__name__
    # The one word of difference to the original: "generator ignored GeneratorExit".
    text = str(error).replace("generator ignored", "coroutine ignored")
    return type(error).__name__, text, cause, context, error.__suppress_context__


def whatever_is_done_to_it_it_behaves_as_the_original() -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    with caller_sets("x"):
        assert scoped(seen)() == ()
    del sys.modules["numpy"]  # the toy has served; hypothesis would seed its random numbers

    numbers, errors = st.integers(0, 9), st.sampled_from(sorted(ERRORS))
    programs = st.lists(
        st.tuples(st.sampled_from(["await", "await and swallow"]), numbers)
        | st.tuples(st.sampled_from(["await and replace", "raise"]), errors)
        | st.tuples(st.just("return"), numbers),
        max_size=5,
    )
    schedules = st.lists(
        st.tuples(st.just("send"), numbers)
        | st.tuples(st.just("throw"), errors)
        | st.tuples(st.just("close"), st.none()),
        max_size=7,
    )

    @settings(max_examples=400, deadline=None, database=None, derandomize=True)
    @given(programs, schedules)
    def check(program: list[Step], schedule: list[Step]) -> None:
        bare: list[Any] = []
        ours: list[Any] = []
        # Python closes what a coroutine awaits when GeneratorExit is thrown in: that is as good
        # as it gets for one that awaits the original.
        original = play_for_another if ("throw", "GeneratorExit") in schedule else play
        with caller_sets("x"):
            expected = drive(original(program, bare), schedule)
            assert drive(scoped_coroutine(play)(program, ours), schedule) == expected
        assert bare == [("x",)] * len(bare)
        assert ours == [()] * len(bare)

    check()
