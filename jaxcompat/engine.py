"""What happens to a patch in this process: armed, applied, reverted; one record per id.

A target that several patches share is one slot: the first original, and the patches that are on
it. Putting one on or taking one off composes the slot anew, in the catalogue's order, so each
patch can go alone. What is on a target is known here and nowhere else; no flag is left on it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

import wrapt

from jaxcompat import settings, versions
from jaxcompat.patch import Patch, Site, catalogue

State = Literal[
    "disabled",
    "absent",
    "unaffected",
    "unlisted",
    "armed",
    "applied",
    "drifted",
    "failed",
    "reverted",
]

_TRIED = ("armed", "applied", "drifted", "failed")
"""Where the patch is for these versions: a copy is patched whatever became of JAX's own code."""

_logger = logging.getLogger("jaxcompat")
_ABSENT: Any = object()


class JaxcompatWarning(UserWarning):
    """Something that the user should know or mend; nothing was broken."""


class JaxcompatError(RuntimeError):
    """Wrong use of jaxcompat; with JAXCOMPAT_STRICT, also a patch that is drifted or failed."""


class PatchStatus(NamedTuple):
    """What became of one patch in this process.

    ``state`` is one of disabled, absent, unaffected, unlisted, armed, applied, drifted, failed,
    reverted; ``reason`` says why, in a sentence; ``affected`` are the version ranges as text;
    ``sites`` the targets as ``module:attribute``, with those that are patched now in ``patched``;
    ``upstream`` the links; ``traceback`` what went wrong where the state is failed, else "".
    """

    id: str
    state: State
    reason: str
    affected: str
    sites: tuple[str, ...]
    patched: tuple[str, ...]
    upstream: tuple[str, ...]
    traceback: str = ""


class _Record:
    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.state: State = "reverted"
        self.reason = "not applied yet"
        self.traceback = ""
        self.forced = False
        # The sites that exist in the installed versions; copies included.
        self.sites: list[Site] = []
        # The modules of the patch's own sites (not of copies) that are still to be imported.
        self.waiting: set[str] = set()


class _Slot:
    def __init__(self, owner: Any, name: str, original: Any, own: bool) -> None:
        self.owner = owner
        self.name = name
        self.original = original  # what was found; or inherited
        self.own = own  # whether it was the owner's own, and not inherited
        self.wraps: dict[str, Site] = {}
        self.ours: Any = _ABSENT

    def compose(self) -> None:
        value = self.original
        for patch_id in catalogue():
            if patch_id in self.wraps:
                wrapped = self.wraps[patch_id].wrap(value)
                if inspect.iscoroutinefunction(wrapped) != inspect.iscoroutinefunction(value):
                    raise _Drifted(f"{self.wraps[patch_id].target} is awaited no more, or only now")
                value = wrapped
        if self.wraps or self.own:
            setattr(self.owner, self.name, value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)  # a copy of the inherited one would shadow it
        self.ours = value if self.wraps else _ABSENT


class _Drifted(Exception):
    """The target is not what the patch knows."""


# Guards the records and slots. Never held while a module is imported or a message is logged.
_lock = threading.RLock()
_slots: dict[str, _Slot] = {}
_copies: dict[str, list[Site]] = {}
_hooked: set[str] = set()
_said: set[str] = set()
"""What is told once in a process, and at DEBUG when it comes again."""
_installed = versions.Installed()


def _renew_lock() -> None:
    # Another thread may have held it at the fork; in the child that thread is gone.
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@functools.cache
def _records() -> dict[str, _Record]:
    return {patch.id: _Record(patch) for patch in catalogue().values()}


# --- what the user calls ---------------------------------------------------------------------


def arm() -> None:
    """Decide on every patch, and put in place what waits for an import; run once, at import."""
    switches = settings.read(catalogue())
    records = list(_records().values())
    originals = _originals(records)
    _start(records, switches)
    _tell_late({target: found for target, found in originals.items() if target in _slots})
    for problem in switches.problems:  # at the end: a warning may be made an error
        warnings.warn(problem, JaxcompatWarning, stacklevel=_outside())


def status() -> tuple[PatchStatus, ...]:
    """Return what became of each patch, in the order in which they compose."""
    with _lock:
        return tuple(_status(record) for record in _records().values())


