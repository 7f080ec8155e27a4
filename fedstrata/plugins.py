"""Components of other people: Python files that a user imports, and installed packages that offer some.

**A file** registers components, with ``@methods.register("name")`` and the like. An experiment names it by its path
(``my_methods.py``) until it is imported, and from then on by its name and the SHA-256 of its content
(``my_methods.py@sha256:...``), so that what is run can be told apart and kept: a run folder holds a copy of the file.
Only the user's own words make a file run: :func:`import_file` is called for what stands on the command line, in an
experiment's file, in a call from Python or in a run folder that is resumed, and never for what came over a network. A
site only looks whether its own operator has given it the file (:func:`require_imports`).

**A package** offers components under the entry points ``fedstrata.methods``, ``fedstrata.models``,
``fedstrata.datasets``, ``fedstrata.partitions``, ``fedstrata.losses``, ``fedstrata.metrics`` and
``fedstrata.diagnostics``; registries load them when they need to.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment, read_pinned
from fedstrata.spec import Registry, registering

IMPORTS_FOLDER = "imports"
"""The folder in a run folder that holds copies of the imported files."""
_BASES = {
    "method": "fedstrata.methods.Part",
    "model": "fedstrata.models.ModelSpec",
    "dataset": "fedstrata.data.DatasetSource",
    "partition": "fedstrata.data.Partitioner",
    "loss": "fedstrata.losses.Loss",
    "metric": "fedstrata.scores.Metric",
    "diagnostic": "fedstrata.diagnostics.Diagnostic",
    "callback": "fedstrata.callbacks.Callback",
}


@dataclass(frozen=True)
class ImportedFile:
    """A file whose components are registered."""

    path: Path
    content: bytes
    registered: tuple[tuple[Registry[Any], str], ...] = ()

    @property
    def name(self) -> str:
        """The name under which experiments and run folders know the file."""
        return self.path.name

    @property
    def sha256(self) -> str:
        """The SHA-256 of the content."""
        return sha256(self.content).hexdigest()

    @property
    def pinned(self) -> str:
        """Name and content, as an experiment writes them."""
        return f"{self.name}@sha256:{self.sha256}"


_imported: dict[str, ImportedFile] = {}
"""By their names, which are unique in an experiment."""
_packages: dict[str, str] = {}
"""The versions of the packages of which something was loaded."""


# Files ----------------------------------------------------------------------------------------------------------------


def import_file(path: Path) -> ImportedFile:
    """Run a file that registers components.

    The same content again does nothing; another version of a file takes the place of the one before. Where anything
    fails, the registries are left as they were.
    """
    return _register(_read(path))


def import_files(paths: Iterable[Path]) -> None:
    """Run some files that register components."""
    for path in paths:
        import_file(path)


def _read(path: Path) -> ImportedFile:
    try:
        return ImportedFile(path, path.read_bytes())
    except FileNotFoundError:
        raise FedStrataError(f"There is no file '{path}' to import; give the path of a Python file.") from None
    except OSError as error:
        raise FedStrataError(f"'{path}' cannot be imported: {(error.strerror or str(error)).lower()}.") from None


def _register(file: ImportedFile) -> ImportedFile:
    there = _imported.get(file.name)
    if there is not None and there.content == file.content:
        return there
    with registering(file.name) as registrations, _in_sys_modules(file) as module:
        for registry, name in () if there is None else there.registered:
            registry.put(name, None)
        _execute(file, module)
        if not registrations.made:
            raise FedStrataError(
                f"'{file.path}' registers nothing; put @methods.register('a-name') before the class of a method, or "
                "the like for a model, a dataset, a partition or a callback. 'fedstrata new method a-name' writes an "
                "example."
            )
        for (registry, name), cls in registrations.made.items():
            _check_component(f"'{file.path}'", registry, name, cls)
    _imported[file.name] = dataclasses.replace(file, registered=tuple(registrations.made))
    return _imported[file.name]


@contextmanager
def _in_sys_modules(file: ImportedFile) -> Iterator[types.ModuleType]:
    """Make a module for a file, where the types of its classes can be looked up; it stays unless anything fails."""
    module = types.ModuleType(f"fedstrata_import_{file.path.stem}_{file.sha256[:8]}")
    module.__file__ = str(file.path.resolve())
    sys.modules[module.__name__] = module
    try:
        yield module
    except BaseException:
        del sys.modules[module.__name__]
        raise


def _execute(file: ImportedFile, module: types.ModuleType) -> None:
    """Run what was read, so that the hash is that of what runs; what it prints is no result of a command."""
    source = str(module.__file__)
    try:
        with redirect_stdout(sys.stderr):
            exec(compile(file.content, source, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise FedStrataError(f"'{file.path}' cannot be imported: {_explain(error, file.path, source)}") from error


def _explain(error: BaseException, path: Path, source: str) -> str:
    """Tell what went wrong in a user's file, and in which of its lines."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
    if isinstance(error, SyntaxError) and error.filename == source:
        lines = [error.lineno]
    where = f"line {lines[-1]}: " if lines and lines[-1] is not None else ""
    what = str(error) if isinstance(error, FedStrataError) else _name_and_message(error)
    if isinstance(error, ModuleNotFoundError) and path.with_name(f"{error.name}.py").exists():
        what += (
            f". A file that is imported stands alone, so that a run can keep it: put what it needs of {error.name}.py "
            "into it, or install that as a package"
        )
    return f"{where}{what}{'' if what.endswith('.') else '.'}"


