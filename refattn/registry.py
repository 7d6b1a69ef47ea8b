"""The array libraries that refattn can run on here, found through the entry points `refattn.backends`.

A plugin that cannot be loaded is listed with its fault and its distribution; it never hides the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from refattn.arrays import Array
from refattn.backend import CAPABILITIES, Backend
from refattn.dtypes import COMPUTED
from refattn.errors import BackendError, PathError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "refattn.backends"
PATHS = "refattn.paths"
# Path -> library -> function. torch.compile reads each of the inner tables once while it traces a call.
_FOUND: dict[str, dict[str, Callable[..., Any]]] = {"tiled": {}, "tiled_vjp": {}}
NAMES = (
    *("name", "library", "distributions", "dtypes", "capabilities"),
    *("installed", "version", "devices", "array", "host"),
)


@dataclass(frozen=True)
class BackendRecord:
    """One line of `refattn backends`.

    version and devices are the library's; distribution is where the plugin came from. status is one of
    "verified"            the three-token example ran on every device listed, with the published result
    "not verified here"   the library is installed, but no device here could run it
    "not installed"       the plugin is there, its library is not
    "broken: ..."         the plugin or its library failed, and how
    """

    name: str
    distribution: str
    version: str | None
    devices: tuple[str, ...]
    capabilities: tuple[str, ...]
    status: str

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def names() -> tuple[str, ...]:
    """The names of all published plugins, working or not, in alphabetical order."""
    return tuple(sorted({entry.name for entry in _published()}))


def get(name: str) -> Backend:
    """The plugin of that name.

    Raises BackendError, listing the names, if there is none, and naming its distribution if it is broken.
    The array library need not be installed: ask the plugin's `installed()`.
    """
    for entry in _published():
        if entry.name == name:
            return _load(entry)
    choices = ", ".join(names()) or "none, because refattn was not installed but merely found on the path"
    raise BackendError("backend", f"a published plugin ({choices})", repr(name))


@functools.cache
def plugin_of(library: str) -> Backend | None:
    """The plugin for arrays of a library, named as its root module; None where there is none."""
    return next(_plugins_of(library), None)


def tiled(library: str) -> Callable[[Any], tuple[Array, Array]]:
    """The tiled path for arrays of a library, named as its root module: its plugin's own, else the generic one.

    Raises PathError where no plugin offers either.
    """
    _look_up("tiled", library)
    return _FOUND["tiled"][library]


def tiled_vjp(library: str) -> Callable[[Any, Array], dict[str, Array]]:
    """The backward pass of the tiled path: of a checked call and the gradient of its output, the gradients by name.

    Raises PathError where no plugin offers one, and where a plugin has tiles of its own but no derivatives of them.
    """
    _look_up("tiled_vjp", library)
    return _FOUND["tiled_vjp"][library]


def _look_up(path: str, library: str) -> bool:
    """Puts a path of a library into the table, once; True."""
    if library not in _FOUND[path]:
        _FOUND[path][library] = _find(path, library)
    return True


# torch.compile cannot trace entry points, and need not: it runs this as it stands, and traces on with the table.
_look_up._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo reads it


def _find(path: str, library: str) -> Callable[..., Any]:
    """A path of the library's own plugin, else the generic one. Raises PathError."""
    compute: Callable[..., Any]
    for plugin in _plugins_of(library):
        if "tiled" in plugin.capabilities:
            if not hasattr(plugin, path):
                expected = f"'dense', as the tiles of backend {plugin.name!r} have no derivatives"
                raise PathError("path", expected, "'tiled'")
            compute = getattr(plugin, path)
            return compute
    from importlib.metadata import entry_points

    for entry in entry_points(group=PATHS, name=path):
        compute = entry.load()
        return compute
    raise PathError("path", f"'dense', as no plugin offers tiles for {library}", "'tiled'")


def _plugins_of(library: str) -> Iterator[Backend]:
    """The plugins for arrays of a library, named as its root module, that can be loaded."""
    for entry in _published():
        with contextlib.suppress(BackendError):  # a broken plugin of another library is no concern here
            plugin = _load(entry)
            if plugin.library.partition(".")[0] == library:
                yield plugin


def backends() -> tuple[BackendRecord, ...]:
    """Every published plugin, in alphabetical order, tried on its devices; imports their libraries.

    What `refattn backends` prints. A plugin that fails is a record that says so, never an error (E4).
    """
    taken: dict[str, str] = {}
    records = []
    for entry in _published():
        if entry.name in taken:
            records.append(_broken(entry, f"the name is already taken by {taken[entry.name]}"))
            continue
        taken[entry.name] = _distribution(entry)
        records.append(_record(entry))
    return tuple(sorted(records, key=lambda record: record.name))


def _published() -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # a quarter of the time that `import refattn` would take

    return tuple(entry_points(group=GROUP))


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown distribution"


def _load(entry: EntryPoint) -> Backend:
    where = f"backend {entry.name!r} of {_distribution(entry)}"
    try:
        plugin = entry.load()
    except Exception as fault:  # what a foreign module raises is its fault alone
        raise BackendError(where, f"to load {entry.value}", f"{type(fault).__name__}: {fault}") from fault
    if lacking := [name for name in NAMES if not hasattr(plugin, name)]:
        raise BackendError(where, "what refattn.backend.Backend lists", f"an object without {', '.join(lacking)}")
    if plugin.name != entry.name:
        raise BackendError(where, "the name of its entry point", f"name = {plugin.name!r}")
    if unknown := sorted(set(plugin.capabilities) - set(CAPABILITIES)):
        raise BackendError(where, f"capabilities out of {', '.join(CAPABILITIES)}", ", ".join(unknown))
    if set(plugin.dtypes) != set(plugin.capabilities) & set(COMPUTED):
        raise BackendError(where, "dtypes to be the dtypes among its capabilities", plugin.dtypes)
    return plugin  # type: ignore[no-any-return]  # checked above, name by name


def _broken(entry: EntryPoint, fault: str) -> BackendRecord:
    return BackendRecord(entry.name, _distribution(entry), None, (), (), f"broken: {fault}")


def _record(entry: EntryPoint) -> BackendRecord:
    version: str | None = None
    devices: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    try:
        plugin = _load(entry)
        capabilities = tuple(sorted(plugin.capabilities))
        if not plugin.installed():
            status = "not installed"
        else:
            version, devices = plugin.version(), tuple(plugin.devices())
            for device in devices:
                _try(plugin, device)
            status = "verified" if devices else "not verified here"
    except Exception as fault:  # noqa: BLE001  # a plugin's fault is one line of the list, not its end
        status = f"broken: {fault if isinstance(fault, BackendError) else f'{type(fault).__name__}: {fault}'}"
    return BackendRecord(entry.name, _distribution(entry), version, devices, capabilities, status)


def _try(plugin: Backend, device: str) -> None:
    """Runs the three-token example on one device. Raises BackendError if the result is not the known one."""
    from refattn import attention, three_tokens

    q, k, v = (plugin.array(x, "float32", device) for x in three_tokens.inputs())
    output: Array = plugin.host(attention(q, k, v))
    if not three_tokens.agrees(output):
        expected = f"the three-token output {[list(row) for row in three_tokens.OUTPUT]}"
        raise BackendError(f"backend {plugin.name!r} on {device}", expected, output.tolist())
