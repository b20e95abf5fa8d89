"""Hook the frameworks that this interpreter may import, then step aside.

Every Python of a job runs this at its start, of whatever version, so it is small, uses nothing
that is not loaded already, and leaves no trace: its folder goes from sys.path, and the
sitecustomize that it shadows is imported in its place, with whatever that one raises. What a hook
does is in _gpulease_hooks, imported by path when its framework is. Before Python 3.7 there is no
effect (and no syntax error: keep this file readable to Python 2).

An interpreter that runs already loads this file as _gpulease_site: nothing happens then, and
_gpulease_hooks.running uses what is here.
"""

import os
import sys

HOOKS = {
    # framework: the module of _gpulease_hooks whose install() is called once it is imported
    "tensorflow": "tensorflow_hook",
    "torch": "torch_hook",
    "jax": "jax_hook",
    "cupy": "cupy_hook",
}
LEASE = "GPULEASE_HOOK"
DEVICES = "CUDA_VISIBLE_DEVICES"
# JAX's share of a GPU, by the name that every version reads and by that of new ones. A script may
# write either; with both set, a new JAX raises ValueError.
SHARES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
SHARE = SHARES[0]
HERE = os.path.dirname(os.path.abspath(__file__))


def trouble(what):
    """Say in one line that something of ours failed; with GPULEASE_STRICT=1 that ends the job."""
    try:
        sys.stderr.write("gpulease: %s\n" % what)
        sys.stderr.flush()
    except Exception:
        pass  # no stderr, no line
    if os.environ.get("GPULEASE_STRICT") == "1":
        try:
            sys.stdout.flush()
        finally:
            os._exit(97)  # SystemExit would be swallowed by a bare except in the script


def hooks_module(name):
    """Import a module of the package beside this file, which is on no sys.path."""
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


class GpuleaseFinder(object):
    """Find a framework as the other finders do, and see when it has been imported."""

    def __init__(self, raw):
        self.raw = raw  # now, since a script may clear its environment
        self.lifts = []  # what takes the hooks off again, where that is ever wanted

    def find_spec(self, name, path=None, target=None):
        """Return what the others find; None, at once, for all that is not a framework."""
        if name not in HOOKS:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                # Neither a folder nor a file of the user's that happens to have this name.
                if spec.origin is not None and spec.submodule_search_locations is not None:
                    self.watch(spec.loader, name)
                return spec
        return None

    def watch(self, loader, name):
        """Have the hook follow the framework's own import; the loader stays what it was."""
        plain = loader.exec_module

        def exec_module(module):
            loader.__dict__.pop("exec_module", None)
            plain(module)
            if module.__name__ == name:
                self.hook(module, name)

        try:
            loader.exec_module = exec_module
        except Exception:
            trouble("cannot hook %s: its loader cannot be watched" % name)

    def hook(self, module, name):
        """Run the hook of a framework, which must not break the import that it follows."""
        try:
            self.lifts.append(hooks_module(HOOKS[name]).install(module, self.raw, trouble))
        except Exception as error:
            trouble("cannot hook %s: %s: %s" % (name, type(error).__name__, error))


class Guard(os.environ.__class__):
    """The class of os.environ in a job: what the script writes there stays inside the lease."""

    raw = share = ""

    def __setitem__(self, key, value):
        if isinstance(value, str):
            if key == DEVICES:
                value = self.leased(value)
            elif key in SHARES:
                value = self.smaller(value)
                self.drop(other for other in SHARES if other != key)
        super(Guard, self).__setitem__(key, value)

    def __delitem__(self, key):
        super(Guard, self).__delitem__(key)
        if key == DEVICES:
            self[key] = self.leased(None)
        elif key in SHARES:
            self[SHARE] = self.share

    def popitem(self):
        """Pop what may go, so that clear() and its like come to an end."""
        for key in self:
            if key not in (DEVICES, SHARE):
                return key, self.pop(key)
        raise KeyError("the environment holds nothing but the lease")

    def clear(self):
        """Empty the environment of all but the lease."""
        for key in list(self):
            self.pop(key, None)

    def drop(self, keys):
        """Delete without putting the lease's own value in the place."""
        for key in keys:
            if key in self:
                super(Guard, self).__delitem__(key)

    def leased(self, value):
        """Return a value of CUDA_VISIBLE_DEVICES in terms of the lease; None stands for all."""
        try:
            return hooks_module("devices").inside(value, self.raw)
        except Exception as error:
            trouble("cannot read %s=%s: %s" % (DEVICES, value, error))
            return "-1"

    def smaller(self, value):
        """Return JAX's share of a GPU: `value`, or the lease's if that is smaller."""
        try:
            return value if 0 < float(value) < float(self.share) else self.share
        except ValueError:
            return self.share


def guard(raw):
    """Keep what the script writes to its environment inside the lease."""
    Guard.raw, Guard.share = raw, os.environ.get(SHARE, "1")
    for name in ("__module__", "__name__", "__qualname__"):
        setattr(Guard, name, getattr(type(os.environ), name))
    os.environ.__class__ = Guard
    # A shell script may have written the variable before this interpreter began.
    found = os.environ.get(DEVICES)
    if found is None or '"visible":"%s"' % found not in raw:
        os.environ[DEVICES] = os.environ.leased(found)


def hold(raw):
    """Hold this interpreter to the lease `raw`, whatever it imports from now on."""
    finder = GpuleaseFinder(raw)
    sys.meta_path.insert(0, finder)
    guard(raw)
    return finder


def install():
    """Hook this interpreter, if it belongs to a job and is not hooked yet."""
    raw = os.environ.get(LEASE)
    known = any(type(finder).__name__ == "GpuleaseFinder" for finder in sys.meta_path)
    if raw is None or known or sys.version_info < (3, 7):
        return
    hold(raw)


def step_aside():
    """Import the sitecustomize that this one shadows; site.py deals with what it raises."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    sys.path_importer_cache.pop(HERE, None)
    this = sys.modules.pop("sitecustomize", None)
    import sitecustomize  # noqa: F401

    return this  # alive until here: Python 2 clears the globals of a module that is dropped


if __name__ != "_gpulease_site":
    try:
        install()
    except Exception as problem:
        trouble("cannot hook this Python: %s: %s" % (type(problem).__name__, problem))
    step_aside()