def _name_and_message(error: BaseException) -> str:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _check_component(whose: str, registry: Registry[Any], name: str, cls: type) -> None:
    """Refuse classes that would only fail later, and less clearly."""
    home, _, base = _BASES.get(registry.kind, "fedstrata.spec.Spec").rpartition(".")
    what = f"{whose} registers '{getattr(cls, '__name__', cls)}' as the {registry.kind} '{name}', but"
    if not (isinstance(cls, type) and issubclass(cls, getattr(import_module(home), base))):
        raise FedStrataError(f"{what} it is not derived from {home}.{base}.")
    if registry.kind == "callback":
        _check_callback(what, cls)
        return
    if any(isinstance(value, dataclasses.Field) for value in vars(cls).values()):
        raise FedStrataError(f"{what} without @dataclass(frozen=True) it has no parameters; put that before the class.")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    declared = [name for parent in cls.__mro__ for name in inspect.get_annotations(parent)]
    missing = [name for name in declared if name not in fields and not hasattr(cls, name)]
    missing += sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise FedStrataError(f"{what} it does not define '{missing[0]}', which every {registry.kind} needs.")
    for field in fields.values():
        if field.default is dataclasses.MISSING:
            raise FedStrataError(f"{what} its parameter '{field.name}' has no default; give it one.")


def _check_callback(what: str, cls: type) -> None:
    from fedstrata.callbacks import refuse_misspelt

    refuse_misspelt(cls)
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise FedStrataError(f"{what} it cannot be made without arguments: {error}; give them defaults.") from None


# What experiments name ------------------------------------------------------------------------------------------------


def load_imports(experiment: Experiment, *places: Path) -> Experiment:
    """Import the files that an experiment names, and name them by their content from now on.

    A file that is named by its content already is the one of this process, or is looked for in some places.
    """
    texts = tuple(dict.fromkeys(experiment.imports))
    names = [imported_name(text) for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise FedStrataError(f"Two files to import are called '{name}'; rename one of them.")
    pinned = tuple(_load(text, places).pinned for text in texts)
    return experiment.with_changes({"imports": pinned}) if texts else experiment


def _load(text: str, places: Sequence[Path]) -> ImportedFile:
    pinned = read_pinned(text)
    if pinned is None:
        return import_file(Path(text))
    name, digest = pinned
    there = _imported.get(name)
    if there is not None and there.sha256 == digest:
        return there
    found = [_read(place / name) for place in places if (place / name).is_file()]
    for file in found:
        if file.sha256 == digest:
            return _register(file)
    if found:
        raise FedStrataError(
            f"'{found[0].path}' has changed: its SHA-256 is {found[0].sha256}, and the experiment needs {digest}; put "
            "the original back."
        )
    looked = ", ".join(f"'{place}'" for place in places)
    raise FedStrataError(
        f"The experiment needs the file '{name}' with the SHA-256 {digest}, which is in none of {looked}; give it with "
        "--import, or from Python with imports=[...]."
    )


def require_imports(imports: Sequence[str], remedy: str = "import it first") -> dict[str, ImportedFile]:
    """Return the files that an experiment names, by name; one that this process has not imported is refused.

    Nothing is imported here: so this is all that may be done with an experiment that came over a network.
    """
    files = {}
    for text in imports:
        pinned = read_pinned(text)
        name = imported_name(text)
        there = _imported.get(name)
        if there is None:
            raise FedStrataError(
                f"The experiment needs the file {_in_words(text)}, which is not imported here; {remedy}."
            )
        if pinned is None or there.sha256 != pinned[1]:
            raise FedStrataError(
                f"The experiment needs the file {_in_words(text)}, but what is imported here is another version "
                f"(SHA-256 {there.sha256}); {remedy}, in the version that is needed."
            )
        files[name] = there
    return files


def imported_callbacks(imports: Sequence[str]) -> list[Any]:
    """Make the callbacks that the files which an experiment names have registered."""
    registered = [place for file in require_imports(imports).values() for place in file.registered]
    return [registry.get(name)() for registry, name in registered if registry.kind == "callback"]


def imported_name(text: str) -> str:
    """Tell the name of a file from its path, or from its name and content.

    >>> imported_name("folder/my_methods.py"), imported_name("my_methods.py@sha256:" + 64 * "0")
    ('my_methods.py', 'my_methods.py')
    """
    pinned = read_pinned(text)
    return Path(text).name if pinned is None else pinned[0]


def _in_words(text: str) -> str:
    pinned = read_pinned(text)
    return f"'{text[:100]}'" if pinned is None else f"'{pinned[0]}' (SHA-256 {pinned[1]})"


# Packages -------------------------------------------------------------------------------------------------------------


def load_packages(registry: Registry[Any]) -> None:
    """Load what installed packages offer under the group of a registry; one that fails is passed over with a warning.

    An entry point names a class, which stands under the entry point's name unless its module registers it, or a module
    that registers its classes.
    """
    for entry in metadata.entry_points(group=registry.group):
        package = "unknown" if entry.dist is None else entry.dist.name
        try:
            with registering(f"package {package}") as registrations, redirect_stdout(sys.stderr):
                offered = entry.load()
                if not (isinstance(offered, types.ModuleType) or registry.holds(offered)):
                    registry.register(entry.name)(offered)
                for (other, name), cls in registrations.made.items():
                    _check_component(f"The package '{package}'", other, name, cls)
        except (Exception, SystemExit) as error:
            what = str(error) if isinstance(error, FedStrataError) else _name_and_message(error)
            warnings.warn(
                f"The {registry.kind} '{entry.name}' of the package '{package}' cannot be used: {what.rstrip('.')}.",
                FedStrataWarning,
                stacklevel=4,
            )
        else:
            _packages[package] = "unknown" if entry.dist is None else entry.dist.version


def loaded_packages() -> Mapping[str, str]:
    """Tell of which packages something was loaded, and their versions."""
    return dict(_packages)


Registry.finders.append(load_packages)
