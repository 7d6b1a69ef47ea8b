import ctypes
import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.11.12"
nox.options.default_venv_backend = "virtualenv"

PYPROJECT = nox.project.load_toml("pyproject.toml")
RUNNER = ("python", "-m", "pytest")
# For all tests but those of times, which want the machine for themselves.
BOTH_CORES = ("-n", "2", "--dist", "worksteal")
TIMES = "tests/test_speed.py"
# For NumPy and PyTorch on both cores: two processes of two threads each take twice as long.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# For libraries that compile each new shape or schedule each call: of the certified vectors those of one chapter, and
# gradients where a library could have its own way; and of whole models one.
FEW_CASES = (
    "(not vectors. or vectors.S) and (not generation. or generation.attention_to_a_context-float32) and "
    "(not gradients. or gradients.empty_rows or gradients.poison or gradients.softcap or gradients.taken)"
)
# And in other dtypes than float32 what is about dtypes and rounding.
FEW_FOR_DASK = f"({FEW_CASES}) and (float32 or arrays. or numbers. or levels.)"
# On JAX, in the sweep alone: models, and chapters whose every step has shapes of its own, which its tests have too.
FEW_FOR_JAX = f"({FEW_FOR_DASK}) and not (generation. or rolling. or paged. or layer. or long_rows.)"
# On their tiled paths nothing of what lies around a path, and on JAX's one case of gradients, beside those of tiling:
# short calls compile step by step there.
OF_TILES = "not (caches. or paged. or rolling. or layer. or generation. or cost. or errors. or vectors.)"
FEW_FOR_DASK_TILED = f"({FEW_FOR_DASK}) and {OF_TILES}"
FEW_FOR_JAX_TILED = f"({FEW_FOR_JAX}) and {OF_TILES} and (not gradients. or gradients.poison_behind_a_mask)"

# Implementations that no random problem may accuse; the second compile or schedule each of them.
RIGHT = (
    *("refattn-numpy", "refattn-numpy-tiled", "refattn-strict", "refattn-torch", "refattn-torch-tiled"),
    *("torch", "torch-math", "torch-flash", "torch-flex", "mlx"),
)
RIGHT_BUT_SLOW = ("refattn-jax", "refattn-jax-tiled", "refattn-dask", "refattn-dask-tiled", "jax")


def pinned(session: nox.Session, *requirements: str) -> None:
    """Install requirements at the exact versions of constraints.txt."""
    session.install("--constraint", "constraints.txt", *requirements)


def group(*names: str) -> tuple[str, ...]:
    """Return the requirements of dependency groups."""
    return nox.project.dependency_groups(PYPROJECT, *names)


def wheel_folder(session: nox.Session) -> Path:
    """Return where the built wheel lies."""
    return session.cache_dir / "wheel"


def install(session: nox.Session, *groups: str, extra: str | None = None) -> None:
    """Install the built wheel with an extra, and dependency groups."""
    (built,) = wheel_folder(session).glob("*.whl")
    # A kept environment may hold an older build of the same version, which pip would leave in place.
    session.install("--no-deps", "--force-reinstall", str(built))
    pinned(session, f"{built}[{extra}]" if extra else str(built), *group(*groups))


def pytest(session: nox.Session, *arguments: str, runner: tuple[str, ...] = RUNNER) -> None:
    """Run pytest against the installed package, not against the checkout that is the working directory."""
    env = {"PYTHONSAFEPATH": "1", **jax_cache(session)}
    session.run(*runner, *arguments, *session.posargs, env=env, external=True)