def apply(*ids: str) -> None:
    """Apply the patches, all when none is named, as `import jaxcompat` would do it now.

    Out of its ranges, or switched off, a patch stays as it is; `status` says why.

    Raises
    ------
    JaxcompatError
        If there is no patch of that id.
    """
    todo = [record for record in _named(ids) if record.state != "applied" or not _is_whole(record)]
    _start(todo, settings.read(catalogue()))


def revert(*ids: str) -> None:
    """Undo the patches, all when none is named, and leave alone what is no longer ours.

    A target that someone else has wrapped or replaced since is not touched: the patch stays
    applied there, and a `JaxcompatWarning` says so.

    Raises
    ------
    JaxcompatError
        If there is no patch of that id.
    """
    stuck: list[str] = []
    for record in _named(ids):
        with _lock:
            if not _is_active(record):
                continue
            held = _undo(record)
            record.waiting.clear()
            if held:
                stuck.append(f"{record.patch.id} stays on {', '.join(held)}")
                record.state, record.reason = "applied", f"{', '.join(held)} was wrapped since"
            else:
                record.state, record.reason = "reverted", "undone by jaxcompat.revert"
    if stuck:
        warnings.warn(
            f"Not undone: {'; '.join(stuck)}: something else was put there since, which may call "
            "ours or bring it back, and putting the original there would take it away. Undo that "
            "first.",
            JaxcompatWarning,
            stacklevel=_outside(),
        )


@contextlib.contextmanager
def disabled(*ids: str) -> Iterator[None]:
    """Run the body without the patches, without all when none is named; for the whole process.

    Raises
    ------
    JaxcompatError
        If there is no patch of that id.
    """
    active = [record.patch.id for record in _named(ids) if _is_active(record)]
    try:
        if active:
            revert(*active)
        yield
    finally:
        if active:
            apply(*active)


def patch_unpickler(target: str) -> None:
    """Mend a third party's copy of JAX's AOT unpickler as JAX's own class is mended.

    Nothing is imported: the class is patched when its module is, or now where that has happened.

    Parameters
    ----------
    target
        ``"package.module:Class"``; the constructor takes `backend` and `execution_devices`, by
        these names, in any order and among others.

    Raises
    ------
    JaxcompatError
        If the target is not of that form.
    """
    module, colon, name = target.partition(":")
    if not (colon and name and all(p.isidentifier() for p in (*module.split("."), name))):
        raise JaxcompatError(f"Expected 'package.module:Class', got {target!r}.")
    todo = []
    with _lock:
        for record in _records().values():
            if record.patch.copies is None:
                continue
            known = {site.target for site in _all_sites(record.patch)}
            new = [s for s in record.patch.copies(module, name) if s.target not in known]
            _copies.setdefault(record.patch.id, []).extend(new)
            if record.state in _TRIED:
                record.sites.extend(new)
                todo.append(record)
    if todo:
        _visit({module}, todo)


def find(patch_id: str) -> Patch:
    """Return the patch of that id.

    Raises
    ------
    JaxcompatError
        If there is none; the message names the nearest.
    """
    try:
        return catalogue()[patch_id]
    except KeyError:
        near = settings.nearest(patch_id, catalogue())
        raise JaxcompatError(f"There is no patch {patch_id!r}{near}.") from None


# --- from a record to its hooks --------------------------------------------------------------


def _start(records: list[_Record], switches: settings.Settings) -> None:
    started: list[_Record] = []
    unlisted: list[_Record] = []
    for record in records:
        state, reason = _decide(record.patch, switches)
        with _lock:
            record.state, record.reason, record.traceback = state, reason, ""
            record.forced = reason.startswith("forced")
            if state == "armed":
                record.sites = [s for s in _all_sites(record.patch) if _exists(s)]
                record.waiting = {site.module for site in record.sites if not site.copy}
                started.append(record)
        if state == "unlisted":
            unlisted.append(record)
        _logger.debug("%s is %s: %s", record.patch.id, state, reason)
    if unlisted:
        _tell_unlisted(unlisted)
    _visit({site.module for record in started for site in record.sites}, started)


def _decide(patch: Patch, switches: settings.Settings) -> tuple[State, str]:
    if switches.disables(patch.id):
        return "disabled", f"switched off by {settings.DISABLE}"
    verdict = versions.judge(patch.affected, _installed)
    if verdict.state == "affected":
        return "armed", f"{verdict.reason}: waits for the import"
    if verdict.state != "absent" and switches.forces(patch.id):
        return "armed", f"forced by {settings.FORCE} although {verdict}"
    return verdict.state, verdict.reason


