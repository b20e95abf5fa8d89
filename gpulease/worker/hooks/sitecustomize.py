"""Enforce the lease in this interpreter: hook the frameworks it imports, and guard os.environ.

Every Python of a job runs this file at its start, in any version. So it is small, imports nothing
that is not loaded yet, and leaves no trace: it removes its folder from sys.path and imports the
sitecustomize that it shadows in its place. The hooks of the frameworks are in _gpulease_hooks,
which is loaded by path. Before Python 3.6 this file has no effect (and no syntax error: keep it
valid for Python 2).

An interpreter that already runs loads this file as _gpulease_site. Then nothing happens here;
_gpulease_hooks.running uses its functions.
"""

import os
import sys

HOOKS = {
    # framework: the module of _gpulease_hooks whose install() runs after the framework's import
    "tensorflow": "tensorflow_hook",
    "torch": "torch_hook",
    "jax": "jax_hook",
    "cupy": "cupy_hook",
    "rmm": "rmm_hook",
    "onnxruntime": "onnxruntime_hook",
}
COUNTERS = {
    # The same for what is only counted; its failure means nothing.
    "keras": "keras_hook",
    "tf_keras": "keras_hook",
}
LEASE = "GPULEASE_HOOK"
DEVICES = "CUDA_VISIBLE_DEVICES"
# JAX's memory fraction: the name that every version reads, and the name of new versions. A script
# may set either; with both set, a new JAX raises ValueError.
FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
FRACTION = FRACTIONS[0]
FAILURES = []  # what this process has reported
HERE = os.path.dirname(os.path.abspath(__file__))


def report_failure(text, lease=None, framework="", version=""):
    """Write one line about a failure of the hooks and report it to the daemon, once.

    With GPULEASE_STRICT=1, end the process. "" means that no framework is limited.
    """
    if text in FAILURES:
        return
    FAILURES.append(text)
    write_line(text)
    try:
        lease = hooks_module("lease").Lease(lease or os.environ[LEASE])
        hooks_module("report").failed(lease, framework, version, text)
    except Exception:
        pass  # the daemon shows a lease as limited only if a hook says so
    end_if_strict()


def write_line(text):
    """Write one line for the user."""
    try:
        sys.stderr.write("gpulease: %s\n" % text)
        sys.stderr.flush()
    except Exception:
        pass  # there is no stderr


def end_if_strict():
    """End the process with status 97 if the job runs with --strict."""
    if os.environ.get("GPULEASE_STRICT") == "1":
        try:
            sys.stdout.flush()
        finally:
            os._exit(97)  # a bare except in the script would swallow SystemExit


def hooks_module(name):
    """Import a module of _gpulease_hooks, the package beside this file, by path."""
    import importlib.util

    if "_gpulease_hooks" not in sys.modules:
        folder = os.path.join(HERE, "_gpulease_hooks")
        spec = importlib.util.spec_from_file_location(
            "_gpulease_hooks",
            os.path.join(folder, "__init__.py"),
            submodule_search_locations=[folder],
        )
        package = importlib.util.module_from_spec(spec)
        sys.modules["_gpulease_hooks"] = package
        spec.loader.exec_module(package)
    return importlib.import_module("_gpulease_hooks." + name)


def is_package(spec):
    """Distinguish a framework from a folder or a file of the user's with the same name."""
    return (
        # Python 3.6 calls the origin of a folder without __init__.py "namespace".
        getattr(spec, "origin", None) not in (None, "namespace")
        and getattr(spec, "submodule_search_locations", None) is not None
    )


class GpuleaseFinder(object):
    """Finds a framework as the other finders do, and hooks it after its import."""

    def __init__(self, lease):
        self.lease = lease  # as JSON; read now, since a script may clear its environment
        self.undos = []  # functions that remove the hooks
        self.reached = set()  # the frameworks that were hooked, or could not be

    def find_spec(self, name, path=None, target=None):
        """Return the spec that another finder returns; None for all but the frameworks."""
        if name not in HOOKS and name not in COUNTERS:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                if is_package(spec):
                    self.hook_after_import(spec.loader, name)
                return spec
        return None

    def hook_after_import(self, loader, name):
        """Hook the framework once its own import is complete; the loader stays the same object."""
        original = loader.exec_module

        def exec_module(module):
            loader.__dict__.pop("exec_module", None)
            original(module)
            if module.__name__ == name:
                self.install_hook(module, name)

        try:
            loader.exec_module = exec_module
        except Exception:
            self.reached.add(name)
            self.fail("cannot hook %s: its loader cannot be wrapped" % name, name)

    def install_hook(self, module, name):
        """Run the hook of a framework; its failure must not break the import."""
        self.reached.add(name)

        def fail(text):
            self.fail(text, name)

        try:
            hook = hooks_module(HOOKS.get(name) or COUNTERS[name])
            self.undos.append(hook.install(module, self.lease, fail))
        except Exception as error:
            fail("cannot hook %s: %s: %s" % (name, type(error).__name__, error))

    def fail(self, text, name):
        """Report that a framework is not limited."""
        if name in COUNTERS:
            return
        version = getattr(sys.modules.get(name), "__version__", "")
        report_failure(text, self.lease, name, version)

    def check_at_exit(self):
        """Report the frameworks that were imported past this finder."""
        for name in HOOKS if self.lease else ():
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if name not in self.reached and is_package(spec):
                self.fail(
                    "%s is not limited to the lease: another import hook hides it" % name, name
                )