def jax_cache(session: nox.Session) -> dict[str, str]:
    """Let all processes that use JAX share what one of them has compiled, which is most of their time."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(session.cache_dir / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def both_suites(
    session: nox.Session,
    library: str,
    *runner: str,
    dtypes: tuple[str, str] | None = None,
    cases: tuple[str, str] | None = None,
) -> None:
    """Run the tests of this project and the conformance suite that it ships, on one array library.

    dtypes are those in which the suite judges the dense and the tiled path, and cases pytest's expressions for those
    that it runs on each, all by default.
    """
    runner = runner or RUNNER
    pytest(session, "tests", "--library", library, runner=runner)
    for path, chosen, expression in zip(("", "-tiled"), dtypes or (None, None), cases or (None, None), strict=True):
        of_dtypes = ("--refattn-dtypes", chosen) if chosen else ()
        target = ("--refattn-target", f"refattn-{library}{path}")
        some = ("-k", expression) if expression else ()
        pytest(session, "--pyargs", "refattn.conformance", *target, *of_dtypes, *some, runner=runner)


@nox.session(default=False, reuse_venv=True)
def wheel(session: nox.Session) -> None:
    """Build the wheel that the other sessions test (10 seconds)."""
    pinned(session, *PYPROJECT["build-system"]["requires"])
    shutil.rmtree(wheel_folder(session), ignore_errors=True)
    session.run("python", "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheel_folder(session)))


@nox.session(default=False)
def dist(session: nox.Session) -> None:
    """Build what a release consists of, and check it: the sdist, and the wheel that is made from it (1 minute)."""
    pinned(session, *group("release"))
    shutil.rmtree(dist_folder(session), ignore_errors=True)
    from_sdist, from_checkout = dist_folder(session), dist_folder(session) / "checkout"
    build = ("python", "-m", "build", "--no-isolation", "--outdir")
    session.run(*build, str(from_sdist))
    session.run(*build, str(from_checkout), "--wheel")
    source, built = released(session)
    if built.read_bytes() != (from_checkout / built.name).read_bytes():
        session.error("the wheel from the sdist is not that from the checkout, byte for byte")
    session.run("twine", "check", "--strict", str(source), str(built))
    session.run("check-wheel-contents", str(built))


def dist_folder(session: nox.Session) -> Path:
    """Return where the session dist puts what it builds."""
    return (session.cache_dir / "dist").resolve()


def released(session: nox.Session) -> tuple[Path, Path]:
    """Return the sdist and the wheel that the session dist has built."""
    (source,), (built,) = (dist_folder(session).glob(pattern) for pattern in ("*.tar.gz", "*.whl"))
    return source, built


@nox.session(requires=["dist"], default=False)
def release(session: nox.Session) -> None:
    """Judge NumPy with the wheel alone, test the sdist, and find nothing left of either (5 minutes)."""
    (source, built), elsewhere = released(session), Path(session.create_tmp()).resolve()
    pinned(session, str(built))
    session.run("python", "-m", "pip", "check")
    with session.chdir(elsewhere):
        session.run("refattn", "check", "numpy")
    pinned(session, *group("test"))
    pytest(session, "--pyargs", "refattn.conformance", "--refattn-target", "numpy", *BOTH_CORES)
    session.run("python", "-m", "tarfile", "--extract", str(source), str(elsewhere))
    with session.chdir(elsewhere / source.name.removesuffix(".tar.gz")):
        # Of the tests, those about what is shipped: files, metadata, examples, the command line, and data.
        pytest(session, *(f"tests/test_{name}.py" for name in ("packaging", "examples", "cli", "vectors")))
    session.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", "refattn")
    everywhere = Path(session.virtualenv.location).resolve().rglob("refattn*")
    if left := [str(path) for path in everywhere if elsewhere not in path.parents]:
        session.error(f"an uninstalled refattn leaves {', '.join(left)}")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types and who may import whom (25 seconds)."""
    pinned(session, *PYPROJECT["project"]["dependencies"], *group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("lint-imports", env={"PYTHONPATH": "backends"})


@nox.session(requires=["wheel"])
def numpy(session: nox.Session) -> None:
    """Test on NumPy (5 minutes)."""
    install(session, "test", "bench")
    pytest(session, TIMES)
    session.env.update(ONE_THREAD)
    both_suites(session, "numpy", *RUNNER, *BOTH_CORES, f"--ignore={TIMES}")


@nox.session(requires=["wheel"], default=False, python="3.11")
def oldest(session: nox.Session) -> None:
    """Test on NumPy with the lowest versions that are admitted, of Python too (8 minutes)."""
    lowest = [one.replace(">=", "==") for one in (*PYPROJECT["project"]["dependencies"], *group("test"))]
    session.install(*lowest)
    session.install("--no-deps", "--force-reinstall", *map(str, wheel_folder(session).glob("*.whl")))
    session.env.update(ONE_THREAD)
    both_suites(session, "numpy", *RUNNER, *BOTH_CORES, f"--ignore={TIMES}")


@nox.session(requires=["wheel"], default=False, python=["3.12", "3.13"])
def newer(session: nox.Session) -> None:
    """Test on NumPy with each of the Pythons after the one that the other sessions use (8 minutes)."""
    install(session, "test", "bench")
    session.env.update(ONE_THREAD)
    both_suites(session, "numpy", *RUNNER, *BOTH_CORES, f"--ignore={TIMES}")


@nox.session(requires=["wheel"], default=False)
def coverage(session: nox.Session) -> None:
    """Measure the coverage of refattn/ on NumPy (15 minutes)."""
    install(session, "test", "coverage", "bench")
    session.run("coverage", "erase")
    both_suites(session, "numpy", "coverage", "run", "-m", "pytest", *BOTH_CORES, f"--ignore={TIMES}")
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session(requires=["wheel"])
def docs(session: nox.Session) -> None:
    """Build the book and its edition for print, offline, and check what was built (2 minutes)."""
    install(session, "docs")
    book, strictly = session.cache_dir / "book", ("--nitpicky", "--fail-on-warning", "--keep-going", "--quiet")
    shutil.rmtree(book, ignore_errors=True)
    env = {"PYTHONSAFEPATH": "1", **built_book(session)}
    # Read on both cores, since examples run then; written on one, since one server renders the formulas.
    read = ("-d", str(book / "read"))
    session.run("sphinx-build", *strictly, *read, "-j", "2", "-b", "dummy", "docs", str(book / "dummy"), env=env)
    session.run("sphinx-build", *strictly, *read, "-b", "html", "docs", env["REFATTN_BOOK"], env=env)
    session.run("sphinx-build", *strictly, "-b", "singlehtml", "-t", "print", "docs", str(book / "print"), env=env)
    session.run(*RUNNER, "tests/docs/test_book.py", *session.posargs, env=env)
    session.log(f"to read: {env['REFATTN_BOOK']}/index.html; to print: {book / 'print' / 'print.html'}")


def built_book(session: nox.Session) -> dict[str, str]:
    """Say where the book lies, for its tests."""
    return {"REFATTN_BOOK": str((session.cache_dir / "book" / "html").resolve())}


@nox.session(requires=["wheel"])
def strict(session: nox.Session) -> None:
    """Test on array-api-strict with its strictest flags (60 seconds)."""
    install(session, "test")
    both_suites(session, "strict")


@nox.session(requires=["wheel"])
def jax(session: nox.Session) -> None:
    """Test on JAX, which compiles each new shape: in few dtypes (270 seconds)."""
    install(session, "test", extra="jax")
    both_suites(
        session,
        "jax",
        *RUNNER,
        *BOTH_CORES,
        dtypes=("float32,bfloat16", "float32"),
        cases=(FEW_FOR_JAX, FEW_FOR_JAX_TILED),
    )


@nox.session(requires=["wheel"])
def dask(session: nox.Session) -> None:
    """Test on Dask (3 minutes)."""
    install(session, "test", extra="dask")
    both_suites(session, "dask", *RUNNER, *BOTH_CORES, cases=(FEW_FOR_DASK, FEW_FOR_DASK_TILED))


@nox.session(requires=["wheel"], default=False, reuse_venv=True)
def torch_env(session: nox.Session) -> None:
    """Prepare the one environment of the sessions torch and models (45 seconds)."""
    install(session, "test", "models", extra="torch")


def torch_python(session: nox.Session) -> str:
    """Return the interpreter of the environment that torch_env prepares."""
    env = session.cache_dir.parent / "torch_env"
    found = shutil.which("python", path=f"{env / 'bin'}{os.pathsep}{env / 'Scripts'}")
    assert found is not None, f"{env} holds no interpreter: run `nox -s torch_env`"
    return found


@nox.session(requires=["torch_env"], python=False)
def torch(session: nox.Session) -> None:
    """Test on PyTorch (150 seconds)."""
    session.env.update(ONE_THREAD)
    both_suites(session, "torch", torch_python(session), "-m", "pytest", *BOTH_CORES)


@nox.session(requires=["torch_env"], python=False)
def models(session: nox.Session) -> None:
    """Run models of transformers on refattn: a trained encoder, and small decoders of four families (35 seconds)."""
    session.env.update(ONE_THREAD)
    # A file stays on one core: its tests share models and their exact runs.
    runner = (torch_python(session), "-m", "pytest", "-n", "2", "--dist", "loadfile")
    pytest(session, "tests/models", "--library", "torch", runner=runner)


def cuda_version() -> int | None:
    """Return the CUDA major version that the driver supports; None where no NVIDIA device answers."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
    devices, version = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(devices)) or not devices.value:
        return None
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000


def cupy_package(session: nox.Session, who_needs: str) -> str:
    """Return CuPy's distribution for the driver here; where no device can run it, skip the session with a sentence."""
    version = cuda_version()
    if version is None:
        session.skip(f"{who_needs} an NVIDIA device and its driver, and none answers here")
    if version < 12:
        session.skip(f"{who_needs} an NVIDIA driver for CUDA 12 or later; this one is for CUDA {version}")
    return f"cupy-cuda{min(version, 13)}x"


@nox.session(requires=["wheel"])
def cupy(session: nox.Session) -> None:
    """Test on CuPy, where there is an NVIDIA device (5 minutes)."""
    package = cupy_package(session, "CuPy needs")
    install(session, "test", package, extra=package)
    both_suites(session, "cupy")


@nox.session(default=False)
def vectors(session: nox.Session) -> None:
    """Make all certified vectors anew and compare them byte for byte; `-- --write` keeps them (1 minute)."""
    pinned(session, "numpy", "python-flint")
    session.run("python", "-m", "certify", *session.posargs, env={"PYTHONPATH": "tests", "PYTHONSAFEPATH": "1"})


@nox.session(requires=["wheel"], default=False)
def sweep(session: nox.Session) -> None:
    """Test on fresh random cases, 10,000 of the whole surface, and judge JAX and Dask in all cases (90 minutes)."""
    install(session, "test", extra="jax,torch")
    pinned(session, "dask[array,distributed]")
    for library in ("numpy", "strict"):
        pytest(session, "tests", "--library", library, "--hypothesis-profile", "sweep")
    pytest(session, "tests/test_whole_surface.py", "--library", "torch", "--hypothesis-profile", "sweep")
    for target in ("refattn-jax", "refattn-jax-tiled", "refattn-dask", "refattn-dask-tiled"):
        pytest(session, "--pyargs", "refattn.conformance", "--refattn-target", target)


@nox.session(requires=["wheel"], default=False)
def alarms(session: nox.Session) -> None:
    """Judge right implementations on fresh random problems, into docs/faults (20 minutes)."""
    install(session, "test", extra="jax,dask,torch")
    pinned(session, "mlx[cpu]")
    where = ("--json", "docs/faults/alarms.json", "--page", "docs/faults/alarms.md")
    for count, names in ((400, RIGHT), (40, RIGHT_BUT_SLOW)):
        arguments = session.posargs or (*names, "--problems", str(count), *where)
        env = {"PYTHONSAFEPATH": "1", **jax_cache(session)}
        session.run("python", "-m", "refattn.conformance.alarms", *arguments, env=env)


@nox.session(requires=["wheel"], default=False)
def faults(session: nox.Session) -> None:
    """Judge all wrong implementations of the catalogue, into docs/faults (3 minutes)."""
    install(session, "test")
    where = ("--json", "docs/faults/matrix.json", "--page", "docs/faults/README.md")
    arguments = session.posargs or where
    session.run("python", "-m", "refattn.conformance.matrix", *arguments, env={"PYTHONSAFEPATH": "1"})


@nox.session(requires=["docs"], default=False)
def pages(session: nox.Session) -> None:
    """Open the book and HTML reports in a headless browser, wide and narrow, in light and dark (3 minutes)."""
    install(session, "pages")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        session.run("python", "-m", "playwright", "install", "chromium")
    shots = session.cache_dir / "pages"
    env = {"REFATTN_BROWSER": browser or "", "REFATTN_SHOTS": str(shots), **built_book(session)}
    tests = session.posargs or ("tests/pages", "tests/docs/test_book_in_browser.py")
    session.run(*RUNNER, *tests, env={"PYTHONSAFEPATH": "1", **env})


@nox.session(requires=["wheel"], default=False)
def diagnosis(session: nox.Session) -> None:
    """Count how often the report on a fault of the catalogue names it first, into docs/faults (20 minutes)."""
    install(session, "test")
    arguments = session.posargs or ("--json", "docs/faults/diagnosis.json")
    session.run("python", "-m", "refattn.conformance.diagnosis.measure", *arguments, env={"PYTHONSAFEPATH": "1"})


@nox.session(requires=["wheel"], default=False)
def scoreboard(session: nox.Session) -> None:
    """Judge public implementations into docs/scoreboard, and be judged by ONNX's node tests (45 minutes)."""
    install(session, "test", "scoreboard")
    pytest(session, "tests/scoreboard")
    env = {"PYTHONSAFEPATH": "1", **jax_cache(session)}
    session.run("python", "-m", "refattn.conformance.scoreboard", *session.posargs, env=env)


@nox.session(requires=["wheel"], default=False)
def cards(session: nox.Session) -> None:
    """Probe public implementations, into docs/cards and the profiles that are shipped (30 minutes)."""
    install(session, "test", "scoreboard")
    env = {"PYTHONSAFEPATH": "1", **jax_cache(session)}
    session.run("python", "-m", "refattn.conformance.cards", *session.posargs, env=env)


@nox.session(requires=["wheel"], default=False)
def bench(session: nox.Session) -> None:
    """Time the fast paths beside their peers, on a quiet machine, into docs/bench (10 minutes)."""
    install(session, "bench", extra="torch")
    where = ("--json", "docs/bench/bench.json", "--svg", "docs/bench/bench.svg", "--page", "docs/bench/README.md")
    arguments = session.posargs or where
    session.run("python", "-m", "refattn_backends.bench", *arguments, env={"PYTHONSAFEPATH": "1"})


@nox.session(requires=["wheel"], default=False)
def ratios(session: nox.Session) -> None:
    """Measure errors over derived bounds, ours and our peers', into docs/bounds (5 minutes)."""
    install(session, "bench", extra="torch")
    pinned(session, "jax", "ml_dtypes")
    where = ("--json", "docs/bounds/ratios.json", "--svg", "docs/bounds/ratios.svg", "--page", "docs/bounds.md")
    arguments = session.posargs or where
    session.run("python", "-m", "refattn_backends.bench.ratios", *arguments, env={"PYTHONSAFEPATH": "1"})


@nox.session(requires=["wheel"], default=False)
def gpu(session: nox.Session) -> None:
    """Check and time the CUDA paths of CuPy and PyTorch, where there is an NVIDIA device (5 minutes)."""
    install(session, cupy_package(session, "the CUDA paths need"), extra="torch")
    session.run("python", "-m", "refattn_backends.gpu", env={"PYTHONSAFEPATH": "1"})