def _visit(modules: set[str], records: list[_Record]) -> None:
    """Patch what is imported, now, and hook what is not."""
    for name in sorted(modules):
        module = sys.modules.get(name)
        if module is None:
            if name not in _hooked:
                _hooked.add(name)
                wrapt.register_post_import_hook(functools.partial(_imported, name), name)
        elif getattr(getattr(module, "__spec__", None), "_initializing", False):
            # Its import is under way around us; wrapt would call the hook at once, too early.
            reason = f"{name} was half imported; call jaxcompat.apply() afterwards"
            for record in records:
                if any(site.module == name for site in record.sites):
                    if name in record.waiting:
                        record.reason = reason
                    _logger.warning("%s is not applied: %s", record.patch.id, reason)
        else:
            _imported(name, module)


def _imported(name: str, module: Any) -> None:
    """Patch a module that has just been imported: the post-import hook.

    Raises
    ------
    JaxcompatError
        With JAXCOMPAT_STRICT, where a patch is drifted or failed. Nothing else: an exception
        from a hook makes the user's import fail, and drops the module.
    """
    _hooked.discard(name)
    switches = settings.read(catalogue())
    broken: list[_Record] = []
    for record in _records().values():
        sites = [site for site in record.sites if site.module == name]
        own = [site for site in sites if not site.copy]
        if record.state not in _TRIED or not sites:
            continue
        if switches.disables(record.patch.id):
            if record.state == "armed":
                _settle(record, "disabled", f"switched off by {settings.DISABLE}", copies=True)
            continue
        if name in record.waiting:
            trouble = _put_all(record, own, module)
            if trouble:
                _settle(record, *trouble)
                _logger.warning("%s", _complaint(record))
                broken.append(record)
            else:
                _progress(record, name)
        for path in dict.fromkeys(site.path[:-1] for site in sites if site.copy):
            copy = [site for site in sites if site.copy and site.path[:-1] == path]
            trouble = _put_all(record, copy, module)
            if trouble:  # a third party's copy concerns nothing else
                with _lock:
                    _undo(record, {site.target for site in copy})
                _logger.warning("%s leaves a copy alone: %s", record.patch.id, trouble[1])
    if broken and switches.strict:
        raise JaxcompatError("\n".join(_complaint(record) for record in broken))


def _put_all(
    record: _Record, sites: list[Site], module: Any
) -> tuple[Literal["drifted", "failed"], str, str] | None:
    """Put the patch on all of these sites; return what is in the way, if anything is."""
    mismatch = versions.disagreement(versions.distributions(record.patch.affected), _installed)
    try:
        with _lock:
            if mismatch and not record.forced:
                raise _Drifted(mismatch)
            for site in sites:
                _check(site, module)
            for site in sites:
                _put(record.patch.id, site, module)
    except _Drifted as drift:
        return "drifted", str(drift), ""
    # Whatever a patch does wrong must not reach the user's import; it is kept and logged.
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}", traceback.format_exc()
    return None


def _progress(record: _Record, name: str) -> None:
    with _lock:
        record.waiting.discard(name)
        if record.waiting or record.state != "armed":
            return
        pair = _installed.describe(versions.distributions(record.patch.affected))
        record.state, record.reason = "applied", f"{pair}{' (forced)' if record.forced else ''}"
    _once(logging.INFO, f"{record.patch.id} applied: {record.reason}{_aftermath(record.patch)}")


def _settle(
    record: _Record, state: State, reason: str, trace: str = "", *, copies: bool = False
) -> None:
    """Take the patch off its own sites, or copies as well, and say what became of it."""
    with _lock:
        _undo(record, {site.target for site in record.sites if copies or not site.copy})
        record.waiting.clear()
        record.state, record.reason, record.traceback = state, reason, trace


# --- from a site to its target ---------------------------------------------------------------


def _owner(site: Site, module: Any) -> Any:
    owner = module
    if module is None:
        raise _Drifted(f"{site.module} is not imported")
    for part in site.path[:-1]:
        # vars(), not getattr: a JAX module's __getattr__ answers for deprecated names, and the
        # user's one warning is gone.
        if part not in vars(owner):
            raise _Drifted(f"{site.module} has no {part}; {site.target} was expected")
        owner = vars(owner)[part]
        if not isinstance(owner, type):
            raise _Drifted(f"{part} is no class in {site.module}; {site.target} was expected")
    return owner


