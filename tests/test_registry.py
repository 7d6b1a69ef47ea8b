"""Plugins: what is found, what is tried, and how a broken one is named without hiding the others."""

import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libraries import LIBRARIES, Library
from refattn import attention_vjp, attention_with_lse, golden, registry
from refattn.backend import CAPABILITIES, Backend
from refattn.dtypes import COMPUTED
from refattn.errors import BackendError, PathError

CHECKOUT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
OURS = tuple(PYPROJECT["project"]["entry-points"]["refattn.backends"])

# A third party's plugin that satisfies the protocol without using refattn's helper class.
HONEST = """
    class Honest:
        name = "{name}"
        library = "numpy"
        distributions = ("numpy",)
        dtypes = ("float32", "float64")
        capabilities = frozenset({{"float32", "float64", "mutable"}})

        def installed(self):
            return True

        def version(self):
            return "1.2.3"

        def devices(self):
            return ("cpu",)

        def array(self, host, dtype=None, device=None):
            return host.astype(dtype or host.dtype)

        def host(self, x):
            return x

    BACKEND = Honest()
"""

Publish = Callable[[str, str], None]


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Installs a throw-away distribution `third-party-NAME` whose module publishes the plugin NAME."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, source: str, distribution: str = "") -> None:
        distribution = distribution or f"third_party_{name}"
        module = f"{distribution}_module"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source).format(name=name))
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[refattn.backends]\n{name} = {module}:BACKEND\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves only third parties' plugins to be found, so that no large library is imported."""
    found = registry._published
    monkeypatch.setattr(
        registry,
        "_published",
        lambda: tuple(entry for entry in found() if entry.value.startswith("third_party")),
    )


def records() -> dict[str, registry.BackendRecord]:
    return {record.name: record for record in registry.backends()}


def test_our_plugins_are_published() -> None:
    """The plugins that pyproject.toml publishes are found by name, and each satisfies the protocol."""
    assert {*OURS} <= {*registry.names()}, "install the package anew, so that its entry points are known"
    assert len(OURS) >= 6
    for name in OURS:
        plugin = registry.get(name)
        assert isinstance(plugin, Backend)
        assert plugin.name == name