def notify_of_devices(text, is_complete):
    """Write what became of a value of CUDA_VISIBLE_DEVICES; --strict accepts no lost entry."""
    write_line(text)
    if not is_complete:
        end_if_strict()


class GuardedEnviron(os.environ.__class__):
    """The class of os.environ in a job: values that the script sets stay inside the lease."""

    lease = fraction = ""

    def __setitem__(self, key, value):
        if isinstance(value, str):
            if key == DEVICES:
                value = self.leased_devices(value)
            elif key in FRACTIONS:
                value = self.leased_fraction(value)
                self.delete_all(other for other in FRACTIONS if other != key)
        super(GuardedEnviron, self).__setitem__(key, value)

    def __delitem__(self, key):
        super(GuardedEnviron, self).__delitem__(key)
        if key == DEVICES:
            self[key] = self.leased_devices(None)
        elif key in FRACTIONS:
            self[FRACTION] = self.fraction

    def popitem(self):
        """Remove a variable that is not part of the lease, so that loops over popitem() end."""
        for key in self:
            if key not in (DEVICES, FRACTION):
                return key, self.pop(key)
        raise KeyError("the environment holds nothing but the lease")

    def clear(self):
        """Remove all variables but those of the lease."""
        for key in list(self):
            self.pop(key, None)

    def delete_all(self, keys):
        """Delete variables without setting the lease's own value instead."""
        for key in keys:
            if key in self:
                super(GuardedEnviron, self).__delitem__(key)

    def leased_devices(self, value):
        """Return a value of CUDA_VISIBLE_DEVICES limited to the lease; None means all of it."""
        try:
            return hooks_module("devices").inside(value, self.lease, notify_of_devices)
        except Exception as error:
            report_failure("cannot read %s=%.100s: %s" % (DEVICES, value, error))
            return "-1"

    def leased_fraction(self, value):
        """Return JAX's memory fraction: `value`, or the lease's if that is smaller."""
        try:
            return value if 0 < float(value) < float(self.fraction) else self.fraction
        except ValueError:
            return self.fraction


def guard_environ(lease):
    """Make os.environ keep the variables that the script sets inside the lease."""
    GuardedEnviron.lease, GuardedEnviron.fraction = lease, os.environ.get(FRACTION, "1")
    for name in ("__module__", "__name__", "__qualname__"):
        setattr(GuardedEnviron, name, getattr(type(os.environ), name))
    os.environ.__class__ = GuardedEnviron
    # A shell script may have set the variables before this interpreter started.
    chosen = os.environ.get(FRACTIONS[1])
    if chosen is not None:
        os.environ.delete_all(FRACTIONS[1:])
        os.environ[FRACTION] = chosen
    found = os.environ.get(DEVICES)
    if found is None or '"visible":"%s"' % found not in lease:
        os.environ[DEVICES] = os.environ.leased_devices(found)


def enforce(lease):
    """Enforce a lease, given as JSON, in this interpreter for everything it imports from now on."""
    import atexit

    finder = GpuleaseFinder(lease)
    atexit.register(finder.check_at_exit)
    sys.meta_path.insert(0, finder)
    guard_environ(lease)
    return finder


def install():
    """Enforce the lease of this interpreter's job, if it has one and that is not done yet."""
    lease = os.environ.get(LEASE)
    done = any(type(finder).__name__ == "GpuleaseFinder" for finder in sys.meta_path)
    if lease is None or done or sys.version_info < (3, 6):
        return
    enforce(lease)


def import_shadowed():
    """Import the sitecustomize that this one shadows; site.py handles what it raises."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    sys.path_importer_cache.pop(HERE, None)
    this = sys.modules.pop("sitecustomize", None)
    import sitecustomize  # noqa: F401

    return this  # a reference until here: Python 2 clears the globals of a dropped module


if __name__ != "_gpulease_site":
    try:
        install()
    except Exception as problem:
        report_failure("cannot hook this Python: %s: %s" % (type(problem).__name__, problem))
    import_shadowed()