def _find(site: Site, module: Any) -> tuple[Any, Any, bool]:
    """Return the owner of the target, the target, and whether it is the owner's own."""
    owner, name = _owner(site, module), site.path[-1]
    if name in vars(owner):
        return owner, vars(owner)[name], True
    for base in inspect.getmro(owner)[1:] if isinstance(owner, type) else ():
        if name in vars(base):
            return owner, vars(base)[name], False
    raise _Drifted(f"{site.module} has no {'.'.join(site.path)}")


def _check(site: Site, module: Any) -> None:
    _, target, _ = _find(site, module)
    there: Collection[str]
    if isinstance(target, types.ModuleType):
        there = vars(target)
        has = f"{target.__name__} is another one"
    elif not callable(target):
        raise _Drifted(f"{site.target} is not a function but {type(target).__name__}")
    elif not site.relies_on:
        return
    else:
        try:
            there = inspect.signature(target).parameters
        except ValueError as error:
            raise _Drifted(f"{site.target} has no signature: {error}") from error
        has = f"it takes {', '.join(there)}"
    gone = [name for name in site.relies_on if name not in there]
    if gone:
        raise _Drifted(f"{site.target} no longer has {', '.join(gone)}; {has}")


def _put(patch_id: str, site: Site, module: Any) -> None:
    owner, target, own = _find(site, module)
    slot = _slots.get(site.target)
    if slot is None or slot.owner is not owner or _is_fresh(slot, target):
        # Never seen, or a new original since: the module was reloaded.
        slot = _slots[site.target] = _Slot(owner, site.path[-1], target, own)
    elif slot.ours is not target and patch_id not in slot.wraps:
        raise _Drifted(f"{site.target} was wrapped by someone else since")
    if patch_id not in slot.wraps:
        slot.wraps[patch_id] = site
        slot.compose()


def _undo(record: _Record, targets: Collection[str] | None = None) -> list[str]:
    """Take the patch off the targets, all where none are given; return those that stay.

    They stay where someone else has wrapped them since.
    """
    held = []
    for target, slot in list(_slots.items()):
        if record.patch.id not in slot.wraps or (targets is not None and target not in targets):
            continue
        current = vars(slot.owner).get(slot.name, _ABSENT)
        if current is slot.ours:
            del slot.wraps[record.patch.id]
            slot.compose()
            if not slot.wraps:
                del _slots[target]
        elif current is _ABSENT or _is_fresh(slot, current):
            del slot.wraps[record.patch.id]  # its module was reloaded: nothing of ours is there
        else:
            held.append(target)  # wrapped, or replaced by something that may call or restore ours
    return held


def _is_active(record: _Record) -> bool:
    return record.state in ("applied", "armed") or any(
        record.patch.id in slot.wraps for slot in _slots.values()
    )


def _is_whole(record: _Record) -> bool:
    """Return whether the patch is on all of its targets that are imported.

    It is not after a reload of a module, or where `revert` could undo only some.
    """
    return all(
        sys.modules.get(site.module) is None
        or (
            (slot := _slots.get(site.target)) is not None
            and record.patch.id in slot.wraps
            and _is_on(site, slot)
        )
        for site in record.sites
    )


def _is_on(site: Site, slot: _Slot) -> bool:
    """Return whether a call of the target comes to ours (through wrappers that tell of it)."""
    try:
        _, target, _ = _find(site, sys.modules.get(site.module))
    except _Drifted:
        return False
    return _is_beneath(slot.ours, target)


def _is_fresh(slot: _Slot, current: Any) -> bool:
    """Return whether `current` is the original once more, as a reload of its module leaves it."""
    if _is_beneath(slot.ours, current):
        return False
    made, first = (getattr(one, "__code__", None) for one in (current, slot.original))
    if made is None or first is None:
        return current is slot.original
    return bool((made.co_filename, made.co_name) == (first.co_filename, first.co_name))


def _is_beneath(ours: Any, current: Any) -> bool:
    """Return whether `ours` is `current`, or what it wraps (as `functools.wraps` records it)."""
    for _ in range(100):  # what answers for any name may wrap something new without end
        if current is ours:
            return True
        current = getattr(current, "__wrapped__", None)
    return False