@pytest.mark.parametrize("name", OURS)
def test_a_plugin_has_its_places(name: str) -> None:
    """Where its library is installed, tested and banned from the specification is said for each of our plugins."""
    plugin, project, tools = registry.get(name), PYPROJECT["project"], PYPROJECT["tool"]
    root = plugin.library.partition(".")[0]
    assert name in LIBRARIES, f"tests/libraries.py lacks {name}"
    assert f"\ndef {name}(session" in (CHECKOUT / "noxfile.py").read_text(encoding="utf-8"), f"no session {name}"
    kinds = (*project["optional-dependencies"].values(), *PYPROJECT["dependency-groups"].values())
    required = [one for kind in (project["dependencies"], *kinds) for one in kind if isinstance(one, str)]
    pinned = (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-").splitlines()
    assert any(re.match(rf"{one}\b(?!-)", line) for one in plugin.distributions for line in required), "no extra"
    assert any(line.startswith(f"{one}==") for one in plugin.distributions for line in pinned), "no constraint"
    banned = tools["ruff"]["lint"]["flake8-tidy-imports"]["banned-module-level-imports"]
    (forbidden,) = (one["forbidden_modules"] for one in tools["importlinter"]["contracts"] if "library" in one["name"])
    assert root in banned and banned == forbidden, f"both lists of array libraries in pyproject.toml must have {root}"


def test_an_unknown_name_lists_the_choices() -> None:
    """Asking for a plugin that nobody published is a BackendError that lists those that are (E4)."""
    with pytest.raises(BackendError, match=r"^backend: expected .*numpy.*torch.* got 'abacus' \[refattn E4\]$"):
        registry.get("abacus")


def test_without_any_plugin_the_message_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no plugin is published, refattn was not installed, and the message says so (E4)."""
    monkeypatch.setattr(registry, "_published", tuple)
    with pytest.raises(BackendError, match="not installed"):
        registry.get("numpy")


def test_finding_plugins_imports_no_array_library() -> None:
    """Looking plugins up, and reading their capabilities and versions, imports no array library."""
    program = textwrap.dedent(
        """
        import sys
        from refattn import registry
        for name in registry.names():
            plugin = registry.get(name)
            plugin.capabilities, plugin.dtypes, plugin.installed(), plugin.version()
        heavy = {"numpy", "torch", "cupy", "jax", "dask", "array_api_strict", "ml_dtypes"} & set(sys.modules)
        sys.exit(f"imported {heavy}" if heavy else 0)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("alone")
def test_a_third_party_plugin_is_found_and_tried(publish: Publish) -> None:
    """A plugin of somebody else's distribution is listed with version, devices and capabilities."""
    publish("abacus", HONEST)
    assert registry.backends() == (
        registry.BackendRecord(
            name="abacus",
            distribution="third_party_abacus",
            version="1.2.3",
            devices=("cpu",),
            capabilities=("float32", "float64", "mutable"),
            status="verified",
        ),
    )
    assert registry.get("abacus").array(np.ones(2), "float32").dtype == np.float32


# The same with a fast path of its own: one row at a time, with what the protocol says about a call.
FAST = HONEST.replace('"mutable"', '"mutable", "tiled"').replace(
    "BACKEND",
    """
        rows = 0

        def tiled(self, call):
            import numpy as np
            from refattn.partials import Partial
            output = np.zeros((*call.scores_shape[:-1], call.v.shape[-1]), call.compute)
            lse = np.zeros(call.scores_shape[:-1], call.compute)
            for head, row in np.ndindex(*lse.shape):
                logits = call.k[head // call.group] @ call.q[head, row] * call.scale
                lse[head, row] = np.log(np.exp(logits).sum())
                output[head, row] = np.exp(logits - lse[head, row]) @ call.v[head // call.group]
                self.rows += 1
            return Partial(output, lse)

    BACKEND""",
)


@pytest.mark.usefixtures("alone")
def test_a_third_partys_fast_path_is_taken(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    """path="tiled" is what the plugin of the arrays' library computes, whoever published it; others do not matter."""
    monkeypatch.setattr(registry, "_FOUND", {"tiled": {}, "tiled_vjp": {}})
    publish("abacus", FAST)
    publish("broken", "BACKEND = 1 / 0")
    q, k, v = (np.random.default_rng(0).standard_normal((heads, 5, 4)) for heads in (4, 2, 2))
    output, lse = attention_with_lse(q, k, v, path="tiled")
    plugin: Any = registry.get("abacus")
    assert plugin.rows == 4 * 5
    expected = golden(q, k, v)
    assert np.all(np.abs(output - expected.output) <= 4 * expected.bound("float64"))
    assert np.all(np.abs(lse - expected.lse) <= 4 * expected.lse_bound("float64"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (FAST, "'dense', as the tiles of backend 'abacus' have no derivatives; got 'tiled'"),
        (FAST.replace("    BACKEND", "        tiled_vjp = lambda self, call, gradient: 1 / 0\n\n    BACKEND"), None),
    ],
    ids=["tiles alone", "both"],
)
def test_a_third_partys_backward_pass_is_taken(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, source: str, words: str | None
) -> None:
    """The gradients of path="tiled" are the plugin's own too, and where it has none the error names it."""
    monkeypatch.setattr(registry, "_FOUND", {"tiled": {}, "tiled_vjp": {}})
    publish("abacus", source)
    x = np.ones((2, 5, 4))
    with pytest.raises(PathError if words else ZeroDivisionError, match=words):
        attention_vjp(x, x, x, x, path="tiled")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            "import a_module_that_nobody_has",
            "ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
        ),
        ("BACKEND = 1 / 0", "ZeroDivisionError"),
        ("OTHER = 1", "AttributeError"),
        ("BACKEND = object()", "without name, library, distributions"),
        (HONEST.replace("host(self, x)", "guest(self, x)"), "without host "),
        (HONEST.replace('"{name}"', '"other"'), "expected the name of its entry point; got name = 'other'"),
        (HONEST.replace('"mutable"', '"telepathy"'), "expected capabilities out of .*; got telepathy"),
        (HONEST.replace('("float32", "float64")', '("float16",)'), "expected dtypes to be the dtypes among"),
    ],
)
def test_a_broken_plugin_is_named_and_hides_nobody(publish: Publish, source: str, fault: str) -> None:
    """A plugin that fails to load is listed with its fault and distribution; the others still work (E4)."""
    publish("broken", source)
    publish("working", HONEST)
    found = records()
    assert found["working"].status == "verified"
    assert found["broken"].status.startswith("broken: ")
    assert found["broken"].distribution == "third_party_broken"
    with pytest.raises(BackendError, match=fault) as raised:
        registry.get("broken")
    assert "third_party_broken" in str(raised.value)
    assert str(raised.value) in found["broken"].status