# --- small things ----------------------------------------------------------------------------


def _all_sites(patch: Patch) -> tuple[Site, ...]:
    return (*patch.sites, *_copies.get(patch.id, ()))


def _exists(site: Site) -> bool:
    return site.where is None or versions.judge([site.where], _installed).state != "unaffected"


def _named(ids: tuple[str, ...]) -> list[_Record]:
    return [_records()[find(patch_id).id] for patch_id in ids or catalogue()]


def _status(record: _Record) -> PatchStatus:
    patch = record.patch
    return PatchStatus(
        id=patch.id,
        state=record.state,
        reason=record.reason + _aftermath(patch),
        affected=versions.describe(patch.affected),
        sites=tuple(site.target for site in record.sites or _all_sites(patch)),
        patched=tuple(
            target
            for target, slot in _slots.items()
            if patch.id in slot.wraps and _is_on(slot.wraps[patch.id], slot)
        ),
        upstream=patch.upstream,
        traceback=record.traceback,
    )


def _aftermath(patch: Patch) -> str:
    """Return what has to be said of a fault that raises no error, where these versions have it."""
    if not patch.aftermath or versions.judge(patch.affected, _installed).state != "affected":
        return ""
    return (
        "; what was restored with these versions without the patch may be wrong, and no error said "
        f"so: `python -m jaxcompat explain {patch.id}` tells how to check it"
    )


def _originals(records: list[_Record]) -> dict[str, Any]:
    """Return the module-level targets of modules that are imported already, as they are."""
    found = {}
    for site in (site for record in records for site in record.patch.sites):
        module: Any = sys.modules.get(site.module)
        if module is not None and len(site.path) == 1 and site.path[0] in vars(module):
            found[site.target] = vars(module)[site.path[0]]
    # Everybody holds jax.numpy; it is one module's name for it that a patch replaces.
    return {t: one for t, one in found.items() if not isinstance(one, types.ModuleType)}


def _tell_late(originals: dict[str, Any]) -> None:
    held = []
    modules: dict[str, Any] = dict(sys.modules) if originals else {}
    for name, module in modules.items():
        if not isinstance(module, types.ModuleType):
            continue
        # Not vars(module): it would load a module that importlib.util.LazyLoader put off.
        names = object.__getattribute__(module, "__dict__")
        for target, original in originals.items():
            if any(value is original for value in list(names.values())):
                held.append(f"{name} holds {target}")
    if held:
        warnings.warn(
            f"jaxcompat was imported late, and {'; '.join(held)} as it was before: calls from "
            "there are not mended. Make `import jaxcompat` the first line of the program.",
            JaxcompatWarning,
            stacklevel=_outside(),
        )


def _tell_unlisted(records: list[_Record]) -> None:
    names = dict.fromkeys(
        name for record in records for name in versions.distributions(record.patch.affected)
    )
    _once(
        logging.WARNING,
        f"{_installed.describe(names)}: newer than what was proven, or of unknown version. Not "
        "applied, since nobody has run them there: "
        f"{', '.join(record.patch.id for record in records)}. If what one of them mends shows up "
        f"(`python -m jaxcompat explain ID`), {settings.FORCE}=ID applies it; "
        f"{settings.DISABLE}=ID silences this. A newer jaxcompat may know these versions.",
    )


def _once(level: int, message: str) -> None:
    _logger.log(logging.DEBUG if message in _said else level, "%s", message)
    _said.add(message)


def _complaint(record: _Record) -> str:
    names = versions.distributions(record.patch.affected)
    return (
        f"{record.patch.id} is {record.state}, nothing of it is applied: {record.reason} "
        f"({_installed.describe(names)}). What it mends may bite: {record.patch.symptom} "
        f"{settings.DISABLE}={record.patch.id} silences this; unnecessary with "
        f"{record.patch.until}"
    )


def _outside() -> int:
    """Return the stacklevel of the first caller outside jaxcompat."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        file = frame.f_code.co_filename
        if not ("importlib" in file and "_bootstrap" in file):  # warnings.warn does not count those
            if frame.f_globals.get("__name__", "").split(".")[0] not in ("jaxcompat", "contextlib"):
                return level
            level += 1
        frame = frame.f_back
    return level