@pytest.mark.usefixtures("alone")
def test_a_plugin_that_computes_nonsense_is_broken(publish: Publish) -> None:
    """A plugin whose arrays lose their values is not verified: the three-token example comes out wrong."""
    publish("lossy", HONEST.replace("host.astype(dtype or host.dtype)", "host.astype(dtype) * 0"))
    assert "expected the three-token output" in records()["lossy"].status


@pytest.mark.usefixtures("alone")
def test_a_failing_device_is_broken(publish: Publish) -> None:
    """A plugin that fails while it is tried is listed with what happened."""
    publish("failing", HONEST.replace("return host.astype", "raise OSError('no memory'); host.astype"))
    assert records()["failing"].status == "broken: OSError: no memory"


@pytest.mark.usefixtures("alone")
def test_without_a_device_nothing_is_verified(publish: Publish) -> None:
    """A library that no device can run is "not verified here", as CuPy is without a GPU."""
    publish("gpu", HONEST.replace('("cpu",)', "()"))
    found = records()["gpu"]
    assert (found.status, found.version, found.devices) == ("not verified here", "1.2.3", ())


@pytest.mark.usefixtures("alone")
def test_a_missing_library_is_not_installed(publish: Publish) -> None:
    """A plugin whose library is missing is listed with its capabilities, but has no version and no device."""
    publish("missing", HONEST.replace("return True", "return False"))
    found = records()["missing"]
    assert (found.status, found.version, found.devices) == ("not installed", None, ())
    assert found.capabilities == ("float32", "float64", "mutable")


@pytest.mark.usefixtures("alone")
def test_a_name_belongs_to_one_plugin(publish: Callable[..., None]) -> None:
    """Of two plugins with one name the first found is used, and the other is listed as the one in its way."""
    publish("twin", HONEST, "third_party_castor")
    publish("twin", HONEST, "third_party_pollux")
    first, second = registry.backends()
    assert first.status == "verified"
    assert second.status == f"broken: the name is already taken by {first.distribution}"
    assert {first.distribution, second.distribution} == {"third_party_castor", "third_party_pollux"}


def test_capabilities_contain_every_dtype() -> None:
    """One table describes capabilities, and dtypes are among them."""
    assert set(COMPUTED) < set(CAPABILITIES)
    assert all(CAPABILITIES.values())


def test_arrays_go_there_and_back(library: Library) -> None:
    """On every device and in every dtype, array() and host() keep the values that the dtype can hold."""
    plugin = registry.get(library.name)
    host = np.array([[1.5, -2.25, 0.0], [np.nan, np.inf, -np.inf]])[:, ::-1]
    host.flags.writeable = False
    assert plugin.devices()
    for device in plugin.devices():
        for dtype in plugin.dtypes:
            x = plugin.array(host, dtype, device)
            assert str(x.dtype).split(".")[-1] == dtype
            assert type(x) is type(library.array(np.zeros(1, dtype="float32")))
            back = plugin.host(x)
            assert isinstance(back, np.ndarray)
            assert back.dtype == ("float32" if dtype == "bfloat16" else dtype)
            np.testing.assert_array_equal(back, host)


def test_arrays_are_copies(library: Library) -> None:
    """Writing into the host array afterwards does not reach the array made from it."""
    plugin = registry.get(library.name)
    host = np.ones(4, dtype="float32")
    x = plugin.array(host)
    host[:] = 2
    np.testing.assert_array_equal(plugin.host(x), np.ones(4))


def test_booleans_and_integers_keep_their_kind(library: Library) -> None:
    """Without a dtype, masks stay boolean and positions stay integers."""
    plugin = registry.get(library.name)
    for host in (np.array([True, False]), np.array([3, -4])):
        back = plugin.host(plugin.array(host))
        assert back.dtype.kind == host.dtype.kind
        np.testing.assert_array_equal(back, host)


def test_unknown_dtypes_and_devices_are_refused(library: Library) -> None:
    """A dtype or device that a library does not have here is an error that lists what it has (E4)."""
    plugin = registry.get(library.name)
    host = np.ones(2, dtype="float32")
    with pytest.raises(BackendError, match=f"^dtype of backend '{library.name}': expected one of .*float32.*'int3'"):
        plugin.array(host, "int3")
    with pytest.raises(BackendError, match=f"^device of backend '{library.name}': expected a known device .*'moon'"):
        plugin.array(host, "float32", "moon")
    if "float16" not in plugin.dtypes:
        with pytest.raises(BackendError, match="got 'float16'"):
            plugin.array(host.astype("float16"))


def test_bfloat16_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ml_dtypes is missing, NumPy has no bfloat16, and asking for it says what to install (E4)."""
    monkeypatch.setattr("refattn.backend.has_module", lambda name: name != "ml_dtypes")
    plugin = registry.get("numpy")
    assert plugin.dtypes == ("float16", "float32", "float64")
    assert "bfloat16" not in plugin.capabilities
    with pytest.raises(BackendError, match="got 'bfloat16', which needs ml_dtypes"):
        plugin.array(np.ones(2), "bfloat16")


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for arrays of a library that is not installed names the distributions that have it (E4)."""
    monkeypatch.setattr("refattn.backend.has_module", lambda _: False)
    plugin = registry.get("cupy")
    assert not plugin.devices()
    with pytest.raises(BackendError, match="cupy-cuda13x or cupy-cuda12x or cupy"):
        plugin.array(np.ones(2))


@pytest.mark.parametrize("name", OURS)
def test_versions_come_from_the_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is the first one that any of the library's distributions has; None if none is installed."""
    from importlib import metadata

    def version(distribution: str) -> str:
        if distribution != plugin.distributions[-1]:
            raise metadata.PackageNotFoundError(distribution)
        return "9.9"

    plugin = registry.get(name)
    monkeypatch.setattr(metadata, "version", version)
    assert plugin.version() == "9.9"
    monkeypatch.setattr(metadata, "version", lambda _: version(""))
    assert plugin.version() is None


def test_cupy_without_a_device_has_none() -> None:
    """CuPy that finds no driver lists no device, and making an array says that nothing can run it (E4)."""

    class CUDARuntimeError(RuntimeError):
        pass

    def no_driver() -> int:
        raise CUDARuntimeError

    cupy: Any = type(sys)("cupy")
    cupy.cuda = type(sys)("cuda")
    cupy.cuda.runtime = type(sys)("runtime")
    cupy.cuda.runtime.CUDARuntimeError = CUDARuntimeError
    cupy.cuda.runtime.getDeviceCount = no_driver
    plugin: Any = registry.get("cupy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(plugin), "installed", lambda _: True)
        patch.setitem(sys.modules, "cupy", cupy)
        assert plugin.devices() == ()
        with pytest.raises(BackendError, match="none, because nothing here can run it"):
            plugin.array(np.ones(2), "float32")


@pytest.mark.library("jax")
def test_jax_does_not_halve_float64_silently() -> None:
    """Without its 64-bit switch JAX would return float32 for float64: an error says how to set it (E4)."""
    jax = pytest.importorskip("jax", reason="it is about JAX's devices")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    try:
        for dtype in ("float64", None):
            with pytest.raises(BackendError, match="jax_enable_x64"):
                registry.get("jax").array(np.ones(2), dtype)
    finally:
        jax.config.update("jax_enable_x64", before)
